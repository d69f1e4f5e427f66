"""Rows of rotary heads put half a head apart: a cut is the cut of the whole, and reads only the heads it needs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from checkpoints import Array, safetensors_bytes
from floating import Blocks, quantize
from packers import opened, written
from waybill.codecs.fp8 import float8_weight
from waybill.plan.boxes import materialize
from waybill.weights import FloatWeight, stored
from waybill.weights.codebook import CodebookWeight
from waybill.weights.dequantize import dequantize_codes
from waybill.weights.pairs import halves_apart
from waybill.weights.ranges import bytes_read

HEAD, HEADS, COLUMNS = 6, 5, 512


@pytest.fixture
def rows() -> Array:
    return np.random.default_rng(0).standard_normal((HEADS * HEAD, COLUMNS)).astype(np.float32)


def expected(rows: Array) -> Array:
    """Row by row: the first of every pair of a head, then the second of every pair."""
    return np.concatenate([rows[h * HEAD + t : (h + 1) * HEAD : 2] for h in range(HEADS) for t in (0, 1)])


@pytest.mark.parametrize(("start", "count"), [(0, 30), (0, 1), (1, 4), (5, 2), (11, 13), (29, 1)])
def test_any_run_of_rows_is_that_of_the_whole(rows: Array, start: int, count: int, tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(safetensors_bytes({"w": rows}))
    with opened(tmp_path, "w.safetensors") as (headers, reader):
        weight = halves_apart(FloatWeight(stored(headers["w"])), HEAD)
        assert isinstance(weight, FloatWeight)
        part = weight.value.narrow(0, start, count).narrow(1, 7, 300)
        assert np.array_equal(materialize(part, reader), expected(rows)[start : start + count, 7:307])
        heads = (start + count - 1) // HEAD - start // HEAD + 1
        assert bytes_read(weight.value.narrow(0, start, count)) == heads * HEAD * COLUMNS * 4


def test_a_bias_is_parted_too(rows: Array, tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(safetensors_bytes({"w": rows[:, 0].copy()}))
    with opened(tmp_path, "w.safetensors") as (headers, reader):
        weight = halves_apart(FloatWeight(stored(headers["w"])), HEAD)
        assert isinstance(weight, FloatWeight)
        assert np.array_equal(materialize(weight.value, reader), expected(rows)[:, 0])


def test_rows_leave_the_blocks_they_shared_a_scale_in(rows: Array, tmp_path: Path) -> None:
    codes, scales, dense = quantize(rows, Blocks(4, 32))
    with written(tmp_path, w={"weight": codes, "scale": scales}) as ((parts,), reader):
        weight = halves_apart(float8_weight(parts["weight"], parts["scale"], (4, 32)), HEAD)
        assert isinstance(weight, CodebookWeight)
        arrays = [materialize(part, reader) for part in (weight.codes, weight.scales)]
        assert np.array_equal(dequantize_codes(*arrays, weight.layout), expected(dense))


@pytest.mark.parametrize("head", [4, 7, 5])
def test_what_is_not_made_of_such_heads_stays_for_others_to_refuse(rows: Array, head: int, tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(safetensors_bytes({"w": rows}))
    with opened(tmp_path, "w.safetensors") as (headers, _):
        weight = FloatWeight(stored(headers["w"]))
        assert halves_apart(weight, head) is weight
