"""4-bit floats as 8-bit integers, exactly: every E2M1 value is half an integer, and half a power of two is one too.

W = E2M1(code) · 2**(s - 127) = (c - 128) · 2**(s - 128), c = 2 · E2M1(code) + 128. Twice the bytes, and wider scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from waybill.weights.affine import AffineLayout, AffinePackedWeight
from waybill.weights.codebook import CodebookWeight
from waybill.weights.lazy import LazyTensor, decoded

if TYPE_CHECKING:
    from waybill.weights.dtypes import Array

_NAN = 255
"""The exponent that is no number."""


def widened(weight: CodebookWeight) -> AffinePackedWeight:
    """The same numbers as codes of 8 bits, without zero points; the sign of zero is lost.

    Raises:
        ValueError: they are not 4-bit floats with powers of two for whole blocks of one row.
    """
    layout, columns = weight.layout, weight.shape[-1]
    if layout.table != "E2M1" or layout.rows != 1 or weight.scales.dtype != "F8_E8M0" or columns % layout.columns:
        raise ValueError(f"{layout} with scales {weight.scales.dtype} over {columns} columns")
    shape = weight.scales.shape
    return AffinePackedWeight(
        layout=AffineLayout(bits=8, group=layout.columns, symmetric=True),
        in_features=columns,
        codes=decoded(weight.codes, "U8", (*shape, layout.columns), DoubledCodes(weight.codes, layout.columns)),
        scales=decoded(weight.scales, "F32", shape, HalvedPowers(weight.scales)),
    )


@dataclass(frozen=True, slots=True)
class DoubledCodes:
    """A decoder: bytes [..., N, K/2] of two codes each, the first in the low bits, to integers [..., N, K/g, g]."""

    value: LazyTensor
    group: int

    def inputs(self, start: tuple[int, ...], extent: tuple[int, ...]) -> tuple[LazyTensor, ...]:
        """The bytes of the wanted groups."""
        octets, axis = self.group // 2, len(start) - 2
        value = self.value.box(start[:axis], extent[:axis])
        return (value.narrow(axis, start[axis] * octets, extent[axis] * octets),)

    def decode(self, arrays: Sequence[Array], start: tuple[int, ...], extent: tuple[int, ...]) -> Array:
        """Two looked up for each byte."""
        import numpy as np

        from waybill.weights.dequantize import table_of

        table = (128 + 2 * table_of("E2M1")).astype(np.uint8)
        pairs = np.stack((table[arrays[0] & 15], table[arrays[0] >> 4]), axis=-1)
        whole: Array = pairs.reshape(*extent[:-1], self.group)
        return whole[..., start[-1] : start[-1] + extent[-1]]


@dataclass(frozen=True, slots=True)
class HalvedPowers:
    """A decoder: exponents [..., N, K/g] to half of the powers of two they stand for, in float32."""

    value: LazyTensor

    def inputs(self, start: tuple[int, ...], extent: tuple[int, ...]) -> tuple[LazyTensor, ...]:
        """As many exponents."""
        return (self.value.box(start, extent),)

    def decode(self, arrays: Sequence[Array], start: tuple[int, ...], extent: tuple[int, ...]) -> Array:
        """2**(byte - 128); the smallest is a subnormal number, and exact."""
        import numpy as np

        exponents = arrays[0].view(np.uint8)
        powers: Array = np.ldexp(np.float32(1), exponents.astype(np.int32) - 128)
        return np.where(exponents == _NAN, np.float32(np.nan), powers)
