"""Every place that may state how components are packed, in checkpoints that are exported, run and compared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import waybill
from checkpoints import Recipe
from composites import assert_equal_to_transformers
from packing import Scheme, dequantize, quantize, sidecars
from waybill.errors import WaybillError
from zoo import LAYOUTS, OLIVE4, ZOO, Layout, Tiny, pack

BY_TITLE = {layout.title: layout for layout in LAYOUTS}
BOTH = BY_TITLE["decoder 4, the other 8 bits"]
MODELS = {tiny.title: tiny for tiny in ZOO if tiny.title in ("LLaVA: CLIP, Llama", "Qwen2-Audio")}
INNER = {"vision_encoder": "vision_config", "audio_encoder": "audio_config", "decoder": "text_config"}
Entries = dict[str, Any]


def components(config: Entries, entries: Entries) -> None:
    config["quantization_config"] = {"components": entries}


def nested(config: Entries, entries: Entries) -> None:
    for component, entry in entries.items():
        config[INNER[component]] = config[INNER[component]] | {"quantization_config": entry}


def in_part(config: Entries, entries: Entries) -> None:
    """The language model's in an entry, the other's inside its own config."""
    config["component_quantization"] = {"decoder": entries.pop("decoder")}
    nested(config, entries)


def twice(config: Entries, entries: Entries) -> None:
    config["component_quantization"] = entries
    nested(config, entries)


def with_root(config: Entries, entries: Entries) -> None:
    """As transformers writes a nested policy: the language model's is also the whole model's."""
    nested(config, entries)
    config["quantization_config"] = entries["decoder"]


def whole(config: Entries, entries: Entries) -> None:
    config["quantization_config"] = entries["decoder"]


FORMS: dict[str, Callable[[Entries, Entries], None]] = {
    form.__name__: form for form in (components, nested, in_part, twice, with_root)
}


def restated(tiny: Tiny, layout: Layout, form: Callable[[Entries, Entries], None], folder: Path) -> tuple[Any, Any]:
    """The same checkpoint, whose layouts are stated elsewhere, and the float one it must equal."""
    packed, dense, _ = pack(tiny, tiny.make(True, folder / "whole"), layout)
    entries = packed.config.pop("component_quantization")
    form(packed.config, entries)
    return packed, dense


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("title", MODELS)
def test_a_layout_means_the_same_wherever_it_is_stated(title: str, form: str, tmp_path: Path) -> None:
    tiny = MODELS[title]
    packed, dense = restated(tiny, BOTH, FORMS[form], tmp_path)
    driver = assert_equal_to_transformers(tiny, packed, dense, tmp_path)
    widths = {graph: {bits for bits, _ in modules.values()} for graph, modules in driver.packed().items()}
    assert widths == {tiny.first: {8}, "embedding": set(), "decoder": {4}}


@pytest.mark.parametrize("rule", ["an exact exclusion", "a `re:` exclusion", "an override"])
@pytest.mark.parametrize("title", MODELS)
def test_rules_inside_a_nested_config_reach_the_modules_of_that_component(
    title: str, rule: str, tmp_path: Path
) -> None:
    tiny = MODELS[title]
    packed, dense = restated(tiny, BY_TITLE[rule], nested, tmp_path)
    driver = assert_equal_to_transformers(tiny, packed, dense, tmp_path)
    found = driver.packed()["decoder"].get(tiny.runtime(tiny.module))
    assert found == ((8, 32) if rule == "an override" else None)


@pytest.mark.parametrize("form", [nested, whole])
@pytest.mark.parametrize("title", MODELS)
def test_what_is_said_of_a_language_model_is_said_of_its_table_too(
    title: str, form: Callable[[Entries, Entries], None], tmp_path: Path
) -> None:
    """The table of tokens is a component of its own here, which no producer knows."""
    tiny, name = MODELS[title], "language_model.model.embed_tokens.weight"
    packed, dense = restated(tiny, BY_TITLE["decoder 4 bits"], form, tmp_path)
    codes, zeros, scales = quantize(packed.tensors.pop(name), OLIVE4)
    dense.tensors[name] = dequantize(codes, zeros, scales, OLIVE4.group)
    packed.tensors |= sidecars(name, codes, zeros, scales, OLIVE4)
    block = (
        packed.config["quantization_config"] if form is whole else packed.config["text_config"]["quantization_config"]
    )
    block["embeds"] = True
    driver = assert_equal_to_transformers(tiny, packed, dense, tmp_path)
    assert "GatherBlockQuantized" in {node.op_type for node in driver.models["embedding"].graph.node}


@pytest.mark.parametrize("title", MODELS)
def test_one_layout_for_the_whole_model_is_that_of_every_component_that_is_packed(title: str, tmp_path: Path) -> None:
    tiny = MODELS[title]
    layout = Layout(title="4 bits", schemes={"first": OLIVE4, "decoder": OLIVE4})
    packed, dense = restated(tiny, layout, whole, tmp_path)
    driver = assert_equal_to_transformers(tiny, packed, dense, tmp_path)
    assert {graph for graph, modules in driver.packed().items() if modules} == {tiny.first, "decoder"}


def problems(recipe: Recipe, folder: Path) -> tuple[WaybillError, ...]:
    return waybill.plan(recipe.write(folder), "onnx").problems


@pytest.mark.parametrize("title", MODELS)
def test_a_nested_layout_that_the_entry_contradicts_is_refused(title: str, tmp_path: Path) -> None:
    tiny = MODELS[title]
    packed, _ = restated(tiny, BOTH, twice, tmp_path)
    inner = INNER[tiny.first]
    block = packed.config[inner]["quantization_config"]
    packed.config[inner] = packed.config[inner] | {"quantization_config": block | {"group_size": 64}}
    (problem,) = problems(packed, tmp_path / "packed")
    assert problem.code == "config-conflict"
    assert problem.where == (
        f"config.json: component_quantization.{tiny.first} and config.json: {inner}.quantization_config"
    )


@pytest.mark.parametrize("title", MODELS)
def test_a_nested_layout_of_one_network_does_not_reach_another(title: str, tmp_path: Path) -> None:
    tiny = MODELS[title]
    packed, _ = restated(tiny, BOTH, nested, tmp_path)
    packed.config[INNER[tiny.first]].pop("quantization_config")
    (problem,) = problems(packed, tmp_path / "packed")
    assert problem.code == "unsupported-quantization"
    assert problem.where.startswith(f"{tiny.first}: ")


def entry_of(recipe: Recipe, component: str) -> Entries:
    found = recipe.config["component_quantization"][component]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("form", ["gptq", "olive"])
@pytest.mark.parametrize("title", ["T5, gated", "Qwen2-Audio"])
def test_an_entry_overrides_single_modules_whatever_the_method(title: str, form: str, tmp_path: Path) -> None:
    tiny = next(each for each in ZOO if each.title == title)
    layout = Layout(title="", schemes={"decoder": Scheme(form, 4, 16)}, override={"bits": 8, "group": 32})
    packed, dense, _ = pack(tiny, tiny.make(True, tmp_path / "whole"), layout)
    entry = entry_of(packed, "decoder")
    rules = entry.pop("dynamic", {})
    parent = tiny.module.rpartition(".")[0]
    entry["overrides"] = {f"re:{tiny.module.replace('.', '[.]')}": {"bits": 8, "group_size": 32}}
    driver = assert_equal_to_transformers(tiny, packed, dense, tmp_path)
    assert driver.packed()["decoder"][tiny.runtime(tiny.module)] == (8, 32)
    entry["overrides"] = {tiny.module: {"bits": 8, "group_size": 32}}
    assert problems(packed, tmp_path / "literal") == ()
    entry["overrides"] = {parent: {"bits": 8, "group_size": 32}}  # and what else is in it
    assert {problem.code for problem in problems(packed, tmp_path / "parent")} == {"packing-mismatch"}
    if rules:
        entry["dynamic"] = rules
        (problem,) = problems(packed, tmp_path / "both")
        assert (problem.code, problem.expected) == ("bad-config", "overrides or dynamic")
        assert problem.where == "config.json: component_quantization.decoder"


@pytest.mark.parametrize("symmetric", [True, False])
def test_an_override_may_change_the_symmetry_of_one_module(symmetric: bool, tmp_path: Path) -> None:
    """Zero points are asked for by what a module is in the end, not by its component."""
    tiny = next(each for each in ZOO if each.title == "T5, gated")
    scheme = Scheme("olive", 4, 16, symmetric=not symmetric)
    layout = Layout(title="", schemes={"decoder": scheme}, override={"symmetric": symmetric})
    packed, dense, _ = pack(tiny, tiny.make(True, tmp_path / "whole"), layout)
    assert (f"{tiny.module}.weight_qzeros" in packed.tensors) is not symmetric
    assert_equal_to_transformers(tiny, packed, dense, tmp_path)
    if not symmetric:
        del packed.tensors[f"{tiny.module}.weight_qzeros"]
        (problem,) = problems(packed, tmp_path / "without")
        assert tiny.module in problem.where
