"""Proving a package: against itself, in the runtime, and against the checkpoint it was made from."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from waybill.errors import BadPackage, Refused, WaybillError
from waybill.onnx import require
from waybill.onnx.verify.described import check_description
from waybill.onnx.verify.digests import check_digests
from waybill.onnx.verify.entries import Entry, PackageEntries, read_entries
from waybill.onnx.verify.origin import Origin
from waybill.onnx.verify.proof import prove, unaccounted
from waybill.onnx.verify.structure import examine, locate, overlaps
from waybill.onnx.verify.trial import CPU, provider_for, run_steps

Progress = Callable[[int], None]


@dataclass(slots=True)
class Report:
    """What was proven of a package. `problems` are what was not; the other counts then say how far it came.

    `runs`: for each component what ran and where, or why nothing could. `weights`: how many were compared with the
    checkpoint value by value, None without one; `sources`: the stored tensors they account for.
    """

    package: Path
    initializers: int = 0
    data_bytes: int = 0
    runs: dict[str, str] = field(default_factory=dict)
    weights: int | None = None
    sources: int = 0
    dropped: Mapping[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    problems: list[WaybillError] = field(default_factory=list)

    def require_clean(self) -> None:
        """Raise Refused with every problem, if there is any."""
        if self.problems:
            raise Refused(self.problems)

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        checkpoint = {"weights": self.weights, "sources": self.sources} if self.weights is not None else None
        return {
            "package": str(self.package),
            "proven": not self.problems,
            "initializers": self.initializers,
            "data_bytes": self.data_bytes,
            "runs": self.runs,
            "checkpoint": checkpoint,
            "dropped": [{"name": name, "reason": reason} for name, reason in self.dropped.items()],
            "seconds": {stage: round(seconds, 3) for stage, seconds in self.seconds.items()},
            "problems": [problem.as_dict() for problem in self.problems],
        }


def verify_package(folder: str | Path, origin: Origin | None, progress: Progress = lambda _: None) -> Report:
    """Prove what can be proven; nothing is run that disagrees with its own bill.

    Raises:
        BadPackage: there is no package, or its waybill.json is malformed.
    """
    package = read_entries(folder)
    report = Report(Path(folder), dropped=package.dropped)
    every = {entry.place: entry for c in package.components.values() for entry in c.initializers.values()}
    report.initializers, report.data_bytes = len(every), package.nbytes
    wrong: dict[str, list[WaybillError]] = {}
    readable: list[Entry] = []
    for name, component in package.components.items():
        clock = time.perf_counter()
        found, sound = examine(package.root, component)
        found += check_digests(package.root, sound, progress)
        readable += sound
        clock = _lap(report, "digests", clock)
        if origin is not None:
            compared, differ = prove(package.root, component, sound, origin, progress)
            found += differ
            report.weights = (report.weights or 0) + compared
            _lap(report, "checkpoint", clock)
        wrong[name] = found
    whole = list(overlaps(readable))
    if origin is not None:
        whole += unaccounted(package, origin)
        report.sources = len({source for component in package.components.values() for source in component.sources})
    if not whole and not any(wrong.values()):
        whole += check_description(package, origin.facts if origin is not None else {})
    for name, component in package.components.items():
        clock = time.perf_counter()
        if whole or wrong[name]:
            report.runs[name] = "not run: the package is not what it should be"
        else:
            wrong[name] = _trial(package, name, component.file, report)
            _lap(report, "run", clock)
    report.problems += [*whole, *(problem for problems in wrong.values() for problem in problems)]
    return report


def _trial(package: PackageEntries, name: str, file: str, report: Report) -> list[WaybillError]:
    available = require("onnxruntime").get_available_providers()
    provider = provider_for(package.ep, package.obstacles, available)
    if provider is None:
        because = "; ".join(package.obstacles.get(CPU, ())) or f"no {CPU}"
        report.runs[name] = f"not run here: {because}"
        return []
    try:
        ran, problems = run_steps(locate(package.root, file), provider)
    except BadPackage as error:
        ran, problems = "", [error]
    report.runs[name] = "failed" if problems else ran
    return problems


def _lap(report: Report, stage: str, since: float) -> float:
    now = time.perf_counter()
    report.seconds[stage] = report.seconds.get(stage, 0.0) + now - since
    return now
