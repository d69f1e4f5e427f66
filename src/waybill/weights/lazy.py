"""Lazy tensors: a shape, a dtype, and a mosaic of boxes cut from stored or decoded tensors.

Every exact rearrangement (narrow, select, concat, stack, transpose, pad) maps a mosaic to a mosaic, so whatever the
rules compose, the result still says which stored elements land where. Narrowing drops what lies outside: a
tensor-parallel rank's lazy tensor refers only to the bytes it needs. Splitting a bank of experts and stacking it again
gives back boxes that touch, which the reader joins into one range.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from waybill.checkpoint.header import DTYPE_BITS, TensorHeader

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

_T = TypeVar("_T")


class Decoder(Protocol):
    """Pure arithmetic that makes a box of a decoded tensor from boxes of its inputs."""

    def inputs(self, start: tuple[int, ...], extent: tuple[int, ...]) -> tuple[LazyTensor, ...]:
        """What must be read for a box, and no more than its rows and columns need."""

    def decode(self, arrays: Sequence[Array], start: tuple[int, ...], extent: tuple[int, ...]) -> Array:
        """The box, of shape `extent`, from the arrays of `inputs(start, extent)`."""


class Decoded(NamedTuple):
    """A tensor that exists only as a computation over stored ones; `file` and `offset` say where its bytes begin."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    decoder: Decoder


_IN_ORDER = tuple(tuple(range(rank)) for rank in range(20))
"""Axes of a tile that is not turned, by rank: a stored tensor has 16 at most."""


class Tile(NamedTuple):
    """A box of one stored or decoded tensor, and the box of the result it fills.

    `offset` and `shape` place it in the result. `axes[i]` is the stored axis that result axis i runs along, or None
    for an axis of length 1 made by stacking; `start` is the corner in the stored tensor. A stored axis that no result
    axis follows is fixed at its start.
    """

    source: TensorHeader | Decoded
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    axes: tuple[int | None, ...]
    start: tuple[int, ...]

    @property
    def extent(self) -> tuple[int, ...]:
        """The box's lengths along the stored axes."""
        if self.axes == _IN_ORDER[len(self.start)]:  # nearly every tile, and asked for often
            return self.shape
        lengths = [1] * len(self.start)
        for axis, length in zip(self.axes, self.shape, strict=True):
            if axis is not None:
                lengths[axis] = length
        return tuple(lengths)

    @property
    def in_order(self) -> bool:
        """Whether the result runs through the stored axes in stored order (no transpose)."""
        followed = [axis for axis in self.axes if axis is not None]
        return followed == sorted(followed)


class LazyTensor(NamedTuple):
    """A tensor that exists only as a description. Elements no tile covers are zero."""

    dtype: str
    shape: tuple[int, ...]
    tiles: tuple[Tile, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor once it exists."""
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8

    def narrow(self, axis: int, start: int, length: int) -> LazyTensor:
        """Keep `length` positions of `axis` from `start`; tiles outside vanish."""
        if start == 0 and length == self.shape[axis]:
            return self
        if start < 0 or length < 0 or start + length > self.shape[axis]:
            raise ValueError(f"narrow {start}+{length} of axis {axis} in {self.shape}")
        kept = []
        for tile in self.tiles:
            low = max(tile.offset[axis], start)
            high = min(tile.offset[axis] + tile.shape[axis], start + length)
            if low < high:
                kept.append(_cut(tile, axis, low, high, start))
        return LazyTensor(self.dtype, _replace(self.shape, axis, length), tuple(kept))

    def box(self, start: Sequence[int], extent: Sequence[int]) -> LazyTensor:
        """Narrow the leading axes, as many as are given."""
        value = self
        for axis, (at, length) in enumerate(zip(start, extent, strict=True)):
            value = value.narrow(axis, at, length)
        return value

    def select(self, axis: int, index: int) -> LazyTensor:
        """Take one position of `axis` and drop the axis: the inverse of `stack`."""
        one = self.narrow(axis, index, 1)
        return LazyTensor(
            self.dtype,
            _without(one.shape, axis),
            tuple(
                tile._replace(
                    offset=_without(tile.offset, axis),
                    shape=_without(tile.shape, axis),
                    axes=_without(tile.axes, axis),
                )
                for tile in one.tiles
            ),
        )

    def transpose(self) -> LazyTensor:
        """Swap the last two axes; what has fewer stays as it is."""
        return LazyTensor(
            self.dtype,
            _swapped(self.shape),
            tuple(
                Tile(tile.source, _swapped(tile.offset), _swapped(tile.shape), _swapped(tile.axes), tile.start)
                for tile in self.tiles
            ),
        )

    def pad(self, axis: int, length: int) -> LazyTensor:
        """Append zeros until `axis` has `length` positions."""
        if length < self.shape[axis]:
            raise ValueError(f"pad axis {axis} of {self.shape} to {length}")
        return LazyTensor(self.dtype, _replace(self.shape, axis, length), self.tiles)


def stored(header: TensorHeader | Decoded) -> LazyTensor:
    """The whole of one stored or decoded tensor."""
    zero = (0,) * len(header.shape)
    if 0 in header.shape:
        return LazyTensor(header.dtype, header.shape, ())
    return LazyTensor(header.dtype, header.shape, (Tile(header, zero, header.shape, _IN_ORDER[len(zero)], zero),))


def decoded(value: LazyTensor, dtype: str, shape: tuple[int, ...], decoder: Decoder) -> LazyTensor:
    """What a decoder makes of a value, known by the name and place of the first tensor that the value is made of."""
    first = min(value.tiles, key=lambda tile: (tile.source.file, tile.source.offset)).source
    return stored(Decoded(first.name, dtype, shape, first.file, first.offset, decoder))


def concat(parts: Sequence[LazyTensor], axis: int = 0) -> LazyTensor:
    """Join along `axis`; the parts agree in dtype and in every other axis (the caller has checked)."""
    if len(parts) == 1:
        return parts[0]
    tiles: list[Tile] = []
    at = 0
    for part in parts:
        for source, offset, shape, axes, start in part.tiles:
            tiles.append(Tile(source, _replace(offset, axis, offset[axis] + at), shape, axes, start))
        at += part.shape[axis]
    return LazyTensor(parts[0].dtype, _replace(parts[0].shape, axis, at), tuple(tiles))


def stack(parts: Sequence[LazyTensor], axis: int = 0) -> LazyTensor:
    """Lay equal shapes side by side along a new axis."""
    tiles = [
        Tile(source, _insert(offset, axis, i), _insert(shape, axis, 1), _insert(axes, axis, None), start)
        for i, part in enumerate(parts)
        for source, offset, shape, axes, start in part.tiles
    ]
    return LazyTensor(parts[0].dtype, _insert(parts[0].shape, axis, len(parts)), tuple(tiles))


def _cut(tile: Tile, axis: int, low: int, high: int, origin: int) -> Tile:
    start = tile.start
    stored_axis = tile.axes[axis]
    if stored_axis is not None:
        start = _replace(start, stored_axis, start[stored_axis] + low - tile.offset[axis])
    return tile._replace(
        offset=_replace(tile.offset, axis, low - origin),
        shape=_replace(tile.shape, axis, high - low),
        start=start,
    )


def _replace(values: tuple[int, ...], axis: int, value: int) -> tuple[int, ...]:
    return (*values[:axis], value, *values[axis + 1 :])


def _insert(values: tuple[_T, ...], axis: int, value: _T) -> tuple[_T, ...]:
    return (*values[:axis], value, *values[axis:])


def _swapped(values: tuple[_T, ...]) -> tuple[_T, ...]:
    return (*values[:-2], *values[:-3:-1])


def _without(values: tuple[_T, ...], axis: int) -> tuple[_T, ...]:
    return (*values[:axis], *values[axis + 1 :])
