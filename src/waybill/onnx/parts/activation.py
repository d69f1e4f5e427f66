"""Activations as nodes, by the names that configs of Hugging Face use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import onnx_ir as ir

from waybill.onnx.graph import MICROSOFT, Graph

QUICK = 1.702
"""σ(1.702 x) is near the normal distribution's cumulative function (arXiv 1606.08415, section 2)."""


def activate(graph: Graph, name: str, x: ir.Value, function: str) -> ir.Value:
    """The function of every element, [...] -> [...].

    Raises:
        ValueError: it is not in `ACTIVATIONS`; a plan refuses such a config before.
    """
    if function not in ACTIVATIONS:
        raise ValueError(f"no activation is named {function!r}; known are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[function](graph, name, x)


def _silu(graph: Graph, name: str, x: ir.Value) -> ir.Value:
    """x · σ(x)."""
    return graph.op(name, "Mul", x, graph.op(f"{name}/sigmoid", "Sigmoid", x))


def _gelu(graph: Graph, name: str, x: ir.Value, *, approximate: str) -> ir.Value:
    """x · Φ(x), exact, or with Φ approximated by a hyperbolic tangent (arXiv 1606.08415, section 2)."""
    return graph.op(name, "Gelu", x, approximate=approximate)


def _quick_gelu(graph: Graph, name: str, x: ir.Value) -> ir.Value:
    """x · σ(1.702 x)."""
    return graph.op(name, "QuickGelu", x, domain=MICROSOFT, alpha=QUICK)


def _relu(graph: Graph, name: str, x: ir.Value) -> ir.Value:
    """max(x, 0)."""
    return graph.op(name, "Relu", x)


ACTIVATIONS: Mapping[str, Callable[[Graph, str, ir.Value], ir.Value]] = {
    "silu": _silu,
    "gelu": partial(_gelu, approximate="none"),
    "gelu_new": partial(_gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(_gelu, approximate="tanh"),
    "quick_gelu": _quick_gelu,
    "relu": _relu,
}
