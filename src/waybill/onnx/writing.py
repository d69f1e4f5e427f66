"""A package into a folder: the data all components share, a graph for each, and what a runtime needs beside them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import onnx_ir as ir
from blake3 import blake3

from waybill.checkpoint import RangeReader
from waybill.checkpoint.jsonfile import read_object
from waybill.checkpoint.places import require_inside
from waybill.checkpoint.reader import copy_whole
from waybill.errors import CannotLink, FileChanged, NoTokenizer
from waybill.onnx import gate
from waybill.onnx.bill import component_bill, package_bill
from waybill.onnx.component import Component
from waybill.onnx.data import DATA, Layout, write_data
from waybill.onnx.genai import genai_config
from waybill.onnx.graph import form
from waybill.onnx.publish import MARKER
from waybill.plan import Binding, Plan
from waybill.text.gguf import documents
from waybill.weights.dtypes import Array

TRAVELS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
    "preprocessor_config.json", "processor_config.json",
)  # fmt: skip
"""Files of a checkpoint that a runtime needs beside the graphs."""

Progress = Callable[[int], None]


def all_bindings(components: Mapping[str, Component]) -> dict[str, Binding]:
    """Every initializer that is brought, once, in the order the plan streams."""
    wanted = {name for component in components.values() for name in component.bindings}
    plan = next(iter(components.values())).plan
    return {binding.target: binding for binding in plan.bindings if binding.target in wanted}


def all_tables(components: Mapping[str, Component]) -> dict[str, Array]:
    """Every initializer that is computed."""
    return {name: table for component in components.values() for name, table in component.graph.tables.items()}


def write_package(components: Mapping[str, Component], layout: Layout, staging: Path, progress: Progress) -> None:
    """Everything a package consists of, into a staging folder.

    Raises:
        CannotLink: the checkpoint's files are on another file system.
        PathEscape: one of its other files is a link to somewhere else, which would travel with the package.
        WaybillError: a value is damaged or does not fit, or a file changed.
    """
    first = next(iter(components.values()))
    plan, options = first.plan, first.options
    for file in layout.files:
        if file != DATA:
            _link(plan.checkpoint.root / file, staging / file)
    digests: dict[str, str] = {}
    if first.bound:
        looked_at = [binding for component in components.values() for binding in component.checked]
        with RangeReader(plan.checkpoint) as reader:
            digests = write_data(
                staging, layout, all_bindings(components), looked_at, all_tables(components), reader, progress
            )
    bills = {name: _write_graph(component, layout, digests, staging) for name, component in components.items()}
    _write_json(staging / "genai_config.json", genai_config(plan, components, options.ep))
    _write_companions(plan, staging)
    _write_json(staging / MARKER, package_bill(plan, options, bills))


def _write_companions(plan: Plan, staging: Path) -> None:
    """What a runtime needs beside the graphs: the folder's files, or the same facts from a GGUF file's metadata."""
    checkpoint = plan.checkpoint
    if checkpoint.metadata is None:
        for name in TRAVELS:
            if (checkpoint.root / name).is_file():
                copy_whole(require_inside(checkpoint.root / name), staging / name)
        planned = {"config.json": checkpoint.config, "generation_config.json": checkpoint.generation_config}
        for name, content in planned.items():
            if (read_object(staging / name) if (staging / name).exists() else {}) != content:
                raise FileChanged(
                    "a file is not what was planned from",
                    where=str(checkpoint.root / name),
                    expected="what it held when the export began",
                    found="something else",
                    fix="let the download finish, and export again",
                )
        return
    config = plan.require_clean()
    facts = {key: value for key, value in checkpoint.config.items() if "." not in key}
    if config.text is not None:
        rotary = config.text.rotary_config
        facts["rope_parameters"] = {"rope_type": "default", **(rotary.scaling or {}), "rope_theta": rotary.base}
    named = {"architectures": config.architectures, "model_type": config.model_type}
    _write_json(staging / "config.json", named | facts)
    _write_json(staging / "generation_config.json", checkpoint.generation_config)
    with suppress(NoTokenizer):  # said among the notices: the package can be given tokens
        for name, content in documents(checkpoint.metadata, checkpoint.name).items():
            _write_json(staging / name, content)


def _write_graph(component: Component, layout: Layout, digests: Mapping[str, str], staging: Path) -> dict[str, Any]:
    """One component's graph file, and its part of the bill."""
    octets = _serialized(component, layout, staging)
    (staging / component.file).write_bytes(octets)
    return component_bill(component, layout, blake3(octets).hexdigest(), digests)


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
