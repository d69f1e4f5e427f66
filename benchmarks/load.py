"""Loading a checkpoint into private memory: wall time, peak memory and bytes read, against a floor and the peers."""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import checkpoints
from benchmarks.measure import MIB, Row, Runs, Sample, child, in_turn, process, report, resident, warm

PIECE = 8 * MIB
CONTESTANTS = ("waybill", "floor", "floor-huge", "safetensors", "transformers")


def rows(runs: int) -> Iterator[Row]:
    """Load wall and peak of both shapes, and what one of two ranks reads."""
    for shape, folder in (("Qwen3-0.6B", checkpoints.dense()), ("Qwen3-MoE, 64 experts", checkpoints.moe())):
        file = checkpoints.weights(folder)
        warm(file)
        yield from _load(f"{shape}, {file.stat().st_size / 1e9:.2f} GB", folder, runs)
        yield half(f"{shape}", folder)


def headers(runs: int) -> Iterator[Row]:
    """What is answered from headers alone, whole processes."""
    large, packed, dense = checkpoints.large(), checkpoints.packed_large(), checkpoints.dense()
    taken = in_turn(
        {
            "plan": partial(process, "-m", "waybill", "plan", str(large)),
            "packed": partial(process, "-m", "waybill", "plan", str(packed)),
            "inspect": partial(process, "-m", "waybill", "inspect", str(dense)),
        },
        runs,
    )
    plan, inspect = taken["plan"], taken["inspect"]
    peak = plan.median("peak") / 1e6
    yield Row(
        "plan, Qwen3-235B-A22B headers (36,945 tensors, 118 files), whole process",
        f"{plan.text()}, {peak:.0f} MB",
        "–",
        "–",
        "< 2 s, < 300 MB",
        plan.median() < 2 and peak < 300,
        "parsing and checking 36,945 header entries, then one record and one tile each",
    )
    yield Row(
        "plan, the same in GPTQ 4-bit (36,472 packed records of four tensors), whole process",
        f"{taken['packed'].text()}, {taken['packed'].median('peak') / 1e6:.0f} MB",
        "–",
        "–",
        "≤ 3 s",
        taken["packed"].median() <= 3,
        "parsing and checking 146,361 header entries, then four tiles a record",
    )
    yield Row(
        "inspect, 1.5 GB checkpoint, whole process",
        inspect.text(),
        "–",
        "–",
        "≤ 0.6 s",
        inspect.median() <= 0.6,
        "imports: numpy, typer, rich",
    )


def _load(shape: str, folder: Path, runs: int) -> Iterator[Row]:
    taken = in_turn({name: partial(child, "load", name, str(folder)) for name in CONTESTANTS}, runs)
    ours, peer, transformers = (taken[name] for name in ("waybill", "safetensors", "transformers"))
    floor = min(taken["floor"], taken["floor-huge"], key=Runs.median)
    pages = "2 MiB" if floor is taken["floor-huge"] else "4 KiB"
    seconds = ours.median()
    to_floor, to_peer = seconds / floor.median(), seconds / peer.median()
    yield Row(
        f"load, {shape}, wall",
        ours.text(),
        f"floor ({pages} pages) {floor.text()}; safetensors {peer.text()}; transformers {transformers.text()}",
        f"{to_floor:.2f} × floor, {to_peer:.2f} × safetensors",
        "≤ 1.2 × floor, ≤ 0.85 × safetensors",
        to_floor <= 1.2 and to_peer <= 0.85,
        "the kernel: one fault for each fresh page, zeroing it, and copying out of the page cache"
        + ("; then comparing the stored tied head" if ours.samples[0]["compared"] else ""),
    )
    sample = ours.samples[0]
    reach = sample["result"] + sample["step"] + 64 * MIB
    over = ours.median("peak") - sample["result"]
    theirs = [f"{name} {taken[name].median('peak') / MIB:.0f} MiB" for name in ("safetensors", "transformers")]
    yield Row(
        f"load, {shape}, peak beyond the interpreter",
        f"{ours.median('peak') / MIB:.0f} MiB = result + {over / MIB:.0f} MiB",
        "; ".join(theirs),
        f"{ours.median('peak') / peer.median('peak'):.2f} × safetensors",
        f"≤ {reach / MIB:.0f} MiB (result {sample['result'] / MIB:.0f} + step {sample['step'] / MIB:.0f} + 64)",
        ours.median("peak") <= reach,
        "the result itself",
    )


def half(shape: str, folder: Path) -> Row:
    """Bytes read by the rank of two that reads more."""
    shares = [child("load", "rank", str(folder), str(rank))["bytes"] for rank in (0, 1)]
    size = checkpoints.weights(folder).stat().st_size
    share = max(shares) / size
    return Row(
        f"bytes read by one rank of TP = 2, {shape}",
        f"{max(shares) / 1e6:.0f} MB",
        f"whole file {size / 1e6:.0f} MB",
        f"{share:.3f} × the file",
        "≤ 0.55 × the file",
        share <= 0.55,
        "norms and routers are replicated; row cuts whose runs are under 1 KiB are read with their gaps, which is "
        "eight times as fast from the page cache as reading them one by one",
    )


def _in_process(load: Callable[[Path], Any], folder: Path) -> Sample:
    """Time and memory of one load, beyond what the imports took. What was loaded is held until both are read."""
    before = resident("VmRSS")
    start = time.perf_counter()
    loaded = load(folder)
    seconds = time.perf_counter() - start
    sample = {"seconds": seconds, "peak": resident("VmHWM") - before}
    del loaded
    return sample


def _waybill(folder: Path) -> Sample:
    import torch  # noqa: F401 - the clock starts after imports

    import waybill

    sample = _in_process(waybill.load, folder)
    plan = waybill.plan(folder)
    return sample | {
        "result": plan.result_bytes,
        "step": max(binding.nbytes for binding in plan.bindings),
        "compared": any(binding.tied_to for binding in plan.bindings),
    }


def _floor(folder: Path, *, huge: bool = False) -> Sample:
    """Two threads fill fresh private memory with the file's bytes, each its own half.

    Huge pages make the first touch of memory cheap on most machines and dear on some virtual ones: both are measured,
    and the faster one is the floor.
    """
    from threading import Thread

    def fill(descriptor: int, view: memoryview, start: int, stop: int) -> None:
        while start < stop:
            start += os.preadv(descriptor, [view[start : min(start + PIECE, stop)]], start)

    def load(path: Path) -> Any:
        file = checkpoints.weights(path)
        size = file.stat().st_size
        # Private: what mmap makes by default is shared memory, which is slower to touch.
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
        descriptor = os.open(file, os.O_RDONLY)
        halves = ((0, size // 2), (size // 2, size))
        threads = [Thread(target=fill, args=(descriptor, memoryview(memory), *half)) for half in halves]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os.close(descriptor)
        return memory

    return _in_process(load, folder)


def _safetensors(folder: Path) -> Sample:
    import torch  # noqa: F401
    from safetensors import safe_open

    def load(path: Path) -> Any:
        # Without the clone the tensors are views of the mapped file: nothing has been read.
        with safe_open(checkpoints.weights(path), framework="pt") as file:
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a dict

    return _in_process(load, folder)


def _transformers(folder: Path) -> Sample:
    import torch
    from transformers import AutoModelForCausalLM

    return _in_process(lambda path: AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16), folder)


def _rank(folder: Path, rank: str) -> Sample:
    """Stream one rank's plan and count what the reader was asked for."""
    import numpy as np

    import waybill
    from waybill.checkpoint import RangeReader
    from waybill.plan.stream import stream

    plan = waybill.plan(folder, tp=2, rank=int(rank))
    plan.require_clean()
    with RangeReader(plan.checkpoint) as reader:
        for _ in stream(plan.bindings, reader, lambda binding: np.empty(binding.nbytes, np.uint8)):
            pass
        return {"bytes": reader.bytes_read}


def main(name: str, folder: str, *rest: str) -> None:
    """One measurement, in a process of its own."""
    cases: dict[str, Callable[..., Sample]] = {
        "waybill": _waybill,
        "floor": _floor,
        "floor-huge": partial(_floor, huge=True),
        "safetensors": _safetensors,
        "transformers": _transformers,
        "rank": _rank,
    }
    report(cases[name](Path(folder), *rest))


if __name__ == "__main__":
    main(*sys.argv[1:])
