"""Progress in bytes on a terminal, and nothing elsewhere: the summary line follows anyway."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


class Progress:
    """A bar on stderr while the block runs; inside it, a function that is told bytes."""

    def __init__(self, label: str, total: int, *, wanted: bool = True) -> None:
        self._bar: Any = None
        if wanted and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
            from rich.progress import Progress as Bar

            columns = (
                TextColumn(label), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
            )  # fmt: skip
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(label, total=total)

    def __enter__(self) -> Callable[[int], None]:
        if self._bar is None:
            return lambda _: None
        self._bar.start()
        return lambda nbytes: self._bar.advance(self._task, nbytes)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
