"""What all commands share on the terminal: sizes, tables, problems. Data goes to stdout, everything else to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from waybill.errors import WaybillError, printable


def size(nbytes: float) -> str:
    """Bytes in decimal units, three digits: 1.19 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}" if unit != "B" else f"{nbytes:.0f} B"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"


def write_json(value: Any) -> None:
    """One JSON document on stdout."""
    json.dump(value, sys.stdout, indent=2)  # ASCII: a name may hold what no encoding can write
    sys.stdout.write("\n")


def write_table(rows: Iterable[Sequence[str]], header: Sequence[str] | None = None, right: Sequence[int] = ()) -> None:
    """A plain aligned table; the columns listed in `right` are right-aligned."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=header is not None, header_style="bold")
    lines = [list(row) for row in rows]
    width = len(header) if header else max((len(line) for line in lines), default=0)
    for column in range(width):
        table.add_column(
            header[column] if header else "",
            justify="right" if column in right else "left",
            overflow="fold",
            style="" if header or column else "dim",
        )
    for line in lines:
        table.add_row(*(Text(printable(cell)) for cell in line))
    console = Console(file=sys.stdout, highlight=False)
    if not sys.stdout.isatty():
        console.width = 110  # a pipe has no width; do not fold to a default of 80
    console.print(table)


def write_problems(problems: Sequence[WaybillError], notices: Sequence[str] = ()) -> None:
    """Notices, then problems, on stderr."""
    for notice in notices:
        print(printable(f"note: {notice}"), file=sys.stderr)
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        print(f"refused: {len(problems)} problem{'s' if len(problems) > 1 else ''}", file=sys.stderr)
