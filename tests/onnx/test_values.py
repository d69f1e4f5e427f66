"""Every packed number of a package is the checkpoint's: codes, zero points and scales, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from safetensors.numpy import load_file

import waybill
from checkpoints import BF16, Array, Recipe, lively, llama, qwen2, qwen3, qwen3_moe
from packing import HEAD, TABLE, Scheme, dequantize, pack, quantize, unpack
from waybill.errors import BadScales, InexactScales, UnsupportedByRuntime, ZeroPointMismatch

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoints"
SCHEMES = [
    *(Scheme(form, bits, group) for form in ("gptq", "gptq_v2") for bits in (2, 4, 8) for group in (16, 32)),
    *(Scheme("olive", bits, 16) for bits in (2, 4, 8)),
    Scheme("olive_dotted", 4, 32, scales=np.float32),
    Scheme("gptq", 8, -1),
    Scheme("awq", 4, 32),
    Scheme("awq", 4, -1),
    Scheme("auto_round", 4, 32),
    *(Scheme("ct", bits, 32) for bits in (2, 4, 8)),
    Scheme("ct_old", 4, 16),
    Scheme("ct_int", 8, -1),
]


class Packed:
    """One packed matrix as its node takes it: plain fields, unpacked here."""

    def __init__(self, node: ir.Node) -> None:
        at = {"MatMulNBits": (1, 2, 3), "GatherBlockQuantized": (0, 2, 3)}[node.op_type]
        self.bits, self.block = (node.attributes[key].as_int() for key in ("bits", "block_size"))
        codes, self.scales, zeros = (values(node, index) for index in at)
        rows = len(codes)
        columns = node.attributes["K"].as_int() if node.op_type == "MatMulNBits" else self.scales.shape[1] * self.block
        self.codes = fields(codes.reshape(rows, -1), self.bits)[:, :columns]
        self.padding = fields(codes.reshape(rows, -1), self.bits)[:, columns:]
        self.has_zeros = zeros.size > 0
        packed = fields(zeros, self.bits) if self.has_zeros else np.full(self.scales.shape, 1 << (self.bits - 1))
        self.zeros = packed[:, : self.scales.shape[1]]


def values(node: ir.Node, at: int) -> Array:
    """An initializer's numbers; none of an input that is left out."""
    value = node.inputs[at] if at < len(node.inputs) else None
    if value is None or value.const_value is None:
        return np.zeros(0, np.uint8)
    return value.const_value.numpy()


def fields(octets: Array, bits: int) -> Array:
    """Each byte's fields, the lowest bits first."""
    parts = [(octets >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return np.stack(parts, -1).reshape(*octets.shape[:-1], -1)


def save(recipe: Recipe, folder: Path, **options: str) -> Path:
    """A checkpoint and its package."""
    waybill.build(recipe.write(folder / "checkpoint"), **options).save(folder / "package")  # type: ignore[arg-type]
    return folder / "package"


def nodes(folder: Path) -> Iterator[tuple[str, ir.Node]]:
    """Nodes by name; the graph lives as long as the iteration."""
    model = ir.load(folder / "model.onnx")
    for node in model.graph:
        yield (node.name or "").rpartition("/")[0], node


def matrices(folder: Path) -> dict[str, Packed]:
    wanted = ("MatMulNBits", "GatherBlockQuantized")
    return {name: Packed(node) for name, node in nodes(folder) if node.op_type in wanted}


def members(name: str) -> list[str]:
    """The checkpoint's weights inside a matrix of the graph."""
    stem, _, last = name.rpartition(".")
    return [f"{stem}.{m}_proj.weight" for m in "qkv"] if last == "qkv_proj" else [f"{name}.weight"]


def assert_holds(found: Packed, recipe: Recipe, names: list[str], scheme: Scheme) -> None:
    """Codes, zeros and scales of the weights, one below the other, every group as the blocks it is made of."""
    parts = [quantize(recipe.tensors[name], scheme) for name in names]
    codes, zeros, scales = (np.concatenate(values) for values in zip(*parts, strict=True))
    group = codes.shape[1] if scheme.group == -1 else scheme.group
    of = np.arange(found.scales.shape[1]) * found.block // group
    np.testing.assert_array_equal(found.codes, codes)
    np.testing.assert_array_equal(found.zeros, zeros[:, of])
    np.testing.assert_array_equal(found.scales, scales[:, of].astype(np.float32))
    assert not found.padding.any()


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("kind", [llama, qwen3])
def test_every_matrix_holds_the_numbers_of_the_checkpoint(
    kind: Callable[..., Recipe], scheme: Scheme, tmp_path: Path
) -> None:
    recipe = lively(kind(np.float32))
    held = matrices(save(pack(recipe, scheme).packed, tmp_path))
    assert len(held) == (10 if kind is llama else 14)  # q, k and v are one where nothing stands between
    for name, found in held.items():
        assert found.bits == scheme.bits
        assert_holds(found, recipe, members(name), scheme)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_packed_tables_hold_the_numbers_of_the_checkpoint(bits: int, symmetric: bool, tmp_path: Path) -> None:
    recipe, scheme = lively(llama(np.float32)), Scheme("olive", bits, 16, symmetric)
    held = matrices(save(pack(recipe, scheme, table=True, head=True).packed, tmp_path))
    assert_holds(held["model.embed_tokens"], recipe, [TABLE], scheme)
    assert_holds(held["lm_head"], recipe, [HEAD], scheme)
    assert held["model.embed_tokens"].has_zeros  # the default differs between runtimes and types
    assert held["lm_head"].has_zeros != symmetric


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("banks", [True, False])
def test_experts_hold_the_numbers_of_the_checkpoint(bits: int, symmetric: bool, banks: bool, tmp_path: Path) -> None:
    recipe, scheme = lively(qwen3_moe(np.float32, banks=banks)), Scheme("olive", bits, 16, symmetric)
    folder = save(pack(recipe, scheme).packed, tmp_path)
    ours = [(name, node) for name, node in nodes(folder) if node.op_type == "QMoE"]
    assert len(ours) == 2
    for path, node in ours:
        for (at, zeros_at), projection in (((2, 11), "gate_up"), ((5, 12), "down")):
            codes, zeros, scales = quantize_bank(recipe, f"{path}.", projection, scheme, banks)
            np.testing.assert_array_equal(fields(values(node, at), bits), codes)
            np.testing.assert_array_equal(values(node, at + 1), scales.astype(np.float32))
            stored = values(node, zeros_at)
            assert (stored.size == 0) == symmetric
            if not symmetric:
                np.testing.assert_array_equal(fields(stored, bits)[..., : zeros.shape[-1]], zeros)


def quantize_bank(
    recipe: Recipe, path: str, projection: str, scheme: Scheme, banks: bool
) -> tuple[Array, Array, Array]:
    """Codes, zeros and scales of all experts; rows of gate and up alternate."""

    def alternating(rows: Array) -> Array:
        gate, up = np.split(rows, 2, axis=-2)
        return np.stack([gate, up], -2).reshape(rows.shape)

    if banks:
        found = quantize(recipe.tensors[f"{path}{projection}_proj"], scheme)
    else:
        each = [
            [quantize(recipe.tensors[f"{path}{e}.{member}_proj.weight"], scheme) for member in projection.split("_")]
            for e in range(4)
        ]
        found = tuple(np.stack([np.concatenate([m[i] for m in e]) for e in each]) for i in range(3))  # type: ignore[assignment]
    codes, zeros, scales = found
    if projection == "down":
        return codes, zeros, scales
    return alternating(codes), alternating(zeros), alternating(scales)


# What producers wrote themselves.


@pytest.mark.parametrize("name", ["ar_auto_gptq_w4_sym", "ar_auto_round_w4_asym", "ol_dense_main", "ol_tied_v013"])
def test_what_producers_wrote_means_the_same_in_the_package(name: str, tmp_path: Path) -> None:
    config = json.loads((GOLDEN / name / "config.json").read_text())
    (file,) = (GOLDEN / name).glob("*.safetensors")
    stated = config["quantization_config"]
    exceptions = {f"model.layers.{layer}.mlp.down_proj": 8 for layer in (0, 1)}
    waybill.build(GOLDEN / name).save(tmp_path / "package")
    held = matrices(tmp_path / "package")
    wider = {name: found.bits for name, found in held.items() if found.bits != stated["bits"]}
    assert wider.items() <= exceptions.items()
    meant = unpack(Recipe(config, load_file(file)), stated["bits"], stated["group_size"], wider)
    for path, found in held.items():
        weight = path if path != "lm_head" or HEAD in meant.tensors else TABLE.removesuffix(".weight")
        dense = np.concatenate([meant.tensors[member] for member in members(weight)])
        np.testing.assert_array_equal(dequantize(found.codes, found.zeros, found.scales, found.block), dense)


# Groups become blocks.


@pytest.mark.parametrize(("group", "block"), [(16, 16), (32, 32), (48, 16), (64, 32), (96, 32), (128, 32), (-1, 32)])
@pytest.mark.parametrize("form", ["gptq", "olive"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_group_is_cut_into_blocks_that_the_operator_knows(
    form: str, bits: int, group: int, block: int, tmp_path: Path
) -> None:
    recipe, scheme = lively(llama(np.float32)), Scheme(form, bits, group)
    held = matrices(save(pack(recipe, scheme).packed, tmp_path))
    down = held["model.layers.0.mlp.down_proj"]  # K is 96
    assert down.block == block
    for name, found in held.items():
        assert_holds(found, recipe, members(name), scheme)


def test_an_expert_s_two_banks_share_the_smaller_block(tmp_path: Path) -> None:
    recipe, scheme = lively(qwen3_moe(np.float32)), Scheme("gptq", group=-1)  # K is 64 and 32
    folder = save(pack(recipe, scheme).packed, tmp_path)
    shapes = [[values(node, at).shape for at in (3, 6)] for _, node in nodes(folder) if node.op_type == "QMoE"]
    assert shapes == 2 * [[(4, 64, 2), (4, 64, 1)]]


# Zero points that say nothing are left out; those that lie are found.


@pytest.mark.parametrize("form", ["gptq", "gptq_v2", "auto_round", "awq"])
def test_midpoints_are_not_written(form: str, tmp_path: Path) -> None:
    recipe, scheme = lively(qwen2(np.float32)), Scheme(form, symmetric=True)
    for name, found in matrices(save(pack(recipe, scheme).packed, tmp_path)).items():
        assert not found.has_zeros
        assert_holds(found, recipe, members(name), scheme)


@pytest.mark.parametrize("form", ["gptq", "gptq_v2", "auto_round"])
def test_a_stored_zero_point_that_is_no_midpoint_is_refused_and_leaves_nothing(form: str, tmp_path: Path) -> None:
    packed = pack(lively(qwen2(np.float32)), Scheme(form, symmetric=True)).packed
    words = packed.tensors["model.layers.1.mlp.up_proj.qzeros"]
    words[-1, -1] ^= 1 << 28
    with pytest.raises(ZeroPointMismatch, match="zero-point-mismatch"):
        save(packed, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


# Scales in the activations' dtype.


def with_scale(value: float) -> Recipe:
    """A checkpoint with bfloat16 scales, one of them this."""
    packed = pack(lively(llama(np.float32)), Scheme("olive", scales=BF16)).packed
    packed.tensors["model.layers.0.mlp.up_proj.weight_scales"][3, 1] = value
    return packed


@pytest.mark.parametrize("value", [2.0**-14, 1.9921875, 0.0078125])
def test_bfloat16_scales_that_float16_holds_are_exported(value: float, tmp_path: Path) -> None:
    held = matrices(save(with_scale(value), tmp_path, dtype="float16"))
    scales = held["model.layers.0.mlp.up_proj"].scales
    assert scales.dtype == np.float16
    assert scales[3, 1] == value


@pytest.mark.parametrize("value", [1.9921875 * 2.0**-20, 2.0**-30])
def test_a_bfloat16_scale_that_float16_does_not_hold_is_refused_and_leaves_nothing(
    value: float, tmp_path: Path
) -> None:
    assert float(ml_dtypes.bfloat16(value)) == value != float(np.float16(value))
    with pytest.raises(InexactScales) as refused:
        save(with_scale(value), tmp_path, dtype="float16")
    assert refused.value.code == "inexact-scales"
    assert "model.layers.0.mlp.up_proj.weight_scales (model.safetensors)" in refused.value.where
    assert f"{value:g}, one of 1" in refused.value.found
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_float16_scales_are_not_put_into_bfloat16(tmp_path: Path) -> None:
    checkpoint = pack(lively(llama(np.float32)), Scheme("gptq")).packed.write(tmp_path)
    (problem,) = waybill.plan(checkpoint, "onnx", dtype="bfloat16", ep="cuda").problems
    assert isinstance(problem, UnsupportedByRuntime)
    assert "float16 scales" in problem.what
    assert problem.found == "bfloat16, for the scales of 10 packed weights"


@pytest.mark.parametrize("stored", [np.float16, np.float32])  # cast, and copied or linked as they lie
@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_damaged_scales_are_refused_and_leave_nothing(stored: Any, link: bool, value: float, tmp_path: Path) -> None:
    packed = pack(lively(llama(np.float32)), Scheme("olive", scales=stored)).packed
    packed.tensors["model.layers.0.mlp.up_proj.weight_scales"][3, 1] = value
    package = waybill.build(packed.write(tmp_path / "checkpoint"), link=link)
    with pytest.raises(BadScales, match="NaN or infinity"):
        package.save(tmp_path / "package", link=link)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
