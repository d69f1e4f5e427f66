"""GGUF blocks: a row is a run of blocks, each with its codes and scales in one piece.

Codes are moved, never computed: what a block means is (code - zero) · scale before and after. Types whose codes have an
odd number of bits go into the next container that kernels know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from waybill.checkpoint import TensorHeader
from waybill.checkpoint.gguf import BLOCK_TYPES
from waybill.config.gguf import LAYOUTS
from waybill.weights.affine import AffineLayout, AffinePackedWeight, Constant
from waybill.weights.dtypes import Array
from waybill.weights.lazy import Decoded, LazyTensor, stored

Box = tuple[int, ...]


def half(blocks: Array, at: int) -> Array:
    """The float16 at a byte of every block, [..., 1]."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)


def nibbles(octets: Array) -> Array:
    """Low nibbles, then high ones, along the last axis."""
    count = octets.shape[-1]
    out = np.empty((*octets.shape[:-1], 2 * count), np.uint8)
    np.bitwise_and(octets, np.uint8(15), out=out[..., :count])
    np.right_shift(octets, np.uint8(4), out=out[..., count:])
    return out


def _q4_0(blocks: Array) -> Array:
    """Byte i holds elements i and i + 16, and shall hold neighbours: two bytes at a time, as one word."""
    words = np.ascontiguousarray(blocks[..., 2:]).view(np.uint16)
    out = np.empty((*words.shape[:-1], 16), np.uint8)
    np.bitwise_or(words & np.uint16(15), words >> np.uint16(4) & np.uint16(240), out=out[..., :8], casting="unsafe")
    words >>= np.uint16(4)
    np.bitwise_or(words & np.uint16(15), words >> np.uint16(4) & np.uint16(240), out=out[..., 8:], casting="unsafe")
    return out


def _q5_0(blocks: Array) -> Array:
    fifth = np.unpackbits(blocks[..., 2:6], axis=-1, bitorder="little")
    codes: Array = nibbles(blocks[..., 6:]) | fifth << np.uint8(4)
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
    lead = blocks.shape[:-1]
    low = nibbles(blocks[..., :128].reshape(*lead, 2, 64)).reshape(*lead, 2, 4, 32)
    high = two_bits(blocks[..., 128:192].reshape(*lead, 2, 32))
    codes: Array = low | high << np.uint8(4)
    return codes.reshape(*lead, 256)


def _q6_k_scales(blocks: Array) -> Array:
    scales: Array = half(blocks, 208).astype(np.float32) * blocks[..., 192:208].view(np.int8).astype(np.float32)
    return scales


def _q3_k(blocks: Array) -> Array:
    """Two low bits like Q6_K's high ones; the third bit of element e is bit e // 32 of mask byte e % 32."""
    lead = blocks.shape[:-1]
    low = two_bits(blocks[..., 32:96].reshape(*lead, 2, 32)).reshape(*lead, 8, 32)
    for bit in range(8):
        low[..., bit, :] |= (blocks[..., :32] >> np.uint8(bit) & np.uint8(1)) << np.uint8(2)
    codes = low.reshape(*lead, 256)
    packed: Array = codes[..., 0::2] | codes[..., 1::2] << np.uint8(4)
    return packed


def _q3_k_scales(blocks: Array) -> Array:
    """Six bits each, less 32: eight bytes of nibbles, then four bytes of the two upper bits."""
    low = nibbles(blocks[..., 96:104])
    high = two_bits(blocks[..., 104:108]).reshape(*blocks.shape[:-1], 16)
    signed = (low | high << np.uint8(4)).astype(np.float32) - np.float32(32)
    scales: Array = half(blocks, 108).astype(np.float32) * signed
    return scales


@dataclass(frozen=True, slots=True)
class BlockType:
    """Blocks U8 [..., bytes] to codes in their container, U8 [..., elements · bits/8], and scales [..., groups]."""

    zero: int
    scale_dtype: str
    codes: Callable[[Array], Array]
    scales: Callable[[Array], Array]


def _first(blocks: Array) -> Array:
    return half(blocks, 0)


TYPES = {
    "Q4_0": BlockType(8, "F16", _q4_0, _first),
    "Q5_0": BlockType(16, "F16", _q5_0, _first),
    "Q8_0": BlockType(128, "F16", _q8_0, _first),
    "Q6_K": BlockType(32, "F32", _q6_k, _q6_k_scales),
    "Q3_K": BlockType(4, "F32", _q3_k, _q3_k_scales),
}
"""The types of LAYOUTS, byte by byte."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Rows of blocks U8 [..., N, bytes] to codes [..., N, G, B] or scales [..., N, G]; whole blocks are read."""

    octets: LazyTensor
    block_type: str
    wants_codes: bool

    def inputs(self, start: Box, extent: Box) -> tuple[LazyTensor, ...]:
        """The blocks around the wanted groups."""
        groups = len(self.octets.shape) - 1
        first, last = self._blocks(start[groups], extent[groups])
        nbytes = BLOCK_TYPES[self.block_type][1]
        value = self.octets.box(start[:groups], extent[:groups])
        return (value.narrow(groups, first * nbytes, (last - first) * nbytes),)

    def decode(self, arrays: Sequence[Array], start: Box, extent: Box) -> Array:
        """Take the blocks apart, then cut to the wanted groups."""
        axis = len(self.octets.shape) - 1
        first, _ = self._blocks(start[axis], extent[axis])
        lead, layout, own = extent[:axis], LAYOUTS[self.block_type], TYPES[self.block_type]
        elements, nbytes = BLOCK_TYPES[self.block_type]
        blocks = arrays[0].reshape(*lead, -1, nbytes)
        skip = start[axis] - first * (elements // layout.group_size)
        wanted = slice(skip, skip + extent[axis])
        if not self.wants_codes:
            return own.scales(blocks).reshape(*lead, -1)[..., wanted]
        whole = own.codes(blocks).reshape(*lead, -1, layout.group_size * layout.bits // 8)
        return whole[..., wanted, start[-1] : start[-1] + extent[-1]]

    def _blocks(self, group: int, groups: int) -> tuple[int, int]:
        per_block = BLOCK_TYPES[self.block_type][0] // LAYOUTS[self.block_type].group_size
        return group // per_block, -(-(group + groups) // per_block)


def affine(header: TensorHeader) -> AffinePackedWeight:
    """A tensor of one of TYPES in canonical form, lazily; its header has been judged."""
    layout, own = LAYOUTS[header.dtype], TYPES[header.dtype]
    elements, nbytes = BLOCK_TYPES[header.dtype]
    *rows, columns = header.shape
    octets = stored(header._replace(dtype="U8", shape=(*rows, columns // elements * nbytes)))
    groups = (*rows, columns // layout.group_size)

    def decoded(dtype: str, shape: Box, wants_codes: bool) -> LazyTensor:
        decoder = Blocks(octets, header.dtype, wants_codes)
        return stored(Decoded(header.name, dtype, shape, header.file, header.offset, decoder))

    zeros = stored(Decoded("zero point", "U8", groups, "", 0, Constant(own.zero)))
    return AffinePackedWeight(
        layout=AffineLayout(bits=layout.bits, group=layout.group_size, symmetric=layout.symmetric),
        in_features=columns,
        codes=decoded("U8", (*groups, layout.group_size * layout.bits // 8), True),
        scales=decoded(own.scale_dtype, groups, False),
        zero_points=None if layout.symmetric else zeros,
    )
