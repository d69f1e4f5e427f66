"""Attention as nodes: over what is there, over a growing cache, and over another sequence.

B requests, S queries, T keys, N query heads, M key heads, H elements a head. Heads lie side by side, [B, S, N·H], but
in a cache, [B, M, T, H]. Scores are multiplied by `scale`, H**-0.5 unless given.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from waybill.onnx.graph import MICROSOFT, Graph

Pair = tuple[ir.Value, ir.Value]


def attend(
    graph: Graph,
    name: str,
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    *,
    heads: int,
    scale: float | None = None,
    mask: ir.Value | None = None,
    bias: ir.Value | None = None,
) -> ir.Value:
    """Every query over every key, [B, S, N·H] -> [B, S, N·H]. Keys and values: [B, T, N·H], or a cache's [B, N, T, H].

    `mask`: I32 [B, T], 1 where there is a key and 0 where there is padding. `bias`: added to the scores,
    [1 or B, 1 or N, S, T].
    """
    attributes = {} if scale is None else {"scale": scale}
    return graph.op(
        name, "MultiHeadAttention", query, key, value, None, mask, bias, domain=MICROSOFT, num_heads=heads, **attributes
    )


def attend_cached(
    graph: Graph,
    name: str,
    query: ir.Value,
    key: ir.Value | None,
    value: ir.Value | None,
    past: Pair,
    lengths: Pair,
    *,
    heads: int,
    kv_heads: int,
    scale: float | None = None,
    rotary: Pair | None = None,
    bias: ir.Value | None = None,
    sinks: ir.Value | None = None,
    window: int = 0,
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Causal attention over a cache, which it extends: [B, S, N·H], and present keys and values [B, M, .., H].

    Keys and values are [B, S, M·H], or None where `query` holds all three, [B, S, (N + 2·M)·H]. `past` may be longer
    than what is used, and present the same memory. `lengths`: each request's last position, I32 [B], and the longest
    length T, I32 [1]. `rotary`: cos and sin, [positions, rotary_dim / 2], that rotate queries and keys. `bias`: added
    to the scores, [1 or B, 1 or N, S, T]. `sinks`: a logit for each head, [N], that takes probability and gives no
    value. `window`: positions a query attends to, its own among them; 0 for all.
    """
    attributes: dict[str, Any] = {} if scale is None else {"scale": scale}
    if window:
        attributes["local_window_size"] = window
    rest = (None, bias) if sinks is None else (None, bias, sinks)
    y, present_key, present_value = graph.node(
        name, "GroupQueryAttention", query, key, value, *past, *lengths, *(rotary or (None, None)), *rest,
        outputs=3, domain=MICROSOFT, num_heads=heads, kv_num_heads=kv_heads, do_rotary=int(rotary is not None),
        **attributes,
    )  # fmt: skip
    return y, present_key, present_value


def attend_across(
    graph: Graph,
    name: str,
    query: ir.Value,
    cache: Pair,
    *,
    heads: int,
    scale: float | None = None,
    mask: ir.Value | None = None,
) -> ir.Value:
    """Attention over another sequence, whose keys and values `cross_cache` made once: [B, S, N·H] -> [B, S, N·H].

    The cache comes from outside and is read where it lies. `mask`: I32 [B, T], 1 where the other sequence has a
    position.
    """
    return attend(graph, name, query, *cache, heads=heads, scale=scale, mask=mask)


def cross_cache(graph: Graph, name: str, key: ir.Value, value: ir.Value, *, heads: int) -> Pair:
    """Keys and values of another sequence for every step to come, [B, T, N·H] -> [B, N, T, H].

    They do not depend on what attends to them, so these nodes belong in a graph that runs once a request.
    """
    apart, made = graph.constant([0, 0, heads, -1]), []
    for kind, x in (("key", key), ("value", value)):
        split = graph.op(f"{name}/{kind}/heads", "Reshape", x, apart)
        made.append(graph.op(f"{name}/{kind}", "Transpose", split, perm=[0, 2, 1, 3]))
    return made[0], made[1]
