"""Packed weights as floats: for tests, tools and eyes. No loader calls this on its own."""

from __future__ import annotations

import math

import numpy as np

from waybill.weights.dtypes import Array


def dequantize_arrays(codes: Array, scales: Array, zero_points: Array | None, bits: int, in_features: int) -> Array:
    """float32 [..., N, K] = float32(code - zero) · float32(scale): exact for fp16 and bf16 scales."""
    values = unpack(codes, bits).astype(np.int16)
    midpoint = np.int16(1 << (bits - 1))
    zeros = midpoint if zero_points is None else zero_points.astype(np.int16)[..., None]
    weight: Array = (values - zeros).astype(np.float32) * scales.astype(np.float32)[..., None]
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
