"""One measurement is one fresh process; a comparison takes its contestants in turn, so that drift hits all alike."""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
THREADS = 2
MIB = 1 << 20

Sample = dict[str, Any]
"""What one run measured, by name."""


@dataclass(frozen=True)
class Row:
    """A line of the table. `ratio` and `reach` are text; `met` says whether the one is within the other."""

    measure: str
    measured: str
    peers: str
    ratio: str
    reach: str
    met: bool | None
    limit: str

    def cells(self) -> tuple[str, ...]:
        """The columns, in order."""
        met = {True: "yes", False: "**no**", None: ""}[self.met]
        return self.measure, self.measured, self.peers, self.ratio, self.reach, met, self.limit


class Runs(NamedTuple):
    """All samples of one contestant."""

    samples: list[Sample]

    def median(self, name: str = "seconds") -> float:
        """The middle one."""
        return statistics.median(sample[name] for sample in self.samples)

    def text(self, unit: str = "s", name: str = "seconds", digits: int = 2) -> str:
        """Median, least and most."""
        values = [sample[name] for sample in self.samples]
        return f"{self.median(name):.{digits}f} {unit} ({min(values):.{digits}f}–{max(values):.{digits}f})"


class Failed(RuntimeError):
    """A process that ended with an error, and the last line it wrote."""


def process(*arguments: str, python: str = sys.executable, **variables: str) -> Sample:
    """Run Python with these arguments; the whole process's wall time, peak resident bytes, and output.

    This process stays small and without torch: on Linux a child's peak starts at what its parent had used.
    """
    with tempfile.TemporaryFile() as errors:  # a pipe that nobody reads would stop a process that says much
        start = time.perf_counter()
        child = subprocess.Popen(
            [python, *arguments], cwd=ROOT, env=_environment() | variables, stdout=subprocess.PIPE, stderr=errors
        )
        output = child.stdout.read() if child.stdout else b""
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - start
        errors.seek(0)
        said = errors.read().decode(errors="replace")
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        last = (said.splitlines() or [""])[-1].strip()
        raise Failed(f"python {' '.join(arguments)} ended with {child.returncode}: {last}")
    return {"seconds": seconds, "peak": usage.ru_maxrss << 10, "output": output.decode()}


def child(module: str, *arguments: str) -> Sample:
    """Run `benchmarks.<module>` and take the sample it reports from inside."""
    return dict(json.loads(process("-m", f"benchmarks.{module}", *arguments)["output"].splitlines()[-1]))


def report(sample: Sample) -> None:
    """The last thing a child does."""
    print(json.dumps(sample), flush=True)


def in_turn(contestants: Mapping[str, Callable[[], Sample]], runs: int) -> dict[str, Runs]:
    """A B C, A B C, …"""
    samples: dict[str, list[Sample]] = {name: [] for name in contestants}
    for _ in range(runs):
        for name, run in contestants.items():
            samples[name].append(run())
    return {name: Runs(taken) for name, taken in samples.items()}


def in_turn_or_why(
    contestants: Mapping[str, Callable[[], Sample]], runs: int
) -> tuple[dict[str, Runs], dict[str, str]]:
    """The same, where who fails once is out: the samples of the others, and why they are."""
    samples: dict[str, list[Sample]] = {name: [] for name in contestants}
    failed: dict[str, str] = {}
    for _ in range(runs):
        for name, run in contestants.items():
            if name not in failed:
                try:
                    samples[name].append(run())
                except Failed as error:
                    failed[name] = str(error).rpartition(": ")[2] or str(error)
    return {name: Runs(taken) for name, taken in samples.items() if name not in failed}, failed


def warm(file: Path) -> None:
    """Read a file once, so that every contestant finds it in the page cache."""
    with file.open("rb", buffering=0) as stream:
        while stream.read(8 * MIB):
            pass


class Bystanders:
    """How busy everybody else kept the processors meanwhile; Linux counts in hundredths of a second."""

    def __init__(self) -> None:
        self._total, self._others = self._now()

    def share(self) -> float:
        """Others' part of all processor time since the start."""
        total, others = self._now()
        return max(others - self._others, 0) / max(total - self._total, 1e-9)

    @staticmethod
    def _now() -> tuple[float, float]:
        ticks = [int(n) / os.sysconf("SC_CLK_TCK") for n in Path("/proc/stat").read_text("ascii").split()[1:9]]
        idle = ticks[3] + ticks[4]
        own = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(ticks), sum(ticks) - idle - own


def resident(field: str) -> int:
    """Bytes of this process by /proc/self/status: VmRSS now, VmHWM at most so far."""
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    raise KeyError(field)


def _environment() -> dict[str, str]:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(THREADS))
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    return {**os.environ, **threads, **quiet}
