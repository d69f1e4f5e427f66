"""From tiles to byte ranges: which runs of a file land where in a result, and how many bytes that reads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from waybill.checkpoint.header import DTYPE_BITS
from waybill.weights.lazy import Decoded, LazyTensor, Tile

SHORTEST_RUN = 1024
"""Bytes. Shorter runs are cheaper to read together with the gaps between them: one system call costs about as much as
copying a few kilobytes."""


class Layout(NamedTuple):
    """A tile as nested loops over its stored axes, strides in elements; `base` is the first element's place."""

    extent: tuple[int, ...]
    source_strides: tuple[int, ...]
    source_base: int
    target_strides: tuple[int, ...]
    target_base: int

    @property
    def run(self) -> tuple[int, int]:
        """Elements that are contiguous on both sides, and how many leading axes remain outside that run."""
        length, outer = 1, len(self.extent)
        for axis in reversed(range(len(self.extent))):
            if self.extent[axis] != 1:
                if not self.source_strides[axis] == self.target_strides[axis] == length:
                    break
                length *= self.extent[axis]
            outer = axis
        return length, outer

    def runs(self) -> Iterator[tuple[int, int]]:
        """(source, target) element offsets of every contiguous run, in file order."""
        _, outer = self.run
        for index in product(*(range(n) for n in self.extent[:outer])):
            source = self.source_base + sum(i * s for i, s in zip(index, self.source_strides, strict=False))
            target = self.target_base + sum(i * s for i, s in zip(index, self.target_strides, strict=False))
            yield source, target


def strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    out = [1] * len(shape)
    for axis in reversed(range(len(shape) - 1)):
        out[axis] = out[axis + 1] * shape[axis + 1]
    return tuple(out)


def layout(tile: Tile, result_shape: tuple[int, ...]) -> Layout:
    """The loops that copy `tile` into a row-major result of `result_shape`."""
    source = strides(tile.source.shape)
    result = strides(result_shape)
    target = [0] * len(source)
    for axis, stride in zip(tile.axes, result, strict=True):
        if axis is not None:
            target[axis] = stride
    return Layout(
        tile.extent,
        source,
        sum(i * s for i, s in zip(tile.start, source, strict=True)),
        tuple(target),
        sum(i * s for i, s in zip(tile.offset, result, strict=True)),
    )


def read_through(tile: Tile) -> Tile:
    """The box to read for `tile`: the tile itself, or the whole rows around it where its runs are too short.

    Widening one axis to its full length makes the box contiguous from that axis on. A decoder makes what it is asked
    for, so a decoded tile is its own box.
    """
    shape, extent = tile.source.shape, tile.extent
    if isinstance(tile.source, Decoded) or extent == shape:
        return _box(tile, tile.start, extent)
    item = DTYPE_BITS[tile.source.dtype] // 8
    start = list(tile.start)
    for axis in reversed(range(len(shape))):
        run = math.prod(extent[axis:]) * item
        whole = extent[axis] == shape[axis]
        if not whole and (run >= SHORTEST_RUN or math.prod(extent[:axis]) == 1):
            break
        if not whole:
            start[axis] = 0
            extent = (*extent[:axis], shape[axis], *extent[axis + 1 :])
    return _box(tile, tuple(start), extent)


def _box(tile: Tile, start: tuple[int, ...], extent: tuple[int, ...]) -> Tile:
    """A box of the tile's source, along the stored axes."""
    return Tile(tile.source, (0,) * len(start), extent, tuple(range(len(start))), start)


def is_direct(tile: Tile, result_shape: tuple[int, ...], dtype: str) -> bool:
    """Whether `tile` lies in the file as it must lie in the result, in runs long enough to be worth a call."""
    if isinstance(tile.source, Decoded) or tile.source.dtype != dtype:
        return False
    loops = layout(tile, result_shape)
    length, outer = loops.run
    long_enough = length * (DTYPE_BITS[tile.source.dtype] // 8) >= SHORTEST_RUN
    return tile.in_order and (long_enough or math.prod(loops.extent[:outer]) == 1)


def bytes_read(value: LazyTensor) -> int:
    """Bytes the file system is asked for to make `value`, gaps read through included."""
    return sum(map(_tile_bytes, value.tiles))


def shares(value: LazyTensor, other: LazyTensor) -> bool:
    """Whether both are decoded from the same stored boxes, tile by tile: read for the one, they are there for both."""
    return len(value.tiles) == len(other.tiles) > 0 and all(map(_of_the_same, value.tiles, other.tiles))


def _of_the_same(one: Tile, other: Tile) -> bool:
    a, b = one.source, other.source
    if not isinstance(a, Decoded) or not isinstance(b, Decoded) or (a.offset, a.name) != (b.offset, b.name):
        return False
    needed, again = a.decoder.inputs(one.start, one.extent), b.decoder.inputs(other.start, other.extent)
    return len(needed) == len(again) > 0 and all(x == y or shares(x, y) for x, y in zip(needed, again, strict=True))


def reads(value: LazyTensor) -> Iterator[tuple[str, int]]:
    """The same in parts: a file, and bytes that are asked of it."""
    for tile in value.tiles:
        if isinstance(tile.source, Decoded):
            for needed in tile.source.decoder.inputs(tile.start, tile.extent):
                yield from reads(needed)
        else:
            yield tile.source.file, _tile_bytes(tile)


def _tile_bytes(tile: Tile) -> int:
    source, extent = tile.source, tile.extent
    if isinstance(source, Decoded):
        return sum(map(bytes_read, source.decoder.inputs(tile.start, extent)))
    if extent == source.shape:
        return source.nbytes
    return math.prod(read_through(tile).shape) * (DTYPE_BITS[source.dtype] // 8)
