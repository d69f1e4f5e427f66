"""One component of a package: its graph and the bill of its weights; and how a plan becomes components."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import onnx_ir as ir

from waybill.checkpoint import Checkpoint, RangeReader
from waybill.config.quantization import QuantizationConfig
from waybill.errors import NoTokenizer, Refused, UnboundPackage
from waybill.manifest import ComponentDescriptor
from waybill.onnx import gate
from waybill.onnx.graph import Graph, form
from waybill.onnx.graphs import GRAPHS
from waybill.onnx.graphs.workbench import Workbench
from waybill.onnx.options import Options
from waybill.plan import Binding, Plan
from waybill.plan.parameter import ParameterSpec, part_name
from waybill.plan.stream import equals, fill
from waybill.text.gguf import tokenizer_of
from waybill.text.tokenizer import stop_tokens
from waybill.weights.dtypes import NUMPY_DTYPES

ROLES = ("weight", "codes", "scales", "zero_points", "midpoint", "minimums")
FILES = {"pixel_values": ("image_processor", "pictures"), "input_features": ("feature_extractor", "recordings")}
"""Inputs that are made of files: what describes how, and what is in the files."""


@dataclass(slots=True)
class Component:
    """One graph and the bindings of its weights. Without weights it is a skeleton: names and shapes.

    A weight that several components use is bound in each; it is written once.
    """

    name: str
    file: str
    graph: Graph
    plan: Plan
    specs: Mapping[str, ParameterSpec]
    options: Options
    bound: bool
    bindings: Mapping[str, Binding] = field(default_factory=dict)
    checked: list[Binding] = field(default_factory=list)
    """Zero points that are read, all the midpoint, and not written."""
    shared: list[Binding] = field(default_factory=list)
    """Tied weights that are stored again: compared with what they are tied to, which serves for both."""

    @property
    def descriptor(self) -> ComponentDescriptor:
        """What the manifest says of it."""
        return self.plan.policy.naming.components.by_name(self.name)

    @property
    def layout(self) -> QuantizationConfig | None:
        """How its metadata states it to be packed; modules may differ, and None is float."""
        plan = self.plan.policy.quantization.for_component(self.name)
        return plan.layout if plan is not None else None

    @property
    def nbytes(self) -> int:
        """Bytes of all initializers."""
        brought = sum(binding.nbytes for binding in self.bindings.values())
        return brought + sum(table.nbytes for table in self.graph.tables.values())

    def model(self) -> ir.Model:
        """The graph, whose initializers are read from the checkpoint when they are looked at.

        Raises:
            UnboundPackage: it was built without weights.
        """
        tensors: dict[str, ir.TensorProtocol] = {}
        for name, value in self.graph.parameters.items():
            dtype, shape = form(value)
            tensors[name] = ir.LazyTensor(partial(self._tensor, name, dtype, shape), dtype, ir.Shape(shape), name=name)
        return self.graph.finish(self.name, tensors)

    def _tensor(self, name: str, dtype: ir.DataType, shape: tuple[int, ...]) -> ir.TensorProtocol:
        stem = name.removesuffix(gate.ROWS)
        if stem in self.graph.tables:
            return ir.tensor(self.graph.tables[stem], name=name)
        if stem not in self.bindings:
            raise unbound(name, 1)
        binding = self.bindings[stem]
        with RangeReader(self.plan.checkpoint) as reader:
            octets = fill(binding, binding.value, reader)
        return ir.Tensor(octets.view(NUMPY_DTYPES[binding.dtype]).reshape(shape), dtype=dtype, name=name)


def unbound(where: str, count: int) -> UnboundPackage:
    """What is wanted of a package has no bytes."""
    return UnboundPackage(
        "the package was built without weights",
        where=where,
        expected="a package built with load_weights=True",
        found=f"{count} parameters without bytes",
        fix="build it with weights, or save it with allow_unbound=True to keep the graph alone",
    )


def notices(plan: Plan, components: Collection[Component]) -> list[str]:
    """What planning found worth a line, and what a runtime will miss or not expect."""
    checkpoint = plan.checkpoint
    bindings = {name: binding for component in components for name, binding in component.bindings.items()}
    again = sum(binding.nbytes for binding in bindings.values() if binding.tied_to is not None)
    lines = {
        "config.json ties the head to the embedding, and the file holds a different one; the file's is used, "
        f"{again:,} bytes beside the embedding's": again > 0,
        "no eos_token_id is stated: generation will not stop by itself": not stop_tokens(
            checkpoint.generation_config, checkpoint.config
        ),
    }
    if (lost := _no_tokenizer(checkpoint)) is not None:
        lines[f"{lost}: the package can be given tokens, not text"] = True
    inputs = {value.name for component in components for value in component.graph.inputs}
    missing = [
        f"there is no preprocessor_config.json: the package can be given arrays, not {things}"
        for name, (section, things) in FILES.items()
        if name in inputs and not _describes(checkpoint.root, section)
    ]
    return [*plan.notices, *(line for line, true in lines.items() if true), *missing]


def _describes(folder: Path, section: str) -> bool:
    """Whether a file says how an input is prepared; it is read when it is used."""
    whole = folder / "processor_config.json"
    if (folder / "preprocessor_config.json").is_file():
        return True
    return whole.is_file() and f'"{section}"' in whole.read_text("utf-8", errors="replace")


def _no_tokenizer(checkpoint: Checkpoint) -> str | None:
    """Why the package will not turn text into tokens."""
    if checkpoint.metadata is None:
        return None if (checkpoint.root / "tokenizer.json").is_file() else "there is no tokenizer.json"
    try:
        tokenizer_of(checkpoint.metadata, checkpoint.name)
    except NoTokenizer as error:
        return f"{error.what}, {error.found}"
    return None


def build_components(plan: Plan, options: Options, *, load_weights: bool) -> dict[str, Component]:
    """The graphs of a plan, checked against it by what their nodes say.

    Raises:
        Refused: the plan has problems, or graphs and plan disagree.
    """
    config = plan.require_clean()
    by_name = {spec.name: spec for spec in plan.specs}
    served = _served(plan, load_weights)
    graphs = GRAPHS[plan.family](config, Workbench(by_name, served, plan.dtype, options))
    components = {}
    for name, graph in graphs.items():
        file = "model.onnx" if len(graphs) == 1 else f"{name}.onnx"
        components[name] = Component(name, file, graph, plan, by_name, options, load_weights)
    if not load_weights:
        return components
    spec_of = {part_name(spec.name, role): spec.name for spec in plan.specs for role in ROLES}
    kept = [b for b in plan.bindings if spec_of[b.target] not in served]
    bindings = {b.target: b for b in kept if b.role != "midpoint"}
    if problems := gate.check(graphs.values(), bindings):
        raise Refused(problems)
    for component in components.values():
        names = {name.removesuffix(gate.ROWS) for name in component.graph.parameters}
        component.bindings = {name: binding for name, binding in bindings.items() if name in names}
    for binding in plan.bindings:
        owner = components[_owner(plan, components, spec_of[binding.target])]
        if spec_of[binding.target] in served:
            owner.shared.append(binding)
        elif binding.role == "midpoint":
            owner.checked.append(binding)
    return components


def _owner(plan: Plan, components: Mapping[str, Component], spec: str) -> str:
    """The component whose bill a weight is in that is read and not written."""
    owner = plan.policy.naming.component(spec)
    return owner if owner in components else next(iter(components))


def _served(plan: Plan, load_weights: bool) -> dict[str, str]:
    """Tied parameters that are absent, or stored again with the same bytes, to what serves for them."""
    tied = {spec.name: spec.tied_to for spec in plan.specs if spec.tied_to is not None}
    if not load_weights:
        return tied
    parts: dict[str, list[Binding]] = defaultdict(list)
    named = {part_name(name, role): name for name in tied for role in ROLES}
    for binding in plan.bindings:
        if binding.target in named:
            parts[named[binding.target]].append(binding)
    tables = {binding.target: binding for binding in plan.bindings}
    with RangeReader(plan.checkpoint) as reader:
        return {
            name: table
            for name, table in tied.items()
            if all(
                _same(part, tables.get(part.tied_to or ""), reader) for part in parts[name] if part.role != "midpoint"
            )
        }


def _same(again: Binding, table: Binding | None, reader: RangeReader) -> bool:
    if table is None or table.shape != again.shape:
        return False
    return equals(again, reader, lambda start, stop: fill(table, table.value.narrow(0, start, stop - start), reader))
