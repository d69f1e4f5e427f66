"""What the nodes say, whatever any config said: they agree with the packings, and with what the plan brings."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import waybill
from checkpoints import BF16, Recipe, lively, llama, qwen2, qwen3, qwen3_moe
from packing import Scheme, pack
from waybill.errors import Refused, UnboundParameter, UnsupportedByRuntime
from waybill.onnx import component as module
from waybill.onnx import gate
from waybill.onnx.component import Component
from waybill.onnx.graph import Graph

DOWN, TABLE = "model.layers.0.mlp.down_proj", "model.embed_tokens"


def component(recipe: Recipe, folder: Path, **options: Any) -> Component:
    return waybill.build(recipe.write(folder), **options)["decoder"]


def node_of(graph: Graph, name: str) -> ir.Node:
    (found,) = [node for node in graph.nodes if (node.name or "").rpartition("/")[0] == name]
    return found


def integers(node: ir.Node, *keys: str) -> tuple[int | None, ...]:
    """Attributes; None where one is absent."""
    return tuple(node.attributes[key].as_int() if key in node.attributes else None for key in keys)


def attributes(part: Component, operator: str, *keys: str) -> set[tuple[int | None, ...]]:
    return {integers(node, *keys) for node in part.graph.nodes if node.op_type == operator}


def packed_tables(scheme: Scheme) -> Recipe:
    return pack(lively(llama(np.float32)), scheme, table=True, head=True).packed


# The attributes are what the packings say.


@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_nodes_say_the_bits_and_blocks_of_their_weights(bits: int, group: int, tmp_path: Path) -> None:
    part = component(packed_tables(Scheme("olive", bits, group)), tmp_path)
    assert attributes(part, "MatMulNBits", "bits", "block_size") == {(bits, group)}
    assert attributes(part, "GatherBlockQuantized", "bits", "block_size", "quantize_axis") == {(bits, group, 1)}
    assert integers(node_of(part.graph, DOWN), "N", "K") == (64, 96)
    assert integers(node_of(part.graph, "model.layers.0.self_attn.qkv_proj"), "N", "K") == (128, 64)


def test_every_module_has_the_bits_of_its_own(tmp_path: Path) -> None:
    overrides = {DOWN: {"bits": 8}, "model.layers.1.mlp.up_proj": {"bits": 2, "group": 16}}
    part = component(pack(lively(qwen2(np.float32)), Scheme("gptq"), overrides=overrides).packed, tmp_path)
    assert integers(node_of(part.graph, DOWN), "bits", "block_size") == (8, 32)
    assert integers(node_of(part.graph, "model.layers.1.mlp.up_proj"), "bits", "block_size") == (2, 16)
    assert attributes(part, "MatMulNBits", "bits") == {(2,), (4,), (8,)}


@pytest.mark.parametrize(
    ("options", "level"),
    [({}, 4), ({"dtype": "float16"}, 4), ({"exact": True}, 0), ({"ep": "cuda", "dtype": "float16"}, 0)],
)
def test_products_round_activations_on_a_cpu_unless_told(options: dict[str, Any], level: int, tmp_path: Path) -> None:
    part = component(pack(lively(qwen3_moe(np.float32)), Scheme("gptq")).packed, tmp_path, **options)
    assert attributes(part, "MatMulNBits", "accuracy_level") == {(level,)}
    assert attributes(part, "QMoE", "accuracy_level") == {(level,)}


WIDTHS = ("expert_weight_bits", "fc1_expert_weight_bits", "fc2_expert_weight_bits")


def experts(up: int, down: int) -> Recipe:
    """Experts whose banks have these bits."""
    recipe = lively(qwen3_moe(np.float32, moe_intermediate_size=64))
    downs = [n.removesuffix(".weight") for n in recipe.tensors if n.endswith("down_proj.weight")]
    return pack(recipe, Scheme("olive", up, 32), overrides={name: {"bits": down} for name in downs}).packed


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("ep", ["cpu", "cuda"])
def test_equal_banks_have_one_number_of_bits(bits: int, ep: str, tmp_path: Path) -> None:
    part = component(experts(bits, bits), tmp_path, ep=ep, dtype="float16")
    assert attributes(part, "QMoE", *WIDTHS, "block_size", "weights_prepacked") == {(bits, None, None, 32, 0)}


@pytest.mark.parametrize(("up", "down"), [(4, 8), (8, 4), (2, 4)])
def test_unequal_banks_have_one_each_where_a_kernel_knows_them(up: int, down: int, tmp_path: Path) -> None:
    part = component(experts(up, down), tmp_path, ep="cuda", dtype="float16")
    assert attributes(part, "QMoE", *WIDTHS) == {(4, up, down)}


@pytest.mark.parametrize(("up", "down", "fix"), [
    (4, 8, "export with --ep cuda --dtype float16"), (2, 4, "export with --ep cuda --dtype float16"),
    (2, 8, "use the engine, which runs it as it is"),
])  # fmt: skip
def test_unequal_banks_are_refused_on_a_cpu_and_the_provider_that_could_is_named(
    up: int, down: int, fix: str, tmp_path: Path
) -> None:
    with pytest.raises(Refused) as refused:
        component(experts(up, down), tmp_path)
    (problem,) = refused.value.problems
    assert isinstance(problem, UnsupportedByRuntime)
    assert problem.code == "unsupported-by-runtime"
    assert problem.what == "the CPUExecutionProvider cannot run this package"
    assert problem.where == "model.layers.0.mlp.experts.gate_up_proj"
    assert (problem.found, problem.fix) == (f"{up} and {down} bits", fix)


@pytest.mark.parametrize(("options", "recipe", "words"), [
    ({"dtype": "bfloat16"}, llama, "its kernels know no bfloat16"),
    ({"dtype": "float32", "ep": "cuda"}, llama, "its attention knows no float32"),
    ({}, lambda: llama(head_dim=8), "a multiple of 16"),
])  # fmt: skip
def test_what_a_provider_has_no_kernel_for_is_refused_before_anything_is_read(
    options: dict[str, Any], recipe: Callable[[], Recipe], words: str, tmp_path: Path
) -> None:
    problems = waybill.plan(recipe().write(tmp_path), "onnx", **options).problems
    assert words in "\n".join(problem.expected for problem in problems if problem.code == "unsupported-by-runtime")


@pytest.mark.parametrize("ep", ["cpu", "cuda"])
def test_blocks_smaller_than_the_operators_know_are_refused(ep: str, tmp_path: Path) -> None:
    recipe = lively(qwen3_moe(np.float32, moe_intermediate_size=40))  # rows of experts are whole blocks: of 8
    checkpoint = pack(recipe, Scheme("gptq", group=16)).packed.write(tmp_path)
    (problem,) = waybill.plan(checkpoint, "onnx", ep=ep, dtype="float16").problems
    assert problem.code == "unsupported-by-runtime"
    assert (problem.where, problem.found) == ("model.layers.0.mlp.experts.gate_up_proj", "blocks of 8")
    assert problem.fix == "use the engine, which runs it as it is"


def test_experts_of_which_one_bank_is_float_are_refused(tmp_path: Path) -> None:
    recipe = lively(qwen3_moe(np.float32))
    downs = [n.removesuffix(".weight") for n in recipe.tensors if n.endswith("down_proj.weight")]
    problems = waybill.plan(pack(recipe, Scheme("gptq"), keep=downs).packed.write(tmp_path), "onnx").problems
    assert {problem.code for problem in problems} == {"unsupported-by-runtime"}
    assert "one of each" in problems[0].found


# The gate.


def changed(name: str, key: str, change: Callable[[int], int]) -> Callable[[Graph], None]:
    def mutate(graph: Graph) -> None:
        node = node_of(graph, name)
        node.attributes[key] = ir.AttrInt64(key, change(node.attributes[key].as_int()))

    return mutate


def swapped(graph: Graph) -> None:
    """Of as many bytes."""
    changed(DOWN, "N", lambda _: 96)(graph)
    changed(DOWN, "K", lambda _: 64)(graph)


def rewired(name: str, at: int, value: Callable[[Graph], ir.Value | None]) -> Callable[[Graph], None]:
    def mutate(graph: Graph) -> None:
        node = node_of(graph, name)
        node.resize_inputs(max(len(node.inputs), at + 1))
        node.replace_input_with(at, value(graph))

    return mutate


MUTATIONS: dict[str, tuple[Callable[[Graph], None], str]] = {
    "bits": (changed(DOWN, "bits", lambda bits: bits // 2), f"{DOWN}.codes, for {DOWN}/MatMulNBits"),
    "block": (changed(DOWN, "block_size", lambda block: block // 2), f"{DOWN}.scales"),
    "rows": (changed(DOWN, "N", lambda rows: rows + 1), f"{DOWN}.codes"),
    "rows and columns": (swapped, f"{DOWN}.codes"),
    "columns": (changed(DOWN, "K", lambda columns: columns - 32), f"{DOWN}.codes"),
    "table bits": (changed(TABLE, "bits", lambda bits: bits // 2), f"{TABLE}.scales"),
    "table block": (changed(TABLE, "block_size", lambda block: block * 2), f"{TABLE}.scales"),
    "a weight is dropped": (rewired(DOWN, 3, lambda _: None), f"{DOWN}.zero_points"),
    "a weight is added": (rewired(DOWN, 5, lambda graph: graph.parameter("new", "F32", (64,))), "new, for"),
    "a weight of another dtype": (rewired(DOWN, 5, lambda graph: graph.parameter("new", "F16", (64,))), "new, for"),
    "a norm's weight is another's": (
        rewired("model.layers.0.input_layernorm", 1, lambda graph: graph.parameters[f"{DOWN}.scales"]),
        "model.layers.0.input_layernorm.weight",
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_graph_that_disagrees_with_the_plan_is_refused(mutation: str, tmp_path: Path) -> None:
    mutate, where = MUTATIONS[mutation]
    part = component(packed_tables(Scheme("olive", 4, 16)), tmp_path)
    assert gate.check([part.graph], part.bindings) == []
    mutate(part.graph)
    problems = gate.check([part.graph], part.bindings)
    assert {problem.code for problem in problems} == {"unbound-parameter"}
    assert where in "\n".join(problem.where for problem in problems)


@pytest.mark.parametrize("key", ["expert_weight_bits", "block_size"])
def test_experts_that_disagree_with_the_plan_are_refused(key: str, tmp_path: Path) -> None:
    part = component(experts(4, 4), tmp_path)
    name = "model.layers.0.mlp.experts"
    changed(name, key, lambda value: value * 2)(part.graph)
    places = [problem.where for problem in gate.check([part.graph], part.bindings)]
    assert places
    assert all(place.endswith(f"for {name}/QMoE") for place in places)


@pytest.mark.parametrize("lost", ["codes", "scales", "zero_points"])
def test_a_parameter_that_nothing_brings_is_refused_by_name(lost: str, tmp_path: Path) -> None:
    part = component(packed_tables(Scheme("olive")), tmp_path)
    name = f"{DOWN}.{lost}"
    (problem,) = gate.check([part.graph], {k: v for k, v in part.bindings.items() if k != name})
    assert isinstance(problem, UnboundParameter)
    assert (problem.where, problem.found) == (f"{name}, for {DOWN}/MatMulNBits", "nothing")


def test_a_build_ends_at_the_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = module.GRAPHS["decoder"]

    def lying(*arguments: Any) -> dict[str, Graph]:
        graphs = honest(*arguments)
        changed(DOWN, "bits", lambda bits: 8)(graphs["decoder"])
        return graphs

    monkeypatch.setattr(module, "GRAPHS", {"decoder": lying})
    with pytest.raises(Refused, match="unbound-parameter"):
        component(packed_tables(Scheme("olive")), tmp_path)


@pytest.mark.parametrize("kind", [llama, qwen2, qwen3, qwen3_moe])
def test_every_initializer_of_a_float_graph_is_brought_and_has_its_shape(
    kind: Callable[..., Recipe], tmp_path: Path
) -> None:
    part = component(kind(BF16), tmp_path)
    needs = {need.name: (need.dtype.name, math.prod(need.shape)) for need in gate.needs(part.graph)}
    brought = {name: ("FLOAT", binding.nbytes // 4) for name, binding in part.bindings.items()}
    tables = {name: ("FLOAT", table.size) for name, table in part.graph.tables.items()}
    assert needs == brought | tables
