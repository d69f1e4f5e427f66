"""Linear layers, whole or cut across ranks. Shape letters: T tokens, I in, O out."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from waybill.engine.distributed import all_reduce
from waybill.engine.layers.base import BaseOP, Parameters


class Linear(BaseOP):
    """y = x Wᵀ + b on this rank's rows of W: column-parallel when the parameter's rows are cut, else replicated.

    Merged projections (q, k, v; gate, up) are one such weight; the caller splits the output in the same order.
    """

    def __init__(self, parameters: Parameters, path: str) -> None:
        self.weight = parameters.empty(f"{path}.weight")
        self.bias = parameters.optional(f"{path}.bias")

    def forward(self, x_TI: torch.Tensor) -> torch.Tensor:
        """[T, I] -> [T, O_local]."""
        return F.linear(x_TI, self.weight, self.bias)


class RowParallelLinear(Linear):
    """y = Σ over ranks of x_local W_localᵀ, plus b once: W's columns are cut, and so is its input."""

    def forward(self, x_TI: torch.Tensor) -> torch.Tensor:
        """[T, I_local] -> [T, O], the same on every rank."""
        y_TO = all_reduce(F.linear(x_TI, self.weight))
        return y_TO if self.bias is None else y_TO + self.bias
