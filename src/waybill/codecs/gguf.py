"""GGUF blocks: a row is a run of blocks, each with its codes and the numbers of its groups in one piece.

Codes are moved, never computed: what a block means is (code - zero) · scale, code · scale + minimum, or what a table
says of a code times scale, before and after. Codes of an odd number of bits go into the next container that kernels
know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from waybill.checkpoint import TensorHeader
from waybill.checkpoint.gguf import BLOCK_TYPES
from waybill.config.gguf import CODEBOOKS, LAYOUTS
from waybill.weights.affine import AffineLayout, AffinePackedWeight, Constant
from waybill.weights.codebook import CodebookLayout, CodebookWeight
from waybill.weights.dequantize import dequantize_arrays, dequantize_codes
from waybill.weights.dtypes import NUMPY_DTYPES, Array
from waybill.weights.lazy import Decoded, LazyTensor, stored
from waybill.weights.record import PackedStorage

STEP = 128 << 10
"""Bytes of blocks that are taken apart at once."""
Box = tuple[int, ...]
Part = Callable[[Array], Array]
"""Blocks U8 [..., bytes] to something of each."""


def half(at: int, blocks: Array) -> Array:
    """The float16 at a byte of every block, [..., 1]."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)


def _float(blocks: Array, at: int) -> Array:
    return half(at, blocks).astype(np.float32)


def nibbles(octets: Array) -> Array:
    """Low nibbles, then high ones, along the last axis."""
    count = octets.shape[-1]
    out = np.empty((*octets.shape[:-1], 2 * count), np.uint8)
    np.bitwise_and(octets, np.uint8(15), out=out[..., :count])
    np.right_shift(octets, np.uint8(4), out=out[..., count:])
    return out


def pairs(octets: Array) -> Array:
    """Byte i of n holds elements i and i + n, and shall hold neighbours: two bytes at a time, as one word."""
    words = np.ascontiguousarray(octets).view(np.uint16)
    count = words.shape[-1]
    out = np.empty((*words.shape[:-1], 2 * count), np.uint8)
    np.bitwise_or(words & np.uint16(15), words >> np.uint16(4) & np.uint16(240), out=out[..., :count], casting="unsafe")
    words = words >> np.uint16(4)
    np.bitwise_or(words & np.uint16(15), words >> np.uint16(4) & np.uint16(240), out=out[..., count:], casting="unsafe")
    return out


def _runs(octets: Array, width: int) -> Array:
    """[..., n · width] to [..., n, width]."""
    return octets.reshape(*octets.shape[:-1], -1, width)


def _joined(values: Array) -> Array:
    """The last two axes as one."""
    return values.reshape(*values.shape[:-2], -1)


def _fives(octets: Array, fifths: Array) -> Array:
    codes: Array = nibbles(octets) | np.unpackbits(fifths, axis=-1, bitorder="little") << np.uint8(4)
    return codes


def _q8_0(blocks: Array) -> Array:
    """Two's complement less its sign bit's meaning: the code plus 128."""
    return blocks[..., 2:] ^ np.uint8(128)


def two_bits(octets: Array) -> Array:
    """The four fields of each byte along a new axis before the last, the lowest first."""
    out = np.empty((*octets.shape[:-1], 4, octets.shape[-1]), np.uint8)
    for field in range(4):
        np.right_shift(octets, np.uint8(2 * field), out=out[..., field, :])
    out &= np.uint8(3)
    return out


def _q6_k(blocks: Array) -> Array:
    """Two halves of 128: 64 bytes of low nibbles and 32 of high bits each; rows of 32 elements."""
    low = nibbles(_runs(blocks[..., :128], 64))
    high = _joined(two_bits(_runs(blocks[..., 128:192], 32)))
    return _joined(low | high << np.uint8(4))


def _q6_k_scales(blocks: Array) -> Array:
    scales: Array = _float(blocks, 208) * blocks[..., 192:208].view(np.int8).astype(np.float32)
    return scales


def _with_bits(codes: Array, octets: Array, place: int) -> Array:
    """Codes [..., 256], to which bit e // 32 of byte e % 32 of [..., 32] is added at a place."""
    rows, mask = codes.reshape(*codes.shape[:-1], 8, 32), np.uint8(1 << place)
    for bit in range(8):
        moved = octets >> np.uint8(bit - place) if bit >= place else octets << np.uint8(place - bit)
        rows[..., bit, :] |= moved & mask
    return codes


def _packed(codes: Array, bits: int) -> Array:
    """Codes [..., n], one a byte, to their container, the first in the low bits: neighbours as one word."""
    words = codes.view(f"u{8 // bits}")
    out = words.astype(np.uint8)
    for field in range(1, 8 // bits):
        out |= (words >> ((8 - bits) * field)).astype(np.uint8)
    return out


def _q3_k(blocks: Array) -> Array:
    """Two low bits like Q6_K's high ones, and a third in masks."""
    low = _joined(_joined(two_bits(_runs(blocks[..., 32:96], 32))))
    return _packed(_with_bits(low, blocks[..., :32], 2), 4)


def _q3_k_scales(blocks: Array) -> Array:
    """Six bits each, less 32: eight bytes of nibbles, then four bytes of the two upper bits."""
    sixes = nibbles(blocks[..., 96:104]) | _joined(two_bits(blocks[..., 104:108])) << np.uint8(4)
    scales: Array = _float(blocks, 108) * (sixes.astype(np.float32) - np.float32(32))
    return scales


def _q2_k(blocks: Array) -> Array:
    """Rows of two-bit codes like Q3_K's, four neighbours to a byte."""
    return _packed(_joined(_joined(two_bits(_runs(blocks[..., 16:80], 32)))), 2)


def _q5_k(blocks: Array) -> Array:
    return _with_bits(_joined(nibbles(_runs(blocks[..., 48:], 32))), blocks[..., 16:48], 4)


def _sixes(upper: bool, blocks: Array) -> Array:
    """Eight 6-bit scales, or (`upper`) minimums, of twelve bytes; the last four have their upper bits elsewhere."""
    first, third = blocks[..., 8:12] if upper else blocks[..., 4:8], blocks[..., 12:16]
    last = third >> np.uint8(4) if upper else third & np.uint8(15)
    sixes = np.concatenate([first & np.uint8(63), last | first >> np.uint8(6) << np.uint8(4)], axis=-1)
    return sixes.astype(np.float32)


def _k_scales(blocks: Array) -> Array:
    scales: Array = _float(blocks, 0) * _sixes(False, blocks)
    return scales


def _k_minimums(blocks: Array) -> Array:
    minimums: Array = -(_float(blocks, 2) * _sixes(True, blocks))
    return minimums


def _q2_k_scales(blocks: Array) -> Array:
    """Sixteen bytes of a 4-bit scale and a 4-bit minimum each."""
    scales: Array = _float(blocks, 80) * (blocks[..., :16] & np.uint8(15)).astype(np.float32)
    return scales


def _q2_k_minimums(blocks: Array) -> Array:
    minimums: Array = -(_float(blocks, 82) * (blocks[..., :16] >> np.uint8(4)).astype(np.float32))
    return minimums


def _iq4_xs_scales(blocks: Array) -> Array:
    """Six bits each, less 32: four bytes of nibbles, and the two upper bits in two bytes before."""
    low = np.stack([blocks[..., 4:8] & np.uint8(15), blocks[..., 4:8] >> np.uint8(4)], axis=-1)
    high = np.swapaxes(two_bits(blocks[..., 2:4]), -1, -2)
    sixes = _joined(low) | _joined(high) << np.uint8(4)
    scales: Array = _float(blocks, 0) * (sixes.astype(np.float32) - np.float32(32))
    return scales


def _exponents(blocks: Array) -> Array:
    return blocks[..., :1].view(NUMPY_DTYPES["F8_E8M0"])


@dataclass(frozen=True, slots=True)
class BlockType:
    """What a block holds: codes in their container, U8 [..., elements · bits/8], scales [..., groups], and either the
    code that means zero or minimums [..., groups]."""

    scale_dtype: str
    codes: Part
    scales: Part
    zero: int = 0
    minimums: Part | None = None


_first, _second = partial(half, 0), partial(half, 2)
TYPES = {
    "Q4_0": BlockType("F16", lambda b: pairs(b[..., 2:]), _first, 8),
    "Q5_0": BlockType("F16", lambda b: _fives(b[..., 6:], b[..., 2:6]), _first, 16),
    "Q8_0": BlockType("F16", _q8_0, _first, 128),
    "Q6_K": BlockType("F32", _q6_k, _q6_k_scales, 32),
    "Q3_K": BlockType("F32", _q3_k, _q3_k_scales, 4),
    "Q4_1": BlockType("F16", lambda b: pairs(b[..., 4:]), _first, minimums=_second),
    "Q5_1": BlockType("F16", lambda b: _fives(b[..., 8:], b[..., 4:8]), _first, minimums=_second),
    "Q2_K": BlockType("F32", _q2_k, _q2_k_scales, minimums=_q2_k_minimums),
    "Q4_K": BlockType("F32", lambda b: _joined(pairs(_runs(b[..., 16:], 32))), _k_scales, minimums=_k_minimums),
    "Q5_K": BlockType("F32", _q5_k, _k_scales, minimums=_k_minimums),
    "MXFP4": BlockType("F8_E8M0", lambda b: pairs(b[..., 1:]), _exponents),
    "IQ4_NL": BlockType("F16", lambda b: pairs(b[..., 2:]), _first),
    "IQ4_XS": BlockType("F32", lambda b: _joined(pairs(_runs(b[..., 8:], 16))), _iq4_xs_scales),
}
"""The types of LAYOUTS, byte by byte."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Rows of blocks U8 [..., N, bytes] to what `part` makes of each: so many positions along the axis after N, which
    may have an axis of bytes each. Whole blocks are read."""

    octets: LazyTensor
    block_bytes: int
    positions: int
    part: Part

    def inputs(self, start: Box, extent: Box) -> tuple[LazyTensor, ...]:
        """The blocks around the wanted positions."""
        axis = len(self.octets.shape) - 1
        first, last = self._blocks(start[axis], extent[axis])
        value = self.octets.box(start[:axis], extent[:axis])
        return (value.narrow(axis, first * self.block_bytes, (last - first) * self.block_bytes),)

    def decode(self, arrays: Sequence[Array], start: Box, extent: Box) -> Array:
        """Take the blocks apart, then cut to the wanted positions."""
        axis = len(self.octets.shape) - 1
        first, last = self._blocks(start[axis], extent[axis])
        with np.errstate(invalid="ignore"):  # what is no number is refused where scales are looked at
            made = _in_steps(self.part, arrays[0].reshape(-1, self.block_bytes))
        whole = made.reshape(*extent[:axis], (last - first) * self.positions, *(-1 for _ in extent[axis + 1 :]))
        begin = (start[axis] - first * self.positions, *start[axis + 1 :])
        cut: tuple[Any, ...] = tuple(slice(at, at + n) for at, n in zip(begin, extent[axis:], strict=True))
        return whole[(..., *cut)]

    def _blocks(self, start: int, length: int) -> tuple[int, int]:
        return start // self.positions, -(-(start + length) // self.positions)


def _in_steps(part: Part, blocks: Array) -> Array:
    """What `part` makes of blocks [n, bytes], few at a time: what lies between stays in the cache, and in memory that
    the allocator keeps.
    """
    step = max(STEP // blocks.shape[1], 1)
    first = part(blocks[:step])
    out = np.empty((len(blocks), *first.shape[1:]), first.dtype)
    out[:step] = first
    for at in range(step, len(blocks), step):
        out[at : at + step] = part(blocks[at : at + step])
    return out


def packed(header: TensorHeader) -> PackedStorage:
    """A tensor of one of TYPES in canonical form, lazily; its header has been judged."""
    layout, own = LAYOUTS[header.dtype], TYPES[header.dtype]
    *rows, columns = header.shape
    groups = (*rows, columns // layout.group_size)
    octets = layout.group_size * layout.bits // 8
    per_block = BLOCK_TYPES[header.dtype][0] // layout.group_size
    scales = _decoded(header, own.scale_dtype, groups, per_block, own.scales)
    if header.dtype in CODEBOOKS:
        return CodebookWeight(
            layout=CodebookLayout(CODEBOOKS[header.dtype], 1, layout.group_size),
            codes=_decoded(header, "U8", (*rows, groups[-1] * octets), per_block * octets, own.codes),
            scales=scales,
        )
    has_zeros = own.minimums is None and not layout.symmetric
    return AffinePackedWeight(
        layout=AffineLayout(bits=layout.bits, group=layout.group_size, symmetric=layout.symmetric),
        in_features=columns,
        codes=_decoded(header, "U8", (*groups, octets), per_block, own.codes),
        scales=scales,
        zero_points=stored(Decoded("zero point", "U8", groups, "", 0, Constant(own.zero))) if has_zeros else None,
        minimums=_decoded(header, own.scale_dtype, groups, per_block, own.minimums) if own.minimums else None,
    )


def numbers(header: TensorHeader) -> LazyTensor:
    """A tensor of one of TYPES as the float32 that it means, lazily: only when that is asked for."""
    return _decoded(header, "F32", header.shape, BLOCK_TYPES[header.dtype][0], partial(_values, header.dtype))


def _decoded(header: TensorHeader, dtype: str, shape: Box, positions: int, part: Part) -> LazyTensor:
    elements, block_bytes = BLOCK_TYPES[header.dtype]
    *rows, columns = header.shape
    octets = stored(header._replace(dtype="U8", shape=(*rows, columns // elements * block_bytes)))
    decoder = Blocks(octets, block_bytes, positions, part)
    return stored(Decoded(header.name, dtype, shape, header.file, header.offset, decoder))


def _values(block_type: str, blocks: Array) -> Array:
    layout, own = LAYOUTS[block_type], TYPES[block_type]
    codes, scales = own.codes(blocks), own.scales(blocks)
    if (table := CODEBOOKS.get(block_type)) is not None:
        return dequantize_codes(codes, scales, CodebookLayout(table, 1, layout.group_size))
    minimums = None if own.minimums is None else own.minimums(blocks)
    zeros = np.full(scales.shape, own.zero, np.uint8)
    groups = _runs(codes, layout.group_size * layout.bits // 8)
    return dequantize_arrays(groups, scales, zeros, layout.bits, BLOCK_TYPES[block_type][0], minimums)
