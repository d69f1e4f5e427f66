"""FP8 models against the same weights as floats: in the engine, cut into ranks, and as ONNX packages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch

import waybill
from checkpoints import BF16, Recipe, lively, llama, qwen3, qwen3_moe
from floating import E5M2, E8M0, Blocks, pack_fp8, pack_mxfp4
from packed.test_parity import logits, tokens
from packing import Twins
from parity.tolerances import LOGITS_FLOAT32
from sessions import Package
from waybill.engine.layers.matrix import CodebookMatrix
from waybill.engine.models.decoder import CausalLM
from waybill.errors import Refused, UnsupportedByRuntime
from waybill.weights.dequantize import E2M1

PROMPTS = [[3, 17, 99, 4, 56], [8], [120, 7, 7, 31, 64, 2, 90, 11, 45]]
LAYER = "model.layers.0"
MODELS: dict[str, Callable[[], Recipe]] = {
    "llama": lambda: lively(llama(np.float32)),
    "qwen3": lambda: lively(qwen3(np.float32), 2),
    "qwen3-moe": lambda: lively(qwen3_moe(np.float32), 3),
}
MULTIPLIED = [
    Blocks(),
    Blocks(scales=BF16),
    Blocks(48, 40),  # the last of every axis is short
    Blocks(128, 128, scales=BF16),  # larger than some axes
    Blocks(-1, -1),
    Blocks(16, 32, codes=E5M2),
    Blocks(32, 32, scales=E8M0),
    *(Blocks(*size, scales=BF16, compressed=True) for size in ((16, 32), (1, -1), (-1, -1))),
]
DIVIDED = [Blocks(16, 32, gptqmodel=True), Blocks(-1, -1, gptqmodel=True), Blocks(1, -1, gptqmodel=True)]


def assert_equal(twins: Twins, folder: Path) -> CausalLM:
    """The FP8 checkpoint computes what its float twin does; returns its model."""
    packed = waybill.load(twins.packed.write(folder / "packed"), dtype="float32")
    dense = waybill.load(twins.dense.write(folder / "dense"), dtype="float32")
    torch.testing.assert_close(logits(packed), logits(dense), atol=LOGITS_FLOAT32, rtol=0)
    assert tokens(packed) == tokens(dense)
    return packed


@pytest.mark.parametrize("blocks", [*MULTIPLIED, *DIVIDED], ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_an_fp8_model_computes_what_its_float_twin_does(kind: str, blocks: Blocks, tmp_path: Path) -> None:
    model = assert_equal(pack_fp8(MODELS[kind](), blocks), tmp_path)
    banks = [op for op in model.descendants() if isinstance(op, CodebookMatrix)]
    assert banks
    assert all(op.codes.dtype == torch.uint8 for op in banks)
    floats = [t for t in model.state_dict().values() if t.is_floating_point() and t.dim() > 1]
    assert sum(t.numel() for t in floats) < sum(op.codes.numel() for op in banks)


def test_banks_of_experts_in_fp8_compute_what_float_banks_do(tmp_path: Path) -> None:
    recipe = lively(qwen3_moe(np.float32, banks=True))
    assert_equal(pack_fp8(recipe, Blocks(16, 32)), tmp_path)


def test_a_bank_whose_gate_and_up_share_a_block_is_refused(tmp_path: Path) -> None:
    twins = pack_fp8(lively(qwen3_moe(np.float32, banks=True)), Blocks(24, 32))
    problem = waybill.plan(twins.packed.write(tmp_path)).problems[0]
    assert problem.code == "shape-mismatch"
    assert problem.found == "0:32 splits a block of 24"


@pytest.mark.parametrize(("blocks", "merged"), [(Blocks(), True), (Blocks(48, 64), False), (Blocks(-1, -1), False)])
def test_projections_are_merged_where_no_block_crosses_from_one_to_the_next(
    blocks: Blocks, merged: bool, tmp_path: Path
) -> None:
    model = assert_equal(pack_fp8(lively(llama(np.float32)), blocks), tmp_path)
    state = model.state_dict()
    assert (f"{LAYER}.self_attn.qkv_proj.codes" in state) == merged
    assert (f"{LAYER}.self_attn.k_proj.codes" in state) != merged
    assert f"{LAYER}.mlp.gate_up_proj.codes" in state  # of equal rows: whole blocks, or one each
    assert bool([line for line in waybill.plan(tmp_path / "packed").notices if "apart" in line]) != merged


def test_modules_the_metadata_excludes_are_float(tmp_path: Path) -> None:
    keep = [f"{LAYER}.self_attn.v_proj", "model.layers.1.mlp.down_proj"]
    state = assert_equal(pack_fp8(lively(llama(np.float32)), Blocks(), keep=keep), tmp_path).state_dict()
    assert all(f"{module}.weight" in state for module in keep)


@pytest.mark.parametrize("elements", [64, 64 * 7, 64 * 40])
def test_a_product_may_begin_in_the_middle_of_a_block(
    elements: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("waybill.engine.layers.matrix.BLOCK_ELEMENTS", elements)
    assert_equal(pack_fp8(lively(llama(np.float32)), Blocks()), tmp_path)


def test_static_scales_of_activations_are_dropped_and_said_to_be(tmp_path: Path) -> None:
    twins = pack_fp8(lively(llama(np.float32)), Blocks(-1, -1))
    names = [name.removesuffix(".weight_scale_inv") for name in twins.packed.tensors if name.endswith("_scale_inv")]
    for name in names:
        twins.packed.tensors[f"{name}.activation_scale"] = np.ones((), np.float32)
    twins.packed.config["quantization_config"]["activation_scheme"] = "static"
    assert_equal(twins, tmp_path)
    bill = waybill.plan(tmp_path / "packed")
    assert bill.notices[0].startswith(f"{len(names)} tensors are not used: scales of activations")
    assert set(bill.ignored) == {f"{name}.activation_scale" for name in names}
    assert bill.summary().endswith("0 unbound")


def test_zero_points_beside_floats_are_refused(tmp_path: Path) -> None:
    recipe = pack_fp8(lively(llama(np.float32)), Blocks(1, -1, compressed=True)).packed
    name = f"{LAYER}.mlp.down_proj.weight_zero_point"
    recipe.tensors[name] = np.zeros((64, 1), np.int8)
    (problem,) = waybill.plan(recipe.write(tmp_path)).problems
    assert problem.code == "packing-mismatch"
    assert problem.where.startswith(name)
    assert problem.expected.startswith("nothing of that name beside floats: compressed-tensors, blocks of 1xall")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrower_dtypes_round_each_value_once(dtype: str, tmp_path: Path) -> None:
    twins = pack_fp8(lively(llama(np.float32)), Blocks(48, 40))
    packed = waybill.load(twins.packed.write(tmp_path / "packed"), dtype=dtype)
    dense = waybill.load(twins.dense.write(tmp_path / "dense"), dtype=dtype)
    assert (logits(packed).float() - logits(dense).float()).abs().max() < 0.1
    assert any("rounds the values" in line for line in waybill.plan(tmp_path / "packed", dtype=dtype).notices)
    assert not any("rounds" in line for line in waybill.plan(tmp_path / "packed", dtype="float32").notices)


def test_every_number_of_mxfp4_is_a_bfloat16(tmp_path: Path) -> None:
    values = np.ldexp(np.array(E2M1, np.float32)[:, None], np.arange(-127, 125))
    assert (values.astype(BF16).astype(np.float32) == values).all()
    folder = pack_mxfp4(lively(qwen3_moe(np.float32, banks=True))).packed.write(tmp_path)
    assert not any("rounds" in line for line in waybill.plan(folder, dtype="bfloat16").notices)
    assert any("rounds the values of 4" in line for line in waybill.plan(folder, dtype="float16").notices)


def test_mxfp4_banks_compute_what_float_banks_do(tmp_path: Path) -> None:
    state = assert_equal(pack_mxfp4(lively(qwen3_moe(np.float32, banks=True))), tmp_path).state_dict()
    assert state[f"{LAYER}.mlp.experts.gate_up_proj.codes"].shape == (4, 64, 32)
    assert state[f"{LAYER}.mlp.experts.gate_up_proj.scales"].dtype == torch.uint8


@pytest.mark.parametrize("recipe", [llama, qwen3_moe], ids=["llama", "qwen3_moe"])
def test_mxfp4_projections_of_compressed_tensors_compute_what_float_ones_do(
    recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    state = assert_equal(pack_mxfp4(lively(recipe(np.float32)), compressed=True), tmp_path).state_dict()
    assert {t.dtype for name, t in state.items() if name.endswith((".codes", ".scales"))} == {torch.uint8}


def test_mxfp4_experts_of_compressed_tensors_may_be_widened_for_onnx(tmp_path: Path) -> None:
    twins = pack_mxfp4(lively(qwen3_moe(np.float32)), compressed=True)
    for name in [name for name in twins.packed.tensors if ".self_attn." in name]:
        del twins.packed.tensors[name]
    attention = {name: tensor for name, tensor in twins.dense.tensors.items() if ".self_attn." in name}
    twins.packed.tensors |= attention
    twins.packed.config["quantization_config"]["ignore"].append("re:.*self_attn.*")
    folder = twins.packed.write(tmp_path / "packed")
    waybill.build(folder, widen_mxfp4=True).save(tmp_path / "package")
    assert not waybill.verify(tmp_path / "package", folder).problems


def test_mxfp4_is_refused_for_onnx_with_what_could_be_offered(tmp_path: Path) -> None:
    folder = pack_mxfp4(lively(qwen3_moe(np.float32, banks=True))).packed.write(tmp_path)
    (problem,) = waybill.plan(folder, "onnx").problems
    assert problem.code == "unsupported-by-runtime"
    assert "exact form in 8-bit integers" in problem.expected
    assert "--widen-mxfp4" in problem.expected
    assert problem.found == "E2M1 in blocks of 1x32, F8_E8M0"


# Packages


@pytest.mark.parametrize("blocks", MULTIPLIED, ids=str)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_package_of_8_bit_floats_computes_what_its_float_twin_does(kind: str, blocks: Blocks, tmp_path: Path) -> None:
    twins = pack_fp8(MODELS[kind](), blocks)
    checkpoint = twins.packed.write(tmp_path / "checkpoint")
    waybill.build(checkpoint).save(tmp_path / "package")
    waybill.build(twins.dense.write(tmp_path / "dense")).save(tmp_path / "twin")
    package, twin = Package(tmp_path / "package"), Package(tmp_path / "twin")
    np.testing.assert_allclose(package.prefill(PROMPTS)[0], twin.prefill(PROMPTS)[0], atol=LOGITS_FLOAT32, rtol=0)
    assert package.greedy(PROMPTS[0], 12) == twin.greedy(PROMPTS[0], 12)
    assert package.operators.count("DequantizeLinear") >= 8
    report = waybill.verify(tmp_path / "package", checkpoint)
    report.require_clean()
    assert report.as_dict()["proven"]


@pytest.mark.parametrize("blocks", MULTIPLIED, ids=str)
def test_a_package_holds_exactly_the_values_of_the_checkpoint(blocks: Blocks, tmp_path: Path) -> None:
    twins = pack_fp8(MODELS["llama"](), blocks)
    waybill.build(twins.packed.write(tmp_path / "checkpoint")).save(tmp_path / "package")
    model = ir.load(tmp_path / "package" / "model.onnx")
    seen = 0
    for node in model.graph:
        if node.op_type != "DequantizeLinear":
            continue
        codes, scales = (value.const_value.numpy() for value in node.inputs if value and value.const_value)
        block = node.attributes["block_size"].as_int()
        values = codes.astype(np.float32) * scales.repeat(block, axis=1)[:, : codes.shape[1]]
        stem = node.outputs[0].name.removesuffix(".weight/values")  # type: ignore[union-attr]
        path, _, leaf = stem.rpartition(".")
        names = [f"{path}.{m}_proj" for m in "qkv"] if leaf == "qkv_proj" else [stem]
        np.testing.assert_array_equal(values, np.concatenate([twins.dense.tensors[f"{n}.weight"] for n in names]))
        seen += len(names)
    assert seen == 14


def test_codes_are_written_as_the_floats_they_are_and_may_be_linked(tmp_path: Path) -> None:
    twins = pack_fp8(lively(llama(np.float32)), Blocks())
    waybill.build(twins.packed.write(tmp_path / "checkpoint"), link=True).save(tmp_path / "package", link=True)
    bill = json.loads((tmp_path / "package" / "waybill.json").read_text())
    entry = bill["components"]["decoder"]["initializers"][f"{LAYER}.mlp.down_proj.codes"]
    assert entry["dtype"] == "F8_E4M3"
    assert entry["file"] == "model.safetensors"
    assert entry["packing"] == {"bits": 8, "block_size": 32, "table": "E4M3"}
    waybill.verify(tmp_path / "package", tmp_path / "checkpoint").require_clean()


def test_a_half_precision_package_takes_scales_that_are_half_precision_numbers(tmp_path: Path) -> None:
    twins = pack_fp8(lively(llama(np.float32)), Blocks(scales=BF16))
    waybill.build(twins.packed.write(tmp_path / "checkpoint"), dtype="float16").save(tmp_path / "package")
    waybill.verify(tmp_path / "package", tmp_path / "checkpoint").require_clean()
    fine = pack_fp8(lively(llama(np.float32)), Blocks())
    with pytest.raises(waybill.errors.WaybillError, match="inexact-scales"):
        waybill.build(fine.packed.write(tmp_path / "fine"), dtype="float16").save(tmp_path / "no")


@pytest.mark.parametrize(
    ("kind", "blocks", "expected"),
    [("llama", DIVIDED[0], "a product with a reciprocal"), ("qwen3-moe", Blocks(), "linear layers only")],
)
def test_what_no_operator_holds_exactly_is_refused_for_onnx(
    kind: str, blocks: Blocks, expected: str, tmp_path: Path
) -> None:
    twins = pack_fp8(MODELS[kind](), blocks)
    with pytest.raises(Refused) as refused:
        waybill.build(twins.packed.write(tmp_path))
    (problem,) = refused.value.problems
    assert isinstance(problem, UnsupportedByRuntime)
    assert expected in problem.expected
    assert "engine" in problem.fix


def test_cuda_is_said_to_be_untried(tmp_path: Path) -> None:
    folder = pack_fp8(lively(llama(np.float32)), Blocks()).packed.write(tmp_path)
    (problem,) = waybill.plan(folder, "onnx", ep="cuda", dtype="float16").problems
    assert "were not tried" in problem.expected
    assert problem.fix == "export with --ep cpu"


@pytest.mark.parametrize("role", ["codes", "scales"])
@pytest.mark.parametrize("blocks", [Blocks(48, 40), Blocks(-1, -1)], ids=str)
def test_verify_names_a_changed_8_bit_float_and_a_changed_scale(role: str, blocks: Blocks, tmp_path: Path) -> None:
    twins = pack_fp8(lively(llama(np.float32)), blocks)
    waybill.build(twins.packed.write(tmp_path / "checkpoint")).save(tmp_path / "package")
    name = f"{LAYER}.mlp.down_proj.weight"
    tensor = twins.packed.tensors[name if role == "codes" else f"{name}_scale_inv"]
    octets = tensor.view(np.uint8) if role == "codes" else tensor.reshape(-1).view(np.uint8)
    octets[..., -1] ^= 1
    (problem,) = waybill.verify(tmp_path / "package", twins.packed.write(tmp_path / "other")).problems
    assert problem.code == "package-mismatch"
    assert problem.where.startswith(f"{LAYER}.mlp.down_proj.{role}")


# Ranks


def test_a_cut_through_a_block_is_refused_with_the_sizes_that_are_legal(tmp_path: Path) -> None:
    folder = pack_fp8(lively(qwen3(np.float32)), Blocks()).packed.write(tmp_path)
    (problem,) = waybill.plan(folder, tp=2).problems  # down_proj has K 96: 48 a rank
    assert (problem.code, problem.where) == ("illegal-tp", f"{LAYER}.mlp.gate_up_proj.weight")
    assert problem.expected == "1 ranks: whole blocks of 32x32 each"
    assert problem.found == "48x64 + 48x64 for each of 2 ranks"
    assert problem.fix == "use --tp 1"


def test_one_block_over_a_whole_axis_is_cut_anywhere(tmp_path: Path) -> None:
    folder = pack_fp8(lively(llama(np.float32)), Blocks(-1, -1)).packed.write(tmp_path)
    for rank in range(2):
        assert not waybill.plan(folder, tp=2, rank=rank).problems
