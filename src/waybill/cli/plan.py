"""waybill plan: the bill of a load, before a byte moves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from waybill.cli.render import size, write_json, write_problems, write_table
from waybill.errors import printable

if TYPE_CHECKING:
    from waybill.plan import Plan


def plan(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint folder.")],
    target: Annotated[str, typer.Option(help="What the weights are for: torch.")] = "torch",
    tp: Annotated[int, typer.Option(help="Number of tensor-parallel ranks.", min=1)] = 1,
    rank: Annotated[int, typer.Option(help="The rank to plan for.", min=0)] = 0,
    dtype: Annotated[
        str | None, typer.Option(help="float32, float16 or bfloat16; by default what the config says.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="One row a parameter, without folding equal layers.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show where every parameter's bytes come from, what that costs, and everything that does not add up.

    Example: waybill plan ./Qwen3-0.6B --tp 2 --rank 1
    """
    import waybill

    bill = waybill.plan(checkpoint, target, tp=tp, rank=rank, dtype=dtype)
    if as_json:
        write_json(bill.as_dict())
    else:
        _write(bill, full)
    if bill.problems:
        raise typer.Exit(1)


def _write(bill: Plan, full: bool) -> None:
    from waybill.plan.fold import fold

    if bill.bindings:
        header = ("parameter", "shape", "dtype", "sources", "operations", "read")
        write_table((row.cells(size) for row in fold(bill.bindings, full)), header, right=(3, 5))
        print()
        write_table(
            (
                ("read", f"{size(bill.bytes_read)} of {size(bill.checkpoint.nbytes)} stored"),
                ("result", f"{size(bill.result_bytes)} in {bill.dtype}"),
                ("peak", f"{size(bill.peak_bytes)} of host memory"),
                ("ranks", f"{bill.tp}; this is the bill of rank {bill.rank}"),
            )
        )
    for name, reason in bill.ignored.items():
        print(printable(f"dropped {name}: {reason}"))
    write_problems(bill.problems, bill.notices)
    if not bill.problems:
        print(bill.summary())
