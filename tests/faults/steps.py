"""Every step a process takes in the file system, told to one function before it is taken.

For child processes: what is replaced here stays replaced. Writes come with a function that does half of them.
"""

from __future__ import annotations

import builtins
import ctypes
import fcntl
import io
import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

Half = Callable[[], object]
Step = Callable[[str, str, Half | None], None]
"""Told the kind of step, the path, and how to do half of it."""

READS = frozenset(("open", "read"))
ROOM = frozenset(("mkdir", "create", "write", "truncate", "copy", "link", "rename", "exchange", "fsync"))
"""What a full disk may refuse."""
CHANGES = ROOM | {"unlink", "rmdir", "flock"}


def path_of(place: Any) -> str:
    return str(Path(f"/proc/self/fd/{place}").readlink()) if isinstance(place, int) else os.fsdecode(place)


def watch(step: Step, *, exchange: bool = True) -> None:
    """From now on every step is told; without `exchange`, the kernel does not know how to swap two names."""
    _watch_os(step)
    _watch_files(step)
    library = ctypes.CDLL(None, use_errno=True)

    def renameat2(*arguments: Any) -> Any:
        step("exchange", path_of(arguments[3]), None)
        return library.renameat2(*arguments)

    def load(*_: object, **__: object) -> Any:
        if not exchange:
            raise OSError("no such library")
        return SimpleNamespace(renameat2=renameat2)

    ctypes.CDLL = load  # type: ignore[assignment,misc]


def _watch_os(step: Step) -> None:
    for name, kind in {
        "mkdir": "mkdir", "truncate": "truncate", "link": "link", "rename": "rename", "replace": "rename",
        "unlink": "unlink", "remove": "unlink", "rmdir": "rmdir", "fsync": "fsync",
    }.items():  # fmt: skip
        real = getattr(os, name)

        def told(place: Any, *rest: Any, _real: Any = real, _kind: str = kind, **options: Any) -> Any:
            step(_kind, path_of(place), None)
            if _kind != "fsync":  # what a process has written stays when it is killed; a power cut is not played
                return _real(place, *rest, **options)
            return None

        setattr(os, name, told)
    pwrite, copy, preadv, flock, opened = os.pwrite, os.copy_file_range, os.preadv, fcntl.flock, os.open

    def write_at(descriptor: int, octets: Any, at: int) -> int:
        step("write", path_of(descriptor), lambda: pwrite(descriptor, octets[: len(octets) // 2], at))
        return pwrite(descriptor, octets, at)

    def copy_range(source: int, target: int, count: int, here: int, there: int) -> int:
        step("copy", path_of(target), lambda: copy(source, target, count // 2, here, there))
        return copy(source, target, count, here, there)

    def read_at(descriptor: int, buffers: Any, at: int) -> int:
        step("read", path_of(descriptor), None)
        return preadv(descriptor, buffers, at)

    def lock(descriptor: int, operation: int) -> None:
        step("flock", path_of(descriptor), None)
        flock(descriptor, operation)

    def open_(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        step("create" if flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR) else "open", path_of(path), None)
        return opened(path, flags, *rest, **options)

    os.pwrite, os.copy_file_range, os.preadv, fcntl.flock, os.open = write_at, copy_range, read_at, lock, open_


def _watch_files(step: Step) -> None:
    """Files opened by Python's own `open`, whose writes do not pass through `os`."""

    class Raw(io.FileIO):
        def write(self, octets: Any) -> int:
            step("write", path_of(self.name), lambda: super(Raw, self).write(bytes(octets)[: len(octets) // 2]))
            return super().write(octets)

        def readinto(self, buffer: Any) -> int:
            step("read", path_of(self.name), None)
            return super().readinto(buffer)

        def readall(self) -> bytes:
            step("read", path_of(self.name), None)
            return super().readall()

    def open_(
        file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, errors: Any = None, newline: Any = None,
        **_: Any,
    ) -> Any:  # fmt: skip
        writes = bool(set(mode) & set("wxa+"))
        step("create" if writes else "open", path_of(file), None)
        raw = Raw(file, mode.replace("b", "").replace("t", ""))
        if buffering == 0:
            return raw
        binary = io.BufferedWriter(raw) if writes else io.BufferedReader(raw)
        return binary if "b" in mode else io.TextIOWrapper(binary, encoding, errors, newline)

    io.open = builtins.open = open_


class Counter:
    """Numbers the steps of some kinds, and tells of each; of the n-th when half of it is done."""

    def __init__(self, kinds: frozenset[str], at: int, tell: Callable[[int, str, str], object]) -> None:
        self._kinds, self._at, self._tell = kinds, at, tell
        self._lock, self._numbers = threading.Lock(), itertools.count(1)

    def __call__(self, kind: str, path: str, half: Half | None) -> None:
        if kind not in self._kinds:
            return
        with self._lock:
            number = next(self._numbers)
        if number == self._at and half:
            half()
        self._tell(number, kind, path)
