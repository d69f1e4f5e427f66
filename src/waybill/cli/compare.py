"""waybill compare: what differs between two checkpoints or packages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from waybill.cli.options import AsJson, Dequantize, Quiet
from waybill.cli.progress import Progress, download
from waybill.cli.render import count, write_json, write_line, write_table
from waybill.comparison import compare_sides, read_side, work
from waybill.differences import Comparison, Difference, Stored

DIFFER = 3
SOME = 20
"""Rows of a kind that are listed without --full."""
LONGEST = 60
"""Characters of a value of a config that are shown."""
TITLES = {"config": "settings", "components": "components", "layouts": "layouts", "tensors": "tensors"}


def compare(
    a: Annotated[str, typer.Argument(help="A checkpoint, a Hugging Face id, or a package that was exported.")],
    b: Annotated[str, typer.Argument(help="What it is compared with.")],
    values: Annotated[
        bool, typer.Option("--values", help="Also by value: the largest difference of each weight, packed or float.")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Every difference in a row of its own, with digests, and not the first 20.")
    ] = False,
    dequantize: Dequantize = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Show what differs in settings, components, layouts and tensors. Exit code 0: nothing does; 3: something does.

    Weights of a checkpoint and a package are always compared by value. 1 and 2 are refusals, as of every command.

    Example: waybill compare ./Qwen3-0.6B ./Qwen3-0.6B-GPTQ --values
    """
    described, wanted = (read_side(a, dequantize), read_side(b, dequantize)), not (quiet or as_json)
    one, other = (download(side, wanted=wanted) for side in described)
    with Progress("comparing", work(one, other, values=values), wanted=wanted) as advance:
        comparison = compare_sides(one, other, values=values, progress=advance)
    if as_json:
        write_json("compare", comparison.as_dict())
    else:
        _write(comparison, None if full else SOME)
    if not comparison.same:
        raise typer.Exit(DIFFER)


def _write(comparison: Comparison, most: int | None) -> None:
    for section, title in TITLES.items():
        _section(title, getattr(comparison, section), most)
    if comparison.values is not None:
        _section("on one side, or of another shape", comparison.weights or (), most)
        rows = [(each.weight, f"{each.largest:.3g}") for each in comparison.values[:most]]
        if rows:
            write_table(rows, ("weight", "largest difference"), right=(1,))
            _more(len(comparison.values) - len(rows))
            print()
        differ = f"{len(comparison.values)} of {count(comparison.weights_compared, 'weight')} differ in value"
        write_line(differ)
    if comparison.tensors_compared:
        write_line(f"{count(comparison.tensors_compared, 'tensor')} of the same name compared")
    write_line("the same" if comparison.same else "they differ")


def _section(title: str, found: Sequence[Difference], most: int | None) -> None:
    if not found:
        return
    from waybill.plan.fold import apart_from_layer, folded_name

    rows: dict[tuple[str, ...], list[str]] = {}
    for each in sorted(found, key=lambda each: -len(each.sides)):  # what both have comes first
        cells = _shown(each.sides, "a", most), _shown(each.sides, "b", most)
        cells = (cells[0], "other bytes") if cells[0] == cells[1] else cells
        rows.setdefault((*cells, *(apart_from_layer(each.name) if most else (each.name,))), []).append(each.name)
    listed = [(folded_name(names), *cells[:2]) for cells, names in rows.items()]
    write_table(listed[:most], (title, "a", "b"))
    _more(len(listed[most:]) if most else 0)
    print()


def _more(number: int) -> None:
    if number:
        print(f"and {number} more; --full lists them")


def _shown(sides: Mapping[str, Any], side: str, most: int | None) -> str:
    """A side in a cell; – where it says nothing. Digests are for those who want it all."""
    if side not in sides:
        return "–"
    value = sides[side]
    if isinstance(value, Stored) and most:
        value = value._replace(digest="")
    text = json.dumps(value) if isinstance(value, (str, bool, dict, list)) or value is None else str(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
