"""An encoder of sound as nodes: convolutions over a spectrogram's frames, positions, and layers."""

from __future__ import annotations

import onnx_ir as ir

from waybill.families.audio import AudioConfig, audio_stack
from waybill.onnx.matrix import Matrices
from waybill.onnx.parts.activation import activate
from waybill.onnx.parts.convolution import convolve
from waybill.onnx.parts.stack import run_stack


def encode_audio(
    matrices: Matrices,
    config: AudioConfig,
    root: str,
    features: ir.Value,
    *,
    final_norm: str | None,
    bias: ir.Value | None = None,
) -> ir.Value:
    """A spectrogram [B, mel bins, frames] to states [B, positions, D], by the encoder at `root`.

    `final_norm` is the path of the norm after the last layer, or None; `bias` is added to the scores of attention.
    """
    graph, x = matrices.graph, features
    for name, stride in (("conv1", 1), ("conv2", 2)):
        path = f"{root}.{name}"
        x = convolve(matrices, path, x, f"{path}.weight", f"{path}.bias", stride=[stride], padding=[1])
        x = activate(graph, f"{path}.activation", x, "gelu")  # whatever the layers' activation is
    states = graph.op(f"{root}.frames", "Transpose", x, perm=[0, 2, 1])
    x = graph.op(f"{root}.embeddings", "Add", states, matrices.vector(f"{root}.embed_positions.weight"))
    return run_stack(matrices, audio_stack(config, root), x, final_norm=final_norm, bias=bias)
