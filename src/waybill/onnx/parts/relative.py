"""Relative position bias: a learned number a head for every range of distances (arXiv 1910.10683, section 2.1).

Distances that differ little share a bucket: near ones have their own, farther ones share logarithmically more, and from
`max_distance` on there is one for all.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from waybill.onnx.matrix import Matrices
from waybill.weights.dtypes import Array


def relative_bias(
    matrices: Matrices,
    name: str,
    weight: str,
    queries: ir.Value,
    keys: ir.Value,
    *,
    bidirectional: bool,
    max_distance: int,
) -> ir.Value:
    """[P, N, S, T] from a weight [buckets, N]: what the scores of all layers are given.

    Positions: queries I64 [P, S], keys I64 [T]. P is B, or 1 where all requests are alike.
    """
    graph = matrices.graph
    buckets = matrices.specs[weight].local_shape(0, 1)[0]
    table = bucket_table(buckets, bidirectional=bidirectional, max_distance=max_distance)
    # By distance rather than by bucket: that depends on nothing, and the runtime does it when it opens the graph.
    rows = matrices.rows(f"{name}/rows", graph.constant(table), weight)
    by_distance = graph.op(f"{name}/by_distance", "Transpose", rows, perm=[1, 0])
    at = graph.op(f"{name}/queries", "Unsqueeze", queries, graph.constant([2]))
    distance = graph.op(f"{name}/distance", "Sub", keys, at)
    farthest = graph.constant(max_distance)
    last = farthest if bidirectional else graph.constant(0)
    clipped = graph.op(f"{name}/clipped", "Clip", distance, graph.constant(-max_distance), last)
    index = graph.op(f"{name}/index", "Add", clipped, farthest)
    values = graph.op(f"{name}/values", "Gather", by_distance, index, axis=1)
    return graph.op(name, "Transpose", values, perm=[1, 0, 2, 3])


def bucket_table(buckets: int, *, bidirectional: bool, max_distance: int) -> Array:
    """The bucket of every distance, key minus query, I64: from -max_distance to max_distance, or to 0.

    Logarithms are float32: so models were trained, and some distances fall into the next bucket otherwise.

    Raises:
        ValueError: buckets of one distance alone reach `max_distance`, or there are none; plans refuse it before.
    """
    distances = np.arange(-max_distance, (max_distance if bidirectional else 0) + 1)
    each = buckets // 2 if bidirectional else buckets  # for keys before the query, and as many for those after
    exact = each // 2
    if not 0 < exact < max_distance:
        raise ValueError(f"{buckets} buckets do not reach to a distance of {max_distance} and share it")
    steps = np.abs(distances)
    logarithms = np.log(np.maximum(steps, 1).astype(np.float32) / exact)
    scaled = logarithms / math.log(max_distance / exact) * (each - exact)
    shared = np.minimum(exact + scaled.astype(np.int64), each - 1)
    table: Array = np.where(steps < exact, steps, shared) + np.where(distances > 0, each, 0)
    return table
