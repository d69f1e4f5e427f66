"""Exporting ONNX packages: whole processes, wall time and peak memory, beside the peers on the same checkpoint.

The peers run under the Python that WAYBILL_BENCH_PEERS names, by default this one. One that is not installed there is
left out, and the row says so.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from benchmarks import checkpoints, startup
from benchmarks.measure import Failed, Row, Runs, Sample, in_turn_or_why, process, warm

OURS = "waybill"
DISTRIBUTIONS = {"mobius": "mobius-onnx", "genai builder": "onnxruntime-genai"}
"""Peers, and the package that each comes in."""
FLOAT_HEAD = "nodes_to_exclude=/lm_head/MatMul,/model/embed_tokens/Gather"
"""The builder rounds the head and the embedding to 4 bits unless told; these checkpoints store them in float."""
PEAK = 350
"""MB of resident memory that no export may exceed."""


class Case(NamedTuple):
    """One checkpoint to export. `bits` of its packed weights, 0 when it has none."""

    label: str
    folder: Path
    bits: int
    reach: float
    limit: str
    link: bool = False


def cases() -> Iterator[Case]:
    """Every export that is measured."""
    smol = startup.model()
    yield Case(
        "SmolLM2-135M float32", smol, 0, 2.0, "importing numpy, onnx_ir and typer; then hashing what was written"
    )
    yield Case(
        "SmolLM2-135M float32, linked",
        smol,
        0,
        1.2,
        "importing numpy, onnx_ir and typer; then hashing the checkpoint",
        link=True,
    )
    yield Case("Qwen3-0.6B bfloat16 to float32", checkpoints.dense(), 0, 5.0, "widening, hashing and writing 2.4 GB")
    for bits in (4, 8):
        folder = checkpoints.gptq_smol(smol, bits)
        yield Case(f"SmolLM2-135M GPTQ {bits}-bit", folder, bits, 2.0, "imports; then planning 902 tensors")


def rows(runs: int) -> Iterator[Row]:
    """One row a checkpoint, and one for linking."""
    for case in cases():
        warm(checkpoints.weights(case.folder))
        with scratch() as folder:
            out = folder / "package"
            contestants = {OURS: partial(export, OURS, case.folder, out, case.bits, link=case.link)}
            absent = {}
            if not case.link:
                absent = missing()
                for name in DISTRIBUTIONS:
                    if name not in absent:
                        contestants[name] = partial(export, name, case.folder, out, case.bits)
            taken, failed = in_turn_or_why(contestants, runs)
        yield _row(case, taken, failed | absent)


def _row(case: Case, taken: dict[str, Runs], failed: dict[str, str]) -> Row:
    if OURS not in taken:
        return Row(f"export, {case.label}, whole process", "–", "–", "–", "–", False, failed[OURS])
    ours = taken.pop(OURS)
    seconds, peak = ours.median("unflushed"), ours.median("peak") / 1e6
    best = min((runs.median() for runs in taken.values()), default=None)
    theirs = [f"{name} {runs.text()}, {runs.median('peak') / 1e6:.0f} MB" for name, runs in sorted(taken.items())]
    return Row(
        f"export, {case.label}, {ours.samples[0]['bytes'] / 1e6:.0f} MB written, whole process",
        f"{ours.text('s', 'unflushed')} and {ours.median('flush'):.2f} s to flush, {peak:.0f} MB",
        "; ".join([*theirs, *(f"{name}: {why}" for name, why in sorted(failed.items()))]) or "–",
        f"{seconds / best:.2f} × the faster peer (peers do not flush)" if best else "–",
        f"≤ {case.reach:g} s without the flush, ≤ {PEAK} MB",
        seconds <= case.reach and peak <= PEAK,
        case.limit,
    )


def export(name: str, checkpoint: Path, out: Path, bits: int, *, link: bool = False, own_head: bool = False) -> Sample:
    """One package by one exporter, which finds no folder there and no earlier writes under way.

    `own_head` lets the builder round a float head to 4 bits, as it does unless told.
    """
    shutil.rmtree(out, ignore_errors=True)
    os.sync()
    if name == OURS:
        sample = process("-m", "waybill", "export", str(checkpoint), str(out), "--json", *["--link"][: int(link)])
        receipt = json.loads(sample["output"])
        flush = receipt["flush_seconds"]
        sample |= {"flush": flush, "unflushed": sample["seconds"] - flush, "bytes": receipt["data_bytes"]}
        return sample
    if name == "mobius":
        arguments = ["mobius", "build", "--config", str(checkpoint), "--ep", "cpu", "--dtype", "f32", str(out)]
    else:
        head = ["--extra_options", FLOAT_HEAD] if bits and not own_head else []
        arguments = ["onnxruntime_genai.models.builder", "-i", str(checkpoint), "-o", str(out), "-e", "cpu",
                     "-p", "int4" if bits else "fp32", "-c", str(out.with_name("cache")), *head]  # fmt: skip
    return process("-m", *arguments, python=peers())


def peers() -> str:
    """The Python that has the peers."""
    return os.environ.get("WAYBILL_BENCH_PEERS") or sys.executable


@cache
def _version(distribution: str) -> str | None:
    try:
        code = f"from importlib.metadata import version; print(version({distribution!r}))"
        return str(process("-c", code, python=peers())["output"]).strip()
    except Failed:
        return None


def missing() -> dict[str, str]:
    """Peers that are not installed."""
    return {name: f"{pip} is not installed" for name, pip in DISTRIBUTIONS.items() if _version(pip) is None}


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder on the disk of the synthetic checkpoints, removed with what is in it."""
    checkpoints.home().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="export-", dir=checkpoints.home()) as folder:
        yield Path(folder)
