"""Where tokens stand: each request's length, its last position, and the rotary angles of all positions."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from waybill.config import RotaryConfig
from waybill.onnx.graph import Graph
from waybill.weights.dtypes import Array

INT32, INT64 = int(ir.DataType.INT32), int(ir.DataType.INT64)


def request_lengths(graph: Graph, mask: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Each request's last position, I32 [B], and the longest request's length, an I32 scalar, from the mask [B, T]."""
    sums = graph.op("lengths/sum", "ReduceSum", mask, graph.constant([1]), keepdims=0)
    last = graph.op("lengths/last", "Sub", sums, graph.constant(1))
    total = graph.op("lengths/total", "Gather", graph.op("lengths/shape", "Shape", mask), graph.constant(1))
    return graph.op("lengths", "Cast", last, to=INT32), graph.op("total_length", "Cast", total, to=INT32)


def last_position(graph: Graph, x: ir.Value, ids: ir.Value, lengths: ir.Value, total: ir.Value) -> ir.Value:
    """Each request's last new position, [B, S, H] -> [B, 1, H].

    Positions before this step are total - S; where one token is added to requests of unequal length, it is at 0.
    """
    new = graph.op("last/new", "Gather", graph.op("last/shape", "Shape", ids), graph.constant(1))
    before = graph.op("last/before", "Sub", total, graph.op("last/count", "Cast", new, to=INT32))
    offset = graph.op("last/offset", "Sub", lengths, before)
    at = graph.op("last/at", "Max", offset, graph.constant(0, np.int32))
    index = graph.op("last/index", "Unsqueeze", graph.op("last/long", "Cast", at, to=INT64), graph.constant([1]))
    row = graph.op("last/row", "GatherND", x, index, batch_dims=1)
    return graph.op("last", "Unsqueeze", row, graph.constant([1]))


def rotary_tables(config: RotaryConfig) -> tuple[Array, Array]:
    """cos and sin, float32 [positions, rotary_dim / 2]. Angles are float32 too: so models were trained."""
    frequencies, factor = config.frequencies()
    angles = np.arange(config.max_position, dtype=np.float32)[:, None] * np.asarray(frequencies, np.float32)
    cos = np.cos(angles)
    sin = np.sin(angles, out=angles)
    cos *= np.float32(factor)
    sin *= np.float32(factor)
    return cos, sin
