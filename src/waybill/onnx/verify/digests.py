"""Digests of a package's initializers, as they lie on disk: each byte read once, forward, in bounded memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from waybill.errors import BadPackage, WaybillError
from waybill.onnx.data import Place, digest
from waybill.onnx.verify.entries import Entry
from waybill.onnx.verify.structure import locate, mismatch
from waybill.plan.bill import THREADS


def check_digests(root: Path, entries: Sequence[Entry], progress: Callable[[int], None]) -> list[WaybillError]:
    """Every entry whose bytes have another BLAKE3 than it states. Host peak: one chunk a thread."""
    places = sorted({Place(entry.file, entry.offset, entry.nbytes) for entry in entries})
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), "waybill-digest") as pool:
        digests = dict(zip(places, pool.map(lambda place: _digest(root, place, progress), places), strict=True))
    return list(_differences(entries, digests))


def _differences(entries: Sequence[Entry], digests: dict[Place, str | BadPackage]) -> Iterator[WaybillError]:
    for entry in entries:
        found = digests[Place(entry.file, entry.offset, entry.nbytes)]
        if isinstance(found, BadPackage):
            yield found
        elif found != entry.digest:
            yield mismatch(
                "the bytes of an initializer are not those that were exported",
                entry,
                f"BLAKE3 {entry.digest}",
                found,
                "copy the file again, or export the package again",
            )


def _digest(root: Path, place: Place, progress: Callable[[int], None]) -> str | BadPackage:
    try:
        return digest(locate(root, place.file), place, progress)
    except BadPackage as error:
        return error
    except OSError as error:
        return BadPackage(
            "a file of the package cannot be read",
            where=str(root / place.file),
            expected="a readable file",
            found=error.strerror or str(error),
            fix="check the file's permissions and the disk",
        )
