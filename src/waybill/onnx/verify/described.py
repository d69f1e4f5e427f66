"""genai_config.json against the graph: a runtime that follows it must be able to feed the graph."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from waybill.errors import PackageMismatch, WaybillError
from waybill.onnx.folder import CONFIG_NAME, read_package
from waybill.onnx.verify.entries import PackageEntries


def check_description(package: PackageEntries) -> list[WaybillError]:
    """What genai_config.json lacks, or says otherwise than sound components."""
    try:
        stated = read_package(package.root)
    except WaybillError as error:
        return [error]
    graphs = {stated.graph, *stated.parts.values()}
    if graphs != {package.root / component.file for component in package.components.values()}:
        files = sorted(component.file for component in package.components.values())
        return [_differs("filename", ", ".join(files), ", ".join(sorted(graph.name for graph in graphs)))]
    decoder = next(c for c in package.components.values() if package.root / c.file == stated.graph)
    rows = [entry.shape[0] for entry in decoder.initializers.values() if entry.role == "table"]
    problems: list[WaybillError] = []
    if rows and stated.context_length > min(rows):
        problems.append(_differs("context_length", f"at most {min(rows)}", str(stated.context_length)))
    sizes = {
        "num_key_value_heads": stated.num_kv_heads,
        "head_size": stated.head_dim,
        "vocab_size": stated.vocab_size,
    }
    held = dict(_sizes(ir.load(stated.graph).graph))
    problems += [
        _differs(name, str(held[name]), str(size)) for name, size in sizes.items() if held.get(name, size) != size
    ]
    return problems


def _sizes(graph: ir.Graph) -> Iterator[tuple[str, int]]:
    """What the graph's own inputs and outputs say, where they say a number."""
    places = {"past_key_values.0.key": {"num_key_value_heads": 1, "head_size": 3}, "logits": {"vocab_size": 2}}
    for value in [*graph.inputs, *graph.outputs]:
        for name, axis in places.get(value.name or "", {}).items():
            if value.shape is not None and len(value.shape) > axis and isinstance(size := value.shape[axis], int):
                yield name, size


def _differs(name: str, expected: str, found: str) -> PackageMismatch:
    return PackageMismatch(
        f"{CONFIG_NAME} does not describe the graph",
        where=f"{CONFIG_NAME}: {name}",
        expected=expected,
        found=found,
        fix="correct it, or export the package again",
    )
