"""GGUF blocks as numbers, a second time: where the bits of each element lie, in tables, from the format's description.

Shares nothing with the codec that exports go through but the sizes of blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from waybill.checkpoint.gguf import BLOCK_TYPES
from waybill.weights.dtypes import Array

ZERO = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 128, "Q6_K": 32, "Q3_K": 4}
"""The code that means zero, in types without a minimum."""
CENTRE = {"Q4_1": 8, "Q4_K": 8, "Q2_K": 2, "Q5_1": 16, "Q5_K": 16}
"""The code that a package is to take for zero, in types with one."""
VALUES = {
    "MXFP4": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),  # doubled
    **dict.fromkeys(("IQ4_NL", "IQ4_XS"), (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)),
}
"""What codes mean that are places in a table."""


class Bits(NamedTuple):
    """A field of every element of a block: its byte, its place in that byte, how wide it is, and what it counts for."""

    byte: Array
    shift: Array
    width: int
    worth: int = 1

    def of(self, blocks: Array) -> Array:
        """The fields of blocks U8 [..., bytes], as U8 [..., elements]."""
        values = blocks[..., self.byte] >> self.shift.astype(np.uint8) & np.uint8((1 << self.width) - 1)
        return values * np.uint8(self.worth)


_Fields = Callable[[Array], list[Bits]]
FIELDS: dict[str, _Fields] = {
    "Q4_0": lambda e: [Bits(2 + e % 16, 4 * (e // 16), 4)],
    "Q5_0": lambda e: [Bits(6 + e % 16, 4 * (e // 16), 4), Bits(2 + e // 8, e % 8, 1, 16)],
    "Q8_0": lambda e: [Bits(2 + e, 0 * e, 8)],
    "Q6_K": lambda e: [
        Bits(64 * (e // 128) + e % 64, 4 * (e // 64 % 2), 4),
        Bits(128 + 32 * (e // 128) + e % 32, 2 * (e // 32 % 4), 2, 16),
    ],
    "Q3_K": lambda e: [
        Bits(32 + 32 * (e // 128) + e % 32, 2 * (e // 32 % 4), 2),
        Bits(e % 32, e // 32, 1, 4),
    ],
    "Q4_1": lambda e: [Bits(4 + e % 16, 4 * (e // 16), 4)],
    "Q5_1": lambda e: [Bits(8 + e % 16, 4 * (e // 16), 4), Bits(4 + e // 8, e % 8, 1, 16)],
    "Q2_K": lambda e: [Bits(16 + 32 * (e // 128) + e % 32, 2 * (e // 32 % 4), 2)],
    "Q4_K": lambda e: [Bits(16 + 32 * (e // 64) + e % 32, 4 * (e // 32 % 2), 4)],
    "Q5_K": lambda e: [
        Bits(48 + 32 * (e // 64) + e % 32, 4 * (e // 32 % 2), 4),
        Bits(16 + e % 32, e // 32, 1, 16),
    ],
    "MXFP4": lambda e: [Bits(1 + e % 16, 4 * (e // 16), 4)],
    "IQ4_NL": lambda e: [Bits(2 + e % 16, 4 * (e // 16), 4)],
    "IQ4_XS": lambda e: [Bits(8 + 16 * (e // 32) + e % 16, 4 * (e // 16 % 2), 4)],
}
"""Where the code of element e of a block lies, low bits first."""


def block_codes(block_type: str, octets: Array) -> Array:
    """Rows of blocks U8 [N, bytes] as codes U8 [N, K]."""
    blocks = _blocks(block_type, octets)
    codes = sum((field.of(blocks) for field in FIELDS[block_type](_elements(block_type))), np.zeros(1, np.uint8))
    if block_type == "Q8_0":
        codes = codes + np.uint8(128)  # modulo 256: two's complement
    return np.asarray(codes, np.uint8).reshape(len(octets), -1)


def block_scales(block_type: str, octets: Array) -> Array:
    """Rows of blocks U8 [N, bytes] as scales [N, G]: float16 as stored, or products in float32."""
    blocks = _blocks(block_type, octets)
    if block_type == "MXFP4":  # of doubled values
        powers: Array = np.exp2(blocks[..., 0].astype(np.float32) - np.float32(128))
        return powers.reshape(len(octets), -1)
    scale = _half(blocks, {"Q6_K": 208, "Q3_K": 108, "Q2_K": 80}.get(block_type, 0))
    if (small := _small_scales(block_type, blocks)) is not None:
        scale = _product(scale, small)
    return np.asarray(scale).reshape(len(octets), -1)


def block_minimums(block_type: str, octets: Array) -> Array | None:
    """The same for minimums; None for a type without."""
    blocks = _blocks(block_type, octets)
    if block_type in ("Q4_1", "Q5_1"):
        return _half(blocks, 2).reshape(len(octets), -1)
    if block_type not in ("Q2_K", "Q4_K", "Q5_K"):
        return None
    whole = _half(blocks, 82 if block_type == "Q2_K" else 2)
    return _product(-whole, _sub_block(block_type, blocks, 1)).reshape(len(octets), -1)


def block_numbers(block_type: str, octets: Array) -> Array:
    """Rows of blocks U8 [N, bytes] as float32 [N, K]: code · scale + minimum, or the table's value · scale."""
    codes, scales = block_codes(block_type, octets), block_scales(block_type, octets)
    each = codes.shape[1] // scales.shape[1]
    values = np.asarray(VALUES[block_type])[codes] if block_type in VALUES else codes
    out = _product(values, scales.repeat(each, axis=1))
    minimums = block_minimums(block_type, octets)
    with np.errstate(invalid="ignore"):
        return out if minimums is None else out + minimums.astype(np.float32).repeat(each, axis=1)


def _half(blocks: Array, at: int) -> Array:
    """The float16 at a byte, [..., 1]."""
    whole = blocks[..., at].astype(np.uint16) | blocks[..., at + 1].astype(np.uint16) << np.uint16(8)
    return np.asarray(whole.view(np.float16)[..., None])


def _product(a: Array, b: Array) -> Array:
    """In float32; a scale may be infinite in a damaged file, and differs then from any package's."""
    with np.errstate(invalid="ignore"):
        return np.asarray(a.astype(np.float32) * b.astype(np.float32))


def _small_scales(block_type: str, blocks: Array) -> Array | None:
    """What the scale of a block is multiplied by for each of its groups, as integers; None: it has one group."""
    j = np.arange(16)
    if block_type == "Q6_K":
        return blocks[..., 192 + j].astype(np.int8)
    if block_type == "Q3_K":
        low, high = Bits(96 + j % 8, 4 * (j // 8), 4), Bits(104 + j % 4, 2 * (j // 4), 2, 16)
        return (low.of(blocks) + high.of(blocks)).astype(np.int8) - np.int8(32)
    if block_type == "IQ4_XS":
        j = j[:8]
        low, high = Bits(4 + j // 2, 4 * (j % 2), 4), Bits(2 + j // 4, 2 * (j % 4), 2, 16)
        return (low.of(blocks) + high.of(blocks)).astype(np.int8) - np.int8(32)
    return _sub_block(block_type, blocks, 0) if block_type in ("Q2_K", "Q4_K", "Q5_K") else None


def _sub_block(block_type: str, blocks: Array, part: int) -> Array:
    """The small scale (`part` 0) or minimum (1) of every group."""
    if block_type == "Q2_K":
        j = np.arange(16)
        return Bits(j, 0 * j + 4 * part, 4).of(blocks)
    j = np.arange(8)
    low = Bits(4 + j % 4 + 4 * part, 0 * j, 6).of(blocks)
    late = Bits(12 + j % 4, 0 * j + 4 * part, 4).of(blocks) + Bits(4 + j % 4 + 4 * part, 0 * j + 6, 2, 16).of(blocks)
    return np.where(j < 4, low, late)


def _elements(block_type: str) -> Array:
    return np.arange(BLOCK_TYPES[block_type][0])


def _blocks(block_type: str, octets: Array) -> Array:
    return octets.reshape(len(octets), -1, BLOCK_TYPES[block_type][1])
