"""Where the files of a folder may really lie: a link in it must not lend it the rest of the disk."""

from __future__ import annotations

from pathlib import Path

from waybill.errors import PathEscape


def homes(root: Path) -> tuple[Path, ...]:
    """The folder itself and, of a snapshot in the hub's cache, whose files are links, the stores they lead to.

    A store belongs to one repository, or, of files that several have, to the cache.
    """
    real = root.resolve()
    if real.parent.name != "snapshots":
        return (real,)
    repository = real.parent.parent
    shared = (repository.parent / "blobs",) if repository.name.startswith("models--") else ()
    return (real, repository / "blobs", *shared)


def require_inside(path: Path) -> Path:
    """The same path, which no link leads out of its folder.

    Raises:
        PathEscape: the file lies somewhere else, or is a link that leads to itself.
    """
    try:
        real = path.resolve()
        if any(real.is_relative_to(home) for home in homes(path.parent)):
            return path
        found = f"a link to {real}"
    except (OSError, RuntimeError):
        found = "a link that leads to itself"
    raise PathEscape(
        "a file lies outside the folder that names it",
        where=str(path),
        expected="a file inside the folder",
        found=found,
        fix="copy the file into the folder, or name its real folder",
    )
