"""Sessions of onnxruntime, and what it says when it cannot."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from waybill.errors import BadPackage, BadRequest
from waybill.onnx import require
from waybill.onnx.folder import Package
from waybill.onnx.providers import PROVIDERS
from waybill.onnx.publish import MARKER
from waybill.onnx.verify.entries import read_entries
from waybill.weights.dtypes import Array

DTYPES: dict[str, type[np.floating[Any]]] = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


def open_session(package: Package, graph: Path) -> Any:
    """One graph of a package, on the CPU.

    A session may open although the first run would fail, so what the exporter knew is asked first.

    Raises:
        MissingRuntime: onnxruntime is not installed.
        BadPackage: the package was exported for another provider, its bill is malformed, or onnxruntime cannot open the
            graph.
    """
    if because := _obstacles(graph.parent):
        raise BadPackage(
            "the package was exported for another provider",
            where=str(graph),
            expected=f"a package that the {PROVIDERS['cpu']} runs",
            found="; ".join(because),
            fix="run it on a machine with that provider, or try waybill export --ep cpu, which says why when it cannot",
        )
    runtime = require("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # what fails is raised, and told once
    options.intra_op_num_threads = min(package.threads, os.cpu_count() or 1)  # others would only wait
    try:
        return runtime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the runtime's errors have no base class of their own
        raise failed(graph, "onnxruntime cannot open the graph", error) from None


def to_tensor(values: Array) -> Any:
    """An array as the runtime sees it; not a copy."""
    return require("onnxruntime").OrtValue.ortvalue_from_numpy(values)


class Network:
    """A graph that runs once a request, or once a step, and keeps nothing: an encoder or an embedding."""

    def __init__(self, package: Package, graph: Path) -> None:
        self.graph = graph
        self._session = open_session(package, graph)
        self.inputs = {node.name: node for node in self._session.get_inputs()}
        self.outputs = [node.name for node in self._session.get_outputs()]

    def dtype_of(self, name: str) -> type[np.floating[Any]]:
        """The dtype of a float input."""
        return DTYPES.get(self.inputs[name].type, np.float32)

    def __call__(self, feeds: Mapping[str, Array]) -> Array:
        """The first output.

        Raises:
            BadPackage: the graph takes other inputs, or fails.
        """
        if feeds.keys() != self.inputs.keys():
            raise other_inputs(self.graph, self.inputs, feeds)
        given = {name: self._fitted(name, values) for name, values in feeds.items()}
        try:
            return np.asarray(self._session.run(self.outputs[:1], given)[0])
        except Exception as error:  # the runtime's errors have no base class of their own
            raise failed(self.graph, "onnxruntime cannot run the graph", error) from None

    def _fitted(self, name: str, values: Array) -> Array:
        """In the input's dtype; refused in another shape."""
        wanted = self.inputs[name].shape
        if len(wanted) != values.ndim or any(
            isinstance(size, int) and size != had for size, had in zip(wanted, values.shape, strict=True)
        ):
            raise BadRequest(
                "an input does not fit the graph",
                where=f"{name} ({self.graph.name})",
                expected=str(wanted),
                found=str(list(values.shape)),
                fix="use the preprocessor files of the checkpoint that was exported",
            )
        return values.astype(self.dtype_of(name), copy=False) if values.dtype.kind == "f" else values


def _obstacles(folder: Path) -> Sequence[str]:
    """Why the CPU cannot run a package, as its bill says; one that somebody else exported has none."""
    return read_entries(folder).obstacles.get(PROVIDERS["cpu"], ()) if (folder / MARKER).exists() else ()


def other_inputs(graph: Path, takes: Iterable[str], given: Iterable[str]) -> BadPackage:
    """A graph in the place of another one."""
    return BadPackage(
        "a graph takes other inputs than it should",
        where=str(graph),
        expected=", ".join(sorted(given)),
        found=", ".join(sorted(takes))[:300],
        fix="copy the whole package folder again, or export it again; each graph keeps its name",
    )


def failed(graph: Path, what: str, why: Exception | str) -> BadPackage:
    """What a graph cannot do here."""
    return BadPackage(
        what,
        where=str(graph),
        expected="a graph and its data that onnxruntime runs on this machine's CPU",
        found=str(why)[:300],
        fix="copy the whole package folder again, or export it again; a newer onnxruntime may know more operators",
    )
