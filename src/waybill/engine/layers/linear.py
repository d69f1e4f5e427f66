"""Linear layers, whole or cut across ranks, float or packed. T tokens, I in, O out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from waybill.engine.distributed import all_reduce
from waybill.engine.layers.base import BaseOP, Parameters
from waybill.engine.layers.matrix import FloatMatrix, linear, make_matrix


class Linear(BaseOP):
    """y = x Wᵀ + b on this rank's rows of W: column-parallel when the parameter's rows are cut, else replicated.

    Merged projections (q, k, v; gate, up) are one such weight; the caller splits the output in the same order.
    """

    def __init__(self, parameters: Parameters, path: str) -> None:
        self.matrix = make_matrix(parameters, f"{path}.weight")
        self.bias = parameters.optional(f"{path}.bias")

    @property
    def weight(self) -> torch.Tensor:
        """The float weight; AttributeError when it is packed."""
        if not isinstance(self.matrix, FloatMatrix):
            raise AttributeError("the weight is packed; it has codes and scales")
        return self.matrix.weight

    def forward(self, x_TI: torch.Tensor) -> torch.Tensor:
        """[T, I] -> [T, O_local]."""
        if isinstance(self.matrix, FloatMatrix):
            return linear(x_TI, self.matrix.weight, self.bias)
        y_TO = self.matrix.product(x_TI)
        return y_TO if self.bias is None else y_TO + self.bias


class RowParallelLinear(Linear):
    """y = Σ over ranks of x_local W_localᵀ, plus b once: W's columns are cut, and so is its input."""

    def partial(self, x_TI: torch.Tensor) -> torch.Tensor:
        """[T, I_local] -> [T, O]: this rank's term of the sum, without b."""
        return self.matrix.product(x_TI)

    def forward(self, x_TI: torch.Tensor) -> torch.Tensor:
        """[T, I_local] -> [T, O], the same on every rank."""
        y_TO = all_reduce(self.partial(x_TI))
        return y_TO if self.bias is None else y_TO + self.bias


def attach_merged(
    owner: BaseOP, parameters: Parameters, path: str, merged: str, members: Sequence[str]
) -> list[Linear]:
    """Give `owner` the merged projection, or its members where the plan keeps them apart; returns them in order."""
    names = [merged] if parameters.has(f"{path}.{merged}.weight") else list(members)
    layers = [Linear(parameters, f"{path}.{name}") for name in names]
    for name, layer in zip(names, layers, strict=True):
        setattr(owner, name, layer)
    return layers


def project(layers: Sequence[Linear], x_TI: torch.Tensor) -> torch.Tensor:
    """The output of a merged projection, or of its members side by side."""
    if len(layers) == 1:
        return layers[0].forward(x_TI)
    return torch.cat([layer.forward(x_TI) for layer in layers], dim=-1)
