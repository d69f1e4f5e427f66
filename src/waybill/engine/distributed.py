"""Tensor-parallel ranks: who this process is, and the three collectives a decoder needs.

Ranks are processes of `torch.distributed`, started by `torchrun`; gloo on CPU, NCCL on GPU.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
import torch.distributed as dist


class TPInfo(NamedTuple):
    """This process's place in the tensor-parallel group."""

    rank: int
    size: int

    def is_primary(self) -> bool:
        """Whether this rank speaks for the group: prints, samples, reports progress."""
        return self.rank == 0


_info = TPInfo(0, 1)


def set_tp_info(rank: int, size: int) -> None:
    """Declare this process's rank and the number of ranks; ValueError when the rank is outside the group."""
    global _info  # noqa: PLW0603 - a process has one place in its group
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is not one of {size} ranks")
    _info = TPInfo(rank, size)


def get_tp_info() -> TPInfo:
    """This process's rank and the number of ranks; (0, 1) until set."""
    return _info


def join_group(device: str) -> TPInfo:
    """Join the group `torchrun` started, if it started this process; otherwise stay alone."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    set_tp_info(int(os.environ.get("RANK", "0")), size)
    return _info


def leave_group() -> None:
    """Part from the group, so that the process ends quietly."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def all_reduce(values: torch.Tensor) -> torch.Tensor:
    """Sum over ranks, in place."""
    if _info.size > 1:
        dist.all_reduce(values)
    return values


def all_gather_last(values: torch.Tensor) -> torch.Tensor:
    """Join the ranks' tensors along the last axis."""
    if _info.size == 1:
        return values
    parts = [torch.empty_like(values) for _ in range(_info.size)]
    dist.all_gather(parts, values.contiguous())
    return torch.cat(parts, dim=-1)


def broadcast(values: torch.Tensor) -> torch.Tensor:
    """The primary rank's values on every rank."""
    if _info.size > 1:
        dist.broadcast(values, 0)
    return values


def all_agree(condition: bool, device: torch.device) -> bool:
    """Whether the condition holds on every rank."""
    if _info.size == 1:
        return condition
    vote = torch.tensor([0 if condition else 1], device=device)
    return int(all_reduce(vote).item()) == 0
