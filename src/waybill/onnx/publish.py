"""Publication: a package appears whole, or not at all.

Written beside its final place, on the same file system; flushed; then renamed. One export at a time writes to a target,
and what a killed one left behind is removed by the next.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from waybill.errors import CannotWrite, TargetBusy, TargetExists

MARKER = "waybill.json"
"""What makes a folder a package that may be replaced."""
SLACK = 16 << 20
"""Bytes beyond the weights: the graph, tokenizer files, the file system's own."""
ASIDE = ".old.partial"
"""How the name of a package ends that is moved out of the way, where both cannot be exchanged at once."""


def require_free(target: Path, *, overwrite: bool) -> None:
    """Refuse a target that is taken, or that an export is writing to, before anything is computed.

    Raises:
        TargetExists: something is there, and it may not be replaced.
        TargetBusy: another export to it is running.
        CannotWrite: it cannot even be looked for.
    """
    with _told_of(target):
        _require_untaken(target, overwrite)
        _left_behind(target)


def _require_untaken(target: Path, overwrite: bool) -> None:
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
    if Path(os.path.realpath(target)) in (origin, *origin.parents):  # a link to itself is no error here
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
        TargetBusy: another export to it is running.
        CannotWrite: no space, no permission, or a failing disk; nothing is left behind.
    """
    target = Path(os.path.realpath(target.parent)) / target.name  # itself as it is: a link to a package is its name
    with _told_of(target), _parents(target.parent) as made, _staging(target, overwrite) as staging:
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
        for folder, _, files in os.walk(staging, topdown=False):
            _flush(*(Path(folder, file) for file in files), Path(folder))
        _require_untaken(target, overwrite)  # something that is no export may have been faster
        _put_in_place(staging, target)
        _flush(target.parent, *(folder.parent for folder in made))


@contextmanager
def _told_of(target: Path) -> Iterator[None]:
    """What the operating system has against a target, as a refusal."""
    try:
        yield
    except OSError as error:
        raise CannotWrite(
            "the package cannot be written",
            where=str(error.filename or target),
            expected="a folder that can be written, with enough space",
            found=error.strerror or str(error),
            fix="free some space, check permissions, or export to another disk",
        ) from error


@contextmanager
def _parents(folder: Path) -> Iterator[list[Path]]:
    """The folder and its parents, made where they are missing, and removed again when the block fails."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield missing
    except BaseException:
        for each in missing:
            with suppress(OSError):
                each.rmdir()
        raise


@contextmanager
def _staging(target: Path, overwrite: bool) -> Iterator[Path]:
    """A new folder beside the target, removed in the end. It is locked while this process lives, so that one without
    a lock is what an export left that was killed, here or in another container; those are removed first.
    """
    staging = target.parent / f".{target.name}.{os.getpid()}-{os.urandom(4).hex()}.partial"
    with ExitStack() as held:
        with _locked(target.parent):
            for left in _left_behind(target):
                if left.name.endswith(ASIDE) and not target.exists():
                    left.rename(target)
                else:
                    _remove(left)
            _require_untaken(target, overwrite)
            held.callback(_remove, staging)  # before it is made: a signal may come in between
            staging.mkdir()
            held.enter_context(_locked(staging))
        yield staging


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # where nothing can be locked, two exports may run, and leftovers stay
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _left_behind(target: Path) -> list[Path]:
    """What killed exports to this target left beside it.

    Raises:
        TargetBusy: the export is running.
    """
    own = re.compile(rf"\.{re.escape(target.name)}\.(\d+)-[0-9a-f]+({re.escape(ASIDE)}|\.partial)")
    found = []
    for path in target.parent.iterdir() if target.parent.is_dir() else ():
        if not (named := own.fullmatch(path.name)):
            continue
        if path.is_symlink():  # what was replaced was a link to a package
            found.append(path)
            continue
        with suppress(OSError):  # gone meanwhile, not ours, or nothing can be locked here
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: who looks is in nobody's way
                found.append(path)
            except BlockingIOError:
                raise TargetBusy(
                    "another export is writing to the target",
                    where=str(target),
                    expected="one export to a target at a time",
                    found=f"process {named[1]}, which is running",
                    fix="wait for it to end, or choose another folder",
                ) from None
            finally:
                os.close(descriptor)
    return found


def _remove(path: Path) -> None:
    """A folder and all that is in it, or a link to one; to the end, also when a signal comes in between."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
        return
    try:
        shutil.rmtree(path, ignore_errors=True)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise


def _flush(*paths: Path) -> None:
    """Onto the disk: a rename that survives a power cut must not point at bytes that do not."""
    for path in paths:
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


def _exchange(one: Path, other: Path) -> None:
    """Swap two names atomically (renameat2 with RENAME_EXCHANGE).

    Where that is not known, in two renames: killed between them, it leaves `other` aside, and the next export puts it
    back.
    """
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    with suppress(AttributeError, OSError):
        if not ctypes.CDLL(None, use_errno=True).renameat2(here, os.fsencode(one), here, os.fsencode(other), exchange):
            return
    aside = one.with_name(one.name.removesuffix(".partial") + ASIDE)
    try:
        other.rename(aside)
        one.rename(other)
    except BaseException:
        with suppress(OSError):  # there is nothing aside, or something in its place
            aside.rename(other)
        raise
    _remove(aside)
