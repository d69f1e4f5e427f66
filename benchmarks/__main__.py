"""`python -m benchmarks [--only NAME] [--runs N]`: measure, print the table, and put it into benchmarks/README.md."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from datetime import date
from itertools import chain
from pathlib import Path

from benchmarks import composite, decode, load, machine, onnx_decode, onnx_export, packed, remote, startup
from benchmarks.measure import Bystanders, Row, Runs

README = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
HEADER = ("measure", "measured", "peers", "ratio", "reach", "met", "what limits it")

Suite = Callable[[int, Runs], Iterable[Row]]

SUITES: dict[str, tuple[Suite, int]] = {
    "headers": (lambda runs, _: load.headers(runs), 5),
    "remote": (lambda runs, _: remote.rows(runs), 5),
    "load": (lambda runs, _: load.rows(runs), 5),
    "packed": (packed.rows, 5),
    "startup": (lambda runs, _: startup.rows(runs), 5),
    "decode": (decode.rows, 3),
    "composite": (lambda runs, _: composite.rows(runs), 3),
    "onnx": (lambda runs, _: chain(onnx_export.rows(runs), onnx_decode.rows(runs)), 3),
}
"""Each suite, and how often it runs unless told."""


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", choices=SUITES, help="one suite; the table in README.md is then left alone")
    parser.add_argument("--runs", type=int, help="how often to run each contestant")
    options = parser.parse_args()
    start, bystanders = time.perf_counter(), Bystanders()
    limits = machine.bandwidth(options.runs or 3)
    rows: list[Row] = []
    for name, (suite, runs) in SUITES.items():
        if options.only in (None, name):
            for row in suite(options.runs or runs, limits):
                print(" | ".join(row.cells()), file=sys.stderr, flush=True)
                rows.append(row)
    text = _document(rows, limits, time.perf_counter() - start, bystanders.share())
    print(text)
    if options.only is None:
        _put(text)


def _document(rows: list[Row], limits: Runs, seconds: float, others: float) -> str:
    rates = ", ".join(
        f"{limits.median(name) / 1e9:.1f} GB/s {what}"
        for name, what in (("copy", "copied"), ("sum", "read by a sum"), ("product", "read by a float32 product"))
    )
    table = [HEADER, ("---",) * len(HEADER), *(row.cells() for row in rows)]
    return "\n".join(
        [
            f"{date.today():%Y-%m-%d}. {machine.describe()}  ",
            f"Two torch threads, 1 GiB buffers: {rates}.  ",
            f"Measured in {seconds:.0f} s; other processes took {others:.0%} of the processors meanwhile.",
            "",
            *(f"| {' | '.join(cells)} |" for cells in table),
        ]
    )


def _put(text: str) -> None:
    before, _, rest = README.read_text("utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    README.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", "utf-8")


if __name__ == "__main__":
    main()
