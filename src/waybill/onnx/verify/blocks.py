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
"""The code that means zero."""


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
    j = np.arange(16)
    at = {"Q6_K": 208, "Q3_K": 108}.get(block_type, 0)
    whole = blocks[..., at].astype(np.uint16) | blocks[..., at + 1].astype(np.uint16) << np.uint16(8)
    scale: Array = whole.view(np.float16)[..., None]
    if block_type == "Q6_K":
        scale = scale.astype(np.float32) * blocks[..., 192 + j].astype(np.int8).astype(np.float32)
    elif block_type == "Q3_K":
        low, high = Bits(96 + j % 8, 4 * (j // 8), 4), Bits(104 + j % 4, 2 * (j // 4), 2, 16)
        scale = scale.astype(np.float32) * ((low.of(blocks) + high.of(blocks)).astype(np.float32) - 32)
    return np.asarray(scale).reshape(len(octets), -1)


def block_numbers(block_type: str, octets: Array) -> Array:
    """Rows of blocks with minima U8 [N, bytes] as float32 [N, K]: code · (d · scale) + m, or less (m · minimum)."""
    blocks, e = _blocks(block_type, octets), _elements(block_type)
    codes = block_codes(block_type, octets).reshape(*blocks.shape[:-1], len(e)).astype(np.float32)
    at = {"Q2_K": 80}.get(block_type, 0)
    d, m = (np.ascontiguousarray(blocks[..., b : b + 2]).view(np.float16).astype(np.float32) for b in (at, at + 2))
    if block_type in ("Q4_1", "Q5_1"):
        values = codes * d + m
    else:
        scale, minimum = (_sub_block(block_type, blocks, e, part).astype(np.float32) for part in (0, 1))
        values = codes * (d * scale) - m * minimum
    return np.asarray(values, np.float32).reshape(len(octets), -1)


def _sub_block(block_type: str, blocks: Array, e: Array, part: int) -> Array:
    """The small scale (`part` 0) or minimum (1) of every element."""
    if block_type == "Q2_K":
        return Bits(e // 16, 0 * e + 4 * part, 4).of(blocks)
    j = e // 32
    low = Bits(4 + j % 4 + 4 * part, 0 * e, 6).of(blocks)
    late = Bits(12 + j % 4, 0 * e + 4 * part, 4).of(blocks) + Bits(4 + j % 4 + 4 * part, 0 * e + 6, 2, 16).of(blocks)
    return np.where(j < 4, low, late)


def _elements(block_type: str) -> Array:
    return np.arange(BLOCK_TYPES[block_type][0])


def _blocks(block_type: str, octets: Array) -> Array:
    return octets.reshape(len(octets), -1, BLOCK_TYPES[block_type][1])
