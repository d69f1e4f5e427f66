"""waybill verify: a package proven against itself, in the runtime, and against its checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from waybill.cli.options import AsJson, Quiet
from waybill.cli.progress import Progress
from waybill.cli.render import size, write_json, write_line, write_problems
from waybill.errors import printable

if TYPE_CHECKING:
    from waybill.onnx.verify.report import Report


def verify(
    package: Annotated[Path, typer.Argument(help="A package folder, as waybill export wrote it.")],
    checkpoint: Annotated[
        str | None, typer.Option(help="Prove every weight equal to this checkpoint's, value by value.")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Prove a package: graph, files and digests agree, it runs, and with --checkpoint its weights are the original's.

    Example: waybill verify ./smollm2-onnx --checkpoint ./SmolLM2-135M-Instruct
    """
    import waybill
    from waybill.onnx.verify.entries import read_entries

    nbytes = read_entries(package).nbytes * (1 if checkpoint is None else 2)
    with Progress("verifying", nbytes, wanted=not (quiet or as_json)) as advance:
        report = waybill.verify(package, checkpoint, progress=advance)
    if as_json:
        write_json("verify", report.as_dict())
    elif report.problems:
        write_problems(report.problems)
    else:
        _write(report, quiet)
    if report.problems:
        raise typer.Exit(1)


def _write(report: Report, quiet: bool) -> None:
    write_line(f"{report.initializers} initializers, {size(report.data_bytes)}: in place, every digest right")
    if report.weights is not None:
        write_line(
            f"{report.weights} weights equal the checkpoint value by value, {report.sources} tensors accounted for"
        )
    for name, outcome in report.runs.items():
        write_line(f"{name}: {outcome}")
    if report.dropped:
        print(f"{len(report.dropped)} tensors dropped by rule")
    times = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in report.seconds.items())
    if not quiet:
        print(f"proven: {printable(str(report.package))}; {times}", file=sys.stderr)
