"""Numpy's names for safetensors dtypes, and exact or checked casts between float dtypes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
"""The float dtypes a weight may have, the integers packed ones are stored in, 8-bit floats, and scales that are powers
of two."""

_BY_RANGE = [NUMPY_DTYPES[tag] for tag in ("F16", "BF16", "F32", "F64")]

_EXPONENTS = {NUMPY_DTYPES["F16"]: np.uint16(0x7C00), NUMPY_DTYPES["BF16"]: np.uint16(0x7F80)}
"""Bits that are all set in NaN and infinity; numpy's own test converts such numbers one by one."""

Array = np.ndarray[Any, np.dtype[Any]]


def cast(values: Array, dtype: np.dtype[Any]) -> Array:
    """Round to nearest even into `dtype`; OverflowError when a finite value becomes infinite."""
    if values.dtype == dtype:
        return values
    if values.dtype == NUMPY_DTYPES["BF16"] and dtype == NUMPY_DTYPES["F32"]:
        return _widened(values, None)
    if values.dtype == NUMPY_DTYPES["F8_E8M0"]:
        values = values.astype(np.float32)  # holds every power of two that a byte of exponent can say
    with np.errstate(over="ignore", invalid="ignore"):
        out = values.astype(dtype)
    narrower = _BY_RANGE.index(dtype) < _BY_RANGE.index(values.dtype)
    if narrower and not all_finite(out) and not np.array_equal(np.isinf(out), np.isinf(values)):
        raise OverflowError
    return out


def cast_into(values: Array, target: Array) -> Array:
    """`cast` to the target's dtype, placed there. Returns what was placed, or `values` where nothing can be lost."""
    if values.dtype == NUMPY_DTYPES["BF16"] and target.dtype == NUMPY_DTYPES["F32"]:
        _widened(values, target)
        return values
    if (values.dtype.name, target.dtype.name) == ("float16", "float32"):
        target[...] = values
        return values
    target[...] = made = cast(values, target.dtype)
    return made


def _widened(values: Array, target: Array | None) -> Array:
    """A bfloat16 is the upper half of a float32: two integer passes, several times faster than the generic cast."""
    bits = None if target is None else target.view(np.uint32)
    return np.left_shift(values.view(np.uint16), 16, out=bits, dtype=np.uint32).view(np.float32)


def all_finite(values: Array) -> bool:
    """Whether no element is NaN or infinite."""
    if exponent := _EXPONENTS.get(values.dtype):
        return not bool(((values.view(np.uint16) & exponent) == exponent).any())
    return bool(np.isfinite(values).all())
