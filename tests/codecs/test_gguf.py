"""GGUF blocks: what gguf itself reads from them, bit for bit, by the codec and by the prover's own decoder."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import load_file

import waybill
from packers import Array, same
from waybill.checkpoint import Checkpoint, RangeReader, TensorHeader
from waybill.checkpoint.folder import Shard
from waybill.checkpoint.gguf import BLOCK_TYPES
from waybill.codecs.gguf import TYPES, affine
from waybill.codecs.numbers import NUMBERS, numbers
from waybill.config.gguf import LAYOUTS, REASONS, WITH_MINIMUM
from waybill.onnx.verify.blocks import FIELDS, ZERO, block_codes, block_numbers, block_scales
from waybill.plan.stream import materialize
from waybill.weights import WeightRecord
from waybill.weights.affine import AffinePackedWeight
from waybill.weights.dequantize import dequantize_arrays, unpack
from waybill.weights.lazy import LazyTensor

GOLDEN = Path(__file__).parents[1] / "golden" / "blocks"


def blocks(block_type: str, rows: int = 6, seed: int = 0) -> tuple[Array, Array]:
    """The golden layer, of Q3_K random bytes with sane scales; and gguf's own floats."""
    golden = GOLDEN / f"gguf_{block_type}.safetensors"
    if golden.exists():
        held = load_file(golden)
        return held["raw"], held["expected_dequant"]
    elements, nbytes = BLOCK_TYPES[block_type]
    generator = np.random.default_rng(seed)
    raw = generator.integers(0, 256, (rows, 512 // elements, nbytes), dtype=np.uint8)
    scales = (generator.standard_normal(raw.shape[:2]) * 0.01).astype(np.float16)
    raw[..., 108:110] = scales[..., None].view(np.uint8)
    raw = raw.reshape(rows, -1)
    return raw, gguf.quants.dequantize(raw, Type[block_type]).astype(np.float32)


def written(folder: Path, block_type: str, raw: Array) -> tuple[TensorHeader, Checkpoint]:
    """The bytes as one tensor of one file."""
    (folder / "w.bin").write_bytes(raw.tobytes())
    elements, nbytes = BLOCK_TYPES[block_type]
    header = TensorHeader(
        "w", block_type, (*raw.shape[:-1], raw.shape[-1] // nbytes * elements), "w.bin", 0, raw.nbytes
    )
    stat = (folder / "w.bin").stat()
    shard = Shard("w.bin", stat.st_size, stat.st_mtime_ns, stat.st_ino, 1)
    return header, Checkpoint(folder, {}, {}, {"w": header}, (shard,))


def values(weight: AffinePackedWeight, checkpoint: Checkpoint) -> Array:
    with RangeReader(checkpoint) as reader:
        parts = {role: materialize(value, reader) for role, value in weight.parts.items()}
    zeros = parts.get("zero_points")
    return dequantize_arrays(parts["codes"], parts["scales"], zeros, weight.layout.bits, weight.in_features)


def made(value: LazyTensor, checkpoint: Checkpoint) -> Array:
    with RangeReader(checkpoint) as reader:
        return materialize(value, reader)


def test_every_block_type_is_packed_read_as_floats_or_refused_with_a_reason() -> None:
    assert TYPES.keys() == LAYOUTS.keys() == ZERO.keys()
    assert NUMBERS.keys() == set(WITH_MINIMUM)
    assert FIELDS.keys() == TYPES.keys() | NUMBERS.keys()
    unnamed = BLOCK_TYPES.keys() - LAYOUTS.keys() - REASONS.keys()
    assert all(name.startswith("IQ") for name in unnamed)


@pytest.mark.parametrize("block_type", TYPES)
def test_a_packed_layer_is_reproduced_bit_for_bit(block_type: str, tmp_path: Path) -> None:
    raw, wanted = blocks(block_type)
    header, checkpoint = written(tmp_path, block_type, raw)
    assert same(values(affine(header), checkpoint) + 0.0, wanted + 0.0)  # of two zeros, gguf keeps the sign


@pytest.mark.parametrize("block_type", NUMBERS)
def test_a_layer_with_minima_is_computed_bit_for_bit(block_type: str, tmp_path: Path) -> None:
    raw, wanted = blocks(block_type)
    header, checkpoint = written(tmp_path, block_type, raw)
    assert same(made(numbers(header), checkpoint), wanted)


@pytest.mark.parametrize("block_type", TYPES)
def test_every_cut_of_a_packed_layer_is_the_cut_of_its_values(block_type: str, tmp_path: Path) -> None:
    raw, wanted = blocks(block_type)
    header, checkpoint = written(tmp_path, block_type, raw)
    weight, group = affine(header), LAYOUTS[block_type].group_size
    for row, rows, first, groups in ((0, 1, 0, 1), (1, 3, 1, 2), (2, 2, 5, 3), (0, 5, 512 // group - 1, 1)):
        cut = weight.narrow(0, row, rows).narrow(1, first * group, groups * group)
        part = wanted[row : row + rows, first * group : (first + groups) * group]
        assert np.array_equal(values(cut, checkpoint), part)
    assert np.array_equal(values(weight.refine(16), checkpoint), wanted)


@pytest.mark.parametrize("block_type", NUMBERS)
def test_every_cut_of_a_computed_layer_is_the_cut_of_its_values(block_type: str, tmp_path: Path) -> None:
    raw, wanted = blocks(block_type)
    header, checkpoint = written(tmp_path, block_type, raw)
    for row, rows, first, columns in ((0, 1, 0, 1), (1, 3, 17, 40), (2, 2, 255, 2), (0, 5, 500, 12)):
        cut = numbers(header).narrow(0, row, rows).narrow(1, first, columns)
        assert np.array_equal(made(cut, checkpoint), wanted[row : row + rows, first : first + columns])


@pytest.mark.parametrize("block_type", TYPES)
def test_a_bank_is_its_matrices(block_type: str, tmp_path: Path) -> None:
    raw, wanted = blocks(block_type)
    header, checkpoint = written(tmp_path, block_type, raw[:6].reshape(2, 3, -1))
    for expert in range(2):
        own = values(affine(header).select(0, expert), checkpoint)
        assert np.array_equal(own, wanted[3 * expert : 3 * expert + 3])


@pytest.mark.parametrize("block_type", TYPES)
def test_the_prover_finds_the_same_integers_by_itself(block_type: str, tmp_path: Path) -> None:
    raw, wanted = blocks(block_type)
    header, checkpoint = written(tmp_path, block_type, raw)
    codes = block_codes(block_type, raw)
    scales = block_scales(block_type, raw)
    group = np.arange(codes.shape[1]) // LAYOUTS[block_type].group_size
    numbers_ = (codes.astype(np.float32) - ZERO[block_type]) * scales.astype(np.float32)[:, group]
    assert np.array_equal(numbers_, wanted)
    weight = affine(header)
    assert np.array_equal(unpack(made(weight.codes, checkpoint), weight.layout.bits).reshape(codes.shape), codes)
    assert np.array_equal(made(weight.scales, checkpoint), scales)


@pytest.mark.parametrize("block_type", NUMBERS)
def test_the_prover_computes_the_same_numbers_by_itself(block_type: str) -> None:
    raw, wanted = blocks(block_type)
    assert same(block_numbers(block_type, raw), wanted)


def test_a_record_dequantizes_to_what_gguf_reads(tmp_path: Path) -> None:
    raw, wanted = blocks("Q6_K")
    header, checkpoint = written(tmp_path, "Q6_K", raw)
    record = WeightRecord("w", "decoder", affine(header), ("w",), checkpoint)
    assert np.array_equal(waybill.dequantize(record), wanted)
