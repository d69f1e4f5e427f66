"""What all commands share on the terminal: sizes, tables, problems. Data goes to stdout, everything else to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from waybill.errors import WaybillError, printable

GAP = "  "
"""Between two columns of a table."""
ENDLESS = 1 << 16
"""Characters; no line is that long."""


def size(nbytes: float) -> str:
    """Bytes in decimal units, three digits: 1.19 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}" if unit != "B" else f"{nbytes:.0f} B"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"


def count(number: int, noun: str) -> str:
    """A number of things; one of them has no s."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def write_json(value: Any) -> None:
    """One JSON document on stdout."""
    json.dump(value, sys.stdout, indent=2)  # ASCII: a name may hold what no encoding can write
    sys.stdout.write("\n")


def write_table(rows: Iterable[Sequence[str]], header: Sequence[str] | None = None, right: Sequence[int] = ()) -> None:
    """A plain aligned table; the columns listed in `right` are right-aligned.

    One with a header that is wider than the terminal has its first column, names, on lines of their own: a name is
    never broken. A pipe has no width; there a row is a line.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=sys.stdout, highlight=False)
    if not sys.stdout.isatty():
        console.width = ENDLESS
    lines = [[printable(cell) for cell in row] for row in rows]
    if header:
        widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
        if sum(widths) + len(GAP) * (len(widths) - 1) > console.width:
            _write_stacked([header, *lines], widths, right)
            return
    table = Table(box=None, pad_edge=False, show_header=header is not None, header_style="bold")
    width = len(header) if header else max((len(line) for line in lines), default=0)
    for column in range(width):
        table.add_column(
            header[column] if header else "",
            justify="right" if column in right else "left",
            overflow="fold",
            style="" if header or column else "dim",
        )
    for line in lines:
        table.add_row(*(Text(cell) for cell in line))
    console.print(table)


def _write_stacked(lines: Iterable[Sequence[str]], widths: Sequence[int], right: Sequence[int]) -> None:
    """Each row in two lines: its name, and below it the other cells, aligned."""
    for name, *cells in lines:
        aligned = [
            cell.rjust(widths[at]) if at in right else cell.ljust(widths[at]) for at, cell in enumerate(cells, 1)
        ]
        print(f"{name}\n{GAP}{GAP.join(aligned)}".rstrip())


def write_problems(problems: Sequence[WaybillError], notices: Sequence[str] = ()) -> None:
    """Notices, then problems, on stderr."""
    for notice in notices:
        print(printable(f"note: {notice}"), file=sys.stderr)
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        print(f"refused: {len(problems)} problem{'s' if len(problems) > 1 else ''}", file=sys.stderr)
