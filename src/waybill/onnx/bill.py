"""waybill.json: for every initializer of a package, where its bytes lie, what they were made from, and their digest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from waybill.checkpoint import Checkpoint
from waybill.onnx import gate
from waybill.onnx.component import Component
from waybill.onnx.data import Layout
from waybill.onnx.graph import TAGS, Graph, form
from waybill.onnx.options import Options
from waybill.onnx.providers import verdicts
from waybill.plan import Binding, Plan
from waybill.plan.parameter import AffinePacking, CodebookPacking, ParameterSpec

FORMAT = 2
TABLE = {"role": "table", "sources": [], "operations": ["computed from the config"]}


def package_bill(plan: Plan, options: Options, components: Mapping[str, Any]) -> dict[str, Any]:
    """The whole document."""
    return {
        "format": FORMAT,
        "producer": f"waybill {version('waybill')}",
        "source": source(plan.checkpoint),
        "dtype": plan.dtype,
        "options": {"ep": options.ep, "exact": options.exact, "logits": "all" if options.all_logits else "last"},
        "providers": verdicts(plan.require_clean(), plan.specs, plan.dtype),
        "components": components,
        "dropped": [{"name": name, "reason": reason} for name, reason in plan.ignored.items()],
        "summary": plan.summary(),
    }


def source(checkpoint: Checkpoint) -> dict[str, Any]:
    """What identifies the checkpoint. No path: a package may travel."""
    shards = [{"name": shard.name, "bytes": shard.size, "tensors": shard.tensors} for shard in checkpoint.shards]
    return {"name": checkpoint.name, "shards": shards}


def component_bill(
    component: Component, layout: Layout, graph_digest: str, digests: Mapping[str, str]
) -> dict[str, Any]:
    """One component: what it is, its graph, its initializers, and what was read only to be checked or compared."""
    if not component.bound:
        return {"file": component.file, **_identity(component), "initializers": {}}
    graph, bindings = component.graph, component.bindings
    names = [name for name in layout.places if name in bindings or name in graph.tables]
    return {
        "file": component.file,
        "blake3": graph_digest,
        **_identity(component),
        "initializers": {
            name: {
                "file": layout.places[name].file,
                "offset": layout.places[name].offset,
                "bytes": layout.places[name].nbytes,
                "blake3": digests[name],
                **_form(graph, name),
                **(_origin(bindings[name], component.specs) if name in bindings else TABLE),
            }
            for name in names
        },
        "checked": [
            {
                "name": binding.target,
                "sources": list(binding.sources),
                "operations": list(binding.operations),
                **({"same_as": binding.tied_to} if binding.tied_to else {}),
            }
            for binding in (*component.checked, *component.shared)
        ],
    }


def _identity(component: Component) -> dict[str, Any]:
    """The component as the manifest describes it, and the layout its metadata states; null is float."""
    descriptor, layout = component.descriptor, component.layout
    return {
        "role": descriptor.role,
        "module": descriptor.module_attribute_path,
        "source_paths": list(descriptor.source_paths),
        "aliases": dict(descriptor.aliases),
        "excluded_methods": {path: sorted(methods) for path, methods in descriptor.excluded_methods.items()},
        "layout": asdict(layout) if layout is not None else None,
    }


def _form(graph: Graph, name: str) -> dict[str, Any]:
    """Dtype and shape as the graph states them."""
    value = graph.parameters.get(name) or graph.parameters[name + gate.ROWS]
    dtype, shape = form(value)
    return {"dtype": TAGS[dtype], "shape": list(shape)}


def _origin(binding: Binding, specs: Mapping[str, ParameterSpec]) -> dict[str, Any]:
    origin: dict[str, Any] = {
        "role": binding.role,
        "sources": list(binding.sources),
        "operations": list(binding.operations),
    }
    if binding.role != "weight":
        stem = binding.target.rpartition(".")[0]
        spec = specs.get(f"{stem}.weight") or specs[stem]
        if isinstance(spec.packing, AffinePacking):
            origin["packing"] = {"bits": spec.packing.bits, "block_size": spec.packing.group}
        elif isinstance(spec.packing, CodebookPacking):
            layout = spec.packing.layout
            origin["packing"] = {"bits": layout.bits, "block_size": layout.columns, "table": layout.table}
    return origin
