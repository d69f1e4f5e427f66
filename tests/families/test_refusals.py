"""What does not add up between components, metadata and tensors: refused from headers, with all one needs to act."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import waybill
from checkpoints import Recipe
from waybill.errors import BadConfig, WaybillError
from zoo import LAYOUTS, ZOO, Layout, pack

T5 = ZOO[0]
BOTH = next(layout for layout in LAYOUTS if layout.title == "decoder 4, the other 8 bits")
EXACT = next(layout for layout in LAYOUTS if layout.title == "an exact exclusion")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return T5.make(True, tmp_path_factory.mktemp("whole"))


def packed(whole: Recipe, layout: Layout = BOTH) -> Recipe:
    return pack(T5, whole, layout)[0]


def problems(recipe: Recipe, folder: Path) -> tuple[WaybillError, ...]:
    """Of a plan, which has read no weight."""
    return waybill.plan(recipe.write(folder), "onnx").problems


def test_packed_weights_of_a_component_that_the_metadata_leaves_out(whole: Recipe, tmp_path: Path) -> None:
    recipe = packed(whole)
    del recipe.config["component_quantization"]["encoder"]
    (problem,) = problems(recipe, tmp_path)
    assert problem.code == "unsupported-quantization"
    assert problem.where.startswith("encoder: encoder.block.0.layer.0.SelfAttention.k.weight_qweight")
    assert "model.safetensors" in problem.where
    assert problem.expected == "an entry for this component in component_quantization"


def test_a_packed_module_that_a_pattern_keeps_float(whole: Recipe, tmp_path: Path) -> None:
    recipe = packed(whole)
    recipe.config["component_quantization"]["decoder"]["modules_to_not_convert"] = [T5.module]
    (problem,) = problems(recipe, tmp_path)
    assert problem.code == "packing-mismatch"
    assert problem.where == f"decoder: {T5.module}.weight (model.safetensors)"
    assert problem.expected == f"a float weight, by the exclusion {T5.module!r}"
    assert f"{T5.module}.weight_qweight U8[64, 48]" in problem.found


def test_a_float_module_that_the_metadata_calls_packed(whole: Recipe, tmp_path: Path) -> None:
    recipe = packed(whole, EXACT)
    recipe.config["component_quantization"]["decoder"]["modules_to_not_convert"] = None
    (problem,) = problems(recipe, tmp_path)
    assert problem.code == "packing-mismatch"
    assert problem.where == f"decoder: {T5.module}.weight (model.safetensors)"
    assert problem.expected == "olive 4-bit, group 16, asymmetric, by the layout of decoder"


def test_a_whole_component_that_is_float_and_called_packed(whole: Recipe, tmp_path: Path) -> None:
    recipe = Recipe(
        whole.config | {"component_quantization": packed(whole).config["component_quantization"]}, whole.tensors
    )
    found = problems(recipe, tmp_path)
    assert {problem.code for problem in found} == {"packing-mismatch"}
    assert {problem.where.partition(":")[0] for problem in found} == {"encoder", "decoder"}


def test_an_entry_for_a_component_that_does_not_exist(whole: Recipe, tmp_path: Path) -> None:
    recipe = packed(whole)
    entries = recipe.config["component_quantization"]
    entries["vision_encoder"] = entries["encoder"]
    (problem,) = problems(recipe, tmp_path)
    assert isinstance(problem, BadConfig)
    assert problem.where == "config.json: component_quantization.vision_encoder"
    assert problem.expected == "an object or null, for one of encoder, decoder"
    assert problem.found == "a component the model does not have: 'vision_encoder'"


@pytest.mark.parametrize("role", ["qweight", "scales", "qzeros"])
def test_a_sidecar_that_no_component_owns(role: str, whole: Recipe, tmp_path: Path) -> None:
    recipe = packed(whole)
    recipe.tensors[f"adapter.weight_{role}"] = np.ones((64, 32), np.uint8 if role != "scales" else np.float16)
    (problem,) = problems(recipe, tmp_path)
    assert problem.code == "unsupported-quantization"
    assert problem.where == f"no component: adapter.weight_{role} (model.safetensors)"


def test_scales_without_their_codes(whole: Recipe, tmp_path: Path) -> None:
    recipe = packed(whole)
    del recipe.tensors[f"{T5.module}.weight_qweight"]
    (problem,) = problems(recipe, tmp_path)
    assert problem.code == "incomplete-weight"
    assert f"{T5.module}.weight" in problem.where
    assert "weight_scales" in problem.found


def test_scales_of_a_component_that_is_declared_float(whole: Recipe, tmp_path: Path) -> None:
    scales = np.ones((64, 4), np.float16)
    recipe = Recipe(dict(whole.config), whole.tensors | {f"{T5.module}.weight_scales": scales})
    (problem,) = problems(recipe, tmp_path)
    assert problem.where == f"decoder: {T5.module}.weight_scales (model.safetensors)"


def model_wide(recipe: Recipe, **changes: Any) -> Recipe:
    """The same weights, whose metadata speaks of the whole model."""
    config = dict(recipe.config)
    entries = config.pop("component_quantization")
    return Recipe(config | {"quantization_config": entries["decoder"] | changes}, recipe.tensors)


def only_decoder(whole: Recipe) -> Recipe:
    return packed(whole, next(layout for layout in LAYOUTS if layout.title == "decoder 4 bits"))


def test_what_is_said_of_the_whole_model_is_said_of_the_components_that_are_packed(
    whole: Recipe, tmp_path: Path
) -> None:
    bill = waybill.plan(model_wide(only_decoder(whole)).write(tmp_path), "onnx")
    assert bill.problems == ()
    assert list(bill.policy.quantization.plans) == ["decoder"]


def test_but_not_its_rules_about_single_modules(whole: Recipe, tmp_path: Path) -> None:
    bill = waybill.plan(model_wide(only_decoder(whole), modules_to_not_convert=["encoder"]).write(tmp_path), "onnx")
    assert bill.problems == ()
    (notice,) = bill.notices
    assert notice.startswith("quantization_config states modules_to_not_convert for the whole model")
    excluding = model_wide(packed(whole, EXACT), modules_to_not_convert=[T5.module])
    (problem,) = problems(excluding, tmp_path / "rule")
    assert (problem.code, T5.module in problem.where) == ("packing-mismatch", True)


@pytest.mark.parametrize(
    ("key", "value", "found"), [("bits", 8, "bits: 4 and 8"), ("group_size", 32, "group_size: 16 and 32")]
)
def test_a_model_wide_block_that_contradicts_the_entry_of_the_decoder(
    key: str, value: int, found: str, whole: Recipe, tmp_path: Path
) -> None:
    recipe = packed(whole)
    recipe.config["quantization_config"] = recipe.config["component_quantization"]["decoder"] | {key: value}
    (problem,) = problems(recipe, tmp_path)
    assert problem.code == "config-conflict"
    assert problem.where == "config.json: component_quantization.decoder and config.json: quantization_config"
    assert problem.found == found


def test_a_missing_layer_is_told_by_the_field_that_counts_it(whole: Recipe, tmp_path: Path) -> None:
    recipe = Recipe(whole.config | {"num_decoder_layers": 4}, whole.tensors)
    (problem,) = problems(recipe, tmp_path)
    assert problem.where == "decoder.block.3"
    assert problem.expected == "layers 0 to 3: num_decoder_layers is 4"
    surplus = Recipe(whole.config | {"num_layers": 1}, whole.tensors)
    assert {p.found for p in problems(surplus, tmp_path / "surplus")} == {"layer 1; num_layers is 1"}


def test_a_skeleton_is_not_saved_unless_asked_for(whole: Recipe, tmp_path: Path) -> None:
    package = waybill.build(packed(whole).write(tmp_path / "checkpoint"), load_weights=False)
    assert list(package) == ["encoder", "decoder"]
    with pytest.raises(WaybillError, match="unbound-package"):
        package.save(tmp_path / "package")
    assert not (tmp_path / "package").exists()
    package.save(tmp_path / "package", allow_unbound=True)
    assert {path.name for path in (tmp_path / "package").glob("*.onnx")} == {"encoder.onnx", "decoder.onnx"}
