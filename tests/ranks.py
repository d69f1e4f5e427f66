"""Tensor-parallel runs: launching them, what each rank does in them, and counting the bytes one would read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from waybill.checkpoint import RangeReader
from waybill.plan import Binding, Plan
from waybill.plan.stream import stream


def torchrun(size: int, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), *args]
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=env)


def played_by(size: int, worker: Path, folders: dict[str, Path]) -> dict[str, Any]:
    """What every rank said of every folder, by the folder's name."""
    done = torchrun(size, str(worker), *map(str, folders.values()))
    assert done.returncode == 0, done.stderr
    played: dict[str, Any] = json.loads(done.stdout)
    assert all(len(said) == size for said in played.values())
    return played


def every_rank(play: Callable[[Path], dict[str, Any]]) -> None:
    """The whole of a worker: play every folder named on the command line; the first rank prints what all ranks said."""
    import torch.distributed as dist

    from waybill.engine.distributed import join_group, leave_group

    tp = join_group("cpu")
    played = {}
    for folder in map(Path, sys.argv[1:]):
        ranks: list[Any] = [None] * tp.size
        dist.all_gather_object(ranks, play(folder))
        played[folder.name] = ranks
    if tp.is_primary():
        json.dump(played, sys.stdout)
    leave_group()


def streamed(bill: Plan) -> tuple[dict[str, Any], int]:
    """Every parameter's bytes, and how many were read for them."""

    def allocate(binding: Binding) -> Any:
        return np.empty(binding.nbytes, np.uint8)

    with RangeReader(bill.checkpoint) as reader:
        arrays = {binding.target: array for binding, array in stream(bill.bindings, reader, allocate)}
        return arrays, reader.bytes_read


def bytes_streamed(bill: Plan) -> int:
    return streamed(bill)[1]
