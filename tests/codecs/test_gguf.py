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
from waybill.codecs.gguf import TYPES, numbers, packed
from waybill.config.gguf import AS_FLOATS, CODEBOOKS, LAYOUTS, WITH_MINIMUM, reason
from waybill.onnx.verify.blocks import (
    FIELDS,
    VALUES,
    ZERO,
    block_codes,
    block_minimums,
    block_numbers,
    block_scales,
)
from waybill.plan.boxes import materialize
from waybill.weights import WeightRecord
from waybill.weights.affine import AffinePackedWeight
from waybill.weights.dequantize import unpack
from waybill.weights.lazy import LazyTensor
from waybill.weights.record import PackedStorage, concat_weights

GOLDEN = Path(__file__).parents[1] / "golden" / "blocks"


def blocks(block_type: str, rows: int = 6, seed: int = 0) -> tuple[Array, Array]:
    """The golden layer, or random bytes with sane scales where there is none; and gguf's own floats."""
    golden = GOLDEN / f"gguf_{block_type}.safetensors"
    if golden.exists():
        held = load_file(golden)
        return held["raw"], held["expected_dequant"]
    elements, nbytes = BLOCK_TYPES[block_type]
    generator = np.random.default_rng(seed)
    raw = generator.integers(0, 256, (rows, 512 // elements, nbytes), dtype=np.uint8)
    scales = (generator.standard_normal(raw.shape[:2]) * 0.01).astype(np.float16)
    at = {"Q3_K": 108, "IQ4_XS": 0}[block_type]
    raw[..., at : at + 2] = scales[..., None].view(np.uint8)
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


def values(weight: PackedStorage, checkpoint: Checkpoint) -> Array:
    return waybill.dequantize(WeightRecord("w", "decoder", weight, ("w",), checkpoint))


def made(value: LazyTensor, checkpoint: Checkpoint) -> Array:
    with RangeReader(checkpoint) as reader:
        return materialize(value, reader)


def test_every_block_type_is_packed_or_refused_with_a_reason() -> None:
    assert TYPES.keys() == LAYOUTS.keys() == FIELDS.keys() == ZERO.keys() | AS_FLOATS
    assert {name for name, own in TYPES.items() if own.minimums is not None} == WITH_MINIMUM
    assert CODEBOOKS.keys() == VALUES.keys()
    vectors = {name for name in BLOCK_TYPES.keys() - LAYOUTS.keys() if "vectors" in reason(name)}
    assert vectors == {"IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M"}


@pytest.mark.parametrize("block_type", TYPES)
def test_a_packed_layer_is_reproduced_bit_for_bit(block_type: str, tmp_path: Path) -> None:
    raw, wanted = blocks(block_type)
    header, checkpoint = written(tmp_path, block_type, raw)
    assert same(values(packed(header), checkpoint) + 0.0, wanted + 0.0)  # of two zeros, gguf keeps the sign


@pytest.mark.parametrize("block_type", TYPES)
def test_a_layer_may_be_read_as_the_floats_that_it_means(block_type: str, tmp_path: Path) -> None:
    raw, wanted = blocks(block_type)
    header, checkpoint = written(tmp_path, block_type, raw)
    assert same(made(numbers(header), checkpoint) + 0.0, wanted + 0.0)


@pytest.mark.parametrize("block_type", TYPES)
def test_every_cut_of_a_packed_layer_is_the_cut_of_its_values(block_type: str, tmp_path: Path) -> None:
    raw, wanted = blocks(block_type)
    header, checkpoint = written(tmp_path, block_type, raw)
    weight, group = packed(header), LAYOUTS[block_type].group_size
    for row, rows, first, groups in ((0, 1, 0, 1), (1, 3, 1, 2), (2, 2, 5, 3), (0, 5, 512 // group - 1, 1)):
        cut = weight.narrow(0, row, rows).narrow(1, first * group, groups * group)
        part = wanted[row : row + rows, first * group : (first + groups) * group]
        assert np.array_equal(values(cut, checkpoint), part)
    if isinstance(weight, AffinePackedWeight):
        assert np.array_equal(values(weight.refine(16), checkpoint), wanted)
    padded = values(weight.pad(0, 9), checkpoint)
    assert np.array_equal(padded[: len(wanted)], wanted)
    assert not padded[len(wanted) :].any()


@pytest.mark.parametrize("block_type", TYPES)
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
        own = values(packed(header).select(0, expert), checkpoint)
        assert np.array_equal(own, wanted[3 * expert : 3 * expert + 3])


@pytest.mark.parametrize("block_type", TYPES)
def test_the_prover_finds_the_same_integers_by_itself(block_type: str, tmp_path: Path) -> None:
    raw, wanted = blocks(block_type)
    header, checkpoint = written(tmp_path, block_type, raw)
    codes, scales, minimums = (read(block_type, raw) for read in (block_codes, block_scales, block_minimums))
    assert codes is not None and scales is not None
    group = np.arange(codes.shape[1]) // LAYOUTS[block_type].group_size
    if block_type in ZERO:
        numbers_ = (codes.astype(np.float32) - ZERO[block_type]) * scales.astype(np.float32)[:, group]
        assert np.array_equal(numbers_, wanted)
    weight = packed(header)
    assert np.array_equal(unpack(made(weight.codes, checkpoint), weight.layout.bits).reshape(codes.shape), codes)
    if block_type != "MXFP4":  # whose table the prover doubles
        assert np.array_equal(made(weight.scales, checkpoint), scales)
    assert (minimums is not None) == (block_type in WITH_MINIMUM)
    if isinstance(weight, AffinePackedWeight) and weight.minimums is not None:
        assert np.array_equal(made(weight.minimums, checkpoint), minimums)


@pytest.mark.parametrize("block_type", sorted(AS_FLOATS))
def test_the_prover_computes_the_same_numbers_by_itself(block_type: str) -> None:
    raw, wanted = blocks(block_type)
    assert same(block_numbers(block_type, raw) + 0.0, wanted + 0.0)


def test_weights_with_minimums_join_their_like_and_nothing_else(tmp_path: Path) -> None:
    (raw, wanted), (raw4, _) = blocks("Q4_1"), blocks("Q4_0")
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    (header, checkpoint), (other, _) = written(tmp_path / "one", "Q4_1", raw), written(tmp_path / "other", "Q4_0", raw4)
    weight = packed(header)
    joined = concat_weights([weight.narrow(0, 4, 4), weight.narrow(0, 0, 4)], 0)
    assert np.array_equal(values(joined, checkpoint), np.concatenate([wanted[4:], wanted[:4]]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weights with minimums do not join weights with zero points"):
        concat_weights([weight, packed(other)], 0)
