"""From an encoder's size to a language model's, by two layers."""

from __future__ import annotations

import onnx_ir as ir

from waybill.onnx.matrix import Matrices
from waybill.onnx.parts.activation import activate


def project(matrices: Matrices, path: str, x: ir.Value, function: str) -> ir.Value:
    """linear_2(activation(linear_1(x))), [..., D] -> [..., H], by the module at `path`; there may be no biases."""
    first, second = f"{path}.linear_1", f"{path}.linear_2"
    x = matrices.product(first, x, f"{first}.weight", f"{first}.bias")
    x = activate(matrices.graph, f"{path}.act", x, function)
    return matrices.product(second, x, f"{second}.weight", f"{second}.bias")
