"""Byte ranges of a checkpoint's files, counted, and checked against the file the header was read from."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from waybill.checkpoint.folder import Checkpoint
from waybill.errors import FileChanged

ANOTHER = "another file, size or modification time than before"
BLOCK = 1 << 20
"""Bytes of a small file that are copied at once."""


class RangeReader:
    """Reads ranges straight into the caller's memory. Safe to use from several threads.

    `bytes_read` counts what was asked of the file system: the figure that the plan predicts.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._root = checkpoint.root
        self._shards = {shard.name: shard for shard in checkpoint.shards}
        self._descriptors: dict[str, int] = {}
        self._lock = threading.Lock()
        self.bytes_read = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            while self._descriptors:
                os.close(self._descriptors.popitem()[1])

    def read_into(self, file: str, segments: list[tuple[int, memoryview]]) -> None:
        """Fill each memory view from its absolute file offset.

        Raises:
            FileChanged: the file was replaced, shrank, or could not be read.
        """
        descriptor = self._open(file)
        done = 0
        for offset, view in segments:
            filled = 0
            while filled < len(view):
                try:
                    count = os.preadv(descriptor, [view[filled:]], offset + filled)
                except OSError as error:
                    raise self._changed(file, error.strerror or str(error)) from error
                if count == 0:
                    raise self._changed(file, f"the file ends at byte {offset + filled:,}")
                filled += count
            done += filled
        with self._lock:
            self.bytes_read += done

    def copy_into(self, file: str, offset: int, target: int, at: int, nbytes: int) -> None:
        """Copy a range into another open file inside the kernel, sharing its blocks where the file system can.

        Raises:
            FileChanged: the file was replaced or shrank.
            OSError: the target cannot be written, or the two files cannot be copied between (EXDEV, EINVAL, …).
        """
        descriptor = self._open(file)
        done = 0
        while done < nbytes:
            count = os.copy_file_range(descriptor, target, nbytes - done, offset + done, at + done)
            if count == 0:
                raise self._changed(file, f"the file ends at byte {offset + done:,}")
            done += count
        with self._lock:
            self.bytes_read += done

    def confirm(self) -> None:
        """What has been read is one checkpoint: every file still is the one whose header was read.

        Raises:
            FileChanged: a file was written to, replaced or removed since.
        """
        for file, shard in self._shards.items():
            try:
                same = shard.is_file((self._root / file).stat())
            except OSError as error:
                raise self._changed(file, error.strerror or str(error)) from error
            if not same:
                raise self._changed(file, ANOTHER)

    def _open(self, file: str) -> int:
        with self._lock:
            descriptor = self._descriptors.get(file)
            if descriptor is None:
                shard = self._shards[file]
                try:
                    descriptor = os.open(self._root / file, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as error:
                    raise self._changed(file, error.strerror or str(error)) from error
                if not shard.is_file(os.fstat(descriptor)):
                    os.close(descriptor)
                    raise self._changed(file, ANOTHER)
                self._descriptors[file] = descriptor
        return descriptor

    def _changed(self, file: str, found: str) -> FileChanged:
        return _changed(file, f"the {self._shards[file].size:,} bytes its header describes", found)


def copy_whole(source: Path, target: Path) -> None:
    """Copy a small file as it is at one moment.

    Raises:
        FileChanged: it was written to or replaced meanwhile, or could not be read.
        OSError: the target cannot be written.
    """
    with target.open("xb") as copy:
        copy.writelines(_blocks(source))


def _blocks(source: Path) -> Iterator[bytes]:
    expected = "the file as it was when it was opened"
    try:
        with source.open("rb") as stream:
            before = os.fstat(stream.fileno())
            while block := stream.read(BLOCK):
                yield block
        after = source.stat()
    except OSError as error:
        raise _changed(str(source), expected, error.strerror or str(error)) from error
    if any(getattr(before, each) != getattr(after, each) for each in ("st_size", "st_mtime_ns", "st_ino")):
        raise _changed(str(source), expected, ANOTHER)


def _changed(where: str, expected: str, found: str) -> FileChanged:
    return FileChanged(
        "a file changed or failed while it was being read",
        where=where,
        expected=expected,
        found=found,
        fix="let the download finish, check the disk, and try again",
    )
