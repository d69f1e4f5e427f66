"""The machine the table was made on, and its own limits."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

from benchmarks.measure import Runs, Sample, child, in_turn, report

NBYTES = 1 << 30
"""Far beyond any last-level cache."""


def describe() -> str:
    """Processor, cores, memory and versions, as Markdown lines."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "safetensors", "numpy"))
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    pages = huge.read_text("ascii").partition("[")[2].partition("]")[0] if huge.exists() else "unknown"
    return (
        f"{_processor()}, {os.cpu_count()} cores, {memory:.1f} GiB of memory, Linux {platform.release()}, "
        f"transparent huge pages: {pages}.  \nPython {platform.python_version()}, {packages}."
    )


def bandwidth(runs: int) -> Runs:
    """Copy and read rates of two threads, in bytes a second."""
    return in_turn({"machine": partial(child, "machine")}, runs)["machine"]


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text("utf-8").splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _rates() -> Sample:
    import torch

    source = torch.ones(NBYTES // 4)
    target = torch.zeros(NBYTES // 4)
    rows = source.view(-1, 4096)
    vector = torch.ones(4096)
    # A copy reads and writes: the rate counts the bytes copied, once.
    return {
        "copy": NBYTES / _best(lambda: target.copy_(source)),
        "sum": NBYTES / _best(source.sum),
        "product": NBYTES / _best(lambda: torch.mv(rows, vector)),
    }


def _best(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


if __name__ == "__main__":
    sys.exit(report(_rates()))
