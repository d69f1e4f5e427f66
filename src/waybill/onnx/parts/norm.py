"""Norms of the last axis, computed in float32. `path` is the module's: its weights are `{path}.weight` and `.bias`."""

from __future__ import annotations

import onnx_ir as ir

from waybill.onnx.graph import MICROSOFT
from waybill.onnx.matrix import Matrices

SUM = 3
"""The output of a norm of a sum that is the sum; those before it are statistics, which nobody needs."""


def rms_norm(matrices: Matrices, path: str, x: ir.Value, epsilon: float) -> ir.Value:
    """x / √(mean(x²) + ε) · weight, [..., D] -> [..., D]."""
    weight = matrices.vector(f"{path}.weight")
    return matrices.graph.op(path, "SimplifiedLayerNormalization", x, weight, axis=-1, epsilon=epsilon, stash_type=1)


def layer_norm(matrices: Matrices, path: str, x: ir.Value, epsilon: float) -> ir.Value:
    """(x - mean(x)) / √(var(x) + ε) · weight + bias, [..., D] -> [..., D]; there may be no bias."""
    weights = _weights(matrices, path)
    return matrices.graph.op(path, "LayerNormalization", x, *weights, axis=-1, epsilon=epsilon, stash_type=1)


def rms_norm_of_sum(
    matrices: Matrices, path: str, y: ir.Value, residual: ir.Value, epsilon: float
) -> tuple[ir.Value, ir.Value]:
    """`rms_norm` of y + residual, and the sum; all [B, S, D]."""
    weight = matrices.vector(f"{path}.weight")
    return _of_sum(matrices, path, "SkipSimplifiedLayerNormalization", y, residual, weight, epsilon=epsilon)


def layer_norm_of_sum(
    matrices: Matrices, path: str, y: ir.Value, residual: ir.Value, epsilon: float
) -> tuple[ir.Value, ir.Value]:
    """`layer_norm` of y + residual, and the sum; all [B, S, D]."""
    weights = _weights(matrices, path)
    return _of_sum(matrices, path, "SkipLayerNormalization", y, residual, *weights, epsilon=epsilon)


def _weights(matrices: Matrices, path: str) -> tuple[ir.Value, ir.Value | None]:
    bias = f"{path}.bias"
    return matrices.vector(f"{path}.weight"), matrices.vector(bias) if bias in matrices.specs else None


def _of_sum(
    matrices: Matrices, path: str, operator: str, *inputs: ir.Value | None, epsilon: float
) -> tuple[ir.Value, ir.Value]:
    outputs = matrices.graph.node(
        path, operator, *inputs, outputs=SUM + 1, unused=range(1, SUM), domain=MICROSOFT, epsilon=epsilon
    )
    return outputs[0], outputs[SUM]
