"""Execute a plan: read each needed byte range once, forward through the shards, straight into its place.

Where no arithmetic is needed a range goes from the file into its rows of the result, with nothing in between. Where the
dtype changes, axes swap or runs are too short to read one by one, a block of at most CHUNK bytes is staged.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from waybill.checkpoint import RangeReader, TensorHeader
from waybill.plan.bill import CHUNK, SCALE_ROLES, THREADS, Binding
from waybill.plan.damage import bad_scales, inexact_scales, non_finite, overflow
from waybill.plan.pages import Scratch, populate
from waybill.weights import Storage
from waybill.weights.affine import AffinePackedWeight
from waybill.weights.codebook import CodebookWeight
from waybill.weights.dequantize import dequantize_arrays, dequantize_codes
from waybill.weights.dtypes import NUMPY_DTYPES, Array, all_finite, cast_into
from waybill.weights.lazy import Decoded, LazyTensor, Tile
from waybill.weights.ranges import Layout, bytes_read, is_direct, layout, read_through, strides

SEGMENTS = 256
"""Runs one job reads at most, so that many short runs are shared among the threads too."""

DECODED = 2 << 20
"""Bytes of a block that is decoded: source, result and what lies between stay in the outer caches."""

IN_FLIGHT = 256 << 20
"""Result bytes filled ahead of the consumer, unless told."""

Job = Callable[[], int]
"""Fills a part of one result; returns the result bytes it filled."""


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
    binding, if larger) are being filled ahead of the consumer, plus CHUNK bytes of scratch a thread.

    Raises:
        FileChanged: a file is not the one the plan was made from, or no longer is when all has been read.
        CastOverflow: a finite value is infinite in the target dtype, or a packed weight could be.
        BadScales: the scales of a packed weight are not finite, or zero for a whole group.
        NonFiniteWeight: `check_finite` was asked for and found NaN or infinity.
    """
    waiting: deque[tuple[Binding, Array, list[Future[int]]]] = deque()
    ahead = 0

    def finish() -> tuple[Binding, Array]:
        nonlocal ahead
        binding, result, jobs = waiting.popleft()
        filled = 0
        for job in jobs:
            told = job.result()
            filled += told
            progress(told)
        if filled < binding.nbytes:
            progress(binding.nbytes - filled)  # padding
        ahead -= binding.nbytes
        if binding.role in SCALE_ROLES and (found := bad_scales(result.view(NUMPY_DTYPES[binding.dtype]), binding)):
            raise found
        numbers = binding.dtype if binding.role == "weight" else binding.numbers
        if check_finite and numbers and not all_finite(result.view(NUMPY_DTYPES[numbers])):
            raise non_finite(binding)
        return binding, result

    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), "waybill-read") as pool:
        try:
            for binding in bindings:
                while waiting and ahead + binding.nbytes > in_flight:
                    yield finish()
                result = allocate(binding)
                ahead += binding.nbytes
                waiting.append((binding, result, [pool.submit(job) for job in _jobs(binding, reader, result)]))
            while waiting:
                yield finish()
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
    own = replace(binding, shape=part.shape, value=part)
    result = allocate(own.nbytes)
    for job in _jobs(own, reader, result):
        job()
    return result


def _jobs(binding: Binding, reader: RangeReader, result: Array) -> Iterator[Job]:
    """Everything to be done for one binding, in file order."""
    direct: list[tuple[str, int, int, int]] = []
    staged: list[Tile] = []
    covered = 0
    for tile in binding.value.tiles:
        covered += math.prod(tile.shape)
        if is_direct(tile, binding.shape, binding.dtype):
            direct += _segments(tile, binding)
        else:
            staged.append(tile)
    if covered < math.prod(binding.shape):
        result[:] = 0  # padding; before any job of this binding starts
    yield from _direct_jobs(direct, reader, result)
    for tile in staged:
        yield from _staged_jobs(tile, binding, reader, result)


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


def _staged_jobs(tile: Tile, binding: Binding, reader: RangeReader, result: Array) -> Iterator[Job]:
    """Blocks along one stored axis."""
    loops = layout(tile, binding.shape)
    target = NUMPY_DTYPES[binding.dtype]
    place = np.lib.stride_tricks.as_strided(
        result.view(target)[loops.target_base :],
        shape=loops.extent,
        strides=[stride * target.itemsize for stride in loops.target_strides],
    )
    blocks = _blocks_of(tile)
    if blocks is None:
        yield partial(_stage, tile, 0, None, binding, reader, place)
        return
    axis, nbytes = blocks
    row = math.prod(read_through(tile).shape) // loops.extent[axis]
    rows = max(nbytes // (row * max(target.itemsize, NUMPY_DTYPES[tile.source.dtype].itemsize)), 1)
    for start in range(0, loops.extent[axis], rows):
        stop = min(start + rows, loops.extent[axis])
        yield partial(_stage, tile, axis, (start, stop), binding, reader, place)


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


def _stage(
    tile: Tile, axis: int, rows: tuple[int, int] | None, binding: Binding, reader: RangeReader, place: Array
) -> int:
    """Read or decode a block, cut away what was read through, cast, and put it in its place."""
    wide = read_through(tile)
    start, extent, inner = list(wide.start), list(wide.shape), list(tile.start)
    index: list[Any] = [slice(None)] * len(extent)
    if rows is not None:
        start[axis] = tile.start[axis] + rows[0]
        inner[axis] = start[axis]
        extent[axis] = rows[1] - rows[0]
        index[axis] = slice(*rows)
    block = _box(tile.source, tuple(start), tuple(extent), reader)
    destination = place[(*index, ...)]
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


def _box(source: TensorHeader | Decoded, start: tuple[int, ...], extent: tuple[int, ...], reader: RangeReader) -> Array:
    """A box of a stored tensor as it lies, or of a decoded one."""
    if isinstance(source, Decoded):
        inputs = source.decoder.inputs(start, extent)
        return source.decoder.decode([materialize(value, reader) for value in inputs], start, extent)
    dtype = NUMPY_DTYPES[source.dtype]
    raw = np.empty(math.prod(extent) * dtype.itemsize, np.uint8)
    view = memoryview(raw)  # type: ignore[arg-type]
    steps = strides(source.shape)
    base = sum(i * s for i, s in zip(start, steps, strict=True))
    loops = Layout(extent, steps, base, strides(extent), 0)
    nbytes = loops.run[0] * dtype.itemsize
    segments = [
        (source.offset + at * dtype.itemsize, view[to * dtype.itemsize : to * dtype.itemsize + nbytes])
        for at, to in loops.runs()
    ]
    reader.read_into(source.file, segments)
    return raw.view(dtype).reshape(extent)


def materialize(value: LazyTensor, reader: RangeReader) -> Array:
    """The whole of a lazy tensor as an array of its own dtype: for small things, and for inputs of decoders."""

    def placed(tile: Tile) -> Array:
        wide = read_through(tile)
        block = _box(tile.source, wide.start, wide.shape, reader)
        cut = tuple(slice(i - s, i - s + n) for i, s, n in zip(tile.start, wide.start, tile.extent, strict=True))
        followed = [axis for axis in tile.axes if axis is not None]
        fixed = tuple(axis for axis in range(block.ndim) if axis not in followed)
        return block[cut].transpose((*fixed, *followed)).reshape(tile.shape)

    if len(value.tiles) == 1 and value.tiles[0].shape == value.shape:
        return np.asarray(placed(value.tiles[0]), order="C")
    result = np.zeros(value.shape, NUMPY_DTYPES[value.dtype])
    for tile in value.tiles:
        result[tuple(slice(o, o + n) for o, n in zip(tile.offset, tile.shape, strict=True))] = placed(tile)
    return result


def dequantized(weight: Storage, reader: RangeReader) -> Array:
    """All values of a weight as float32."""
    parts = {role: materialize(value, reader) for role, value in weight.parts.items()}
    if isinstance(weight, AffinePackedWeight):
        bits, zeros, minimums = weight.layout.bits, parts.get("zero_points"), parts.get("minimums")
        return dequantize_arrays(parts["codes"], parts["scales"], zeros, bits, weight.in_features, minimums)
    if isinstance(weight, CodebookWeight):
        return dequantize_codes(parts["codes"], parts[weight.layout.scale_role], weight.layout)
    return parts["weight"].astype(np.float32)
