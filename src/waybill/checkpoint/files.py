"""Where a checkpoint's files are: in a folder on this disk, or on a hub that is asked the same questions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Protocol, TypeVar

from waybill.checkpoint.gguf import GgufHeader, read_gguf
from waybill.checkpoint.header import FileHeader, read_header
from waybill.checkpoint.places import homes
from waybill.errors import MissingShard, PathEscape

_T = TypeVar("_T")
Progress = Callable[[int], None]
"""Told bytes that have arrived, from several threads."""


class Files(Protocol):
    """The files of one checkpoint, by names relative to `root`. Config files lie there; weight files may not."""

    @property
    def root(self) -> Path:
        """The folder on this disk."""

    @property
    def place(self) -> str:
        """What messages call it."""

    def names(self) -> Collection[str]:
        """The files that lie at the top."""

    def holds(self, name: str) -> bool:
        """Whether there is such a file, at the top or below."""

    def header(self, name: str) -> FileHeader:
        """The header of a safetensors file; a CheckpointError says what is wrong with it."""

    def gguf(self, name: str) -> GgufHeader:
        """The header of a GGUF file; a CheckpointError says what is wrong with it."""

    def octets(self, name: str, offset: int, nbytes: int) -> bytes:
        """A small part of a file; OSError when it cannot be read."""

    def each(self, do: Callable[[str], _T], names: Collection[str]) -> Iterable[_T]:
        """What `do` makes of each name, in order, as many at a time as is good for the place."""


class Remote(Protocol):
    """Files that can be brought to this disk."""

    def pending(self, names: Collection[str]) -> int:
        """Bytes of these files, and of those that go with any, which are not here yet."""

    def fetch(self, names: Collection[str], progress: Progress) -> None:
        """Bring them."""


class Folder:
    """A folder on this disk."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.place = str(root)

    def names(self) -> Collection[str]:
        """The files that lie at the top."""
        return [path.name for path in self.root.glob("*")]

    def holds(self, name: str) -> bool:
        """Whether there is such a file."""
        return is_kind(Path.is_file, self.root / name)

    def header(self, name: str) -> FileHeader:
        """The header of a safetensors file.

        Raises:
            PathEscape: it is a link out of the folder.
            CheckpointError: as `read_header`, and for a link that leads nowhere.
        """
        try:
            real = (self.root / name).resolve()
        except (OSError, RuntimeError):  # a link that leads to itself
            raise self._broken_link(name) from None
        if not any(real.is_relative_to(home) for home in homes(self.root)):
            raise escape(name, "folder", f"a link to {real}")
        if not real.exists():
            raise self._broken_link(name)
        return read_header(real, name)

    def gguf(self, name: str) -> GgufHeader:
        """The header of a GGUF file."""
        return read_gguf(self.root / name, name)

    def octets(self, name: str, offset: int, nbytes: int) -> bytes:
        """A small part of a file."""
        with (self.root / name).open("rb") as stream:
            stream.seek(offset)
            return stream.read(nbytes)

    def each(self, do: Callable[[str], _T], names: Collection[str]) -> Iterable[_T]:
        """One after the other."""
        return map(do, names)

    def _broken_link(self, name: str) -> MissingShard:
        path = self.root / name
        return MissingShard(
            "a weight file is a link that leads nowhere: incomplete download?",
            where=name,
            expected="a file",
            found=f"a link to {path.readlink()}" if path.is_symlink() else "nothing",
            fix="download the file again; `hf download` resumes where it stopped",
        )


def is_kind(kind: Callable[[Path], bool], path: Path) -> bool:
    """`path.is_file()` and the like, false also for a name no file system takes."""
    try:
        return kind(path)
    except (OSError, ValueError):
        return False


def leaves(name: str) -> bool:
    """Whether a name from a stranger is no file inside a folder."""
    return not name or Path(name).is_absolute() or ".." in Path(name).parts or "\\" in name or "\0" in name


def escape(name: str, where: str, found: str) -> PathEscape:
    """A file that a stranger places outside the folder."""
    return PathEscape(
        "a weight file lies outside the checkpoint folder",
        where=f"{where}: {name}",
        expected="a file inside the folder",
        found=found,
        fix="copy the file into the folder, or name its real folder",
    )
