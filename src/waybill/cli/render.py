"""What all commands share on the terminal: sizes, tables, problems. Data goes to stdout, everything else to stderr."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

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


def is_terminal(stream: TextIO) -> bool:
    """Whether somebody looks on, at something that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def width() -> int:
    """Columns of the terminal; a pipe has no width, there a row is a line."""
    from rich.console import Console

    return Console(file=sys.stdout).width if sys.stdout.isatty() else ENDLESS


def write_json(schema: str, document: Mapping[str, Any]) -> None:
    """One JSON document on stdout, which begins with the name and version of its schema."""
    # ASCII: a name may hold what no encoding can write.
    json.dump({"schema": f"waybill/{schema}/1", **document}, sys.stdout, indent=2)
    sys.stdout.write("\n")


def write_table(rows: Iterable[Sequence[str]], header: Sequence[str] | None = None, right: Sequence[int] = ()) -> None:
    """A plain aligned table; the columns listed in `right` are right-aligned.

    One with a header that is wider than the terminal has its first column, names, on lines of their own: a name is
    never broken. A pipe has no width; there a row is a line.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    plain = not is_terminal(sys.stdout) or "NO_COLOR" in os.environ  # no bold either
    console = Console(file=sys.stdout, highlight=False, width=width(), color_system=None if plain else "auto")
    lines = [[printable(cell) for cell in row] for row in rows]
    if header:
        widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
        if sum(widths) + len(GAP) * (len(widths) - 1) > console.width:
            _write_stacked([header, *lines], widths, right)
            return
    table = Table(box=None, pad_edge=False, show_header=header is not None, header_style="bold")
    for column in range(len(header) if header else max(map(len, lines), default=0)):
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
        print(name)
        write_line(GAP + GAP.join(aligned).rstrip(), indent=2 * GAP)


def write_line(text: str, indent: str = GAP) -> None:
    """A line of words on stdout, broken between them where the terminal ends; what follows is indented."""
    text = printable(text)
    if len(text) > width():
        text = textwrap.fill(
            text,
            width(),
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
            drop_whitespace=True,
        )
    print(text)


def write_problems(problems: Sequence[WaybillError], notices: Sequence[str] = (), *, quiet: bool = False) -> None:
    """Notices, unless they are not wanted, then problems, on stderr."""
    for notice in () if quiet else notices:
        print(printable(f"note: {notice}"), file=sys.stderr)
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        print(f"refused: {len(problems)} problem{'s' if len(problems) > 1 else ''}", file=sys.stderr)
