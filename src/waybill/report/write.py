"""Putting a report where it was asked for: whole or not at all, and never over anything but a report."""

from __future__ import annotations

import os
from contextlib import suppress
from glob import escape
from pathlib import Path

from waybill.errors import CannotWrite, TargetExists

MARKER = "<!doctype html>\n<!-- waybill report -->"
"""How every report begins: what may be replaced."""


def require_free(target: Path, *, overwrite: bool) -> None:
    """Refuse a place that is taken or is not there, before anything is computed.

    Raises:
        TargetExists: something is there, and it may not be replaced.
        CannotWrite: there is no such folder.
    """
    if target.exists() or target.is_symlink():
        if not overwrite:
            raise _taken(
                target, "something of that name", "choose another name, or give --overwrite to replace a report"
            )
        if not _is_report(target):
            raise _taken(target, "something that is no report", "only reports are replaced; choose another name")
    elif not target.parent.is_dir():
        raise _cannot(target.parent, "no such folder", "make the folder first, or choose another")


def write_report(page: str, target: Path, *, overwrite: bool) -> None:
    """Write beside the place, flush, rename. What a killed process left there is removed.

    Raises:
        TargetExists, CannotWrite: as above, and for a full disk or a lack of permission; nothing is left behind.
    """
    require_free(target, overwrite=overwrite)
    staging = target.with_name(f".{target.name}.{os.urandom(4).hex()}.partial")
    try:
        for left in target.parent.glob(f".{escape(target.name)}.*.partial"):
            left.unlink(missing_ok=True)
        with staging.open("x", encoding="utf-8") as file:
            file.write(page)
            file.flush()
            os.fsync(file.fileno())
        staging.replace(target)
    except OSError as error:
        found = error.strerror or str(error)
        raise _cannot(target, found, "free some space, check permissions, or choose another place") from error
    finally:
        with suppress(OSError):
            staging.unlink()


def _is_report(path: Path) -> bool:
    with suppress(OSError):
        if path.is_file():  # opening a pipe would wait for ever
            with path.open("rb") as file:
                return file.read(len(MARKER)) == MARKER.encode()
    return False


def _taken(target: Path, found: str, fix: str) -> TargetExists:
    return TargetExists(
        "the target is taken", where=str(target), expected="nothing, or a report with --overwrite", found=found, fix=fix
    )


def _cannot(where: Path, found: str, fix: str) -> CannotWrite:
    return CannotWrite(
        "the report cannot be written",
        where=str(where),
        expected="a place in a folder that can be written, with enough space",
        found=found,
        fix=fix,
    )
