"""A graph under construction: nodes are appended, parameters are promised, and bytes come later."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from waybill.weights.dtypes import Array

IR_VERSION = 11
OPSETS = {"": 24, "com.microsoft": 1}
MICROSOFT = "com.microsoft"
IR_DTYPES = {
    "F32": ir.DataType.FLOAT,
    "F16": ir.DataType.FLOAT16,
    "BF16": ir.DataType.BFLOAT16,
    "U8": ir.DataType.UINT8,
    "F8_E4M3": ir.DataType.FLOAT8E4M3FN,
    "F8_E5M2": ir.DataType.FLOAT8E5M2,
    "I64": ir.DataType.INT64,
}
"""Safetensors tags of what a package holds."""
INT32 = int(ir.DataType.INT32)
"""What a Cast is told: lengths and masks are this inside a graph, and I64 outside."""
TAGS = {dtype: tag for tag, dtype in IR_DTYPES.items()}
LEGIBLE = 8
"""Values of a constant that still make a name; more are named by their digest."""

Dim = int | str


@dataclass(slots=True)
class Graph:
    """Appends nodes in running order. `parameters` wait for their place in a data file; `tables` are computed."""

    inputs: list[ir.Value] = field(default_factory=list)
    outputs: list[ir.Value] = field(default_factory=list)
    nodes: list[ir.Node] = field(default_factory=list)
    parameters: dict[str, ir.Value] = field(default_factory=dict)
    tables: dict[str, Array] = field(default_factory=dict)
    _constants: dict[str, ir.Value] = field(default_factory=dict)
    _finished: ir.Graph | None = None

    def input(self, name: str, dtype: str, shape: Sequence[Dim]) -> ir.Value:
        """A graph input."""
        self.inputs.append(_value(name, dtype, shape))
        return self.inputs[-1]

    def output(self, value: ir.Value, name: str, dtype: str, shape: Sequence[Dim]) -> None:
        """Make a node's output the graph's."""
        value.name, value.shape, value.type = name, ir.Shape(shape), ir.TensorType(IR_DTYPES[dtype])
        self.outputs.append(value)

    def parameter(self, name: str, dtype: str, shape: Sequence[int]) -> ir.Value:
        """An initializer whose bytes the plan brings."""
        if name not in self.parameters:
            self.parameters[name] = _value(name, dtype, shape)
        return self.parameters[name]

    def table(self, name: str, values: Array, dtype: str) -> ir.Value:
        """An initializer that is computed from the config and stored beside the parameters."""
        self.tables[name] = values
        return self.parameter(name, dtype, values.shape)

    def constant(self, values: Any, dtype: type[np.generic] = np.int64) -> ir.Value:
        """A small constant inside the graph; equal ones are one."""
        array = np.asarray(values, dtype)
        written = ",".join(map(str, array.ravel().tolist()))
        if array.size > LEGIBLE:
            written = hashlib.sha256(array.tobytes()).hexdigest()[:16]
        name = f"constant/{array.dtype}{list(array.shape)}/{written}"
        if name not in self._constants:
            self._constants[name] = ir.Value(name=name, const_value=ir.tensor(array, name=name))
        return self._constants[name]

    def node(
        self,
        name: str,
        operator: str,
        *inputs: ir.Value | None,
        outputs: int = 1,
        unused: Sequence[int] = (),
        domain: str = "",
        **attributes: Any,
    ) -> list[ir.Value]:
        """Append a node; optional inputs are None. Returns its outputs; `unused` ones have no name and are not made."""
        given = list(inputs)
        while given and given[-1] is None:
            given.pop()
        names = [name, *(f"{name}/{at}" for at in range(1, outputs))]
        values = [ir.Value(name="" if at in unused else label) for at, label in enumerate(names)]
        self.nodes.append(
            ir.node(operator, given, attributes=attributes, domain=domain, outputs=values, name=f"{name}/{operator}")
        )
        return values

    def op(self, name: str, operator: str, *inputs: ir.Value | None, domain: str = "", **attributes: Any) -> ir.Value:
        """The same for the usual case, one output."""
        return self.node(name, operator, *inputs, domain=domain, **attributes)[0]

    def choose(
        self,
        name: str,
        condition: ir.Value,
        then: Callable[[Graph], Sequence[ir.Value]],
        otherwise: Callable[[Graph], Sequence[ir.Value]],
    ) -> list[ir.Value]:
        """One of two branches, which use this graph's values and parameters, by a boolean. Their outputs correspond."""
        branches: dict[str, Any] = {}
        count = 0
        for label, fill in (("then_branch", then), ("else_branch", otherwise)):
            inner = replace(self, nodes=[])
            made = fill(inner)
            count = len(made)
            branches[label] = ir.Graph([], made, nodes=inner.nodes, name=f"{name}/{label}")
        return self.node(name, "If", condition, outputs=count, **branches)

    def finish(self, name: str, tensors: dict[str, ir.TensorProtocol]) -> ir.Model:
        """The model, with a tensor for every parameter. A second time, with other tensors, it is the same model."""
        for parameter, value in self.parameters.items():
            value.const_value = tensors[parameter]
        if self._finished is None:  # nodes belong to one graph
            self._finished = ir.Graph(
                self.inputs,
                self.outputs,
                nodes=self.nodes,
                initializers=[*self._constants.values(), *self.parameters.values()],
                opset_imports=OPSETS,
                name=name,
            )
        return ir.Model(self._finished, ir_version=IR_VERSION, producer_name="waybill")


def every_node(nodes: Iterable[ir.Node]) -> Iterator[ir.Node]:
    """Nodes, and those of their branches."""
    for node in nodes:
        yield node
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                yield from every_node(attribute.as_graph())


def form(value: ir.Value) -> tuple[ir.DataType, tuple[int, ...]]:
    """Dtype and shape of a parameter, which was made with both."""
    if value.dtype is None or value.shape is None:
        raise TypeError(f"{value.name} has no type")
    return value.dtype, value.shape.numpy()


def _value(name: str, dtype: str, shape: Sequence[Dim]) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(IR_DTYPES[dtype]))
