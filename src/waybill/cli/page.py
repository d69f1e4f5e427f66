"""The options that `inspect` and `plan` share: a report to look at."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from waybill.errors import printable

HTML = typer.Option(help="Write a report to look at, too: one file, for any browser, without network or scripts.")
OVERWRITE = typer.Option("--overwrite", help="Replace a report that is there.")


def require_free(target: Path | None, overwrite: bool) -> None:
    """Refuse a report's place before anything is computed, if a report is wanted at all."""
    if target is not None:
        from waybill.report import write

        write.require_free(target, overwrite=overwrite)


def write_page(page: str, target: Path, overwrite: bool, *, quiet: bool) -> None:
    """Put a report in its place, and say where that is."""
    from waybill.report.write import write_report

    write_report(page, target, overwrite=overwrite)
    if not quiet:
        print(printable(f"report: {target}"), file=sys.stderr)
