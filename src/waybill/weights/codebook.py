"""Codebook weights, and the algebra that is exact on them.

W[n, k] = table[code[n, k]] · scale[n // r, k // c], or divided by that scale. Leading axes (experts) may stand
before N.
Block FP8 and MXFP4 are such weights: an 8- or 4-bit float is a code, and its meaning a table. GGUF's IQ4 types have a
table of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from waybill.weights.lazy import LazyTensor, concat, decoded, stack

if TYPE_CHECKING:
    from waybill.weights.dtypes import Array

CODE_BITS = MappingProxyType({"E4M3": 8, "E5M2": 8, "E2M1": 4, "IQ4": 4})
"""Bits of a code, by its table: that of a float format (OCP 8-bit floating point and microscaling formats), or IQ4.
Two 4-bit codes share a byte, the first in the low bits."""
LARGEST = MappingProxyType({"E4M3": 448.0, "E5M2": 57344.0, "E2M1": 6.0, "IQ4": 127.0})
"""The largest magnitude in each table."""


class CodebookLayout(NamedTuple):
    """What codes mean and what one scale covers: `rows` of N times `columns` of K. The last blocks may be short."""

    table: str
    rows: int
    columns: int
    divides: bool = False

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return CODE_BITS[self.table]

    @property
    def scale_role(self) -> str:
        """What its scales are called: they multiply, or divide."""
        return "divisors" if self.divides else "scales"

    def __str__(self) -> str:
        return f"{self.table} in blocks of {self.rows}x{self.columns}{', divided' if self.divides else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CodebookWeight:
    """One weight as codes and scales.

    codes: U8 [..., N, K·bits/8]; scales: a float dtype or F8_E8M0 (2**(byte - 127)) [..., ceil(N/rows),
    ceil(K/columns)]. Blocks are no longer than N and K.
    """

    layout: CodebookLayout
    codes: LazyTensor
    scales: LazyTensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape [..., N, K]."""
        return (*self.codes.shape[:-1], self.codes.shape[-1] * 8 // self.layout.bits)

    @property
    def parts(self) -> dict[str, LazyTensor]:
        """What is stored of it, by role."""
        return {"codes": self.codes, self.layout.scale_role: self.scales}

    def narrow(self, axis: int, start: int, length: int) -> CodebookWeight:
        """Keep part of an axis of the logical shape; ValueError when a cut would split a block.

        One block that spans the whole axis covers any part of it as well.
        """
        rank, size = len(self.shape), self.shape[axis]
        if start == 0 and length == size:
            return self
        if axis < rank - 2:
            return self.map(lambda value: value.narrow(axis, start, length))
        along_rows = axis == rank - 2
        block = self.layout.rows if along_rows else self.layout.columns
        scales, per_byte = self.scales, 1 if along_rows else 8 // self.layout.bits
        if block < size:
            if start % block or (length % block and start + length != size):
                raise ValueError(f"{start}:{start + length} splits a block of {block}")
            scales = scales.narrow(axis, start // block, -(-length // block))
        if start % per_byte or length % per_byte:
            raise ValueError(f"{start}:{start + length} splits a byte of {per_byte} codes")
        block = min(block, length)
        layout = self.layout._replace(rows=block) if along_rows else self.layout._replace(columns=block)
        codes = self.codes.narrow(axis, start // per_byte, length // per_byte)
        return CodebookWeight(layout=layout, codes=codes, scales=scales)

    def select(self, axis: int, index: int) -> CodebookWeight:
        """Take one position of a leading axis and drop the axis."""
        if axis >= len(self.shape) - 2:
            raise ValueError(f"axis {axis} of {self.shape} is not a leading one")
        return self.map(lambda value: value.select(axis, index))

    def pad(self, axis: int, length: int) -> CodebookWeight:
        """Append rows of zeros: of code 0, which is zero in every table of floats, and scales of zero; ValueError where
        these would divide."""
        if axis != len(self.shape) - 2:
            raise ValueError(f"only rows are added, not along axis {axis} of {self.shape}")
        rows = self.layout.rows
        if rows == self.shape[axis]:
            return replace(self, layout=self.layout._replace(rows=length), codes=self.codes.pad(axis, length))
        if self.layout.divides:
            raise ValueError("rows are not added to a weight that is divided block by block")
        return replace(self, codes=self.codes.pad(axis, length), scales=self.scales.pad(axis, -(-length // rows)))

    def row_by_row(self) -> CodebookWeight:
        """The same weight with scales of its own for every row: [..., N, ceil(K/columns)]."""
        if self.layout.rows == 1:
            return self
        shape = (*self.codes.shape[:-1], self.scales.shape[-1])
        scales = decoded(self.scales, self.scales.dtype, shape, RepeatedRows(self.scales, self.layout.rows))
        return replace(self, layout=self.layout._replace(rows=1), scales=scales)

    def map(self, change: Callable[[LazyTensor], LazyTensor]) -> CodebookWeight:
        """The same change to codes and scales: it must be one of axes before the blocks, or of rows that are blocks."""
        return replace(self, codes=change(self.codes), scales=change(self.scales))


def concat_codebooks(parts: Sequence[CodebookWeight], axis: int) -> CodebookWeight:
    """Join along N weights of one layout; ValueError when a block would reach from one part into the next."""
    first = parts[0]
    whole = all(part.shape[axis] % first.layout.rows == 0 for part in parts[:-1])
    if axis != len(first.shape) - 2 or any(part.layout != first.layout for part in parts) or not whole:
        raise ValueError(f"{' and '.join(str(part.layout) for part in parts)} do not join along axis {axis}")
    return _join(parts, lambda values: concat(values, axis))


def stack_codebooks(parts: Sequence[CodebookWeight], axis: int = 0) -> CodebookWeight:
    """Lay equal weights side by side along a new leading axis; between N and K too, where every row has its scales."""
    first = parts[0]
    if any(part.layout != first.layout for part in parts) or (axis > len(first.shape) - 2 and first.layout.rows > 1):
        raise ValueError(f"{' and '.join(str(part.layout) for part in parts)} do not stack along axis {axis}")
    return _join(parts, lambda values: stack(values, axis))


def _join(parts: Sequence[CodebookWeight], join: Callable[[Sequence[LazyTensor]], LazyTensor]) -> CodebookWeight:
    return replace(parts[0], codes=join([part.codes for part in parts]), scales=join([part.scales for part in parts]))


@dataclass(frozen=True, slots=True)
class RepeatedRows:
    """A decoder: scales [..., R, C], each row of them `repeat` times, to [..., N, C]."""

    value: LazyTensor
    repeat: int

    def inputs(self, start: tuple[int, ...], extent: tuple[int, ...]) -> tuple[LazyTensor, ...]:
        """The rows of scales around the wanted ones."""
        axis = len(start) - 2
        value = self.value.box(start[:axis], extent[:axis])
        first, last = start[axis] // self.repeat, -(-(start[axis] + extent[axis]) // self.repeat)
        return (value.narrow(axis, first, last - first).narrow(axis + 1, start[-1], extent[-1]),)

    def decode(self, arrays: Sequence[Array], start: tuple[int, ...], extent: tuple[int, ...]) -> Array:
        """Repeat, then cut to the wanted rows."""
        skip = start[-2] % self.repeat
        return arrays[0].repeat(self.repeat, axis=-2)[..., skip : skip + extent[-2], :]
