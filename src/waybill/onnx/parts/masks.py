"""Additive masks: 0 where a query sees a key, and far below every score where it does not.

B requests, S queries, T keys; P is B, or 1 where all requests are alike.
"""

from __future__ import annotations

import onnx_ir as ir

from waybill.onnx.graph import Graph
from waybill.weights.dtypes import NUMPY_DTYPES

UNSEEN = -30000
"""Its exponential is 0 in every dtype, and the sum of two is still finite in the narrowest."""


def causal_bias(graph: Graph, name: str, queries: ir.Value, keys: ir.Value, dtype: str) -> ir.Value:
    """[P, 1, S, T]: a query sees the keys up to its own position. Positions: queries I64 [P, S], keys I64 [T]."""
    rows = graph.op(f"{name}/queries", "Unsqueeze", queries, graph.constant([1, 3]))
    return _additive(graph, name, graph.op(f"{name}/seen", "LessOrEqual", keys, rows), dtype)


def padding_bias(graph: Graph, name: str, mask: ir.Value, queries: ir.Value, dtype: str) -> ir.Value:
    """[B, 1, S, T]: every query sees the keys where the mask, I64 [B, T], is 1. Positions of queries: I64 [P, S]."""
    keys = graph.op(f"{name}/keys", "Unsqueeze", mask, graph.constant([1, 2]))
    seen = graph.op(f"{name}/seen", "Greater", keys, graph.constant(0))
    count = graph.op(f"{name}/count", "Shape", queries, start=1, end=2)
    shape = graph.op(f"{name}/shape", "Concat", graph.constant([1, 1]), count, graph.constant([1]), axis=0)
    return graph.op(name, "Expand", _additive(graph, f"{name}/row", seen, dtype), shape)


def _additive(graph: Graph, name: str, seen: ir.Value, dtype: str) -> ir.Value:
    kind = NUMPY_DTYPES[dtype].type
    return graph.op(name, "Where", seen, graph.constant(0, kind), graph.constant(UNSEEN, kind))
