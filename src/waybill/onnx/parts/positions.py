"""Where tokens stand: each request's length, its last position, and the rotary angles of all positions."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from waybill.config import RotaryConfig
from waybill.onnx.graph import Graph
from waybill.weights.dtypes import Array


def request_lengths(graph: Graph, mask: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Each request's last position, I64 [B], and the longest request's length, I64 [1], from the mask [B, T]."""
    sums = graph.op("lengths/sum", "ReduceSum", mask, graph.constant([1]), keepdims=0)
    last = graph.op("lengths/last", "Sub", sums, graph.constant(1))
    return last, graph.op("lengths/total", "Shape", mask, start=1, end=2)


def last_positions(graph: Graph, ids: ir.Value, last: ir.Value, total: ir.Value) -> ir.Value:
    """Where each request's last new position is among the new ones, I64 [B, 1, 1].

    Positions before this step are total - S; where one token is added to requests of unequal length, it is at 0.
    """
    before = graph.op("last/before", "Sub", total, graph.op("last/new", "Shape", ids, start=1, end=2))
    at = graph.op("last/at", "Max", graph.op("last/offset", "Sub", last, before), graph.constant(0))
    return graph.op("last/index", "Unsqueeze", at, graph.constant([1, 2]))


def span(graph: Graph, name: str, length: ir.Value) -> ir.Value:
    """0, 1, … before `length`, I64 [1] -> I64 [length]."""
    end = graph.op(f"{name}/end", "Squeeze", length)
    return graph.op(name, "Range", graph.constant(0), end, graph.constant(1))


def new_positions(graph: Graph, ids: ir.Value, last: ir.Value) -> ir.Value:
    """Where each request's new tokens stand, I64 [B, S], from its last position, I64 [B].

    A first step starts at 0 in every request, and what is beyond a shorter one's end is padding.
    """
    new = graph.op("positions/new", "Shape", ids, start=1, end=2)
    end = graph.op("positions/end", "Add", last, graph.constant(1))
    start = graph.op("positions/start", "Max", graph.op("positions/before", "Sub", end, new), graph.constant(0))
    rows = graph.op("positions/rows", "Unsqueeze", start, graph.constant([1]))
    return graph.op("positions", "Add", rows, span(graph, "positions/steps", new))


def pick(graph: Graph, name: str, x: ir.Value, index: ir.Value) -> ir.Value:
    """One position of each request, [B, S, H] -> [B, 1, H]."""
    return graph.op(name, "GatherND", x, index, batch_dims=1)


def rotary_tables(config: RotaryConfig) -> tuple[Array, Array]:
    """cos and sin, float32 [positions, rotary_dim / 2]. Angles are float32 too: so models were trained."""
    frequencies, factor = config.frequencies()
    angles = np.arange(config.max_position, dtype=np.float32)[:, None] * np.asarray(frequencies, np.float32)
    cos = np.cos(angles)
    sin = np.sin(angles, out=angles)
    cos *= np.float32(factor)
    sin *= np.float32(factor)
    return cos, sin
