"""The gate: what the emitted nodes need, whatever any config said, against what the plan brings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import onnx_ir as ir

from waybill.errors import UnboundParameter, WaybillError, some
from waybill.onnx.graph import IR_DTYPES, TAGS, Graph, every_node, form
from waybill.plan import Binding

ROWS = ".rows"
"""A packed table used twice: as rows of bytes under this name, and in blocks under its own. Both are the same bytes."""


@dataclass(frozen=True, slots=True)
class Need:
    """One initializer as a node needs it."""

    name: str
    dtype: ir.DataType
    shape: tuple[int, ...]
    node: str


def needs(graph: Graph) -> Iterator[Need]:
    """Every packed weight with the shapes its node's attributes imply, every other initializer with its own."""
    for node in every_node(graph.nodes):
        implied = _implied(node)
        for at, value in enumerate(node.inputs):
            if value is None or graph.parameters.get(value.name or "") is not value:
                continue  # made by a node, an input, or a constant
            dtype, shape = form(value)
            yield Need(value.name or "", dtype, implied.get(at, shape), node.name or node.op_type)


def _implied(node: ir.Node) -> dict[int, tuple[int, ...]]:
    """Input shapes that follow from a packed operator's attributes."""
    number = {
        name: attribute.as_int()
        for name, attribute in node.attributes.items()
        if attribute.type == ir.AttributeType.INT
    }
    if node.op_type == "MatMulNBits":
        rows, columns, bits, block = (number[key] for key in ("N", "K", "bits", "block_size"))
        blocks = math.ceil(columns / block)
        return {1: (rows, blocks, block * bits // 8), 2: (rows, blocks), 3: (rows, math.ceil(blocks * bits / 8))}
    if node.op_type == "GatherBlockQuantized":
        rows, octets = _shape(node, 0)
        blocks = octets * 8 // number["bits"] // number["block_size"]
        return {0: (rows, blocks * number["block_size"] * number["bits"] // 8), 2: (rows, blocks),
                3: (rows, math.ceil(blocks * number["bits"] / 8))}  # fmt: skip
    if node.op_type == "DequantizeLinear":
        rows, columns = _shape(node, 0)
        return {1: (rows, math.ceil(columns / number["block_size"]))}
    if node.op_type == "QMoE":
        return _bank(node, 2, 11, number) | _bank(node, 5, 12, number)
    return {}


def _bank(node: ir.Node, codes: int, zeros: int, number: Mapping[str, int]) -> dict[int, tuple[int, ...]]:
    key = "fc1_expert_weight_bits" if codes == 2 else "fc2_expert_weight_bits"
    bits = number.get(key, number["expert_weight_bits"])
    experts, rows, octets = _shape(node, codes)
    blocks = octets * 8 // bits // number["block_size"]
    whole = blocks * number["block_size"] * bits // 8
    return {codes: (experts, rows, whole), codes + 1: (experts, rows, blocks),
            zeros: (experts, rows, math.ceil(blocks * bits / 8))}  # fmt: skip


def _shape(node: ir.Node, at: int) -> tuple[int, ...]:
    value = node.inputs[at]
    return value.shape.numpy() if value is not None and value.shape is not None else ()


def check(graphs: Iterable[Graph], bindings: Mapping[str, Binding]) -> list[WaybillError]:
    """Every initializer that nothing brings, every weight that no node takes, every disagreement about a form."""
    problems: list[WaybillError] = []
    taken: set[str] = set()
    for graph, need in ((each, need) for each in graphs for need in needs(each)):
        name = need.name.removesuffix(ROWS)
        if name in graph.tables:
            continue
        taken.add(name)
        binding = bindings.get(name)
        found = "nothing" if binding is None else f"{binding.dtype}{list(binding.shape)}"
        if binding is None or IR_DTYPES[binding.dtype] != need.dtype or not _joins(binding.shape, need.shape):
            problems.append(
                UnboundParameter(
                    "a node needs an initializer that the plan does not bring",
                    where=f"{need.name}, for {need.node}",
                    expected=f"{TAGS[need.dtype]}{list(need.shape)}",
                    found=found,
                    fix="report this: graph and plan come from one declaration and should agree",
                )
            )
    left = sorted(bindings.keys() - taken)
    if left:
        problems.append(
            UnboundParameter(
                "the plan brings weights that no node takes",
                where=some(left),
                expected="every weight consumed by a node",
                found=f"{len(left)} weights without one",
                fix="report this: graph and plan come from one declaration and should agree",
            )
        )
    return problems


def _joins(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether `shape` becomes `wanted` by joining neighbouring axes: the same bytes, and the same rows."""
    ends, wanted_ends = (tuple(accumulate(each, mul)) for each in (shape, wanted))
    return ends[-1:] == wanted_ends[-1:] and set(wanted_ends) <= set(ends)
