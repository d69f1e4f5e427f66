"""Publication: a package appears whole, or not at all.

Written beside its final place, on the same file system; flushed; then renamed. What a killed export left behind is
removed by the next one.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from glob import escape
from pathlib import Path

from waybill.errors import CannotWrite, TargetExists

MARKER = "waybill.json"
"""What makes a folder a package that may be replaced."""
SLACK = 16 << 20
"""Bytes beyond the weights: the graph, tokenizer files, the file system's own."""


def require_free(target: Path, *, overwrite: bool) -> None:
    """Refuse a target that is taken, before anything is computed.

    Raises:
        TargetExists: something is there, and it may not be replaced.
    """
    if not target.exists() and not target.is_symlink():
        return
    if not overwrite:
        raise _taken(
            target, "something of that name", "choose another folder, or give --overwrite to replace a package"
        )
    if not (target / MARKER).is_file():
        found = f"a {'folder' if target.is_dir() else 'file'} without {MARKER}"
        raise _taken(target, found, "only packages are replaced; choose another folder")


def require_outside(target: Path, source: Path) -> None:
    """Refuse a target that holds what the package is made from: replacing it would delete that.

    Raises:
        TargetExists: the source is the target, or lies in it.
    """
    origin = source.resolve()
    if target.resolve() in (origin, *origin.parents):
        raise _taken(target, f"{source}, which the package is made from", "choose another folder")


def _taken(target: Path, found: str, fix: str) -> TargetExists:
    return TargetExists(
        "the target is taken",
        where=str(target),
        expected="nothing, or a package with --overwrite",
        found=found,
        fix=fix,
    )


@contextmanager
def publication(target: Path, *, overwrite: bool, nbytes: int) -> Iterator[Path]:
    """A folder to write `nbytes` into, that becomes `target` when the block ends, and vanishes when it fails.

    Raises:
        TargetExists: something is there, and it may not be replaced.
        CannotWrite: no space, no permission, or a failing disk; nothing is left behind.
    """
    target = target.parent.resolve() / target.name  # not resolved itself: a link to a package is the package's name
    require_free(target, overwrite=overwrite)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _staging(target) as staging:
            free = shutil.disk_usage(target.parent).free
            if free < nbytes + SLACK:
                raise CannotWrite(
                    "there is not enough free space",
                    where=str(target.parent),
                    expected=f"{nbytes + SLACK:,} bytes",
                    found=f"{free:,} bytes",
                    fix="free some space, or export to another disk; --link needs almost none",
                )
            yield staging
            _flush(staging)
            require_free(target, overwrite=overwrite)  # another export may have been faster
            _put_in_place(staging, target)
    except OSError as error:
        raise CannotWrite(
            "the package cannot be written",
            where=str(error.filename or target),
            expected="a folder that can be written, with enough space",
            found=error.strerror or str(error),
            fix="free some space, check permissions, or export to another disk",
        ) from error


@contextmanager
def _staging(target: Path) -> Iterator[Path]:
    """A new folder beside the target, removed in the end. It is locked while this process lives, so that one without
    a lock is what an export left that was killed, here or in another container; those are removed first.
    """
    staging = target.parent / f".{target.name}.{os.getpid()}-{os.urandom(4).hex()}.partial"
    with ExitStack() as held:
        with _locked(target.parent):
            for left in target.parent.glob(f".{escape(target.name)}.*.partial"):
                with suppress(OSError), _locked(left, wait=False):
                    _remove(left)
            staging.mkdir()
            held.callback(lambda: _remove(staging))
            held.enter_context(_locked(staging))
        yield staging


@contextmanager
def _locked(folder: Path, *, wait: bool = True) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError) if wait else nullcontext():  # where nothing can be locked, leftovers stay
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """A folder and all that is in it, or a link to one."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def _flush(folder: Path) -> None:
    """Everything onto the disk: a rename that survives a power cut must not point at bytes that do not."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _put_in_place(staging: Path, target: Path) -> None:
    """Rename; where a package is replaced, both are exchanged at once and the old one is removed after that."""
    if target.exists():
        _exchange(staging, target)
    else:
        staging.rename(target)
    descriptor = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(one: Path, other: Path) -> None:
    """Swap two names atomically (renameat2 with RENAME_EXCHANGE); where that is not known, in two renames."""
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    with suppress(AttributeError, OSError):
        if not ctypes.CDLL(None, use_errno=True).renameat2(here, os.fsencode(one), here, os.fsencode(other), exchange):
            return
    aside = one.with_name(f"{one.name.removesuffix('.partial')}.old.partial")
    other.rename(aside)
    one.rename(other)
    aside.rename(one)
