"""Convolutions as nodes, over one axis or more: audio frames, and patches of an image."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from waybill.onnx.matrix import Matrices


def convolve(
    matrices: Matrices,
    name: str,
    x: ir.Value,
    weight: str,
    bias: str | None,
    *,
    stride: Sequence[int],
    padding: Sequence[int] | None = None,
) -> ir.Value:
    """[B, C, ...] -> [B, N, ...] by a weight [N, C, k, ...], as Hugging Face stores it; a bias [N], if there is one.

    `stride` and `padding`, zeros before and after, are one number an axis that is slid along; no padding is none.
    """
    added = matrices.vector(bias) if bias is not None and bias in matrices.specs else None
    pads = list(padding or [0] * len(stride))
    return matrices.graph.op(name, "Conv", x, matrices.vector(weight), added, strides=list(stride), pads=[*pads, *pads])
