"""Rows of rotary heads: pairs side by side, or half a head apart. Whole rows move, so any storage stays exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from waybill.weights.codebook import CodebookWeight
from waybill.weights.lazy import LazyTensor, decoded
from waybill.weights.record import FloatWeight, Storage

if TYPE_CHECKING:
    from waybill.weights.dtypes import Array


@dataclass(frozen=True, slots=True)
class HalvesApart:
    """[heads · D/2 · 2, …] to [heads · 2 · D/2, …]: row h·D + 2j + t becomes row h·D + t·D/2 + j."""

    value: LazyTensor
    head_dim: int

    def inputs(self, start: tuple[int, ...], extent: tuple[int, ...]) -> tuple[LazyTensor, ...]:
        """The whole heads around the wanted rows: a rank that holds some heads reads only those."""
        first, last = self._heads(start[0], extent[0])
        rows = self.value.narrow(0, first * self.head_dim, (last - first) * self.head_dim)
        for axis, (at, length) in enumerate(zip(start[1:], extent[1:], strict=True), 1):
            rows = rows.narrow(axis, at, length)
        return (rows,)

    def decode(self, arrays: Sequence[Array], start: tuple[int, ...], extent: tuple[int, ...]) -> Array:
        """Part the pairs, then cut to the wanted rows."""
        first, last = self._heads(start[0], extent[0])
        pairs = arrays[0].reshape(last - first, self.head_dim // 2, 2, *extent[1:])
        rows = pairs.swapaxes(1, 2).reshape((last - first) * self.head_dim, *extent[1:])
        skip = start[0] - first * self.head_dim
        return rows[skip : skip + extent[0]]

    def _heads(self, row: int, rows: int) -> tuple[int, int]:
        return row // self.head_dim, -(-(row + rows) // self.head_dim)


def halves_apart(weight: Storage, head_dim: int) -> Storage:
    """A weight whose heads' rows lie pair by pair, with each head's first halves of pairs before the second ones.

    A weight that is not made of such heads is given back as it is: its shape is refused elsewhere.
    """
    if not weight.shape or weight.shape[0] % head_dim or head_dim % 2 or 0 in weight.shape:
        return weight

    def parted(value: LazyTensor) -> LazyTensor:
        return decoded(value, value.dtype, value.shape, HalvesApart(value, head_dim))

    if isinstance(weight, FloatWeight):
        return FloatWeight(parted(weight.value))
    return (weight.row_by_row() if isinstance(weight, CodebookWeight) else weight).map(parted)
