"""Damaged packed checkpoints: one thing is changed, and the refusal names the tensor, the file and what is wrong.

Everything headers and metadata show is refused before a weight byte is read; only contents are found while loading.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import waybill
from checkpoints import Recipe, lively, llama, qwen3, qwen3_moe
from packing import HEAD, TABLE, Scheme, pack
from waybill.errors import BadScales, CastOverflow, WaybillError

FILE = "model.safetensors"
LAYER = "model.layers.1"
DOWN = f"{LAYER}.mlp.down_proj"
BANK = f"{LAYER}.mlp.experts.down_proj"
FORMATS: dict[str, tuple[Scheme, str]] = {
    "gptq": (Scheme("gptq"), f"{DOWN}."),
    "gptq-v2-merged": (Scheme("gptq_v2", bits=8), f"{LAYER}.self_attn.k_proj."),
    "auto-round": (Scheme("auto_round"), f"{DOWN}."),
    "awq": (Scheme("awq"), f"{DOWN}."),
    "olive-dotted": (Scheme("olive_dotted"), f"{DOWN}."),
    "olive": (Scheme("olive", bits=8), f"{LAYER}.self_attn.k_proj.weight_"),
    "olive-banks": (Scheme("olive", group=16), f"{BANK}_"),
}
"""A scheme, and what stands before the roles of the weight that is damaged."""
ROLES = ("qweight", "scales", "qzeros")
CASES = [pytest.param(kind, role, id=f"{kind}-{role}") for kind in FORMATS for role in ROLES]
G_IDX = [pytest.param("gptq", "g_idx", id="gptq-g_idx")]


def good(kind: str) -> tuple[Recipe, str]:
    scheme, stem = FORMATS[kind]
    recipe = lively(qwen3_moe(np.float32, banks=True) if kind == "olive-banks" else llama(np.float32))
    return pack(recipe, scheme).packed, stem


def refusals(recipe: Recipe, folder: Path) -> list[WaybillError]:
    """The problems of a plan made while every read of a weight range fails."""

    def unread(*_: object) -> int:
        raise AssertionError("a weight was read")

    recipe.write(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", unread)
        bill = waybill.plan(folder)
        with pytest.raises(waybill.errors.Refused):
            waybill.load(folder)
    assert bill.problems
    assert not bill.bindings
    assert all(problem.fix for problem in bill.problems)
    return list(bill.problems)


def refusal(recipe: Recipe, folder: Path, code: str, *names: str) -> WaybillError:
    """The one problem, with this code, that says these words and the file."""
    (problem,) = refusals(recipe, folder)
    assert problem.code == code, problem
    missing = [name for name in (*names, FILE) if name not in str(problem)]
    assert not missing, problem
    return problem


@pytest.mark.parametrize("kind", FORMATS)
def test_the_undamaged_checkpoint_loads(kind: str, tmp_path: Path) -> None:
    waybill.load(good(kind)[0].write(tmp_path))


@pytest.mark.parametrize(("kind", "role"), CASES)
def test_a_packed_weight_without_one_of_its_parts_is_refused(kind: str, role: str, tmp_path: Path) -> None:
    recipe, stem = good(kind)
    del recipe.tensors[stem + role]
    problem = refusal(recipe, tmp_path, "incomplete-weight", stem.rstrip("._"), role)
    assert f"no {role}" in problem.what


@pytest.mark.parametrize(("kind", "role"), CASES)
def test_one_part_alone_is_refused(kind: str, role: str, tmp_path: Path) -> None:
    recipe, stem = good(kind)
    for other in {*ROLES, "g_idx"} - {role}:
        recipe.tensors.pop(stem + other, None)
    refusal(recipe, tmp_path, "incomplete-weight", stem + role)


def test_g_idx_alone_is_refused_and_its_absence_is_not(tmp_path: Path) -> None:
    recipe, stem = good("gptq")
    g_idx = recipe.tensors.pop(f"{stem}g_idx")
    waybill.load(recipe.write(tmp_path / "without"))
    recipe.tensors = {name: t for name, t in recipe.tensors.items() if not name.startswith(stem)}
    recipe.tensors[f"{stem}g_idx"] = g_idx
    refusal(recipe, tmp_path / "alone", "incomplete-weight", f"{stem}g_idx")


@pytest.mark.parametrize("kind", FORMATS)
def test_a_weight_whose_parts_are_all_gone_is_refused(kind: str, tmp_path: Path) -> None:
    recipe, stem = good(kind)
    recipe.tensors = {name: tensor for name, tensor in recipe.tensors.items() if not name.startswith(stem)}
    problems = refusals(recipe, tmp_path)
    module = stem.removesuffix(".").removesuffix("_").removesuffix(".weight").rpartition(".")[0]
    assert {problem.code for problem in problems} <= {"missing-weight", "incomplete-merge"}
    assert all(module in str(problem) for problem in problems)


@pytest.mark.parametrize(("kind", "role"), CASES)
@pytest.mark.parametrize("spelling", ["{}s", "{}_old", "old_{}"])
def test_a_renamed_part_is_refused_under_both_names(kind: str, role: str, spelling: str, tmp_path: Path) -> None:
    recipe, stem = good(kind)
    renamed = stem + spelling.format(role)
    recipe.tensors[renamed] = recipe.tensors.pop(stem + role)
    problems = refusals(recipe, tmp_path)
    text = "\n".join(map(str, problems))
    assert {"incomplete-weight"} <= {problem.code for problem in problems}
    assert f"no {role}" in text
    assert FILE in text
    if not spelling.endswith("{}"):  # an ending of its own is another weight's part, and it lacks the rest
        assert renamed in text or len(problems) == 1


@pytest.mark.parametrize("kind", FORMATS)
def test_a_weight_stored_packed_and_as_it_is_is_refused(kind: str, tmp_path: Path) -> None:
    recipe, stem = good(kind)
    name = stem.removesuffix("_") if stem.endswith("_") else f"{stem}weight"
    recipe.tensors[name] = np.zeros((64, 96), np.float32)
    refusal(recipe, tmp_path, "claimed-twice", name, f"{stem}qweight")


@pytest.mark.parametrize("role", ROLES)
def test_a_part_stored_under_both_of_olives_names_is_refused(role: str, tmp_path: Path) -> None:
    recipe, stem = good("olive-dotted")
    recipe.tensors[f"{stem}weight_{role}"] = recipe.tensors[stem + role].copy()
    refusal(recipe, tmp_path, "claimed-twice", stem + role, f"{stem}weight_{role}")


@pytest.mark.parametrize(("kind", "role"), [*CASES, *G_IDX])
@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_part_of_another_length_is_refused(kind: str, role: str, axis: int, change: int, tmp_path: Path) -> None:
    recipe, stem = good(kind)
    tensor = recipe.tensors[stem + role]
    length = tensor.shape[axis] + change
    recipe.tensors[stem + role] = np.resize(tensor, [*tensor.shape[: axis % tensor.ndim], length, *tensor.shape[1:]][
        : tensor.ndim] if axis == 0 else [*tensor.shape[:-1], length])  # fmt: skip
    problems = refusals(recipe, tmp_path)
    assert {problem.code for problem in problems} <= {"packing-mismatch", "shape-mismatch", "expert-mismatch"}
    assert any(stem in str(problem) and FILE in str(problem) for problem in problems)


@pytest.mark.parametrize(("kind", "role"), [*CASES, *G_IDX])
@pytest.mark.parametrize("dtype", [np.int64, np.float64, np.uint8, np.int32])
def test_a_part_of_another_dtype_is_refused(kind: str, role: str, dtype: Any, tmp_path: Path) -> None:
    recipe, stem = good(kind)
    tensor = recipe.tensors[stem + role]
    recipe.tensors[stem + role] = tensor.astype(np.float32 if tensor.dtype == dtype else dtype)
    refusal(recipe, tmp_path, "packing-mismatch", stem + role)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_flat_part_is_refused(kind: str, tmp_path: Path) -> None:
    recipe, stem = good(kind)
    recipe.tensors[f"{stem}qweight"] = recipe.tensors[f"{stem}qweight"].reshape(-1)
    refusal(recipe, tmp_path, "packing-mismatch", f"{stem}qweight")


# Metadata.


@pytest.mark.parametrize("kind", FORMATS)
def test_packed_weights_without_metadata_are_refused(kind: str, tmp_path: Path) -> None:
    recipe, _ = good(kind)
    del recipe.config["quantization_config"]
    problem = refusal(recipe, tmp_path, "unsupported-quantization", "model.layers.0")
    assert "no metadata" in problem.what


def edited(kind: str, **changes: Any) -> Recipe:
    recipe, _ = good(kind)
    recipe.config["quantization_config"] |= changes
    return recipe


OTHER_NUMBERS: list[tuple[str, dict[str, Any]]] = [
    *((kind, {"bits": 8}) for kind in ("gptq", "auto-round", "olive-dotted", "olive-banks")),
    ("olive", {"bits": 4}),
    *((kind, {"group_size": 16}) for kind in ("gptq", "gptq-v2-merged", "auto-round", "awq", "olive", "olive-dotted")),
    *((kind, {"group_size": -1}) for kind in FORMATS),
    ("olive-banks", {"group_size": 32}),
]


@pytest.mark.parametrize(("kind", "changes"), OTHER_NUMBERS)
def test_metadata_with_other_numbers_is_refused(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    problems = refusals(edited(kind, **changes), tmp_path)
    assert {problem.code for problem in problems} <= {"packing-mismatch", "shape-mismatch"}
    assert all(FILE in str(problem) for problem in problems)


EXCLUDED: dict[str, dict[str, Any]] = {
    "gptq": {"dynamic": {rf"-:{DOWN}": {}}},
    "auto-round": {"extra_config": {DOWN: {"bits": 16}}},
    "awq": {"modules_to_not_convert": [DOWN]},
    "olive-dotted": {"modules_to_not_convert": [DOWN]},
    "olive-banks": {"modules_to_not_convert": [BANK]},
}


@pytest.mark.parametrize("kind", EXCLUDED)
def test_a_weight_packed_on_disk_and_excluded_is_refused_with_the_rule(kind: str, tmp_path: Path) -> None:
    module = BANK if kind == "olive-banks" else DOWN
    problem = refusal(edited(kind, **EXCLUDED[kind]), tmp_path, "packing-mismatch", f"{FORMATS[kind][1]}qweight")
    assert problem.what == "a weight is packed on disk, and float by the metadata"
    assert repr(module) in problem.expected


@pytest.mark.parametrize("kind", EXCLUDED)
def test_a_weight_float_on_disk_and_not_excluded_is_refused(kind: str, tmp_path: Path) -> None:
    recipe, stem = good(kind)
    plain = lively(qwen3_moe(np.float32, banks=True) if kind == "olive-banks" else llama(np.float32))
    name = BANK if kind == "olive-banks" else f"{DOWN}.weight"
    recipe.tensors = {key: tensor for key, tensor in recipe.tensors.items() if not key.startswith(stem)}
    recipe.tensors[name] = plain.tensors[name]
    problem = refusal(recipe, tmp_path, "packing-mismatch", name)
    assert problem.what == "weights are float on disk, and packed by the metadata"
    assert "model-wide" in problem.expected or "experts" in problem.expected


@pytest.mark.parametrize("form", ["gptq", "awq", "olive"])
def test_a_packed_router_is_refused(form: str, tmp_path: Path) -> None:
    recipe = lively(qwen3_moe(np.float32, num_experts=8))
    router = f"{LAYER}.mlp.gate"
    disguised = Recipe({}, {f"{router}_proj.weight": recipe.tensors.pop(f"{router}.weight")})
    packed = pack(recipe, Scheme(form)).packed
    sidecars = pack(disguised, Scheme(form)).packed.tensors
    packed.tensors |= {name.replace("gate_proj", "gate"): tensor for name, tensor in sidecars.items()}
    refusal(packed, tmp_path, "packing-mismatch", f"{router}.weight")


@pytest.mark.parametrize("kind", ["gptq", "awq", "olive"])
@pytest.mark.parametrize("which", [TABLE, HEAD])
def test_a_packed_table_the_metadata_does_not_know_of_is_refused(kind: str, which: str, tmp_path: Path) -> None:
    packed = pack(lively(llama(np.float32)), FORMATS[kind][0], table=which == TABLE, head=which == HEAD).packed
    packed.config["quantization_config"] |= {"lm_head": False, "embeds": False}
    problem = refusal(packed, tmp_path, "packing-mismatch", which)
    assert problem.what == "a weight is packed on disk, and float by the metadata"


@pytest.mark.parametrize("switch", ["lm_head", "embeds"])
def test_a_float_table_the_metadata_calls_packed_is_refused(switch: str, tmp_path: Path) -> None:
    refusal(edited("olive", **{switch: True}), tmp_path, "packing-mismatch", HEAD if switch == "lm_head" else TABLE)


@pytest.mark.parametrize("form", ["gptq", "olive"])
def test_a_packed_head_tied_to_a_float_table_is_refused(form: str, tmp_path: Path) -> None:
    recipe = lively(qwen3(np.float32))
    recipe.tensors[HEAD] = recipe.tensors[TABLE].copy()
    packed = pack(recipe, Scheme(form), head=True).packed
    problem = refusal(packed, tmp_path, "packing-mismatch", "lm_head")
    assert "tied" in problem.what
    assert TABLE in str(problem)


def test_a_float_head_tied_to_a_packed_table_is_refused(tmp_path: Path) -> None:
    recipe = lively(qwen3(np.float32))
    recipe.tensors[HEAD] = recipe.tensors[TABLE].copy()
    problem = refusal(pack(recipe, Scheme("olive"), table=True).packed, tmp_path, "packing-mismatch", HEAD)
    assert "tied" in problem.what


def test_experts_packed_differently_within_a_bank_are_refused(tmp_path: Path) -> None:
    expert = f"{LAYER}.mlp.experts.2.down_proj"
    recipe = lively(qwen3_moe(np.float32))
    packed = pack(recipe, Scheme("gptq"), overrides={expert: {"bits": 8}}).packed
    refusal(packed, tmp_path / "bits", "packing-mismatch", f"{LAYER}.mlp.experts.2")
    refusal(pack(recipe, Scheme("gptq"), keep=[expert]).packed, tmp_path / "float", "packing-mismatch", expert)


def test_act_order_is_refused(tmp_path: Path) -> None:
    problems = refusals(edited("gptq", desc_act=True), tmp_path)
    assert {problem.code for problem in problems} == {"act-order"}
    assert any("mlp.down_proj" in problem.where and FILE in problem.where for problem in problems)


def test_what_is_wrong_with_every_layer_is_said_once_for_each_projection(tmp_path: Path) -> None:
    problems = refusals(edited("gptq", desc_act=True), tmp_path / "act-order")
    assert len(problems) <= 7
    problems = refusals(edited("olive", bits=4), tmp_path / "bits")
    assert len(problems) <= 7 * 2  # scales and zero points


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("gptq", {"checkpoint_format": "marlin"}), ("awq", {"version": "gemv"}), ("gptq", {"bits": 3}),
     ("olive", {"quant_method": "bitsandbytes"}), ("auto-round", {"packing_format": "auto_round:mlx"})],
)  # fmt: skip
def test_metadata_that_is_not_supported_is_the_only_problem(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    (problem,) = refusals(edited(kind, **changes), tmp_path)
    assert problem.code == "unsupported-quantization"
    assert str(next(iter(changes.values()))) in problem.found
    assert "quantization_config" in problem.where


# Contents: found while loading.


def damage(recipe: Recipe, folder: Path, code: str, *names: str) -> WaybillError:
    """The error of loading a checkpoint whose headers are right."""
    waybill.plan(recipe.write(folder)).require_clean()
    with pytest.raises(WaybillError) as caught:
        waybill.load(folder)
    assert caught.value.code == code, caught.value
    assert all(name in str(caught.value) for name in names), caught.value
    return caught.value


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_scale_that_is_not_finite_is_refused(kind: str, value: float, tmp_path: Path) -> None:
    recipe, stem = good(kind)
    recipe.tensors[f"{stem}scales"][-1, ..., -1] = value
    error = damage(recipe, tmp_path, "bad-scales", f"{stem}scales", FILE)
    assert isinstance(error, BadScales)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("group", [0, 1])
def test_a_group_whose_scales_are_all_zero_is_refused(kind: str, group: int, tmp_path: Path) -> None:
    recipe, stem = good(kind)
    scales = recipe.tensors[f"{stem}scales"]
    if kind.startswith("olive"):
        scales[..., group] = 0
    else:
        scales[group] = 0
    damage(recipe, tmp_path, "bad-scales", f"{stem}scales", FILE)


@pytest.mark.parametrize("value", [np.nan, 0])
def test_damaged_scales_of_one_expert_are_named_among_all_of_a_bank(value: float, tmp_path: Path) -> None:
    recipe = pack(lively(qwen3_moe(np.float32, num_experts=8)), Scheme("gptq")).packed
    damaged = f"{LAYER}.mlp.experts.7.up_proj.scales"
    recipe.tensors[damaged][0] = value
    damage(recipe, tmp_path, "bad-scales", damaged, FILE)


@pytest.mark.parametrize("kind", FORMATS)
def test_an_output_whose_scales_are_all_zero_is_a_pruned_one(kind: str, tmp_path: Path) -> None:
    recipe, stem = good(kind)
    scales = recipe.tensors[f"{stem}scales"]
    if kind.startswith("olive"):
        scales[..., 3, :] = 0
    else:
        scales[:, 3] = 0
    waybill.load(recipe.write(tmp_path))


@pytest.mark.parametrize("form", ["gptq", "gptq_v2", "awq", "olive"])
def test_a_symmetric_weight_with_another_zero_point_is_refused(form: str, tmp_path: Path) -> None:
    recipe = pack(lively(llama(np.float32)), Scheme(form)).packed
    recipe.config["quantization_config"] |= {"sym": True, "zero_point": False, "symmetric": True}
    error = damage(recipe, tmp_path, "zero-point-mismatch", "model.layers.0")
    assert "symmetric" in error.what


@pytest.mark.parametrize(("wrote", "says"), [("gptq", "gptq_v2"), ("gptq_v2", "gptq")])
def test_a_symmetric_weight_read_as_the_other_version_is_refused(wrote: str, says: str, tmp_path: Path) -> None:
    recipe = pack(lively(llama(np.float32)), Scheme(wrote, symmetric=True)).packed
    recipe.config["quantization_config"]["checkpoint_format"] = says
    error = damage(recipe, tmp_path, "zero-point-mismatch", "model.layers.0")
    assert "checkpoint_format" in error.fix


def test_permuted_groups_are_refused_whatever_the_metadata_says(tmp_path: Path) -> None:
    recipe, stem = good("gptq")
    recipe.tensors[f"{stem}g_idx"] = recipe.tensors[f"{stem}g_idx"][::-1].copy()
    damage(recipe, tmp_path, "act-order", DOWN)


@pytest.mark.parametrize("kind", FORMATS)
def test_scales_with_which_a_weight_could_exceed_float16_are_refused_there_and_load_elsewhere(
    kind: str, tmp_path: Path
) -> None:
    recipe, stem = good(kind)
    recipe.tensors[f"{stem}scales"][-1, ..., -1] = 32768
    folder = recipe.write(tmp_path)
    with pytest.raises(CastOverflow) as refused:
        waybill.load(folder, dtype="float16")
    most = (1 << recipe.config["quantization_config"]["bits"]) - 1
    assert refused.value.expected == f"scales up to {65504 / most:g}"
    assert f"{stem}scales" in refused.value.where
    assert (refused.value.found, refused.value.fix) == ("a scale of 32768", "load in bfloat16 or float32")
    waybill.load(folder, dtype="float32")


def test_a_dtype_that_rounds_the_scales_is_noticed_before_anything_is_read(tmp_path: Path) -> None:
    folder = good("gptq")[0].write(tmp_path)
    rounded = "bfloat16 rounds the F16 scales of 8 packed weights when it computes; float32 keeps them"
    assert rounded in waybill.plan(folder, dtype="bfloat16").notices
    assert waybill.plan(folder, dtype="float32").notices == ()
