"""Tables of tokens and heads, packed or not, tied or not, in models whose table and head lie in different graphs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest

import waybill
from checkpoints import Recipe
from composites import assert_equal_to_transformers
from packing import Scheme, dequantize, metadata, quantize, sidecars
from waybill.onnx.package import ModelPackage
from zoo import LAYOUTS, OLIVE4, ZOO, Layout, Tiny, pack

BOTH = next(layout for layout in LAYOUTS if layout.title == "decoder 4, the other 8 bits")
FLOAT = next(layout for layout in LAYOUTS if layout.title == "float")
OLIVE8 = Scheme("olive", 8, 16, symmetric=True)


class Names(NamedTuple):
    """A model's table of tokens with the component that owns it, its head, which graphs look tokens up, and the
    table as a package calls it."""

    table: str
    owner: str
    head: str
    lookups: tuple[str, ...]
    runtime: str


_INNER = "language_model.model.embed_tokens.weight"
_LANGUAGE = Names(_INNER, "embedding", "language_model.lm_head.weight", ("embedding",),
                  "model.language_model.embed_tokens")  # fmt: skip
_OWN = "model.decoder.embed_tokens"
NAMES = {
    "T5, gated": Names("shared.weight", "encoder", "lm_head.weight", ("encoder", "decoder"), "shared"),
    "LLaVA: CLIP, Llama": _LANGUAGE,
    "Qwen2-Audio": _LANGUAGE,
    "Whisper": Names(f"{_OWN}.weight", "decoder", "proj_out.weight", ("decoder",), _OWN),
}
TINIES = {tiny.title: tiny for tiny in ZOO if tiny.title in NAMES}


def with_tables(
    tiny: Tiny, recipe: Recipe, layout: Layout, tables: Mapping[str, Scheme], switches: Mapping[str, Mapping[str, Any]]
) -> tuple[Recipe, Recipe]:
    """A checkpoint whose layers have a layout and some of whose tables are packed too, and the float one it must equal.

    `switches`: component to what its entry says besides; a component without an entry gets one of its table's.
    """
    packed, dense, _ = pack(tiny, recipe, layout)
    for name, scheme in tables.items():
        codes, zeros, scales = quantize(recipe.tensors[name], scheme)
        dense.tensors[name] = dequantize(codes, zeros, scales, scheme.group)
        del packed.tensors[name]
        packed.tensors |= sidecars(name, codes, zeros, scales, scheme)
    entries = packed.config.setdefault("component_quantization", {})
    for component, more in switches.items():
        scheme = next(iter(tables.values()), OLIVE4)
        block = metadata(scheme, [], {}, table=False, head=False, moe=False, tie=False)
        entries[component] = {**entries.get(component, block), **more}
    return packed, dense


def uses(model: onnx.ModelProto, kind: str, table: str) -> set[tuple[str, str]]:
    """File and offset of the codes of a table, in nodes of a kind."""
    names = {name for node in model.graph.node if node.op_type == kind for name in node.input}
    found = {tensor.name: {e.key: e.value for e in tensor.external_data} for tensor in model.graph.initializer}
    codes = {name for name in names if name.removesuffix(".rows") == f"{table}.codes"}
    return {(found[name]["location"], found[name]["offset"]) for name in codes}


@pytest.mark.parametrize("layers", [BOTH, FLOAT], ids=["packed layers", "float layers"])
@pytest.mark.parametrize("scheme", [OLIVE4, OLIVE8], ids=str)
@pytest.mark.parametrize("title", NAMES)
def test_a_packed_table_is_looked_up_and_multiplied_with_over_the_same_bytes(
    title: str, scheme: Scheme, layers: Layout, tmp_path: Path
) -> None:
    tiny, names = TINIES[title], NAMES[title]
    if names.owner in (tiny.first, "decoder") and layers is BOTH:
        scheme = replace(OLIVE8, group=32, symmetric=False) if names.owner == tiny.first else OLIVE4
    whole = tiny.make(True, tmp_path / "whole")
    switches = {names.owner: {"quantize_embeddings": True}}
    if layers is FLOAT:  # the layers of the table's own component are float too
        switches[names.owner]["modules_to_not_convert"] = [f"re:(?:{tiny.linear.pattern})"]
    packed, dense = with_tables(tiny, whole, layers, {names.table: scheme}, switches)
    driver = assert_equal_to_transformers(tiny, packed, dense, tmp_path)

    places = [uses(driver.models[graph], "GatherBlockQuantized", names.runtime) for graph in names.lookups]
    places.append(uses(driver.models["decoder"], "MatMulNBits", names.runtime))
    assert all(len(place) == 1 for place in places)
    assert len(set.union(*places)) == 1
    package = ModelPackage.load(tmp_path / "package")
    built = waybill.build(tmp_path / "packed", exact=True)
    assert package.nbytes == built.nbytes
    several = len({*names.lookups, "decoder"}) > 1
    stored = sum(tensor.nbytes for name, tensor in packed.tensors.items() if name.startswith(names.table))
    assert (built.shared_bytes > stored) if several else (built.shared_bytes == 0)


@pytest.mark.parametrize("title", NAMES)
def test_a_float_table_that_several_graphs_use_is_stored_once_and_counted(title: str, tmp_path: Path) -> None:
    tiny, names = TINIES[title], NAMES[title]
    built = waybill.build(tiny.make(True, tmp_path / "whole").write(tmp_path / "checkpoint"))
    several = len({*names.lookups, "decoder"}) > 1
    assert built.shared_bytes == (128 * 64 * 4 if several else 0)


@pytest.mark.parametrize("switch", ["quantize_lm_head", "lm_head"])
@pytest.mark.parametrize("title", [title for title in NAMES if False in TINIES[title].ties])
def test_a_head_is_packed_while_the_table_is_float(title: str, switch: str, tmp_path: Path) -> None:
    tiny, names = TINIES[title], NAMES[title]
    whole = tiny.make(False, tmp_path / "whole")
    packed, dense = with_tables(tiny, whole, BOTH, {names.head: OLIVE4}, {"decoder": {switch: True}})
    driver = assert_equal_to_transformers(tiny, packed, dense, tmp_path)
    head = names.head.removeprefix("language_model.").removesuffix(".weight")
    assert head in driver.packed()["decoder"]
    for graph in names.lookups:
        assert not [node for node in driver.models[graph].graph.node if node.op_type == "GatherBlockQuantized"]


@pytest.mark.parametrize("title", [title for title in NAMES if False in TINIES[title].ties])
def test_a_table_is_packed_while_the_head_is_float(title: str, tmp_path: Path) -> None:
    tiny, names = TINIES[title], NAMES[title]
    scheme = OLIVE4 if names.owner != tiny.first else replace(OLIVE8, group=32, symmetric=False)
    whole = tiny.make(False, tmp_path / "whole")
    switches = {names.owner: {"quantize_embeddings": True}}
    driver = assert_equal_to_transformers(
        tiny, *with_tables(tiny, whole, BOTH, {names.table: scheme}, switches), tmp_path
    )
    assert names.head.removeprefix("language_model.").removesuffix(".weight") not in driver.packed()["decoder"]
    for graph in names.lookups:
        assert len(uses(driver.models[graph], "GatherBlockQuantized", names.runtime)) == 1


@pytest.mark.parametrize("title", ["T5, gated", "LLaVA: CLIP, Llama", "Qwen2-Audio"])
def test_the_switch_of_another_component_does_not_reach_the_head(title: str, tmp_path: Path) -> None:
    tiny, names = TINIES[title], NAMES[title]
    whole = tiny.make(False, tmp_path / "whole")
    packed, _ = with_tables(tiny, whole, BOTH, {names.head: OLIVE4}, {tiny.first: {"quantize_lm_head": True}})
    (problem,) = waybill.plan(packed.write(tmp_path / "packed"), "onnx").problems
    assert problem.code == "packing-mismatch"
    assert problem.where.startswith(f"decoder: {names.head}")
    assert problem.expected == "a float weight, by the default for a head"


def test_a_packed_head_beside_a_float_table_it_is_tied_to_is_refused(tmp_path: Path) -> None:
    tiny, names = TINIES["LLaVA: CLIP, Llama"], NAMES["LLaVA: CLIP, Llama"]
    whole = tiny.make(True, tmp_path / "whole")
    whole.tensors[names.head] = whole.tensors[names.table]
    packed, _ = with_tables(tiny, whole, BOTH, {names.head: OLIVE4}, {"decoder": {"quantize_lm_head": True}})
    (problem,) = waybill.plan(packed.write(tmp_path / "packed"), "onnx").problems
    assert (problem.code, problem.what.startswith("a tied weight is packed")) == ("packing-mismatch", True)


def test_a_head_that_is_stored_again_packed_as_the_table_is_stored_once(tmp_path: Path) -> None:
    tiny, names = TINIES["LLaVA: CLIP, Llama"], NAMES["LLaVA: CLIP, Llama"]
    whole = tiny.make(True, tmp_path / "whole")
    whole.tensors[names.head] = whole.tensors[names.table]
    switches = {"decoder": {"quantize_lm_head": True}, names.owner: {"quantize_embeddings": True}}
    tables = {names.table: OLIVE4, names.head: OLIVE4}
    driver = assert_equal_to_transformers(tiny, *with_tables(tiny, whole, BOTH, tables, switches), tmp_path)
    place = uses(driver.models["decoder"], "MatMulNBits", names.runtime)
    assert place == uses(driver.models["embedding"], "GatherBlockQuantized", names.runtime)
    assert len(place) == 1


@pytest.mark.parametrize("component", ["encoder", "decoder"])
def test_learned_positions_stay_float_where_embeddings_are_packed(component: str, tmp_path: Path) -> None:
    tiny = TINIES["Whisper"]
    whole = tiny.make(True, tmp_path / "whole")
    switches = {"encoder": {"quantize_embeddings": True}, "decoder": {"quantize_embeddings": True}}
    table = NAMES["Whisper"].table
    packed, dense = with_tables(tiny, whole, BOTH, {table: OLIVE4}, switches)
    assert waybill.plan(packed.write(tmp_path / "float"), "onnx").problems == ()
    name = f"model.{component}.embed_positions.weight"
    scheme = OLIVE4 if component == "decoder" else replace(OLIVE8, group=32, symmetric=False)
    forced, _ = with_tables(tiny, whole, BOTH, {table: OLIVE4, name: scheme}, switches)
    (problem,) = waybill.plan(forced.write(tmp_path / "forced"), "onnx").problems
    assert problem.code == "packing-mismatch"
    assert problem.where.startswith(f"{component}: {name}")
    assert dense.tensors[name].dtype == np.float32
