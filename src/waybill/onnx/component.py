"""One component of a package: its graph, the bill of its weights, and how both are written."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import onnx_ir as ir

from waybill.checkpoint import RangeReader
from waybill.errors import CannotLink, Refused, UnboundPackage
from waybill.onnx import gate
from waybill.onnx.bill import component_bill, package_bill
from waybill.onnx.data import DATA, Layout, write_data
from waybill.onnx.decoder import Options, build_decoder
from waybill.onnx.genai import genai_config
from waybill.onnx.graph import Graph, form
from waybill.onnx.publish import MARKER
from waybill.plan import Binding, Plan
from waybill.plan.parameter import ParameterSpec
from waybill.plan.stream import equals, fill
from waybill.text.tokenizer import stop_tokens
from waybill.weights.dtypes import NUMPY_DTYPES

GRAPH = "model.onnx"
TRAVELS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""Files of a checkpoint that a runtime needs beside the graph."""

Progress = Callable[[int], None]


@dataclass(slots=True)
class Component:
    """One graph and the bill of its weights. Without weights it is a skeleton: names and shapes."""

    name: str
    graph: Graph
    plan: Plan
    specs: Mapping[str, ParameterSpec]
    options: Options
    bound: bool
    bindings: Mapping[str, Binding] = field(default_factory=dict)
    checked: list[Binding] = field(default_factory=list)
    shared: list[Binding] = field(default_factory=list)
    """A tied head that is stored again: compared with the table, which serves as both."""

    @property
    def nbytes(self) -> int:
        """Bytes of all initializers."""
        brought = sum(binding.nbytes for binding in self.bindings.values())
        return brought + sum(table.nbytes for table in self.graph.tables.values())

    @property
    def notices(self) -> tuple[str, ...]:
        """What planning found worth a line, and what a runtime will miss or not expect."""
        checkpoint = self.plan.checkpoint
        lines = {
            "config.json ties the head to the embedding, and the file holds a different one; the file's is used": any(
                binding.tied_to is not None for binding in self.bindings.values()
            ),
            "no eos_token_id is stated: generation will not stop by itself": not stop_tokens(
                checkpoint.generation_config, checkpoint.config
            ),
            "there is no tokenizer.json: the package can be given tokens, not text": not (
                checkpoint.root / "tokenizer.json"
            ).is_file(),
        }
        return (*self.plan.notices, *(line for line, true in lines.items() if true))

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


def write_component(component: Component, layout: Layout, staging: Path, progress: Progress) -> None:
    """Everything a component consists of, into a staging folder.

    Raises:
        CannotLink: the checkpoint's files are on another file system.
        WaybillError: a value is damaged or does not fit, or a file changed.
    """
    plan = component.plan
    for file in layout.files:
        if file != DATA:
            _link(plan.checkpoint.root / file, staging / file)
    digests: dict[str, str] = {}
    if component.bound:
        with RangeReader(plan.checkpoint) as reader:
            digests = write_data(
                staging, layout, component.bindings, component.checked, component.graph.tables, reader, progress
            )
    octets = _serialized(component, layout, staging)
    (staging / GRAPH).write_bytes(octets)
    own = (
        component_bill(
            GRAPH,
            hashlib.sha256(octets).hexdigest(),
            component.graph,
            layout,
            component.bindings,
            [*component.checked, *component.shared],
            component.specs,
            digests,
        )
        if component.bound
        else {"file": GRAPH, "initializers": {}}
    )
    generation = plan.checkpoint.generation_config
    _write_json(
        staging / "genai_config.json",
        genai_config(plan.require_clean(), plan.checkpoint.config, generation, GRAPH, component.options.ep),
    )
    bill = package_bill(plan, component.options, {component.name: own})
    for name in TRAVELS:
        if (plan.checkpoint.root / name).is_file():
            shutil.copyfile(plan.checkpoint.root / name, staging / name)
    _write_json(staging / MARKER, bill)


def _serialized(component: Component, layout: Layout, folder: Path) -> bytes:
    """The graph, whose parameters refer to their places."""
    tensors: dict[str, ir.TensorProtocol] = {}
    for name, value in component.graph.parameters.items():
        place = layout.places.get(name.removesuffix(gate.ROWS))
        dtype, shape = form(value)
        tensors[name] = ir.ExternalTensor(
            place.file if place else DATA,
            place.offset if place else None,
            place.nbytes if place else None,
            dtype,
            shape=ir.Shape(shape),
            name=name,
            base_dir=folder,
        )
    model = component.graph.finish(component.name, tensors)
    octets: bytes = ir.to_proto(model).SerializeToString(deterministic=True)
    return octets


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source.resolve(), target)
    except OSError as error:
        raise CannotLink(
            "the package cannot refer to the checkpoint's bytes",
            where=str(source),
            expected="a file on the same file system as the package, and the right to link to it",
            found=error.strerror or str(error),
            fix="export to the checkpoint's file system, or without --link",
        ) from error


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", "utf-8")


def build_component(plan: Plan, options: Options, *, load_weights: bool) -> Component:
    """The graph of a plan, checked against it by what its nodes say.

    Raises:
        Refused: the plan has problems, or graph and plan disagree.
    """
    config = plan.require_clean()
    by_name = {spec.name: spec for spec in plan.specs}
    tied = config.tie_word_embeddings and (not load_weights or _shares_head(plan))
    graph = build_decoder(config, by_name, plan.dtype, options, tied=tied)
    if not load_weights:
        return Component("decoder", graph, plan, by_name, options, bound=False)
    wanted = [b for b in plan.bindings if not (tied and b.tied_to)]
    bindings = {b.target: b for b in wanted if b.role != "midpoint"}
    if problems := gate.check(graph, bindings):
        raise Refused(problems)
    checked = [b for b in wanted if b.role == "midpoint"]
    shared = [b for b in plan.bindings if tied and b.tied_to]
    return Component("decoder", graph, plan, by_name, options, True, bindings, checked, shared)


def _shares_head(plan: Plan) -> bool:
    """Whether a head the config ties is absent, or stored again with the embedding's bytes."""
    heads = [b for b in plan.bindings if b.tied_to is not None and b.role != "midpoint"]
    tables = {b.target: b for b in plan.bindings}
    with RangeReader(plan.checkpoint) as reader:
        return all(_same(head, tables.get(head.tied_to or ""), reader) for head in heads)


def _same(head: Binding, table: Binding | None, reader: RangeReader) -> bool:
    if table is None or table.shape != head.shape:
        return False
    return equals(head, reader, lambda start, stop: fill(table, table.value.narrow(0, start, stop - start), reader))
