"""Boxes of stored and of decoded tensors as arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from waybill.checkpoint import RangeReader, TensorHeader
from waybill.weights import Storage
from waybill.weights.affine import AffinePackedWeight
from waybill.weights.codebook import CodebookWeight
from waybill.weights.dequantize import dequantize_arrays, dequantize_codes
from waybill.weights.dtypes import NUMPY_DTYPES, Array
from waybill.weights.lazy import Decoded, LazyTensor, Tile
from waybill.weights.ranges import Layout, read_through, strides

Held = dict[tuple[LazyTensor, ...], Sequence[Array]]
"""What has been read for decoders: those of the same job may share it."""


def read_box(
    source: TensorHeader | Decoded,
    start: tuple[int, ...],
    extent: tuple[int, ...],
    reader: RangeReader,
    held: Held | None = None,
) -> Array:
    """A box of a stored tensor as it lies, or of a decoded one."""
    if isinstance(source, Decoded):
        inputs = source.decoder.inputs(start, extent)
        arrays = held.get(inputs) if held else None
        if arrays is None:
            arrays = [materialize(value, reader, held) for value in inputs]
            if held is not None:
                held[inputs] = arrays
        return source.decoder.decode(arrays, start, extent)
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


def materialize(value: LazyTensor, reader: RangeReader, held: Held | None = None) -> Array:
    """The whole of a lazy tensor as an array of its own dtype: for small things, and for inputs of decoders."""

    def placed(tile: Tile) -> Array:
        wide = read_through(tile)
        block = read_box(tile.source, wide.start, wide.shape, reader, held)
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
    held: Held = {}
    parts = {role: materialize(value, reader, held) for role, value in weight.parts.items()}
    if isinstance(weight, AffinePackedWeight):
        bits, zeros, minimums = weight.layout.bits, parts.get("zero_points"), parts.get("minimums")
        return dequantize_arrays(parts["codes"], parts["scales"], zeros, bits, weight.in_features, minimums)
    if isinstance(weight, CodebookWeight):
        return dequantize_codes(parts["codes"], parts[weight.layout.scale_role], weight.layout)
    return parts["weight"].astype(np.float32)
