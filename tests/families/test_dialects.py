"""Names as the hub has them and as transformers 5 writes them: told apart, reported, and loaded alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

import waybill
from checkpoints import Recipe
from llavas import make_llava, spell_as_hub, spell_as_memory
from waybill.overview import describe
from zoo import LAYOUTS, ZOO, pack

TINIES = {tiny.title: tiny for tiny in ZOO}
BOTH = next(layout for layout in LAYOUTS if layout.title == "decoder 4, the other 8 bits")
TOWER = "model.vision_tower"
FOUND: dict[str, tuple[Callable[[Path, Path], Path], dict[str, str]]] = {
    "transformers 5": (lambda folder, _: folder, {"vision_tower": "transformers 5"}),
    "the hub": (spell_as_hub, {"vision_tower.vision_model": "the hub"}),
    "modules": (spell_as_memory, {f"{TOWER}.vision_model": "modules of transformers 4"}),
}


def names(folder: Path) -> list[dict[str, Any]]:
    """What the report says of names."""
    found = describe(waybill.open(folder)).as_dict()["names"]
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize("who", FOUND)
def test_the_report_says_whose_names_a_file_has(who: str, tmp_path: Path) -> None:
    respell, expected = FOUND[who]
    make_llava().save_pretrained(tmp_path / "checkpoint")
    folder = respell(tmp_path / "checkpoint", tmp_path / "other")
    towers = {each["stored"]: each["written_by"] for each in names(folder) if each["runtime"] == TOWER}
    assert towers == expected
    counted = {each["stored"]: each["tensors"] for each in names(folder)}
    stored = load_file(folder / "model.safetensors")
    assert counted == {root: sum(name.startswith(f"{root}.") for name in stored) for root in counted}


def test_people_are_told_too(tmp_path: Path) -> None:
    make_llava().save_pretrained(tmp_path)
    rows = list(describe(waybill.open(tmp_path)).rows(str))
    told = [value for _, value in rows[next(at for at, (label, _) in enumerate(rows) if label == "names") :]]
    assert any(row.startswith("vision_tower for model.vision_tower (transformers 5), ") for row in told)


@pytest.mark.parametrize("title", ["T5, gated", "Whisper", "Llama with per-layer inputs"])
def test_files_that_have_the_names_of_modules_need_no_other(title: str, tmp_path: Path) -> None:
    assert names(TINIES[title].make(True, tmp_path / "whole").write(tmp_path / "checkpoint")) == []


def renamed(recipe: Recipe) -> Recipe:
    """The same tensors under the names of the hub."""

    def hub(name: str) -> str:
        return name.replace("vision_tower.", "vision_tower.vision_model.", 1) if name.startswith("vision_t") else name

    return Recipe(recipe.config, {hub(name): tensor for name, tensor in recipe.tensors.items()})


def test_a_packed_file_of_the_hub_is_planned_as_the_one_that_transformers_5_writes(tmp_path: Path) -> None:
    tiny = TINIES["LLaVA: CLIP, Llama"]
    packed = pack(tiny, tiny.make(True, tmp_path / "whole"), BOTH)[0]
    first = waybill.plan(packed.write(tmp_path / "first"), "onnx")
    second = waybill.plan(renamed(packed).write(tmp_path / "second"), "onnx")
    assert second.problems == ()
    assert [(b.target, b.shape, b.dtype) for b in sorted(second.bindings, key=lambda b: b.target)] == [
        (b.target, b.shape, b.dtype) for b in sorted(first.bindings, key=lambda b: b.target)
    ]


@pytest.mark.parametrize("root", ["vision_tower", "vision_tower.vision_model", TOWER, f"{TOWER}.vision_model"])
@pytest.mark.parametrize("hub", [True, False], ids=["a file of the hub", "a file of transformers 5"])
def test_an_exclusion_means_a_module_by_every_name_it_has_had(hub: bool, root: str, tmp_path: Path) -> None:
    tiny = TINIES["LLaVA: CLIP, Llama"]
    whole = tiny.make(True, tmp_path / "whole")
    module = "vision_tower.encoder.layers.1.mlp.fc1"
    packed = pack(tiny, whole, BOTH)[0]
    for role in ("qweight", "scales", "qzeros"):
        del packed.tensors[f"{module}.weight_{role}"]
    packed.tensors[f"{module}.weight"] = whole.tensors[f"{module}.weight"]
    entry = packed.config["component_quantization"]["vision_encoder"]
    entry["modules_to_not_convert"] = [f"{root}.encoder.layers.1.mlp.fc1"]
    assert waybill.plan((renamed(packed) if hub else packed).write(tmp_path / "packed"), "onnx").problems == ()
    entry["modules_to_not_convert"] = [f"{root}.encoder.layers.1.mlp.fc2"]
    found = waybill.plan((renamed(packed) if hub else packed).write(tmp_path / "wrong"), "onnx").problems
    assert {problem.code for problem in found} == {"packing-mismatch"}
