"""LLaVA as three graphs: pictures to features, tokens and features to embeddings, embeddings to logits."""

from __future__ import annotations

from waybill.families import multimodal
from waybill.families.llava import TOWER, LlavaConfig
from waybill.families.vision import vision_stack
from waybill.onnx.graph import Graph
from waybill.onnx.graphs.decoder import build_decoder
from waybill.onnx.graphs.multimodal import embedding_graph
from waybill.onnx.graphs.workbench import Workbench
from waybill.onnx.matrix import Matrices
from waybill.onnx.parts.norm import layer_norm
from waybill.onnx.parts.patches import patch_embeddings
from waybill.onnx.parts.projector import project
from waybill.onnx.parts.stack import hidden_states

FEATURES = "image_features"
END = (1 << 63) - 1
"""Of a slice that goes to the end of its axis."""


def llava_graphs(config: LlavaConfig, bench: Workbench) -> dict[str, Graph]:
    """All three graphs, by component."""
    return {
        "vision_encoder": _vision_encoder(config, bench.matrices()),
        "embedding": embedding_graph(config.text, bench, FEATURES, config.image_token),
        "decoder": build_decoder(config.text, bench, root=multimodal.ROOT, embeds=True),
    }


def _vision_encoder(config: LlavaConfig, matrices: Matrices) -> Graph:
    """`pixel_values` [N, C, height, width] to `image_features` [N · tokens, H], picture after picture."""
    graph, vision = matrices.graph, config.vision
    picture = (vision.num_channels, vision.image_size, vision.image_size)
    pixels = graph.input("pixel_values", matrices.dtype, ("num_images", *picture))
    x = patch_embeddings(matrices, f"{TOWER}.embeddings", pixels, vision.patch_size)
    if vision.is_clip:
        x = layer_norm(matrices, f"{TOWER}.pre_layrnorm", x, vision.eps)
    states = hidden_states(matrices, vision_stack(vision, TOWER, config.tower_layers), x)
    chosen = [states[layer] for layer in config.feature_layers]
    features = chosen[0] if len(chosen) == 1 else graph.op("features/layers", "Concat", *chosen, axis=-1)
    if config.drops_first:
        start, end, axis = (graph.constant([at]) for at in (1, END, 1))
        features = graph.op("features/selected", "Slice", features, start, end, axis)
    projected = project(matrices, multimodal.PROJECTOR, features, config.projector_act)
    hidden = config.text.hidden_size
    flat = graph.op("features", "Reshape", projected, graph.constant([-1, hidden]))
    graph.output(flat, FEATURES, matrices.dtype, (f"num_{FEATURES}", hidden))
    return graph
