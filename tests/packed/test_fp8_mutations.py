"""Damaged checkpoints of small floats: one thing is changed, and the refusal names the tensor and the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import waybill
from checkpoints import BF16, Array, Recipe, lively, llama, qwen3_moe
from floating import Blocks, pack_fp8, pack_mxfp4
from packed.test_mutations import damage, refusal, refusals

DOWN = "model.layers.1.mlp.down_proj"
CODES, SCALES = f"{DOWN}.weight", f"{DOWN}.weight_scale_inv"
BANK = "model.layers.1.mlp.experts.down_proj"
FORMS = [Blocks(), Blocks(48, 40, BF16), Blocks(-1, -1), Blocks(16, 32, gptqmodel=True)]
every_form = pytest.mark.parametrize("blocks", FORMS, ids=str)


def fp8(blocks: Blocks = FORMS[0], **changes: Any) -> Recipe:
    recipe = pack_fp8(lively(llama(np.float32)), blocks).packed
    recipe.config["quantization_config"] |= changes
    return recipe


def mxfp4() -> Recipe:
    return pack_mxfp4(lively(qwen3_moe(np.float32, banks=True))).packed


@every_form
@pytest.mark.parametrize(("lost", "role"), [(CODES, "weight"), (SCALES, "scale_inv")])
def test_codes_without_scales_and_scales_without_codes_are_refused(
    blocks: Blocks, lost: str, role: str, tmp_path: Path
) -> None:
    recipe = fp8(blocks)
    del recipe.tensors[lost]
    problem = refusal(recipe, tmp_path, "incomplete-weight", CODES)
    assert problem.what == f"a packed weight has no {role}"
    assert problem.expected == "weight + scale_inv"


CHANGES: dict[str, tuple[str, Callable[[Array], Array], str]] = {
    "floats beside scales": (CODES, lambda t: t.astype(np.float32), "F8_E4M3 or F8_E5M2 [N, K]"),
    "integers beside scales": (CODES, lambda t: t.view(np.uint8), "F8_E4M3 or F8_E5M2 [N, K]"),
    "codes in one row": (CODES, lambda t: t.reshape(-1), "F8_E4M3 or F8_E5M2 [N, K]"),
    "integer scales": (SCALES, lambda t: t.astype(np.int32), "F32[2, 3]: fp8, blocks of 32x32"),
    "turned scales": (SCALES, lambda t: np.ascontiguousarray(t.T), "F32[2, 3]: fp8, blocks of 32x32"),
    "no scales for the last columns": (SCALES, lambda t: t[:, :-1].copy(), "F32[2, 3]: fp8, blocks of 32x32"),
    "flat scales": (SCALES, lambda t: t.reshape(-1), "F32[2, 3]: fp8, blocks of 32x32"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_parts_that_do_not_fit_are_refused(change: str, tmp_path: Path) -> None:
    recipe = fp8()
    name, changed, expected = CHANGES[change]
    recipe.tensors[name] = changed(recipe.tensors[name])
    problem = refusal(recipe, tmp_path, "packing-mismatch", name)
    assert problem.expected.startswith(expected)


@pytest.mark.parametrize("size", [[64, 32], [32, 64], [16, 16], None])
def test_another_size_of_blocks_than_the_scales_have_is_refused(size: list[int] | None, tmp_path: Path) -> None:
    problems = refusals(fp8(weight_block_size=size), tmp_path)
    assert {problem.code for problem in problems} == {"packing-mismatch"}
    assert all("weight_scale_inv" in problem.where for problem in problems)


def test_8_bit_floats_that_the_metadata_excludes_are_refused(tmp_path: Path) -> None:
    problem = refusal(fp8(modules_to_not_convert=[DOWN]), tmp_path, "packing-mismatch", SCALES)
    assert problem.expected == f"a float weight, by the exclusion {DOWN!r}"


def test_a_float_weight_that_the_metadata_calls_packed_is_refused(tmp_path: Path) -> None:
    recipe = fp8()
    del recipe.tensors[SCALES]
    recipe.tensors[CODES] = recipe.tensors[CODES].astype(np.float32)
    problem = refusal(recipe, tmp_path, "packing-mismatch", CODES)
    assert problem.expected == "fp8, blocks of 32x32, by the model-wide layout"


def test_8_bit_floats_without_metadata_are_refused(tmp_path: Path) -> None:
    recipe = fp8()
    del recipe.config["quantization_config"]
    problem = refusal(recipe, tmp_path, "unsupported-quantization", "weight_scale_inv")
    assert "no metadata says how" in problem.what


STATED: dict[str, tuple[dict[str, Any], str, str]] = {
    "fmt": ({"fmt": "e3m4"}, "unsupported-quantization", "e4m3 | e5m2"),
    "expert_dtype": ({"expert_dtype": "fp4"}, "unsupported-quantization", "fp8"),
    "scale_fmt": ({"scale_fmt": "int"}, "unsupported-quantization", "float | ue8m0"),
    "weight_scale_semantics": (
        {"format": "float8_e4m3fn", "weight_scale_method": "block", "weight_scale_semantics": "direct"},
        "unsupported-quantization",
        "inverse",
    ),
    "weight_scale_method": (
        {"format": "float8_e4m3fn", "weight_scale_semantics": "inverse"},
        "unsupported-quantization",
        "tensor | row | block",
    ),
    "weight_block_size": ({"weight_block_size": [32]}, "bad-config", "[rows, columns], or null"),
}


@pytest.mark.parametrize("field", STATED)
def test_metadata_that_says_something_unknown_is_refused_with_its_field(field: str, tmp_path: Path) -> None:
    changes, code, expected = STATED[field]
    (problem,) = refusals(fp8(**changes), tmp_path)
    assert (problem.code, problem.where) == (code, f"config.json: quantization_config.{field}")
    assert problem.expected.startswith(expected)


def test_the_same_tensors_mean_something_else_when_gptqmodel_wrote_them(tmp_path: Path) -> None:
    theirs, ours = FORMS[3], Blocks(16, 32)
    recipe = fp8(theirs)
    divided = dict(waybill.plan(recipe.write(tmp_path / "one")).packings)
    recipe.config["quantization_config"] = ours.metadata | {"ignored_layers": ["lm_head"]}
    multiplied = dict(waybill.plan(recipe.write(tmp_path / "other")).packings)
    assert str(divided[CODES]) == "E4M3 in blocks of 16x32, divided, F32"
    assert str(multiplied[CODES]) == "E4M3 in blocks of 16x32, F32"


# Contents: found while loading.


@every_form
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_scale_that_is_not_finite_is_refused(blocks: Blocks, value: float, tmp_path: Path) -> None:
    recipe = fp8(blocks)
    recipe.tensors[SCALES].reshape(-1)[-1:] = value
    damage(recipe, tmp_path, "bad-scales", SCALES, "NaN or infinity")


@every_form
def test_scales_that_make_everything_zero_are_refused(blocks: Blocks, tmp_path: Path) -> None:
    recipe = fp8(blocks)
    recipe.tensors[SCALES][...] = 0
    found = "a divisor of zero" if blocks.gptqmodel else "scales are all zero"
    damage(recipe, tmp_path, "bad-scales", SCALES, found)


def test_one_divisor_of_zero_is_refused_and_one_scale_of_zero_is_a_pruned_block(tmp_path: Path) -> None:
    recipe = fp8(FORMS[3])
    recipe.tensors[SCALES][1, 1] = 0
    damage(recipe, tmp_path / "divided", "bad-scales", SCALES, "a divisor of zero")
    recipe = fp8()
    recipe.tensors[SCALES][1, 1] = 0
    waybill.load(recipe.write(tmp_path / "pruned"))


@every_form
def test_values_too_large_for_float16_are_refused_there(blocks: Blocks, tmp_path: Path) -> None:
    recipe = fp8(blocks)
    recipe.tensors[SCALES].reshape(-1)[:1] = 2.0**-10 if blocks.gptqmodel else 1024
    folder = recipe.write(tmp_path)
    with pytest.raises(waybill.errors.CastOverflow) as refused:
        waybill.load(folder, dtype="float16")
    assert (refused.value.expected, refused.value.found) == ("scales up to 146.214", "a scale of 1024")
    waybill.load(folder, dtype="float32")


def test_a_code_that_is_no_number_is_found_on_request(tmp_path: Path) -> None:
    recipe = fp8()
    recipe.tensors[CODES].view(np.uint8)[5, 7] = 0x7F
    folder = recipe.write(tmp_path)
    waybill.load(folder)
    with pytest.raises(waybill.errors.NonFiniteWeight, match=DOWN):
        waybill.load(folder, check_finite=True)


# MXFP4


@pytest.mark.parametrize(("lost", "left"), [("blocks", "scales"), ("scales", "blocks")])
def test_a_bank_without_one_of_its_parts_is_refused(lost: str, left: str, tmp_path: Path) -> None:
    recipe = mxfp4()
    del recipe.tensors[f"{BANK}_{lost}"]
    problem = refusal(recipe, tmp_path, "incomplete-weight", f"{BANK}_{left}")
    assert problem.what == f"a packed weight has no {lost}"


BANKS: dict[str, tuple[str, Callable[[Array], Array]]] = {
    "blocks of 8 bytes": ("blocks", lambda t: t.reshape(*t.shape[:-2], -1, 8)),
    "an axis too many": ("blocks", lambda t: t[None]),
    "signed blocks": ("blocks", lambda t: t.reshape(-1).view(np.int32).reshape(*t.shape[:-1], -1)),
    "a scale short": ("scales", lambda t: t[:, :-1].copy()),
    "float scales": ("scales", lambda t: t.astype(np.float32)),
}


@pytest.mark.parametrize("change", BANKS)
def test_a_bank_whose_parts_do_not_fit_is_refused(change: str, tmp_path: Path) -> None:
    recipe = mxfp4()
    role, changed = BANKS[change]
    recipe.tensors[f"{BANK}_{role}"] = changed(recipe.tensors[f"{BANK}_{role}"])
    refusal(recipe, tmp_path, "packing-mismatch", f"{BANK}_{role}")


def test_an_exponent_that_means_no_number_is_refused(tmp_path: Path) -> None:
    recipe = mxfp4()
    recipe.tensors[f"{BANK}_scales"][2, 5, 0] = 255
    damage(recipe, tmp_path, "bad-scales", f"{BANK}_scales", "NaN or infinity")


def test_a_bank_that_the_metadata_excludes_is_refused(tmp_path: Path) -> None:
    recipe = mxfp4()
    recipe.config["quantization_config"]["modules_to_not_convert"] = [BANK]
    refusal(recipe, tmp_path, "packing-mismatch", f"{BANK}_blocks")


def test_a_bank_without_an_axis_of_experts_is_refused(tmp_path: Path) -> None:
    recipe = pack_fp8(lively(qwen3_moe(np.float32, banks=True)), Blocks(16, 16)).packed
    for name in (BANK, f"{BANK}_scale_inv"):
        recipe.tensors[name] = recipe.tensors[name][0].copy()
    problem = refusals(recipe, tmp_path)[0]
    assert (problem.code, problem.what) == ("shape-mismatch", "a bank cannot be taken apart")
    assert problem.found == "axis 0 of (64, 32) is not a leading one"
