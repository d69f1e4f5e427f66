"""Defects that other projects shipped, on models of several networks: tied tables, names, exclusions, packages."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import waybill
from checkpoints import Recipe
from drivers import every_node
from packing import Scheme, quantize, sidecars
from waybill.errors import WaybillError
from zoo import HUB_HEAD, HUB_TABLE, LAYOUTS, OLIVE4, OLIVE8, ZOO, Layout, Tiny, pack

T5, LLAVA, WHISPER, QWEN2_AUDIO = (ZOO[at] for at in (0, 2, 4, 5))
FAMILIES = (T5, LLAVA, WHISPER, QWEN2_AUDIO)
TABLES = {
    "T5, gated": ("lm_head.weight", "shared.weight"),
    "LLaVA: CLIP, Llama": (HUB_HEAD, HUB_TABLE),
    "Whisper": ("proj_out.weight", "model.decoder.embed_tokens.weight"),
    "Qwen2-Audio": (HUB_HEAD, HUB_TABLE),
}
"""Head and table, as stored."""
BOTH = next(layout for layout in LAYOUTS if layout.title == "decoder 4, the other 8 bits")
families = pytest.mark.parametrize("tiny", FAMILIES, ids=lambda tiny: tiny.title)

Make = Callable[..., Recipe]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Checkpoints by model and tie, made once; every caller has a copy of the dictionaries."""
    made: dict[tuple[str, bool], Recipe] = {}

    def one(tiny: Tiny, tied: bool = True) -> Recipe:
        key = tiny.title, tied
        if key not in made:
            made[key] = tiny.make(tied, tmp_path_factory.mktemp("model"))
        config = json.loads(json.dumps(made[key].config))
        return Recipe(config, dict(made[key].tensors))

    return one


def problems(recipe: Recipe, folder: Path) -> tuple[WaybillError, ...]:
    return waybill.plan(recipe.write(folder), "onnx").problems


def exported(recipe: Recipe, folder: Path) -> tuple[Path, dict[str, Any]]:
    """A package that was proven, and its bill."""
    checkpoint = recipe.write(folder / "checkpoint")
    waybill.build(checkpoint).save(folder / "package")
    assert waybill.verify(folder / "package", checkpoint).problems == []
    return folder / "package", json.loads((folder / "package" / "waybill.json").read_text())


def holders(bill: dict[str, Any], name: str) -> dict[str, int]:
    """Where each component has an initializer."""
    return {
        component: entries["initializers"][name]["offset"]
        for component, entries in bill["components"].items()
        if name in entries["initializers"]
    }


@families
def test_a_tied_head_that_is_stored_again_is_written_once(tiny: Tiny, make: Make, tmp_path: Path) -> None:
    recipe = make(tiny)
    head, table = TABLES[tiny.title]
    recipe.tensors[head] = recipe.tensors[table].copy()
    package, bill = exported(recipe, tmp_path)
    held = holders(bill, f"{tiny.runtime(table.removesuffix('.weight'))}.weight")
    assert "decoder" in held and len(set(held.values())) == 1
    assert holders(bill, f"{tiny.runtime(head.removesuffix('.weight'))}.weight") == {}
    alone = exported(make(tiny), tmp_path / "alone")[0]
    assert (package / "model.onnx.data").stat().st_size == (alone / "model.onnx.data").stat().st_size


@families
def test_a_tied_head_that_is_stored_differently_is_the_one_that_is_used(tiny: Tiny, make: Make, tmp_path: Path) -> None:
    recipe = make(tiny)
    head, table = TABLES[tiny.title]
    recipe.tensors[head] = recipe.tensors[table] * 2
    built = waybill.build(recipe.write(tmp_path))
    assert any("the file holds a different one" in notice for notice in built.notices)


@families
def test_an_untied_head_that_is_missing_is_refused(tiny: Tiny, make: Make, tmp_path: Path) -> None:
    recipe = make(tiny, False)
    del recipe.tensors[TABLES[tiny.title][0]]
    (problem,) = problems(recipe, tmp_path)
    assert problem.code == "missing-head"


def packed_table(recipe: Recipe, name: str, scheme: Scheme) -> None:
    """Put a table's parts in its place."""
    tensor = recipe.tensors.pop(name).astype(np.float32)
    recipe.tensors |= sidecars(name, *quantize(tensor, scheme), scheme)


def test_a_packed_table_serves_a_tied_head_in_another_component(make: Make, tmp_path: Path) -> None:
    recipe = pack(LLAVA, make(LLAVA), BOTH)[0]
    packed_table(recipe, HUB_TABLE, OLIVE8)
    entry = recipe.config["component_quantization"]["vision_encoder"]
    recipe.config["component_quantization"]["embedding"] = entry | {"embeds": True}
    package, bill = exported(recipe, tmp_path)
    for part in ("codes", "scales", "zero_points"):
        held = holders(bill, f"model.language_model.embed_tokens.{part}")
        assert held.keys() == {"embedding", "decoder"} and len(set(held.values())) == 1
    (gather,) = [
        node
        for node in every_node(onnx.load(package / "embedding.onnx", load_external_data=False).graph)
        if node.op_type == "GatherBlockQuantized"
    ]
    assert gather.input[3] == "model.language_model.embed_tokens.zero_points"  # providers differ without


def test_a_packed_head_that_is_tied_to_a_float_table_is_refused(make: Make, tmp_path: Path) -> None:
    recipe = pack(LLAVA, make(LLAVA), BOTH)[0]
    recipe.tensors[HUB_HEAD] = recipe.tensors[HUB_TABLE]
    packed_table(recipe, HUB_HEAD, OLIVE4)
    recipe.config["component_quantization"]["decoder"]["lm_head"] = True
    (problem,) = problems(recipe, tmp_path)
    assert problem.code == "packing-mismatch"
    assert problem.what == "a tied weight is packed and what it is tied to is not, or the reverse"


def renamed(recipe: Recipe, old: str, new: str) -> Recipe:
    return Recipe(recipe.config, {re.sub(old, new, name): tensor for name, tensor in recipe.tensors.items()})


def test_names_that_all_have_a_prefix_too_many_are_one_problem(make: Make, tmp_path: Path) -> None:
    (problem,) = problems(renamed(make(T5), "^", "transformer."), tmp_path)
    assert (problem.code, problem.found) == ("prefix-drift", "every name starts with 'transformer.'")


def test_a_tower_under_another_name_is_refused_and_not_left_random(make: Make, tmp_path: Path) -> None:
    found = problems(renamed(make(LLAVA), "^vision_tower", "visual"), tmp_path)
    assert {problem.code for problem in found} >= {"unclaimed-weight", "missing-weight"} or [
        problem.code for problem in found
    ] == ["prefix-drift"]


def test_a_layer_that_is_kept_float_is_not_those_whose_number_begins_alike(make: Make, tmp_path: Path) -> None:
    recipe = make(T5)
    for number in range(3, 11):
        for name in [name for name in recipe.tensors if name.startswith("decoder.block.2.")]:
            recipe.tensors[name.replace(".2.", f".{number}.", 1)] = recipe.tensors[name]
    recipe.config["num_decoder_layers"] = 11
    only = replace(T5, module_pattern=r"decoder\.block\.1\..*")
    kept = pack(only, recipe, replace(BOTH, keep="re"))[0]
    kept.config["component_quantization"]["decoder"]["modules_to_not_convert"] = ["decoder.block.1"]
    plan = waybill.plan(kept.write(tmp_path), "onnx")
    assert plan.problems == ()
    assert any(name.startswith("decoder.block.10.") for name in plan.packings)
    assert not any(name.startswith("decoder.block.1.") for name in plan.packings)


@pytest.mark.parametrize("pattern", ["wo", "block.1", "DenseReluDense", "decoder.block.1.layer.2.DenseReluDense.w"])
def test_a_short_pattern_of_an_entry_is_no_path_and_the_disk_says_so(pattern: str, make: Make, tmp_path: Path) -> None:
    """Such a pattern selects nothing; what its author left float is then refused, and never read as packed."""
    recipe = pack(T5, make(T5), replace(BOTH, keep="exact"))[0]
    recipe.config["component_quantization"]["decoder"]["modules_to_not_convert"] = [pattern]
    (problem,) = problems(recipe, tmp_path)
    assert problem.where == f"decoder: {T5.module}.weight (model.safetensors)"


@pytest.mark.parametrize("stated", [None, [], "lm_head", ["lm_head"]])
def test_a_list_of_exclusions_may_be_absent_or_a_single_name(stated: Any, make: Make, tmp_path: Path) -> None:
    recipe = pack(T5, make(T5), BOTH)[0]
    recipe.config["component_quantization"]["decoder"]["modules_to_not_convert"] = stated
    assert problems(recipe, tmp_path) == ()


def test_a_broken_expression_is_told_with_its_component(make: Make, tmp_path: Path) -> None:
    recipe = pack(T5, make(T5), BOTH)[0]
    recipe.config["component_quantization"]["decoder"]["modules_to_not_convert"] = ["re:("]
    (problem,) = problems(recipe, tmp_path)
    assert problem.code == "bad-pattern"
    assert problem.where.startswith("config.json: component_quantization.decoder")


@families
def test_what_is_reported_is_what_is_planned(tiny: Tiny, make: Make, tmp_path: Path) -> None:
    """One policy for both: an exclusion counts for each."""
    from waybill.overview import describe

    recipe, _, forms = pack(tiny, make(tiny), replace(BOTH, keep="exact"))
    report = describe(waybill.open(recipe.write(tmp_path)))
    reported = {
        module
        for layout in report.quantization.values()
        for form, modules in layout.groups.items()
        if form != "float"
        for module in modules
    }
    assert reported == {tiny.runtime(module) for module in forms}
    assert all(layout.agrees for layout in report.quantization.values())


def nested(make: Make) -> Recipe:
    """A LLaVA whose inner configs state how each network is packed."""
    recipe = pack(LLAVA, make(LLAVA), BOTH)[0]
    entries = recipe.config.pop("component_quantization")
    recipe.config["text_config"]["quantization_config"] = entries["decoder"]
    recipe.config["vision_config"]["quantization_config"] = entries["vision_encoder"]
    return recipe


def test_inner_configs_state_their_own_networks(make: Make, tmp_path: Path) -> None:
    plan = waybill.plan(nested(make).write(tmp_path), "onnx")
    assert plan.problems == () and plan.policy is not None
    plans = plan.policy.quantization.plans
    assert {name: plan.layout.bits for name, plan in plans.items()} == {"decoder": 4, "vision_encoder": 8}


def test_an_outer_block_that_contradicts_the_inner_one_is_refused(make: Make, tmp_path: Path) -> None:
    recipe = nested(make)
    recipe.config["quantization_config"] = recipe.config["text_config"]["quantization_config"] | {"bits": 8}
    (problem,) = problems(recipe, tmp_path)
    assert (problem.code, problem.found) == ("config-conflict", "bits: 4 and 8")


@families
def test_an_encoder_is_packed_exactly_where_the_metadata_says_so(tiny: Tiny, make: Make, tmp_path: Path) -> None:
    recipe = pack(tiny, make(tiny), BOTH)[0]
    entry = recipe.config["component_quantization"].pop(tiny.first)
    (problem,) = problems(recipe, tmp_path / "undeclared")
    assert problem.code == "unsupported-quantization" and problem.where.startswith(f"{tiny.first}: ")
    floating = pack(tiny, make(tiny), next(one for one in LAYOUTS if one.title == "decoder 4 bits"))[0]
    floating.config["component_quantization"][tiny.first] = entry
    (problem,) = problems(floating, tmp_path / "declared")
    assert problem.code == "packing-mismatch" and problem.where.startswith(f"{tiny.first}: ")


def test_a_side_file_speaks_of_the_components_that_are_packed(make: Make, tmp_path: Path) -> None:
    recipe = pack(T5, make(T5), Layout(title="", schemes={"decoder": replace(OLIVE4, form="gptq")}))[0]
    block = recipe.config.pop("component_quantization")["decoder"]
    recipe.write(tmp_path)
    (problem,) = waybill.plan(tmp_path, "onnx").problems
    assert problem.code == "unsupported-quantization"  # and no integer is read as a float weight
    (tmp_path / "quantize_config.json").write_text(json.dumps(block))
    assert waybill.plan(tmp_path, "onnx").problems == ()
    (tmp_path / "config.json").write_text(
        json.dumps(recipe.config | {"component_quantization": {"decoder": block | {"bits": 8}}})
    )
    (problem,) = waybill.plan(tmp_path, "onnx").problems
    assert problem.where.endswith("component_quantization.decoder and quantize_config.json")


def test_zero_points_of_an_odd_number_of_blocks_fill_whole_bytes(make: Make, tmp_path: Path) -> None:
    """T5's wo has 96 columns: three blocks of 32, whose zero points of 4 bits take two bytes a row."""
    layout = Layout(title="", schemes={"first": Scheme("olive", 4, 32), "decoder": Scheme("olive", 4, 32)})
    _, bill = exported(pack(T5, make(T5), layout)[0], tmp_path)
    shape = bill["components"]["decoder"]["initializers"][f"{T5.module}.zero_points"]["shape"]
    assert shape == [64, 2]


@families
def test_a_package_that_was_moved_runs_and_one_without_data_does_not(tiny: Tiny, make: Make, tmp_path: Path) -> None:
    package, bill = exported(make(tiny), tmp_path)
    shutil.move(package, tmp_path / "moved")
    report = waybill.verify(tmp_path / "moved")
    assert report.problems == [] and report.runs.keys() == bill["components"].keys()
    (tmp_path / "moved" / "model.onnx.data").unlink()
    assert {problem.what for problem in waybill.verify(tmp_path / "moved").problems} == {
        "a file of the package is missing"
    }


def test_attention_on_cuda_adds_nothing_to_scores(make: Make, tmp_path: Path) -> None:
    """Its kernel of grouped queries refuses a bias when it runs, so T5 is refused before."""
    checkpoint = make(T5).write(tmp_path / "t5")
    (problem,) = waybill.plan(checkpoint, "onnx", ep="cuda", dtype="float16").problems
    assert (problem.code, problem.where) == ("unsupported-by-runtime", "attention scores")
    assert problem.found == "relative positions"
    assert "--ep cpu" in problem.fix
    whisper = make(WHISPER).write(tmp_path / "whisper")
    assert waybill.plan(whisper, "onnx", ep="cuda", dtype="float16").problems == ()


@pytest.mark.parametrize("value", ["<s>", -1, 128, 1.5, True, [0]])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("tiny", [T5, WHISPER], ids=lambda tiny: tiny.title)
def test_a_first_token_that_is_none_is_refused_before_a_weight_is_read(
    tiny: Tiny, file: str, value: Any, make: Make, tmp_path: Path
) -> None:
    make(tiny).write(tmp_path)
    stated = json.loads((tmp_path / file).read_text()) if (tmp_path / file).exists() else {}
    (tmp_path / file).write_text(json.dumps(stated | {"decoder_start_token_id": value}))
    (problem,) = waybill.plan(tmp_path, "onnx").problems
    assert (problem.code, problem.where) == ("bad-config", f"{file}: decoder_start_token_id")
    assert problem.expected == "a token below vocab_size 128"
