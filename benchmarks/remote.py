"""A checkpoint by its id: what is fetched of 118 files to judge them, over loopback from a stand-in for the hub."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from benchmarks import checkpoints
from benchmarks.measure import ROOT, Row, Sample, in_turn, process

REPO = "org/model"


def rows(runs: int) -> Iterator[Row]:
    """One row each for `inspect` and `plan`."""
    with _served(checkpoints.large()) as server:
        told = json.loads(_tell(server))
        taken = in_turn({name: partial(_asked, server, told, name) for name in ("inspect", "plan")}, runs)
    for name, sampled in taken.items():
        fetched, requests = sampled.median("bytes") / 1e6, sampled.median("requests")
        yield Row(
            f"{name} by id, Qwen3-235B-A22B (36,945 tensors, 118 files, 470 GB), loopback, empty cache, whole process",
            f"{sampled.text()}, {fetched:.1f} MB in {requests:.0f} requests",
            "–",
            "–",
            "≤ 12 MB, ≤ 4 s",
            fetched <= 12 and sampled.median() <= 4,
            "64 KiB ahead of each file, and the index; each file's redirect is a request",
        )


def _asked(server: subprocess.Popen[str], told: dict[str, str], command: str) -> Sample:
    """One command with a cache of its own."""
    with tempfile.TemporaryDirectory() as cache:
        sample = process("-m", "waybill", command, REPO, **told | {"HF_HOME": cache, "HF_HUB_OFFLINE": "0"})
    return sample | json.loads(_tell(server))


def _tell(server: subprocess.Popen[str]) -> str:
    """What went out since the last time."""
    if server.stdin is None or server.stdout is None:
        raise TypeError("a server without pipes")
    server.stdin.write("\n")
    server.stdin.flush()
    return server.stdout.readline()


@contextmanager
def _served(folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "benchmarks.remote", str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        yield server
        server.terminate()


def main(folder: str) -> None:
    """The stand-in, in a process of its own: it answers a line with what it did."""
    from tests.hub import environment, serving

    with serving(Path(folder)) as hub:
        sizes = hub.files()
        hub.files = lambda: sizes  # type: ignore[method-assign]
        told = environment(hub, Path())
        sys.stdin.readline()
        print(json.dumps({name: told[name] for name in told if name.startswith("HF_")}), flush=True)
        for _ in sys.stdin:
            print(json.dumps({"bytes": sum(hub.sent.values()), "requests": len(hub.log)}), flush=True)
            hub.log.clear()
            hub.sent.clear()


if __name__ == "__main__":
    main(sys.argv[1])
