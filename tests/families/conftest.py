"""The table in docs/components.md, written from the tests of the matrix that passed: `make families`."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "components.md"
BEGIN, END = "<!-- families: begin -->\n", "<!-- families: end -->\n"
Cell = tuple[str, str]
WANTED = "WAYBILL_WRITE_TABLE"
COUNTS: dict[Cell, list[bool]] = defaultdict(list)
"""By family and layout: whether each test of it passed."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and (told := dict(report.user_properties)).keys() >= {"family", "layout"}:
        COUNTS[str(told["family"]), str(told["layout"])].append(report.passed)


def pytest_sessionfinish() -> None:
    if WANTED not in os.environ:
        return
    families, layouts = (list(dict.fromkeys(cell[at] for cell in COUNTS)) for at in (0, 1))
    rows = [["", *layouts], ["---"] * (len(layouts) + 1)]
    rows += [[family, *("✓" if all(COUNTS[family, layout]) else "fails" for layout in layouts)] for family in families]
    before, rest = PAGE.read_text("utf-8").split(BEGIN)
    after = rest.split(END)[1]
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    PAGE.write_text(before + BEGIN + table + END + after, "utf-8")
