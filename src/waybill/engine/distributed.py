"""Tensor-parallel ranks: who this process is, the three collectives a decoder needs, and what fails on one rank alone.

Ranks are processes of `torch.distributed`, started by `torchrun`; gloo on CPU, NCCL between GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from waybill.errors import OtherRankFailed, WaybillError


class TPInfo(NamedTuple):
    """This process's place in the tensor-parallel group."""

    rank: int
    size: int

    def is_primary(self) -> bool:
        """Whether this rank speaks for the group: prints, samples, reports progress."""
        return self.rank == 0


_info = TPInfo(0, 1)
_store: Any = None
"""What ranks can write down for each other; under `torchrun` it outlives all of them."""


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
    """Join the group `torchrun` started, if it started this process; otherwise stay alone.

    Raises:
        OtherRankFailed: the others are not there.
    """
    global _store  # noqa: PLW0603 - as above
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if size > 1 and not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
        try:
            _store = next(rendezvous("env://"))[0]
            dist.init_process_group(backend, store=_store, rank=rank, world_size=size)
        except (RuntimeError, ValueError) as error:
            raise OtherRankFailed(
                "the ranks do not find each other",
                expected=f"{size} ranks, started together",
                found=str(error).partition("\n")[0][:160],
                fix="start them with torchrun",
            ) from error
    set_tp_info(rank, size)
    return _info


def leave_group() -> None:
    """Part from the group, so that the process ends quietly."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def _together() -> Iterator[None]:
    """A collective; what fails in one is that some rank has ended.

    Raises:
        OtherRankFailed: it names the rank that was the first to end.
    """
    try:
        yield
    except RuntimeError as error:
        ended = _ended()
        raise OtherRankFailed(
            f"{ended} ended, and the others cannot go on" if ended else "the ranks cannot exchange what they compute",
            expected=f"{_info.size} ranks",
            found=str(error).partition("\n")[0].rpartition("] ")[2].partition(". ")[0][:160],
            fix=f"see what {ended or 'each'} printed, and whether a signal or a lack of memory ended it",
        ) from error


def _ended() -> str:
    """Who is gone: nothing can be sent to them. A rank that finds this leaves too, and tells the others before it does
    who was the first.
    """
    gone = []
    for rank in range(_info.size):
        try:
            if rank != _info.rank:
                dist.isend(torch.zeros(1), rank)
        except RuntimeError:
            gone.append(rank)
    found = _named(gone) if gone else ""
    with suppress(RuntimeError):  # the store ends with the first rank, where `torchrun` does not keep it
        if _store is not None and gone:
            return str(_store.compare_set("ended", "", found), "utf-8")
    return found


def _named(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def all_reduce(values: torch.Tensor) -> torch.Tensor:
    """Sum over ranks, in place."""
    if _info.size > 1:
        with _together():
            dist.all_reduce(values)
    return values


def all_gather_last(values: torch.Tensor) -> torch.Tensor:
    """Join the ranks' tensors along the last axis."""
    if _info.size == 1:
        return values
    parts = [torch.empty_like(values) for _ in range(_info.size)]
    with _together():
        dist.all_gather(parts, values.contiguous())
    return torch.cat(parts, dim=-1)


def broadcast(values: torch.Tensor) -> torch.Tensor:
    """The primary rank's values on every rank."""
    if _info.size > 1:
        with _together():
            dist.broadcast(values, 0)
    return values


def all_agree(condition: bool) -> bool:
    """Whether the condition holds on every rank."""
    return not _dissenting(condition)


def _dissenting(condition: bool) -> list[int]:
    """The ranks on which the condition does not hold."""
    votes = torch.zeros(_info.size, dtype=torch.int32)
    votes[_info.rank] = not condition
    against: list[int] = all_reduce(votes).nonzero().flatten().tolist()
    return against


@contextmanager
def agreeing() -> Iterator[None]:
    """What is refused on one rank fails on all, and no rank waits for one that has left; the first of those that refuse
    says why.

    Raises:
        OtherRankFailed: it names the ranks that refused, and this is none of them.
    """
    try:
        yield
    except WaybillError as error:
        error.speaks = True
        with suppress(OtherRankFailed):
            error.speaks = _dissenting(False)[0] == _info.rank
        raise
    if refused := _dissenting(True):
        raise OtherRankFailed(
            f"{_named(refused)} refused to load",
            expected=f"{_info.size} ranks",
            fix=f"see what rank {refused[0]} printed",
        )
