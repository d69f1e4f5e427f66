"""genai_config.json against the graphs: a runtime that follows it must be able to feed them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from waybill.checkpoint.jsonfile import read_object
from waybill.errors import PackageMismatch, WaybillError
from waybill.onnx.folder import CONFIG_NAME, SECTIONS, TOKENS, read_package
from waybill.onnx.verify.entries import PackageEntries

CACHE = "past_key_values.0.key"
MADE = {"encoder_hidden_states", "inputs_embeds", "image_features", "audio_features"}
"""What a graph may be given that another graph of the package must make."""

Graphs = Mapping[str, ir.Graph]
"""By section: decoder, encoder and so on."""


def check_description(package: PackageEntries, facts: Mapping[str, Any]) -> list[WaybillError]:
    """What genai_config.json lacks, or says otherwise than sound components, or than a checkpoint's `facts`."""
    try:
        stated = read_package(package.root)
    except WaybillError as error:
        return [error]
    named = {"decoder": stated.graph, **stated.parts}
    files = {SECTIONS.get(name, name): package.root / each.file for name, each in package.components.items()}
    if named != files:
        expected, found = (
            ", ".join(f"{section}: {file.name}" for section, file in sorted(side.items())) for side in (files, named)
        )
        return [_differs("filename", expected, found)]
    graphs = {section: ir.load(graph).graph for section, graph in named.items()}
    if strangers := list(_strangers(graphs)):
        return strangers
    model = read_object(package.root / CONFIG_NAME)["model"]
    problems = [problem for section in graphs for problem in _misnamed(section, model[section], graphs[section])]
    decodes = next(each for each in package.components.values() if package.root / each.file == stated.graph)
    rows = [entry.shape[0] for entry in decodes.initializers.values() if entry.role == "table"]
    if rows and stated.context_length > min(rows):
        problems.append(_differs("context_length", f"at most {min(rows)}", str(stated.context_length)))
    decoder = {**model["decoder"], "vocab_size": stated.vocab_size}
    sizes = dict(_sizes(graphs["decoder"]))
    wrong = {name: size for name, size in sizes.items() if decoder.get(name, size) != size}
    problems += [_differs(name, str(size), repr(decoder[name])) for name, size in wrong.items()]
    return problems or list(_otherwise(model, facts))


def _strangers(graphs: Graphs) -> Iterator[WaybillError]:
    """A decoder that is none, and what a graph is given that no graph makes."""
    if CACHE not in _every(graphs["decoder"].inputs) or "logits" not in _every(graphs["decoder"].outputs):
        yield _differs("decoder", f"a graph that is given {CACHE} and makes logits", "another graph")
    made = {name for graph in graphs.values() for name in _every(graph.outputs)}
    for section, graph in graphs.items():
        for name in sorted((_every(graph.inputs) & MADE) - made):
            yield _differs(
                section, f"another graph, which makes its {name}", f"no such graph among {', '.join(graphs)}"
            )


def _misnamed(section: str, stated: Mapping[str, Any], graph: ir.Graph) -> Iterator[WaybillError]:
    """Names of inputs and outputs that the graph does not have; %d stands for the number of a layer."""
    for side, values in (("inputs", graph.inputs), ("outputs", graph.outputs)):
        names, known = stated.get(side, {}), _every(values)
        listed = names.values() if isinstance(names, Mapping) else [names]
        if wrong := [name for name in listed if not isinstance(name, str) or name.replace("%d", "0") not in known]:
            yield _differs(f"{section}.{side}", ", ".join(sorted(known))[:160], repr(wrong)[:120])


def _otherwise(model: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterator[WaybillError]:
    """What the checkpoint's own files say otherwise; nothing where there is no checkpoint."""
    for name in dict.fromkeys((*facts, *TOKENS)) if facts else ():
        if model.get(name) != facts.get(name):
            yield _differs(name, f"{facts.get(name)}, as in the checkpoint"[:160], repr(model.get(name))[:120])


def _sizes(graph: ir.Graph) -> Iterator[tuple[str, int]]:
    """What the graph's own inputs and outputs say, where they say a number."""
    places = {CACHE: {"num_key_value_heads": 1, "head_size": 3}, "logits": {"vocab_size": 2}}
    for value in [*graph.inputs, *graph.outputs]:
        for name, axis in places.get(value.name or "", {}).items():
            if value.shape is not None and len(value.shape) > axis and isinstance(size := value.shape[axis], int):
                yield name, size
    yield "num_hidden_layers", sum(name.startswith("past_key_values.") for name in _every(graph.inputs)) // 2


def _every(values: Sequence[ir.Value]) -> set[str]:
    return {value.name or "" for value in values}


def _differs(name: str, expected: str, found: str) -> PackageMismatch:
    return PackageMismatch(
        f"{CONFIG_NAME} does not describe the graph",
        where=f"{CONFIG_NAME}: {name}",
        expected=expected,
        found=found,
        fix="correct it, or export the package again",
    )
