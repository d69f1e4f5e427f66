"""Several requests at a time, and how those under way are told that nobody waits for them any more."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Self, TypeVar

from waybill.checkpoint.files import Progress

_T = TypeVar("_T")


def each(do: Callable[[str], _T], names: Collection[str], most: int, stopped: threading.Event) -> list[_T]:
    """What `do` makes of each name, in order, `most` at a time.

    When one fails, `stopped` is set, and its error is raised when the others have ended. Who interrupts does not wait:
    the threads are daemons, so that a server that stalls does not keep the process.
    """
    todo: SimpleQueue[str] = SimpleQueue()
    done: SimpleQueue[tuple[str, Callable[[], _T]]] = SimpleQueue()
    for name in names:
        todo.put(name)

    def work() -> None:
        with suppress(Empty):
            while not stopped.is_set():
                name = todo.get_nowait()
                done.put((name, _outcome(do, name)))

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(most, len(names)))]
    for thread in threads:
        thread.start()
    results: dict[str, _T] = {}
    try:
        while len(results) < len(names):
            name, outcome = done.get()
            results[name] = outcome()
    except BaseException as error:
        stopped.set()
        for thread in threads if isinstance(error, Exception) else ():
            thread.join()
        raise
    return [results[name] for name in names]


def _outcome(do: Callable[[str], _T], name: str) -> Callable[[], _T]:
    """A call that returns what `do` returned, or raises what it raised."""
    try:
        result = do(name)
    except BaseException as error:
        raised = error

        def fail() -> _T:
            raise raised

        return fail
    return lambda: result


class _Stopped(Exception):
    """Ends a download whose result nobody waits for."""


def bar_of(progress: Progress, stopped: threading.Event, most: int) -> type[Any]:
    """What huggingface_hub takes for a progress bar of tqdm: it shows nothing, tells bytes, and ends the endless."""

    class Bar:
        total: int | None = None

        def __init__(self, **_: Any) -> None:
            self.arrived = 0

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None: ...

        def update(self, nbytes: float | None = 1) -> None:
            if stopped.is_set():
                raise _Stopped
            self.arrived += int(nbytes or 0)
            if self.arrived > most:
                raise ValueError(f"more than the {most:,} bytes that were listed")
            progress(int(nbytes or 0))

        def _ignore(self, *_: Any, **__: Any) -> None: ...

        update_transfer = set_postfix_str = set_transfer_postfix_str = refresh = close = _ignore

    return Bar
