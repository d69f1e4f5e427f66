"""Qwen2-Audio as three graphs: recordings to features, tokens and features to embeddings, embeddings to logits."""

from __future__ import annotations

import onnx_ir as ir

from waybill.families.audio import EPS
from waybill.families.multimodal import ROOT
from waybill.families.qwen2_audio import POOLED, PROJECTION, TOWER, Qwen2AudioConfig
from waybill.onnx.graph import IR_DTYPES, Graph
from waybill.onnx.graphs.decoder import build_decoder
from waybill.onnx.graphs.multimodal import embedding_graph
from waybill.onnx.graphs.workbench import Workbench
from waybill.onnx.matrix import Matrices
from waybill.onnx.parts.audio import encode_audio
from waybill.onnx.parts.masks import padding_bias
from waybill.onnx.parts.norm import layer_norm
from waybill.onnx.parts.positions import span

FEATURES = "audio_features"


def qwen2_audio_graphs(config: Qwen2AudioConfig, bench: Workbench) -> dict[str, Graph]:
    """All three graphs, by component."""
    return {
        "audio_encoder": _encoder(config, bench.matrices()),
        "embedding": embedding_graph(config.text, bench, FEATURES, config.audio_token_id),
        "decoder": build_decoder(config.text, bench, root=ROOT, embeds=True),
    }


def _encoder(config: Qwen2AudioConfig, matrices: Matrices) -> Graph:
    """`input_features` [A, mel bins, frames] and `feature_attention_mask` [A, frames] to `audio_features` [n, H].

    The mask is 1 where a recording has a frame, and 0 in the padding after it. States of padding are seen by none, and
    the n features are those of recordings alone, one recording after the other.
    """
    graph, audio = matrices.graph, config.audio
    given = graph.input("input_features", matrices.dtype, ("num_audios", audio.mel_bins, audio.frames))
    mask = graph.input("feature_attention_mask", "I64", ("num_audios", audio.frames))
    frames = graph.op("lengths/frames", "ReduceSum", mask, graph.constant([1]), keepdims=1)
    more = graph.op("lengths/more", "Add", frames, graph.constant(1))
    convolved = graph.op("lengths/convolved", "Div", more, graph.constant(2))
    pooled = graph.op("lengths/pooled", "Div", convolved, graph.constant(POOLED))
    x = encode_audio(matrices, audio, TOWER, given, final_norm=None, bias=_seen(matrices, convolved, audio.positions))
    x = _averages(graph, x)
    valid = _before(graph, "valid", pooled, audio.positions // POOLED)
    places = graph.op("places", "Transpose", graph.op("places/found", "NonZero", valid), perm=[1, 0])
    x = graph.op("recorded", "GatherND", x, places)
    x = layer_norm(matrices, f"{TOWER}.layer_norm", x, EPS)
    features = matrices.product(PROJECTION, x, f"{PROJECTION}.weight", f"{PROJECTION}.bias")
    graph.output(features, FEATURES, matrices.dtype, (f"num_{FEATURES}", config.hidden_size))
    return graph


def _seen(matrices: Matrices, lengths: ir.Value, positions: int) -> ir.Value:
    """The scores' bias, [A, 1, T, T], where each recording has `lengths` [A, 1] of T states."""
    graph = matrices.graph
    mask = graph.op("seen/mask", "Cast", _before(graph, "seen", lengths, positions), to=int(IR_DTYPES["I64"]))
    return padding_bias(graph, "scores/padding", mask, mask, matrices.dtype)


def _before(graph: Graph, name: str, lengths: ir.Value, positions: int) -> ir.Value:
    """Whether each of so many positions comes before a length, [A, 1] -> bool [A, positions]."""
    return graph.op(name, "Less", span(graph, f"{name}/positions", graph.constant([positions])), lengths)


def _averages(graph: Graph, x: ir.Value) -> ir.Value:
    """The mean of every two states, [A, T, D] -> [A, T // 2, D]; a last one without a partner is left out."""
    turned = graph.op("averages/turned", "Transpose", x, perm=[0, 2, 1])
    means = graph.op("averages/means", "AveragePool", turned, kernel_shape=[POOLED], strides=[POOLED])
    return graph.op("averages", "Transpose", means, perm=[0, 2, 1])
