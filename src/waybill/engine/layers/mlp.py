"""Feed-forward networks: SwiGLU (arXiv 2002.05202), dense, as a bank of routed experts, or as both."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from waybill.engine.distributed import all_reduce
from waybill.engine.layers.base import BaseOP, Parameters
from waybill.engine.layers.linear import Linear, RowParallelLinear, attach_merged, project
from waybill.engine.layers.matrix import CodebookMatrix, PackedMatrix, make_packed

Bank = torch.Tensor | PackedMatrix | CodebookMatrix
"""Experts' matrices, one after the other."""


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up, the halves of the last axis."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class GatedMLP(BaseOP):
    """down(silu(gate(x)) · up(x)), gate and up in one product."""

    def __init__(self, parameters: Parameters, path: str) -> None:
        self._gate_up = attach_merged(self, parameters, path, "gate_up_proj", ("gate_proj", "up_proj"))
        self.down_proj = RowParallelLinear(parameters, f"{path}.down_proj")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self.down_proj.forward(self._inner(x))

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's term of it, for who adds others before the sum over ranks; without the bias of down."""
        return self.down_proj.partial(self._inner(x))

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return silu_and_mul(project(self._gate_up, x))


class Experts(BaseOP):
    """The experts' weights as banks: gate_up_proj `[E, 2I, H]`, down_proj `[E, H, I]`, I cut across ranks."""

    def __init__(self, parameters: Parameters, path: str) -> None:
        self.gate_up_proj = _bank(parameters, f"{path}.gate_up_proj")
        self.down_proj = _bank(parameters, f"{path}.down_proj")
        self._experts = parameters.config.num_experts

    def forward(self, x_TH: torch.Tensor, weights_TS: torch.Tensor, chosen_TS: torch.Tensor) -> torch.Tensor:
        """This rank's term of Σ over a token's S chosen experts of weight · expert(x)."""
        return sum_of_chosen(x_TH, weights_TS, chosen_TS, self._experts, self._answer)

    def _answer(self, expert: int, x_TH: torch.Tensor) -> torch.Tensor:
        return _product(self.down_proj, expert, silu_and_mul(_product(self.gate_up_proj, expert, x_TH)))


def sum_of_chosen(
    x_TH: torch.Tensor,
    weights_TS: torch.Tensor,
    chosen_TS: torch.Tensor,
    experts: int,
    answer: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Σ over a token's S chosen experts of weight · answer(expert, x), [T, H]; each chosen one runs once."""
    out_TH = torch.zeros_like(x_TH)
    slots = chosen_TS.shape[1]
    order = chosen_TS.flatten().argsort(stable=True)
    counts = torch.bincount(chosen_TS.flatten(), minlength=experts).tolist()
    at = 0
    for expert, count in enumerate(counts):
        if count == 0:
            continue
        picks = order[at : at + count]
        at += count
        tokens = picks // slots
        out_TH.index_add_(0, tokens, answer(expert, x_TH[tokens]) * weights_TS.flatten()[picks, None])
    return out_TH


def _bank(parameters: Parameters, name: str) -> Bank:
    packing = parameters.packing(name)
    return parameters.empty(name) if packing is None else make_packed(parameters, name, packing)


def _product(bank: Bank, index: int, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, bank[index]) if isinstance(bank, torch.Tensor) else bank.expert(index, x)


class MoEMLP(BaseOP):
    """A router picks a few experts for each token; beside them there may be one that every token is given to.

    Experts are cut as MLPs are, and summed over ranks once. The router is replicated on every rank, and so is the gate
    of the shared expert: the sigmoid of one number a token, which scales that expert's output.
    """

    def __init__(self, parameters: Parameters, path: str) -> None:
        self.gate = Linear(parameters, f"{path}.gate")
        self.experts = Experts(parameters, f"{path}.experts")
        shared = parameters.config.shared_expert_intermediate_size > 0
        self.shared_expert = GatedMLP(parameters, f"{path}.shared_expert") if shared else None
        self.shared_expert_gate = Linear(parameters, f"{path}.shared_expert_gate") if shared else None
        self._slots = parameters.config.num_experts_per_tok
        self._normalize = parameters.config.norm_topk_prob

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]. Probabilities are taken in float32 over all experts, then the best are kept."""
        weights, chosen = self.gate.forward(x).softmax(dim=-1, dtype=torch.float32).topk(self._slots, dim=-1)
        if self._normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        y = self.experts.forward(x, weights.to(x.dtype), chosen)
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            y = y + self.shared_expert_gate.forward(x).sigmoid() * self.shared_expert.partial(x)
        return all_reduce(y)
