"""Execute a plan: read each needed byte range once, forward through the shards, straight into its place.

Where no arithmetic is needed a range goes from the file into its rows of the result, with nothing in between. Where the
dtype changes, axes swap or runs are too short to read one by one, a block of at most CHUNK bytes is staged.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from waybill.checkpoint import RangeReader
from waybill.plan.bill import CHUNK, SCALE_ROLES, THREADS, Binding, bundles
from waybill.plan.boxes import Held, read_box
from waybill.plan.damage import bad_scales, inexact_scales, non_finite, overflow
from waybill.plan.pages import Scratch, populate
from waybill.weights.dtypes import NUMPY_DTYPES, Array, all_finite, cast_into
from waybill.weights.lazy import Decoded, LazyTensor, Tile
from waybill.weights.ranges import bytes_read, is_direct, layout, read_through

SEGMENTS = 256
"""Runs one job reads at most, so that many short runs are shared among the threads too."""

DECODED = 1 << 20
"""Bytes of a block that is decoded: source, result and what lies between stay in the outer caches, and in memory that
the allocator keeps: twice as much is given back to the kernel after each block, and faulted in again."""

ALIGNMENT = 64
"""Bytes between the beginnings of results that lie in one piece of memory."""

IN_FLIGHT = 256 << 20
"""Result bytes filled ahead of the consumer, unless told."""

Job = Callable[[], int]
"""Fills a part of one result, or of several that share what is read; returns the result bytes it filled."""
Results = Sequence[tuple[Binding, Array]]
"""Bindings that are made together, and where."""


def stream(
    bindings: tuple[Binding, ...],
    reader: RangeReader,
    allocate: Callable[[Binding], Array],
    *,
    in_flight: int = IN_FLIGHT,
    check_finite: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> Iterator[tuple[Binding, Array]]:
    """Yield each binding once, in order, with its bytes in the array that `allocate` gave.

    `allocate` returns an uninitialised uint8 array of `binding.nbytes`. At most `in_flight` result bytes (or one
    weight, if larger) are being filled ahead of the consumer, plus CHUNK bytes of scratch a thread.

    Raises:
        FileChanged: a file is not the one the plan was made from, or no longer is when all has been read.
        CastOverflow: a finite value is infinite in the target dtype, or a packed weight could be.
        BadScales: the scales of a packed weight are not finite, or zero for a whole group.
        NonFiniteWeight: `check_finite` was asked for and found NaN or infinity.
    """
    waiting: deque[tuple[Results, list[Future[int]]]] = deque()
    ahead = 0

    def finish() -> Results:
        nonlocal ahead
        results, jobs = waiting.popleft()
        unfilled = nbytes = sum(binding.nbytes for binding, _ in results)
        for job in jobs:
            told = job.result()
            unfilled -= told
            progress(told)
        if unfilled:
            progress(unfilled)  # padding
        ahead -= nbytes
        for binding, result in results:
            if binding.role in SCALE_ROLES and (found := bad_scales(result.view(NUMPY_DTYPES[binding.dtype]), binding)):
                raise found
            numbers = binding.dtype if binding.role == "weight" else binding.numbers
            if check_finite and numbers and not all_finite(result.view(NUMPY_DTYPES[numbers])):
                raise non_finite(binding)
        return results

    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), "waybill-read") as pool:
        try:
            for bundle in bundles(bindings):
                nbytes = sum(binding.nbytes for binding in bundle)
                while waiting and ahead + nbytes > in_flight:
                    yield from finish()
                results = [(binding, allocate(binding)) for binding in bundle]
                ahead += nbytes
                waiting.append((results, [pool.submit(job) for job in _jobs(results, reader)]))
            while waiting:
                yield from finish()
            reader.confirm()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def equals(binding: Binding, reader: RangeReader, reference: Callable[[int, int], Array]) -> bool:
    """Whether a stored parameter has exactly the bytes of another, reading no further than the first difference.

    `reference(start, stop)` gives the bytes of those rows of the other. Works through blocks of rows, so that nothing
    of the parameter's size is allocated.
    """
    rows = binding.shape[0]
    row_bytes = max(binding.nbytes // max(rows, 1), 1)
    block = max(CHUNK // row_bytes, 1)
    workers = min(THREADS, os.cpu_count() or 1)
    scratch = Scratch()

    def same(start: int) -> bool:
        stop = min(start + block, rows)
        own = fill(binding, binding.value.narrow(0, start, stop - start), reader, scratch)
        return _equal_bytes(own, reference(start, stop))

    starts = range(0, rows, block)
    with ThreadPoolExecutor(workers, "waybill-compare") as pool:
        for at in range(0, len(starts), workers):
            if not all(list(pool.map(same, starts[at : at + workers]))):
                return False
    return True


def _equal_bytes(one: Array, other: Array) -> bool:
    """Whether two byte arrays are equal, eight at a time where they divide so."""
    if one.size == other.size and one.size % 8 == 0:
        one, other = one.view(np.uint64), other.view(np.uint64)
    return np.array_equal(one, other)


def fill(
    binding: Binding,
    part: LazyTensor,
    reader: RangeReader,
    allocate: Callable[[int], Array] = lambda nbytes: np.empty(nbytes, np.uint8),
) -> Array:
    """The bytes of a part of a binding's value, in the binding's dtype, made in this thread."""
    return fill_together((binding,), (part,), reader, allocate)[0]


def fill_together(
    bundle: Sequence[Binding],
    parts: Sequence[LazyTensor],
    reader: RangeReader,
    allocate: Callable[[int], Array] = lambda nbytes: np.empty(nbytes, np.uint8),
) -> list[Array]:
    """The same of bindings that share their bytes, and of the same rows of each; in one piece of memory."""
    own = [replace(binding, shape=part.shape, value=part) for binding, part in zip(bundle, parts, strict=True)]
    ends = list(accumulate((-(-binding.nbytes // ALIGNMENT) * ALIGNMENT for binding in own), initial=0))
    room = allocate(ends[-2] + own[-1].nbytes)
    results = [room[start : start + binding.nbytes] for start, binding in zip(ends, own, strict=False)]
    for job in _jobs(list(zip(own, results, strict=True)), reader):
        job()
    return results


def _jobs(results: Results, reader: RangeReader) -> Iterator[Job]:
    """Everything to be done for one binding, or several that share their bytes, in file order."""
    for binding, result in results:
        if sum(math.prod(tile.shape) for tile in binding.value.tiles) < math.prod(binding.shape):
            result[:] = 0  # padding; before any job of this binding starts
    first, place = results[0]
    direct: list[tuple[str, int, int, int]] = []
    staged: list[tuple[Tile, ...]] = []
    for tiles in zip(*(binding.value.tiles for binding, _ in results), strict=True):
        if is_direct(tiles[0], first.shape, first.dtype):  # never where bytes are shared: those are decoded
            direct += _segments(tiles[0], first)
        else:
            staged.append(tiles)
    yield from _direct_jobs(direct, reader, place)
    for tiles in staged:
        yield from _staged_jobs([(tile, *made) for tile, made in zip(tiles, results, strict=True)], reader)


def _segments(tile: Tile, binding: Binding) -> Iterator[tuple[str, int, int, int]]:
    """(file, file offset, result offset, bytes) of every contiguous run."""
    item = NUMPY_DTYPES[binding.dtype].itemsize
    loops = layout(tile, binding.shape)
    nbytes = loops.run[0] * item
    for source, target in loops.runs():
        yield tile.source.file, tile.source.offset + source * item, target * item, nbytes


def ranges(binding: Binding) -> Iterator[tuple[str, int, int, int]]:
    """(file, file offset, offset in the result, bytes) of a direct binding's runs, those that touch joined."""
    return _joined(sorted(segment for tile in binding.value.tiles for segment in _segments(tile, binding)))


def _direct_jobs(segments: list[tuple[str, int, int, int]], reader: RangeReader, result: Array) -> Iterator[Job]:
    """Join runs that touch on both sides, cut long ones, and pack them into jobs of about CHUNK bytes."""
    view = memoryview(result)  # type: ignore[arg-type]
    batch: list[tuple[int, memoryview]] = []
    batch_file, batch_bytes = "", 0

    def job() -> Job:
        return partial(_read, reader, batch_file, batch, batch_bytes)

    for file, offset, at, nbytes in _joined(sorted(segments)):
        for done in range(0, nbytes, CHUNK):
            length = min(CHUNK, nbytes - done)
            if batch and (file != batch_file or batch_bytes + length > CHUNK or len(batch) == SEGMENTS):
                yield job()
                batch, batch_bytes = [], 0
            batch_file = file
            batch.append((offset + done, view[at + done : at + done + length]))
            batch_bytes += length
    if batch:
        yield job()


def _joined(segments: list[tuple[str, int, int, int]]) -> Iterator[tuple[str, int, int, int]]:
    held: tuple[str, int, int, int] | None = None
    for segment in segments:
        file, offset, at, nbytes = segment
        if held and held[0] == file and held[1] + held[3] == offset and held[2] + held[3] == at:
            held = (file, held[1], held[2], held[3] + nbytes)
            continue
        if held:
            yield held
        held = segment
    if held:
        yield held


def _read(reader: RangeReader, file: str, segments: list[tuple[int, memoryview]], nbytes: int) -> int:
    for _, view in segments:
        populate(view)
    reader.read_into(file, segments)
    return nbytes


def _staged_jobs(made: Sequence[tuple[Tile, Binding, Array]], reader: RangeReader) -> Iterator[Job]:
    """Blocks along one stored axis of a tile, and the same of others that share its bytes."""
    places = [_Place(tile, binding, _inside(result, tile, binding)) for tile, binding, result in made]
    tile, _, array = places[0]
    blocks = _blocks_of(tile)
    if blocks is None or any(blocks[0] >= place.array.ndim for place in places):
        yield partial(_stage_all, places, 0, None, reader)
        return
    axis, nbytes = blocks
    length = array.shape[axis]
    row = math.prod(read_through(tile).shape) // length
    rows = max(nbytes // (row * max(array.dtype.itemsize, NUMPY_DTYPES[tile.source.dtype].itemsize)), 1)
    for start in range(0, length, rows):
        yield partial(_stage_all, places, axis, (start, min(start + rows, length)), reader)


class _Place(NamedTuple):
    """A tile, whose it is, and where it lies in the result, along the stored axes."""

    tile: Tile
    binding: Binding
    array: Array


def _inside(result: Array, tile: Tile, binding: Binding) -> Array:
    loops = layout(tile, binding.shape)
    target = NUMPY_DTYPES[binding.dtype]
    return np.lib.stride_tricks.as_strided(
        result.view(target)[loops.target_base :],
        shape=loops.extent,
        strides=[stride * target.itemsize for stride in loops.target_strides],
    )


def _blocks_of(tile: Tile) -> tuple[int, int] | None:
    """The axis to cut into blocks and the bytes of one; None for a single element.

    A stored tensor is cut along its first axis. A decoded one along the axis whose pieces ask the file for least: codes
    packed along K lie there a group after another, and a block of outputs would be read in short runs, or the whole of
    it for each block.
    """
    extent = tile.extent
    axes = [axis for axis, length in enumerate(extent) if length > 1]
    if not axes:
        return None
    if not isinstance(tile.source, Decoded):
        return axes[0], CHUNK
    decoder = tile.source.decoder

    def asked(box: tuple[int, ...]) -> int:
        return sum(map(bytes_read, decoder.inputs(tile.start, box)))

    whole = asked(extent)
    pieces = {axis: asked((*extent[:axis], 1, *extent[axis + 1 :])) for axis in axes}
    read = {axis: extent[axis] * piece if piece < whole else math.inf for axis, piece in pieces.items()}
    axis = min(axes, key=read.__getitem__)
    return axis, CHUNK if read[axis] > whole else DECODED


def _stage_all(places: Sequence[_Place], axis: int, rows: tuple[int, int] | None, reader: RangeReader) -> int:
    held: Held | None = {} if len(places) > 1 else None
    return sum(_stage(place, axis, rows, reader, held) for place in places)


def _stage(place: _Place, axis: int, rows: tuple[int, int] | None, reader: RangeReader, held: Held | None) -> int:
    """Read or decode a block, cut away what was read through, cast, and put it in its place."""
    tile, binding, array = place
    wide = read_through(tile)
    start, extent, inner = list(wide.start), list(wide.shape), list(tile.start)
    index: list[Any] = [slice(None)] * len(extent)
    if rows is not None:
        start[axis] = tile.start[axis] + rows[0]
        inner[axis] = start[axis]
        extent[axis] = rows[1] - rows[0]
        index[axis] = slice(*rows)
    block = read_box(tile.source, tuple(start), tuple(extent), reader, held)
    destination = array[(*index, ...)]
    cut: tuple[Any, ...] = tuple(
        slice(i - s, i - s + n) for i, s, n in zip(inner, start, destination.shape, strict=True)
    )
    stored = block[(*cut, ...)]
    try:
        made = cast_into(stored, destination)
    except OverflowError:
        raise overflow(tile, binding) from None
    if binding.role in SCALE_ROLES and made is not stored and (found := inexact_scales(stored, made, tile, binding)):
        raise found
    return destination.size * destination.dtype.itemsize
