"""waybill inspect: what a checkpoint is, from headers and config alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from waybill.cli.options import AsJson, Dequantize, Quiet
from waybill.cli.page import HTML, OVERWRITE, require_free, write_page
from waybill.cli.render import size, write_json, write_problems, write_table


def inspect(
    checkpoint: Annotated[
        str, typer.Argument(help="A folder with config.json and safetensors, a GGUF file, or a Hugging Face id.")
    ],
    dequantize: Dequantize = False,
    html: Annotated[Path | None, HTML] = None,
    overwrite: Annotated[bool, OVERWRITE] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Show what a checkpoint is: model, sizes, shards, ties, legal TP sizes, problems. Reads headers only.

    Of a Hugging Face id, ORG/NAME or ORG/NAME@REVISION, nothing else is downloaded.

    Example: waybill inspect ./Qwen3-0.6B --html report.html
    """
    from waybill.checkpoint import read_checkpoint
    from waybill.overview import describe

    require_free(html, overwrite)
    report = describe(read_checkpoint(checkpoint, dequantize=dequantize))
    if html:  # first: whoever reads what is printed may stop reading
        from waybill.report.page import inspect_page

        write_page(inspect_page(report, size), html, overwrite, quiet=quiet or as_json)
    if as_json:
        write_json("inspect", report.as_dict())
    else:
        write_table(report.rows(size))
        write_problems(report.bill.problems, report.bill.notices, quiet=quiet)
    if report.bill.problems:
        raise typer.Exit(1)
