"""Packed weights as floats: for tests, tools and eyes. No loader calls this on its own."""

from __future__ import annotations

import math

import numpy as np

from waybill.weights.codebook import CodebookLayout
from waybill.weights.dtypes import NUMPY_DTYPES, Array

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of the 4-bit float with 2 bits of exponent and 1 of mantissa, by its code."""
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Values of GGUF's codes that are denser near zero."""


def dequantize_arrays(
    codes: Array, scales: Array, zero_points: Array | None, bits: int, in_features: int, minimums: Array | None = None
) -> Array:
    """float32 [..., N, K] = float32(code - zero) · float32(scale), exact for fp16 and bf16 scales; or code · scale,
    exact for weights that have minimums, plus float32(minimum), rounded once."""
    values = unpack(codes, bits).astype(np.int16)
    if minimums is None:
        values -= np.int16(1 << (bits - 1)) if zero_points is None else zero_points.astype(np.int16)[..., None]
    weight: Array = values.astype(np.float32) * scales.astype(np.float32)[..., None]
    if minimums is not None:
        weight += minimums.astype(np.float32)[..., None]
    flat: Array = weight.reshape(*weight.shape[:-2], math.prod(weight.shape[-2:]))
    return flat[..., :in_features]


def unpack(codes: Array, bits: int) -> Array:
    """Bytes to codes along the last axis, the first code in the low bits."""
    if bits == 8:
        return codes
    per_byte = 8 // bits
    out = np.empty((*codes.shape, per_byte), np.uint8)
    for slot in range(per_byte):  # whole arrays: a shift by a row of shifts would run over two or four bytes at a time
        np.bitwise_and(codes >> np.uint8(slot * bits), np.uint8((1 << bits) - 1), out=out[..., slot])
    return out.reshape(*codes.shape[:-1], codes.shape[-1] * per_byte)


def dequantize_codes(codes: Array, scales: Array, layout: CodebookLayout) -> Array:
    """float32 [..., N, K] = table[code] times, or divided by, float32(scale), rounded once."""
    values = table_of(layout.table)[unpack(codes, layout.bits)]
    *_, rows, columns = values.shape
    of_rows, of_columns = np.arange(rows) // layout.rows, np.arange(columns) // layout.columns
    spread = scales.astype(np.float32)[..., of_rows[:, None], of_columns]
    out: Array = values / spread if layout.divides else values * spread
    return out


def table_of(name: str) -> Array:
    """float32, a value for each code of a codebook, or for each byte of a scale that is a power of two (E8M0)."""
    if name in ("E2M1", "IQ4"):
        return np.array(E2M1 if name == "E2M1" else IQ4, np.float32)
    codes = np.arange(256, dtype=np.uint8)
    return codes.view(NUMPY_DTYPES[f"F8_{name}"]).astype(np.float32)
