"""compressed-tensors checkpoints from end to end: what is read, what is left aside with a reason, what is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import waybill
from checkpoints import Recipe, lively, llama, qwen3_moe
from commands import Capture, Patch, run_unread
from packed.meaning import assert_every_rank_holds, assert_exported
from packing import HEAD, Scheme, Twins, compressed_group, pack
from waybill.errors import WaybillError

FILE = "model.safetensors"
LAYER = "model.layers.1"
DOWN, K = f"{LAYER}.mlp.down_proj", f"{LAYER}.self_attn.k_proj"
WORDS, BYTES, OLD = Scheme("ct"), Scheme("ct_int", bits=8), Scheme("ct_old")
SCHEMES = {"words": WORDS, "bytes": BYTES, "signed-zeros": OLD}


def good(scheme: Scheme = WORDS, **options: Any) -> Recipe:
    return pack(lively(llama(np.float32)), scheme, **options).packed


def refusals(recipe: Recipe, folder: Path) -> list[WaybillError]:
    """The problems of a plan made while every read of a weight range fails."""

    def unread(*_: object) -> int:
        raise AssertionError("a weight was read")

    recipe.write(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", unread)
        return list(waybill.plan(folder).problems)


def refusal(recipe: Recipe, folder: Path, code: str, *words: str) -> WaybillError:
    """The one problem, with this code, that says these words and the file."""
    (problem,) = refusals(recipe, folder)
    assert problem.code == code, problem
    assert not [word for word in (*words, FILE) if word not in str(problem)], problem
    return problem


def damage(recipe: Recipe, folder: Path, code: str, *words: str) -> WaybillError:
    """The error of loading a checkpoint whose headers are right."""
    waybill.plan(recipe.write(folder)).require_clean()
    with pytest.raises(WaybillError) as caught:
        waybill.load(folder)
    assert caught.value.code == code, caught.value
    assert not [word for word in words if word not in str(caught.value)], caught.value
    return caught.value


# What is read


def shared_scales(strategy: str, symmetric: bool) -> Twins:
    """Signed bytes whose scale is a whole tensor's, or 24 rows' and 32 columns': neither divides every weight."""
    scheme = Scheme("ct_int", bits=8, group=-1, symmetric=symmetric)
    twins = pack(lively(llama(np.float32)), scheme)
    (group,) = twins.packed.config["quantization_config"]["config_groups"].values()
    rows, columns = (24, 32) if strategy == "block" else (1 << 20, 1 << 20)
    group["weights"] |= {"strategy": strategy, "block_structure": [rows, columns]}
    random = np.random.default_rng(5)
    for name, codes in list(twins.packed.tensors.items()):
        if codes.dtype != np.int8 or not name.endswith(".weight"):
            continue
        shape = tuple(-(-length // each) for length, each in zip(codes.shape, (rows, columns), strict=True))
        scales = (random.uniform(0.5, 1.5, shape) * 0.01).astype(np.float16)
        zeros = random.integers(-128, 128, shape).astype(np.int8) if not symmetric else np.zeros(shape, np.int8)
        of = np.ix_(np.arange(codes.shape[0]) // rows, np.arange(codes.shape[1]) // columns)
        values = (codes.astype(np.float32) - zeros[of].astype(np.float32)) * scales[of].astype(np.float32)
        stored = (1,) if strategy == "tensor" else shape
        twins.packed.tensors[f"{name}_scale"] = scales.reshape(stored)
        if not symmetric:
            twins.packed.tensors[f"{name}_zero_point"] = zeros.reshape(stored)
        twins.dense.tensors[name] = values
    return twins


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("strategy", ["tensor", "block"])
def test_a_scale_of_several_rows_is_each_rows(strategy: str, symmetric: bool, tp: int, tmp_path: Path) -> None:
    assert_every_rank_holds(shared_scales(strategy, symmetric), tmp_path, tp)


@pytest.mark.parametrize("strategy", ["tensor", "block"])
def test_a_scale_of_several_rows_is_exported(strategy: str, tmp_path: Path) -> None:
    assert_exported(shared_scales(strategy, False), tmp_path)


MIXED: dict[str, Callable[[], Twins]] = {
    "words": lambda: pack(lively(llama(np.float32)), WORDS),
    "signed-zeros-one-group": lambda: pack(lively(llama(np.float32)), Scheme("ct_old", bits=2, group=-1)),
    "bytes-among-words": lambda: pack(
        lively(llama(np.float32)), WORDS, overrides={DOWN: {"form": "ct_int", "bits": 8}, K: {"bits": 2, "group": 16}}
    ),
    "head-and-table": lambda: pack(lively(llama(np.float32)), WORDS, table=True, head=True),
    "experts": lambda: pack(lively(qwen3_moe(np.float32)), WORDS),
}


@pytest.mark.parametrize("case", MIXED)
def test_a_package_is_proven_by_a_decoder_of_its_own(case: str, tmp_path: Path) -> None:
    checkpoint = MIXED[case]().packed.write(tmp_path / "checkpoint")
    waybill.build(checkpoint).save(tmp_path / "package")
    report = waybill.verify(tmp_path / "package", checkpoint)
    report.require_clean()
    assert report.weights


@pytest.mark.parametrize("role", ["weight_packed", "weight_scale", "weight_zero_point"])
def test_a_package_of_other_weights_is_not_proven(role: str, tmp_path: Path) -> None:
    recipe = good()
    waybill.build(recipe.write(tmp_path / "checkpoint")).save(tmp_path / "package")
    tensor = recipe.tensors[f"{DOWN}.{role}"]
    tensor.reshape(-1)[3:4] = -tensor.reshape(-1)[3:4] - (0 if role == "weight_scale" else 1)
    report = waybill.verify(tmp_path / "package", recipe.write(tmp_path / "other"))
    assert any(DOWN in str(problem) for problem in report.problems)


def test_a_component_may_have_an_entry_of_its_own(tmp_path: Path) -> None:
    twins = pack(lively(llama(np.float32)), WORDS)
    block = twins.packed.config.pop("quantization_config")
    twins.packed.config["component_quantization"] = {"decoder": block}
    assert_every_rank_holds(twins, tmp_path)


def test_inspect_counts_what_each_target_and_exclusion_selects(
    monkeypatch: Patch, capsys: Capture, tmp_path: Path
) -> None:
    recipe = good(overrides={DOWN: {"bits": 8}})
    recipe.config["quantization_config"]["ignore"] += ["re:.*experts.*"]
    _, said, _ = run_unread(monkeypatch, capsys, "inspect", recipe.write(tmp_path))
    assert "13 × 4-bit, group 32" in said
    assert "1 × 8-bit, group 32" in said
    assert f"targets '{DOWN}': 1 modules" in said
    assert "targets 'Linear': 15 modules" in said
    assert "ignore 'lm_head': 1 modules" in said
    assert "ignore 're:.*experts.*': 0 modules, is it spelled right?" in said


def test_signed_bytes_are_not_counted_as_float(monkeypatch: Patch, capsys: Capture, tmp_path: Path) -> None:
    _, said, _ = run_unread(monkeypatch, capsys, "inspect", good(BYTES).write(tmp_path))
    assert "14 × 8-bit, group 32" in said
    assert "2 × float: model.embed_tokens, lm_head" in said


def activations(recipe: Recipe) -> list[str]:
    """Adds what calibration of activations and of the cache leaves behind; returns the names."""
    group = recipe.config["quantization_config"]["config_groups"]["group_0"]
    group["input_activations"] = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False}
    names = [f"{DOWN}.input_scale", f"{DOWN}.input_zero_point", f"{LAYER}.self_attn.k_scale"]
    recipe.tensors |= {name: np.ones(1, np.int8 if "zero" in name else np.float16) for name in names}
    return names


def test_scales_of_activations_are_dropped_with_a_reason_and_a_notice(tmp_path: Path) -> None:
    recipe = good(BYTES)
    names = activations(recipe)
    bill = waybill.plan(recipe.write(tmp_path))
    bill.require_clean()
    assert sorted(bill.ignored) == sorted(names)
    assert all("activations" in reason for reason in bill.ignored.values())
    assert "0 unbound" in bill.summary()
    assert [line for line in bill.notices if "input_activations is for running the model" in line]
    waybill.load(tmp_path)
    waybill.build(tmp_path).save(tmp_path / "package")
    report = waybill.verify(tmp_path / "package", tmp_path)
    report.require_clean()
    assert sorted(report.dropped) == sorted(names)


def test_what_a_weight_says_twice_is_consumed(tmp_path: Path) -> None:
    recipe = good()
    recipe.tensors[f"{DOWN}.weight_g_idx"] = (np.arange(96) // 32).astype(np.int32)
    bill = waybill.plan(recipe.write(tmp_path))
    assert bill.consumed == len(recipe.tensors)
    waybill.load(tmp_path)


# What headers and metadata show


PARTS = [
    pytest.param("words", "weight_packed", id="words-weight_packed"),
    pytest.param("bytes", "weight", id="bytes-weight"),
    *(pytest.param(kind, "weight_scale", id=f"{kind}-weight_scale") for kind in SCHEMES),
    *(pytest.param(kind, "weight_zero_point", id=f"{kind}-weight_zero_point") for kind in SCHEMES),
]


@pytest.mark.parametrize(("kind", "part"), PARTS)
def test_a_weight_without_one_of_its_parts_is_refused(kind: str, part: str, tmp_path: Path) -> None:
    recipe = good(SCHEMES[kind])
    del recipe.tensors[f"{DOWN}.{part}"]
    problem = refusal(recipe, tmp_path, "incomplete-weight", DOWN)
    assert problem.what == f"a packed weight has no {part}"


@pytest.mark.parametrize(("kind", "part"), [*PARTS, pytest.param("words", "weight_shape", id="words-weight_shape")])
@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_part_of_another_length_is_refused(kind: str, part: str, axis: int, change: int, tmp_path: Path) -> None:
    recipe = good(SCHEMES[kind])
    tensor = recipe.tensors[f"{DOWN}.{part}"]
    shape = list(tensor.shape)
    shape[axis] += change
    recipe.tensors[f"{DOWN}.{part}"] = np.resize(tensor, shape)
    problems = refusals(recipe, tmp_path)
    assert {problem.code for problem in problems} <= {"packing-mismatch", "shape-mismatch"}
    assert any(DOWN in str(problem) and FILE in str(problem) for problem in problems)


@pytest.mark.parametrize(("kind", "part"), [*PARTS, pytest.param("words", "weight_shape", id="words-weight_shape")])
@pytest.mark.parametrize("dtype", [np.float64, np.uint8])
def test_a_part_of_another_dtype_is_refused(kind: str, part: str, dtype: Any, tmp_path: Path) -> None:
    recipe = good(SCHEMES[kind])
    recipe.tensors[f"{DOWN}.{part}"] = recipe.tensors[f"{DOWN}.{part}"].astype(dtype)
    refusal(recipe, tmp_path, "packing-mismatch", f"{DOWN}.{part}")


@pytest.mark.parametrize("kind", SCHEMES)
def test_a_flat_weight_is_refused(kind: str, tmp_path: Path) -> None:
    recipe = good(SCHEMES[kind])
    part = f"{DOWN}.weight" if kind == "bytes" else f"{DOWN}.weight_packed"
    recipe.tensors[part] = recipe.tensors[part].reshape(-1)
    refusal(recipe, tmp_path, "packing-mismatch", part)


def test_a_weight_stored_packed_and_as_it_is_is_refused(tmp_path: Path) -> None:
    recipe = good()
    recipe.tensors[f"{DOWN}.weight"] = np.zeros((64, 96), np.float32)
    refusal(recipe, tmp_path, "claimed-twice", f"{DOWN}.weight_packed")


def test_float_numbers_with_scales_beside_them_are_no_codes(tmp_path: Path) -> None:
    recipe = good(BYTES)
    recipe.tensors[f"{DOWN}.weight"] = recipe.tensors[f"{DOWN}.weight"].astype(np.float32)
    refusal(recipe, tmp_path, "packing-mismatch", f"{DOWN}.weight", "I8[N, K]")


@pytest.mark.parametrize(("kind", "form"), [("words", "int-quantized"), ("bytes", "pack-quantized")])
def test_another_format_than_the_tensors_have_is_refused(kind: str, form: str, tmp_path: Path) -> None:
    recipe = good(SCHEMES[kind])
    (group,) = recipe.config["quantization_config"]["config_groups"].values()
    group["format"], group["weights"]["num_bits"] = form, 8
    problems = refusals(recipe, tmp_path)
    assert {problem.code for problem in problems} == {"incomplete-weight"}


@pytest.mark.parametrize(
    "changes",
    [{"num_bits": 8}, {"group_size": 16}, {"group_size": 20}, {"strategy": "channel"}, {"strategy": "tensor"}],
)
def test_metadata_with_other_numbers_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    recipe = good()
    (group,) = recipe.config["quantization_config"]["config_groups"].values()
    group["weights"] |= changes
    assert {problem.code for problem in refusals(recipe, tmp_path)} <= {"packing-mismatch", "shape-mismatch"}
    assert refusals(recipe, tmp_path)


@pytest.mark.parametrize("kind", SCHEMES)
def test_packed_weights_without_metadata_are_refused(kind: str, tmp_path: Path) -> None:
    recipe = good(SCHEMES[kind])
    del recipe.config["quantization_config"]
    assert "no metadata" in refusal(recipe, tmp_path, "unsupported-quantization").what


def test_a_weight_packed_on_disk_and_ignored_is_refused_with_the_rule(tmp_path: Path) -> None:
    recipe = good()
    recipe.config["quantization_config"]["ignore"].append(f"re:{LAYER}.mlp.down")
    problem = refusal(recipe, tmp_path, "packing-mismatch", DOWN)
    assert problem.expected == f"a float weight, by the exclusion 're:{LAYER}.mlp.down'"


def test_a_weight_packed_on_disk_that_no_target_selects_is_refused(tmp_path: Path) -> None:
    recipe = good()
    (group,) = recipe.config["quantization_config"]["config_groups"].values()
    group["targets"] = ["re:.*self_attn", "re:.*(gate|up)_proj", "re:model.layers.0"]
    problem = refusal(recipe, tmp_path, "packing-mismatch", DOWN)
    assert problem.expected == "a float weight, by targets, none of which selects it"


def test_a_weight_float_on_disk_and_targeted_is_refused(tmp_path: Path) -> None:
    recipe = good(keep=[DOWN])
    recipe.config["quantization_config"]["ignore"] = ["lm_head"]
    problem = refusal(recipe, tmp_path, "packing-mismatch", f"{DOWN}.weight")
    assert problem.expected.endswith("by the rule 'Linear'")
    recipe.config["quantization_config"]["ignore"] = [DOWN]
    refusal(recipe, tmp_path, "packing-mismatch", HEAD)


def test_a_part_of_another_method_is_refused(tmp_path: Path) -> None:
    recipe = good()
    recipe.tensors[f"{DOWN}.qzeros"] = np.zeros((2, 8), np.int32)
    refusal(recipe, tmp_path / "words", "packing-mismatch", f"{DOWN}.qzeros", "compressed-tensors")
    recipe = pack(lively(llama(np.float32)), Scheme("gptq")).packed
    recipe.tensors[f"{DOWN}.weight_scale"] = np.zeros((64, 3), np.float16)
    refusal(recipe, tmp_path / "gptq", "packing-mismatch", f"{DOWN}.weight_scale", "gptq")


def test_experts_stacked_in_one_tensor_are_refused(tmp_path: Path) -> None:
    recipe = good()
    recipe.tensors[f"{DOWN}.weight_packed"] = recipe.tensors[f"{DOWN}.weight_packed"][None]
    refusal(recipe, tmp_path, "packing-mismatch", "I32[N, K·bits/32]")


def test_groups_ordered_by_columns_are_refused_by_the_metadata_and_by_the_bytes(tmp_path: Path) -> None:
    recipe = good()
    (group,) = recipe.config["quantization_config"]["config_groups"].values()
    group["weights"]["actorder"] = "group"
    assert {problem.code for problem in refusals(recipe, tmp_path / "stated")} == {"act-order"}
    group["weights"]["actorder"] = "static"
    waybill.load(recipe.write(tmp_path / "static"))
    recipe.tensors[f"{DOWN}.weight_g_idx"] = (np.arange(96)[::-1] // 32).astype(np.int32)
    damage(recipe, tmp_path / "stored", "act-order", DOWN)


# What only bytes show


def test_a_weight_that_states_another_shape_is_refused(tmp_path: Path) -> None:
    recipe = good()
    recipe.tensors[f"{DOWN}.weight_shape"] = np.array([64, 92])
    error = damage(recipe, tmp_path, "packing-mismatch", DOWN)
    assert (error.expected, error.found) == ("weight_shape [64, 96]", "[64, 92]")


@pytest.mark.parametrize("kind", SCHEMES)
def test_a_symmetric_weight_with_another_zero_point_is_refused(kind: str, tmp_path: Path) -> None:
    recipe = good(SCHEMES[kind])
    (group,) = recipe.config["quantization_config"]["config_groups"].values()
    group["weights"]["symmetric"] = True
    damage(recipe, tmp_path, "zero-point-mismatch", "symmetric", "model.layers.0")


def test_a_symmetric_weight_may_store_its_midpoint(tmp_path: Path) -> None:
    recipe = good(Scheme("ct_old", symmetric=True))
    recipe.tensors[f"{DOWN}.weight_zero_point"] = np.zeros((64, 3), np.int8)
    waybill.load(recipe.write(tmp_path))


def test_a_signed_zero_point_that_no_code_reaches_is_refused(tmp_path: Path) -> None:
    recipe = good(OLD)
    recipe.tensors[f"{DOWN}.weight_zero_point"][3, 1] = 8
    error = damage(recipe, tmp_path, "zero-point-mismatch", DOWN)
    assert error.expected == "-8 to 7"


@pytest.mark.parametrize("kind", SCHEMES)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_scale_that_is_not_finite_is_refused(kind: str, value: float, tmp_path: Path) -> None:
    recipe = good(SCHEMES[kind])
    recipe.tensors[f"{DOWN}.weight_scale"][-1, -1] = value
    damage(recipe, tmp_path, "bad-scales", f"{DOWN}.weight_scale", FILE)


def test_the_words_of_a_whole_number_of_groups_are_read_in_place(tmp_path: Path) -> None:
    bill = waybill.plan(good().write(tmp_path))
    codes = [binding for binding in bill.bindings if binding.role == "codes" and DOWN in binding.sources[0]]
    assert [binding.is_direct for binding in codes] == [True]


def targeted(*targets: str) -> dict[str, Any]:
    return {"group_0": compressed_group(WORDS, targets)}


def test_targets_may_name_every_module_by_its_path(tmp_path: Path) -> None:
    twins = pack(lively(llama(np.float32)), WORDS)
    modules = [name.removesuffix(".weight_packed") for name in twins.packed.tensors if name.endswith("_packed")]
    twins.packed.config["quantization_config"]["config_groups"] = targeted(*modules)
    assert_every_rank_holds(twins, tmp_path, 2)
