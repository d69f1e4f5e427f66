"""Initializers on disk: where each lies, and how its bytes get there, in bounded memory and each source byte once."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from waybill.checkpoint import RangeReader
from waybill.plan import Binding
from waybill.plan.bill import CHUNK, SCALE_ROLES, THREADS
from waybill.plan.damage import bad_scales
from waybill.plan.pages import Scratch
from waybill.plan.stream import fill, ranges
from waybill.weights import LazyTensor
from waybill.weights.dtypes import NUMPY_DTYPES, Array
from waybill.weights.lazy import Decoded

DATA = "model.onnx.data"
DECODED = 8 * CHUNK
"""Bytes of a piece that is decoded."""
PAGE = 4096
"""Large initializers begin on a page, so that a runtime can map them; small ones are aligned for vector loads."""
ALIGNMENT = 64


class Place(NamedTuple):
    """An initializer's bytes: a file of the package, where in it, and how many."""

    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Places of bindings and tables by name, and the size of the data file. What is linked lies in the checkpoint's."""

    places: Mapping[str, Place]
    data_bytes: int
    linked: frozenset[str]

    @property
    def files(self) -> list[str]:
        """Every file that holds initializers."""
        return sorted({place.file for place in self.places.values()})


def lay_out(bindings: Mapping[str, Binding], tables: Mapping[str, Array], *, link: bool) -> Layout:
    """One after the other in streaming order, tables last."""
    places: dict[str, Place] = {}
    linked: set[str] = set()
    end = 0
    sizes = {name: binding.nbytes for name, binding in bindings.items()}
    for name, nbytes in (sizes | {name: table.nbytes for name, table in tables.items()}).items():
        if link and name in bindings and (whole := one_range(bindings[name])) is not None:
            places[name] = whole
            linked.add(name)
            continue
        alignment = PAGE if nbytes >= PAGE else ALIGNMENT
        start = -(-end // alignment) * alignment
        places[name] = Place(DATA, start, nbytes)
        end = start + nbytes
    return Layout(places, end, frozenset(linked))


def one_range(binding: Binding) -> Place | None:
    """The stored range that already is this initializer, byte for byte; None when something has to be done."""
    if not binding.is_direct:
        return None
    found = list(ranges(binding))
    if len(found) != 1 or found[0][3] != binding.nbytes:
        return None
    file, offset, _, nbytes = found[0]
    return Place(file, offset, nbytes)


def write_data(
    folder: Path,
    layout: Layout,
    bindings: Mapping[str, Binding],
    checked: list[Binding],
    tables: Mapping[str, Array],
    reader: RangeReader,
    progress: Callable[[int], None],
) -> dict[str, str]:
    """Fill the data file, look at what is only checked, and return the BLAKE3 of every initializer as it lies there.

    Host peak: CHUNK bytes and what decoding them takes, a thread; and the scales of one weight.

    Raises:
        WaybillError: a file changed, or a value is damaged or does not fit.
        OSError: the data file cannot be written.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(folder / DATA, flags, 0o644)
    try:
        os.truncate(descriptor, layout.data_bytes)
        writer = _Writer(reader, descriptor, folder, layout, progress)

        def one(name: str) -> tuple[str, str]:
            if name in tables:
                return name, writer.table(name, tables[name])
            return name, writer.binding(name, bindings[name])

        with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), "waybill-write") as pool:
            try:
                checks = [pool.submit(_look_at, binding, reader) for binding in checked]
                digests = dict(pool.map(one, layout.places))
                for check in checks:
                    check.result()
                reader.confirm()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    finally:
        os.close(descriptor)
    return digests


def _look_at(binding: Binding, reader: RangeReader) -> None:
    """Make a value for what its decoder finds on the way."""
    for _, part in pieces(binding.value, NUMPY_DTYPES[binding.dtype].itemsize):
        fill(binding, part, reader)


def pieces(value: LazyTensor, item: int, axis: int = 0, at: int = 0) -> Iterator[tuple[int, LazyTensor]]:
    """(byte offset, part) of parts of at most CHUNK bytes, or of one row of the last axis, in order.

    Decoded parts are larger: a producer may have packed along the other axis, and a block of a few outputs would be
    short runs of the file.
    """
    limit = DECODED if any(isinstance(tile.source, Decoded) for tile in value.tiles) else CHUNK
    nbytes = math.prod(value.shape) * item
    if nbytes <= limit or axis == len(value.shape):
        yield at, value
        return
    row = nbytes // value.shape[axis]
    if row > limit:
        for index in range(value.shape[axis]):
            yield from pieces(value.narrow(axis, index, 1), item, axis + 1, at + index * row)
        return
    rows = limit // row
    for start in range(0, value.shape[axis], rows):
        length = min(rows, value.shape[axis] - start)
        yield at + start * row, value.narrow(axis, start, length)


@dataclass(frozen=True, slots=True)
class _Writer:
    reader: RangeReader
    descriptor: int
    folder: Path
    layout: Layout
    progress: Callable[[int], None]
    scratch: Scratch = field(default_factory=Scratch)

    def table(self, name: str, values: Array) -> str:
        """A computed table."""
        octets = memoryview(values.reshape(-1).view("u1"))  # type: ignore[arg-type]
        _write(self.descriptor, octets, self.layout.places[name].offset)
        self.progress(len(octets))
        return blake3(octets).hexdigest()

    def binding(self, name: str, binding: Binding) -> str:
        """One initializer: linked, copied inside the kernel, or made piece by piece."""
        place = self.layout.places[name]
        whole = binding.role in SCALE_ROLES  # few, and looked at as a whole
        linked = name in self.layout.linked
        if binding.is_direct and not (whole or linked) and self._copied(binding, place):
            return digest(self.folder / place.file, place, self.progress)
        made_of = blake3()
        parts = [(0, binding.value)] if whole else pieces(binding.value, NUMPY_DTYPES[binding.dtype].itemsize)
        for at, part in parts:
            made = fill(binding, part, self.reader, self.scratch)
            if whole and (found := bad_scales(made.view(NUMPY_DTYPES[binding.dtype]), binding)):
                raise found
            octets = memoryview(made)  # type: ignore[arg-type]
            made_of.update(octets)
            if not linked:
                _write(self.descriptor, octets, place.offset + at)
            self.progress(len(octets))
        return made_of.hexdigest()

    def _copied(self, binding: Binding, place: Place) -> bool:
        """Whether the kernel could copy every range; where it fails, reading and writing show which of the two does."""
        try:
            for file, offset, at, nbytes in ranges(binding):
                self.reader.copy_into(file, offset, self.descriptor, place.offset + at, nbytes)
        except OSError:
            return False
        return True


def digest(path: Path, place: Place, progress: Callable[[int], None]) -> str:
    """BLAKE3 of an initializer as it lies, a chunk at a time; of fewer bytes than promised where the file ends."""
    made = blake3()
    scratch = memoryview(bytearray(min(CHUNK, place.nbytes)))
    done = 0
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while done < place.nbytes:
            count = os.preadv(descriptor, [scratch[: place.nbytes - done]], place.offset + done)
            if count == 0:
                break
            made.update(scratch[:count])
            progress(count)
            done += count
    finally:
        os.close(descriptor)
    return made.hexdigest()


def _write(descriptor: int, octets: memoryview, at: int) -> None:
    done = 0
    while done < len(octets):
        done += os.pwrite(descriptor, octets[done:], at + done)
