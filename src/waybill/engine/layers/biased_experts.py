"""Experts with biases and a clamped SwiGLU, and the router that weighs only those it picks."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from waybill.config.sinks import ClampedSwiGLU
from waybill.engine.distributed import all_reduce
from waybill.engine.layers.base import BaseOP, Parameters
from waybill.engine.layers.linear import Linear
from waybill.engine.layers.matrix import CodebookMatrix, Matrix, PackedMatrix, make_packed
from waybill.engine.layers.mlp import sum_of_chosen


class FloatBank(Matrix):
    """Matrices [E, N, K] as they are."""

    def __init__(self, parameters: Parameters, name: str) -> None:
        self.weight = parameters.empty(name)

    def expert(self, index: int, x_TK: torch.Tensor) -> torch.Tensor:
        """The product with one of them."""
        return F.linear(x_TK, self.weight[index])


class BiasedBank(BaseOP):
    """y = x W[e]ᵀ + b[e], on this rank's rows or columns of W."""

    def __init__(self, parameters: Parameters, path: str) -> None:
        name = f"{path}.weight"
        packing = parameters.packing(name)
        self.matrix: FloatBank | PackedMatrix | CodebookMatrix = (
            FloatBank(parameters, name) if packing is None else make_packed(parameters, name, packing)
        )
        self.bias = parameters.empty(f"{path}.bias")

    def product(self, index: int, x_TK: torch.Tensor, *, biased: bool = True) -> torch.Tensor:
        """[T, K] -> [T, N], with the bias or without."""
        y_TN = self.matrix.expert(index, x_TK)
        return y_TN + self.bias[index] if biased else y_TN


def clamped_swiglu(gate_up: torch.Tensor, form: ClampedSwiGLU) -> torch.Tensor:
    """gate · σ(alpha · gate) · (up + 1), gate and up alternating along the last axis, and clamped first."""
    gate, up = gate_up[..., ::2].clamp(max=form.limit), gate_up[..., 1::2].clamp(-form.limit, form.limit)
    return gate * torch.sigmoid(form.alpha * gate) * (up + 1)


class BiasedExperts(BaseOP):
    """gate_up_proj [E, 2I, H], rows alternating, and down_proj [E, H, I], I cut across ranks."""

    def __init__(self, parameters: Parameters, path: str, form: ClampedSwiGLU) -> None:
        self.gate_up_proj = BiasedBank(parameters, f"{path}.gate_up_proj")
        self.down_proj = BiasedBank(parameters, f"{path}.down_proj")
        self._experts = parameters.config.num_experts
        self._form = form
        self._adds_bias = parameters.tp.is_primary()  # what every rank holds is added to their sum once

    def forward(self, x_TH: torch.Tensor, weights_TS: torch.Tensor, chosen_TS: torch.Tensor) -> torch.Tensor:
        """This rank's term of Σ over a token's S chosen experts of weight · expert(x)."""
        return sum_of_chosen(x_TH, weights_TS, chosen_TS, self._experts, self._answer)

    def _answer(self, expert: int, x_TH: torch.Tensor) -> torch.Tensor:
        hidden = clamped_swiglu(self.gate_up_proj.product(expert, x_TH), self._form)
        return self.down_proj.product(expert, hidden, biased=self._adds_bias)


class BiasedMoE(BaseOP):
    """A replicated router with a bias picks experts; the softmax is over the picked logits alone."""

    def __init__(self, parameters: Parameters, path: str, form: ClampedSwiGLU) -> None:
        self.router = Linear(parameters, f"{path}.router")
        self.experts = BiasedExperts(parameters, f"{path}.experts", form)
        self._slots = parameters.config.num_experts_per_tok

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        logits, chosen = self.router.forward(x).topk(self._slots, dim=-1)
        weights = logits.softmax(dim=-1, dtype=torch.float32).to(x.dtype)
        return all_reduce(self.experts.forward(x, weights, chosen))
