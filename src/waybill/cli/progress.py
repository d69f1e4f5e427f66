"""Progress in bytes, with the rate and what remains: a bar on a terminal, elsewhere a single line."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from waybill.cli.render import is_terminal, size

if TYPE_CHECKING:
    from waybill.comparison import Side
    from waybill.plan import Plan

_Reader = TypeVar("_Reader", "Plan", "Side")


class Progress:
    """Something to see on stderr while the block runs; inside it, a function that is told bytes."""

    def __init__(self, label: str, total: int, *, wanted: bool = True) -> None:
        self._label, self._total, self._wanted = label, total, wanted
        self._bar: Any = None

    def __enter__(self) -> Callable[[int], None]:
        if not self._wanted:
            return lambda _: None
        self._start = time.perf_counter()
        if not is_terminal(sys.stderr):
            print(f"{self._label} {size(self._total)}: ", end="", file=sys.stderr, flush=True)
            return lambda _: None
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as Bar

        columns = (
            TextColumn(self._label), BarColumn(None), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
        )  # fmt: skip
        self._bar = Bar(*columns, console=Console(stderr=True), transient=True, expand=True)
        task = self._bar.add_task(self._label, total=self._total)
        self._bar.start()
        return lambda nbytes: self._bar.advance(task, nbytes)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._wanted:
            seconds = time.perf_counter() - self._start
            rate = f"{seconds:.2f} s, {size(self._total / max(seconds, 1e-9))}/s"
            print("stopped" if kind else rate, file=sys.stderr, flush=True)


def download(reader: _Reader, *, wanted: bool = True) -> _Reader:
    """The same over files on this disk: those it reads are brought, if they lie on a hub."""
    total = reader.checkpoint.pending(reader.files)
    if not total:
        return reader.fetched()
    with Progress("downloading", total, wanted=wanted) as advance:
        return reader.fetched(advance)
