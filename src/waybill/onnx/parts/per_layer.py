"""Inputs of a layer's own, as nodes: a token gives every layer something beside the states that run through all.

The formulas are those of transformers' Gemma 4 text model, as released in transformers 5; norms are this decoder's,
weight · x, as that model's are too. B requests, S positions, H hidden elements, L layers, P elements of a layer's own
input.
"""

from __future__ import annotations

import onnx_ir as ir

from waybill.config import ModelConfig
from waybill.onnx.matrix import Matrices
from waybill.onnx.parts.activation import activate
from waybill.onnx.parts.norm import rms_norm
from waybill.weights.dtypes import NUMPY_DTYPES


def per_layer_inputs(
    matrices: Matrices, config: ModelConfig, root: str, ids: ir.Value, embedded: ir.Value
) -> list[ir.Value]:
    """What each layer is given, L times [B, S, P]; none where the config has no such inputs.

    (norm(W e · H**-0.5) + table[id] · P**0.5) · 2**-0.5, of a token's id and its embedding e; the norm is of each
    layer's P elements by themselves.

    Args:
        matrices: makes the nodes that use parameters.
        config: the model.
        root: the path of the decoder.
        ids: tokens, I64 [B, S].
        embedded: their embeddings, [B, S, H].
    """
    size = config.hidden_size_per_layer_input
    if size == 0:
        return []
    graph, path = matrices.graph, f"{root}.per_layer_model_projection"
    apart = graph.constant([0, 0, config.num_layers, size])

    def scaled(name: str, x: ir.Value, factor: float) -> ir.Value:
        return graph.op(name, "Mul", x, graph.constant(factor, NUMPY_DTYPES[matrices.dtype].type))

    projected = scaled(f"{path}/scaled", matrices.product(path, embedded, f"{path}.weight"), config.hidden_size**-0.5)
    by_layer = graph.op(f"{path}/by_layer", "Reshape", projected, apart)
    normed = rms_norm(matrices, f"{root}.per_layer_projection_norm", by_layer, config.rms_norm_eps)
    path = f"{root}.embed_tokens_per_layer"
    rows = scaled(f"{path}/scaled", matrices.rows(path, ids, f"{path}.weight"), size**0.5)
    looked_up = graph.op(f"{path}/by_layer", "Reshape", rows, apart)
    both = scaled("per_layer", graph.op("per_layer/sum", "Add", normed, looked_up), 2**-0.5)
    return [graph.op(f"per_layer/{n}", "Gather", both, graph.constant(n), axis=2) for n in range(config.num_layers)]


def given_to_layer(matrices: Matrices, config: ModelConfig, path: str, x: ir.Value, own: ir.Value) -> ir.Value:
    """norm(W₂ (activation(W₁ x) · own)), what a layer's own input [B, S, P] adds to its states [B, S, H].

    `path` is the layer's, and `x` what comes out of it: after its feed-forward network, with the residual.
    """
    graph, first, second = matrices.graph, f"{path}.per_layer_input_gate", f"{path}.per_layer_projection"
    gate = activate(graph, f"{first}/activation", matrices.product(first, x, f"{first}.weight"), config.hidden_act)
    product = graph.op(f"{first}/product", "Mul", gate, own)
    y = matrices.product(second, product, f"{second}.weight")
    return rms_norm(matrices, f"{path}.post_per_layer_input_norm", y, config.rms_norm_eps)
