"""The embedding of a language model that is also given features of pictures or sound, as a graph of its own."""

from __future__ import annotations

from waybill.config import ModelConfig
from waybill.families.multimodal import EMBEDDING, ROOT
from waybill.onnx.graph import Graph
from waybill.onnx.graphs.workbench import Workbench


def embedding_graph(text: ModelConfig, bench: Workbench, features: str, token: int) -> Graph:
    """`input_ids` [B, S] and features [n, H] to `inputs_embeds` [B, S, H]: the n places of `token` get them in order.

    A step without such places is given no features, [0, H].
    """
    matrices = bench.matrices()
    graph = matrices.graph
    axes = ("batch_size", "sequence_length")
    ids = graph.input("input_ids", "I64", axes)
    given = graph.input(features, bench.dtype, (f"num_{features}", text.hidden_size))
    rows = matrices.rows(f"{ROOT}.embed_tokens", ids, EMBEDDING)
    places = graph.op("places/found", "NonZero", graph.op("places/equal", "Equal", ids, graph.constant(token)))
    pairs = graph.op("places", "Transpose", places, perm=[1, 0])
    merged = graph.op("merged", "ScatterND", rows, pairs, given)
    graph.output(merged, "inputs_embeds", bench.dtype, (*axes, text.hidden_size))
    return graph
