"""Initializers on disk: where each lies, and how its bytes get there, in bounded memory and each source byte once."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from blake3 import blake3

from waybill.checkpoint import RangeReader
from waybill.plan import Binding
from waybill.plan.bill import CHUNK, SCALE_ROLES, THREADS, bundles
from waybill.plan.damage import bad_scales
from waybill.plan.pages import Scratch
from waybill.plan.stream import fill_together, ranges
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
        with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), "waybill-write") as pool:
            try:
                checks = [pool.submit(_look_at, binding, reader) for binding in checked]
                made = [pool.submit(writer.bundle, bundle) for bundle in bundles(bindings.values())]
                made += [pool.submit(writer.table, name, values) for name, values in tables.items()]
                digests = {name: digest for each in made for name, digest in each.result().items()}
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
    for parts in pieces([binding]):
        fill_together([binding], parts, reader)


def pieces(bundle: Sequence[Binding]) -> Iterator[Sequence[LazyTensor]]:
    """Parts of at most CHUNK bytes together, or of one row of the last axis that all have, in order.

    Decoded parts are larger: a producer may have packed along the other axis, and a block of a few outputs would be
    short runs of the file.
    """
    values = [binding.value for binding in bundle]
    decoded = any(isinstance(tile.source, Decoded) for value in values for tile in value.tiles)
    return _pieces(values, [NUMPY_DTYPES[b.dtype].itemsize for b in bundle], DECODED if decoded else CHUNK, 0)


def _pieces(
    values: Sequence[LazyTensor], items: Sequence[int], limit: int, axis: int
) -> Iterator[Sequence[LazyTensor]]:
    nbytes = sum(math.prod(value.shape) * item for value, item in zip(values, items, strict=True))
    if nbytes <= limit or axis == min(len(value.shape) for value in values):
        yield values
        return
    length = values[0].shape[axis]
    rows = limit // (nbytes // length)
    step = max(rows, 1)
    for start in range(0, length, step):
        part = [value.narrow(axis, start, min(step, length - start)) for value in values]
        yield from [part] if rows else _pieces(part, items, limit, axis + 1)


@dataclass(frozen=True, slots=True)
class _Writer:
    reader: RangeReader
    descriptor: int
    folder: Path
    layout: Layout
    progress: Callable[[int], None]
    scratch: Scratch = field(default_factory=Scratch)

    def table(self, name: str, values: Array) -> dict[str, str]:
        """A computed table."""
        octets = memoryview(values.reshape(-1).view("u1"))  # type: ignore[arg-type]
        _write(self.descriptor, octets, self.layout.places[name].offset)
        self.progress(len(octets))
        return {name: blake3(octets).hexdigest()}

    def bundle(self, bundle: Sequence[Binding]) -> dict[str, str]:
        """Initializers that share their bytes, or one: linked, copied inside the kernel, or made piece by piece."""
        first = bundle[0]
        place, linked = self.layout.places[first.target], first.target in self.layout.linked
        computed = len(bundle) > 1 or first.role in SCALE_ROLES or linked or not first.is_direct
        if not computed and self._copied(first, place):
            return {first.target: digest(self.folder / place.file, place, self.progress)}
        written = [_Written(self, binding) for binding in bundle]
        for parts in pieces(bundle):
            for each, made in zip(written, fill_together(bundle, parts, self.reader, self.scratch), strict=True):
                each.add(made)
        return {binding.target: each.finish() for binding, each in zip(bundle, written, strict=True)}

    def _copied(self, binding: Binding, place: Place) -> bool:
        """Whether the kernel could copy every range; where it fails, reading and writing show which of the two does."""
        try:
            for file, offset, at, nbytes in ranges(binding):
                self.reader.copy_into(file, offset, self.descriptor, place.offset + at, nbytes)
        except OSError:
            return False
        return True


class _Written:
    """One initializer that is made in pieces. Scales are few, and looked at as a whole before they are written."""

    def __init__(self, writer: _Writer, binding: Binding) -> None:
        name, self._writer, self._binding = binding.target, writer, binding
        self._place = None if name in writer.layout.linked else writer.layout.places[name]
        self._whole = np.empty(binding.nbytes, np.uint8) if binding.role in SCALE_ROLES else None
        self._made_of = blake3()
        self._done = 0

    def add(self, made: Array) -> None:
        """The next piece, which may be overwritten afterwards."""
        if self._whole is None:
            self._put(made)
        else:
            self._whole[self._done : self._done + len(made)] = made
        self._done += len(made)

    def finish(self) -> str:
        """The digest of the whole."""
        if self._whole is not None:
            if found := bad_scales(self._whole.view(NUMPY_DTYPES[self._binding.dtype]), self._binding):
                raise found
            self._done = 0
            self._put(self._whole)
        return self._made_of.hexdigest()

    def _put(self, made: Array) -> None:
        octets = memoryview(made)  # type: ignore[arg-type]
        self._made_of.update(octets)
        if self._place is not None:
            _write(self._writer.descriptor, octets, self._place.offset + self._done)
        self._writer.progress(len(octets))


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
