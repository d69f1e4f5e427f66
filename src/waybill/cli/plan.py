"""waybill plan: the bill of a load, before a byte moves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from waybill.cli.options import AsJson, Dequantize, Quiet
from waybill.cli.page import HTML, OVERWRITE, require_free, write_page
from waybill.cli.render import size, write_json, write_line, write_problems, write_table

if TYPE_CHECKING:
    from waybill.plan import Plan


SOME = 4
"""Tensors dropped for one reason that are named without --full."""


def plan(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint folder, a GGUF file, or a Hugging Face id.")],
    target: Annotated[str, typer.Option(help="What the weights are for: torch or onnx.")] = "torch",
    tp: Annotated[int, typer.Option(help="Number of tensor-parallel ranks.", min=1)] = 1,
    rank: Annotated[int, typer.Option(help="The rank to plan for.", min=0)] = 0,
    dtype: Annotated[
        str | None, typer.Option(help="float32, float16 or bfloat16; by default what the config says.")
    ] = None,
    ep: Annotated[str, typer.Option(help="For onnx, what will run it: cpu or cuda.")] = "cpu",
    link: Annotated[bool, typer.Option("--link", help="For onnx, plan an export with --link.")] = False,
    dequantize: Dequantize = False,
    widen_mxfp4: Annotated[
        bool, typer.Option("--widen-mxfp4", help="For onnx, plan an export with --widen-mxfp4.")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="One row a parameter, without folding equal layers; every dropped tensor.")
    ] = False,
    html: Annotated[Path | None, HTML] = None,
    overwrite: Annotated[bool, OVERWRITE] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Show where every parameter's bytes come from, what that costs, and everything that does not add up.

    Example: waybill plan ./Qwen3-0.6B --tp 2 --rank 1 --html bill.html
    """
    import waybill
    from waybill.checkpoint import read_checkpoint

    require_free(html, overwrite)
    opened = read_checkpoint(checkpoint, dequantize=dequantize)
    bill = waybill.plan(opened, target, tp=tp, rank=rank, dtype=dtype, ep=ep, link=link, widen_mxfp4=widen_mxfp4)
    extra = _package_facts(bill) if target == "onnx" else {}
    if html:  # first: whoever reads what is printed may stop reading
        from waybill.report.page import plan_page

        write_page(plan_page(bill, dict(_package_rows(extra)), size), html, overwrite, quiet=quiet or as_json)
    if as_json:
        write_json("plan", bill.as_dict() | extra)
    else:
        _write(bill, full, extra, quiet)
    if bill.problems:
        raise typer.Exit(1)


def _package_facts(bill: Plan) -> dict[str, Any]:
    """What only a package has: a size on disk, and providers that can run it or cannot."""
    import shutil

    from waybill.onnx.providers import verdicts

    if bill.config is None:
        return {}
    providers = verdicts(bill.config, bill.specs, bill.dtype)
    return {"free_disk_bytes": shutil.disk_usage(Path.cwd()).free, "providers": providers}


def _verdict(verdict: Mapping[str, Any]) -> str:
    """What one provider can, in a line."""
    if not verdict["runs"]:
        return "; ".join(verdict["because"])
    scratch, options = verdict.get("scratch_bytes"), verdict.get("options", {})
    unpacks = f"; unpacks a layer's experts into {size(scratch)} of its memory" if scratch else ""
    return f"can run it{unpacks}" + "".join(f"; set {name} to {value} or more" for name, value in options.items())


def _package_rows(extra: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The same for people."""
    if extra:
        yield "free disk", f"{size(extra['free_disk_bytes'])} here"
        yield from ((name, _verdict(verdict)) for name, verdict in extra["providers"].items())


def _write(bill: Plan, full: bool, extra: dict[str, Any], quiet: bool) -> None:
    from waybill.plan.fold import fold

    if bill.bindings:
        header = ("parameter", "shape", "dtype", "sources", "operations", "read")
        write_table((row.cells(size) for row in fold(bill.bindings, full)), header, right=(3, 5))
        print()
        rows = [
            ("read", f"{size(bill.bytes_read)} of {size(bill.checkpoint.nbytes)} stored"),
            ("result", f"{size(bill.result_bytes)} in {bill.dtype}"),
            ("peak", f"{size(bill.peak_bytes)} of host memory"),
        ]
        if extra:
            rows += _package_rows(extra)
        else:
            rows.append(("ranks", f"{bill.tp}; this is the bill of rank {bill.rank}"))
        write_table(rows)
    reasons: dict[str, list[str]] = {}
    for name, reason in bill.ignored.items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        listed = names if full or len(names) <= SOME else [f"{len(names)} tensors, {names[0]} and others"]
        for name in listed:
            write_line(f"dropped {name}: {reason}")
    write_problems(bill.problems, bill.notices, quiet=quiet)
    if not bill.problems:
        write_line(bill.summary())
