"""Casts between float dtypes: exact where they can be, rounded to nearest even where not, never silently infinite."""

from __future__ import annotations

import math
import struct
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from waybill.weights.dtypes import NUMPY_DTYPES, Array, all_finite, cast, cast_into

PATTERNS = np.arange(1 << 16, dtype=np.uint16)
TAGS = ("F64", "F32", "F16", "BF16")


def bits_of_bfloat16(value: float) -> int:
    """Nearest even, from the definition: half the lowest kept bit is added, ties look at the bit above."""
    bits = int.from_bytes(struct.pack("<f", value), "little")
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def of(tag: str, *values: float) -> Array:
    return np.array(values, np.float64).astype(NUMPY_DTYPES[tag])


def test_the_tags_name_the_dtypes_safetensors_means() -> None:
    sizes = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "U8": 1, "I8": 1, "I32": 4, "I64": 8,
             "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}  # fmt: skip
    assert {tag: dtype.itemsize for tag, dtype in NUMPY_DTYPES.items()} == sizes
    assert float(ml_dtypes.finfo(NUMPY_DTYPES["BF16"]).max) > 3e38


@pytest.mark.parametrize("tag", TAGS)
def test_a_cast_to_the_same_dtype_copies_nothing(tag: str) -> None:
    values = of(tag, 1, math.inf, math.nan)
    assert cast(values, NUMPY_DTYPES[tag]) is values


def test_every_bfloat16_becomes_the_float32_whose_upper_half_it_is() -> None:
    wide = cast(PATTERNS.view(NUMPY_DTYPES["BF16"]), NUMPY_DTYPES["F32"])
    np.testing.assert_array_equal(wide.view(np.uint32), PATTERNS.astype(np.uint32) << 16)


def test_a_bfloat16_matrix_that_is_not_contiguous_widens_too() -> None:
    matrix = PATTERNS.view(NUMPY_DTYPES["BF16"]).reshape(256, 256)[::2, 3:10]
    wide = cast(matrix, NUMPY_DTYPES["F32"])
    np.testing.assert_array_equal(wide.view(np.uint32), PATTERNS.reshape(256, 256)[::2, 3:10].astype(np.uint32) << 16)


def test_a_cast_into_rows_and_columns_of_a_larger_array_touches_nothing_else() -> None:
    matrix = PATTERNS.view(NUMPY_DTYPES["BF16"]).reshape(256, 256)[:, 3:10]
    whole = np.full((256, 20), 7, np.float32)
    cast_into(matrix, whole[:, 4:18:2])
    expected = np.full((256, 20), 7, np.float32)
    expected[:, 4:18:2] = cast(matrix, NUMPY_DTYPES["F32"])
    np.testing.assert_array_equal(whole.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize(("source", "target"), list(product(TAGS, TAGS)))
def test_a_cast_into_an_array_places_what_a_cast_returns(source: str, target: str) -> None:
    values, place = of(source, 1, -0.0, math.inf, 1.0078125), np.zeros(4, NUMPY_DTYPES[target])
    made = cast_into(values, place)
    expected = cast(values, NUMPY_DTYPES[target])
    assert place.tobytes() == expected.tobytes()
    assert made is values or made.tobytes() == expected.tobytes()


def test_every_float16_becomes_the_float32_of_the_same_value() -> None:
    narrow = PATTERNS.view(np.float16)
    expected = np.array([struct.unpack("<e", struct.pack("<H", pattern))[0] for pattern in PATTERNS.tolist()])
    np.testing.assert_array_equal(cast(narrow, NUMPY_DTYPES["F32"]), expected.astype(np.float32))


@given(st.lists(st.floats(-65519, 65519, width=32), min_size=1))
def test_float32_rounds_to_the_nearest_float16_ties_to_even(values: list[float]) -> None:
    packed = b"".join(struct.pack("<e", value) for value in values)
    assert cast(np.array(values, np.float32), NUMPY_DTYPES["F16"]).tobytes() == packed


@given(st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=1))
def test_float32_rounds_to_the_nearest_bfloat16_ties_to_even(values: list[float]) -> None:
    out = cast(np.array(values, np.float32), NUMPY_DTYPES["BF16"])
    assert out.view(np.uint16).tolist() == [bits_of_bfloat16(value) for value in values]


@pytest.mark.parametrize(
    ("source", "target", "value"),
    [
        ("F32", "F16", 65520.0),
        ("F32", "F16", -1e30),
        ("BF16", "F16", 1e38),
        ("F64", "F16", 1e6),
        ("F32", "BF16", 3.4e38),
        ("F32", "BF16", -3.4e38),
        ("F64", "BF16", 1e39),
        ("F64", "F32", 1e39),
    ],
)
def test_a_finite_value_that_becomes_infinite_is_an_error(source: str, target: str, value: float) -> None:
    assert np.isfinite(of(source, value)).all()
    with pytest.raises(OverflowError):
        cast(of(source, 1.0, math.inf, value, math.nan), NUMPY_DTYPES[target])


@pytest.mark.parametrize(
    ("source", "target", "value", "rounded"),
    [("F32", "F16", 65519.0, 65504.0), ("F64", "F16", -65504.0, -65504.0), ("F32", "BF16", 3.39e38, 3.3895314e38)],
)
def test_the_largest_values_that_still_fit_are_not_an_error(
    source: str, target: str, value: float, rounded: float
) -> None:
    out = cast(of(source, value), NUMPY_DTYPES[target])
    assert float(out[0]) == pytest.approx(rounded, rel=1e-6)


@pytest.mark.parametrize(("source", "target"), list(product(TAGS, TAGS)))
def test_infinity_nan_and_the_sign_of_zero_survive_every_cast(source: str, target: str) -> None:
    out = cast(of(source, math.inf, -math.inf, math.nan, -0.0, 0.0), NUMPY_DTYPES[target]).astype(np.float64)
    assert out.dtype == np.float64
    np.testing.assert_array_equal(out, [math.inf, -math.inf, math.nan, 0.0, 0.0])
    assert np.signbit(out[[1, 3, 4]]).tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("source", "target"), [("F16", "F32"), ("F16", "F64"), ("BF16", "F32"), ("BF16", "F64"), ("F32", "F64")]
)
def test_casting_up_and_back_changes_no_value(source: str, target: str) -> None:
    values = of(source, 0.1, -1.5, 3e-5, 1024, 0.333)
    np.testing.assert_array_equal(cast(cast(values, NUMPY_DTYPES[target]), NUMPY_DTYPES[source]), values)


@pytest.mark.parametrize("tag", TAGS)
def test_large_small_and_zero_values_are_finite(tag: str) -> None:
    info = ml_dtypes.finfo(NUMPY_DTYPES[tag])
    values = np.array([info.max, info.min, info.smallest_subnormal, -0.0, 0.0, 1.0], NUMPY_DTYPES[tag])
    assert all_finite(values)
    assert all_finite(values[:0])


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, -math.nan])
@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("at", [0, 500, 999])
def test_one_bad_value_anywhere_is_found(tag: str, bad: float, at: int) -> None:
    values = np.ones(1000, NUMPY_DTYPES[tag])
    values[at] = bad
    assert not all_finite(values)


def test_every_bfloat16_pattern_is_judged_like_its_value() -> None:
    values = PATTERNS.view(NUMPY_DTYPES["BF16"])
    finite = np.isfinite((PATTERNS.astype(np.uint32) << 16).view(np.float32))
    assert [all_finite(values[i : i + 1]) for i in range(0, len(values), 7)] == finite[::7].tolist()
