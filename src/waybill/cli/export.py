"""waybill export: an ONNX package from a checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from waybill.checkpoint import read_checkpoint
from waybill.cli.options import AsJson, Dequantize, Quiet
from waybill.cli.progress import Progress, download
from waybill.cli.render import size, write_json, write_line, write_problems, write_table

if TYPE_CHECKING:
    from waybill.onnx.package import ModelPackage, Receipt


def export(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint folder, a GGUF file, or a Hugging Face id.")],
    output: Annotated[Path, typer.Argument(help="The package's folder, made by this command.")],
    dtype: Annotated[
        str | None, typer.Option(help="float32, float16 or bfloat16; float32 by default on a CPU.")
    ] = None,
    ep: Annotated[str, typer.Option(help="The execution provider that will run it: cpu or cuda.")] = "cpu",
    exact: Annotated[
        bool, typer.Option("--exact", help="Packed products in float, several times slower, instead of 8-bit inputs.")
    ] = False,
    logits: Annotated[str, typer.Option(help="last: of each request's last position; all: for scoring.")] = "last",
    link: Annotated[
        bool, typer.Option("--link", help="Refer to the checkpoint's own files by hard links; nothing is copied.")
    ] = False,
    dequantize: Dequantize = False,
    widen_mxfp4: Annotated[
        bool, typer.Option("--widen-mxfp4", help="Experts of 4-bit floats as 8-bit integers, exactly; twice the bytes.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a package that is there.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Write a package for ONNX Runtime: graph, weights, tokenizer, genai_config.json and waybill.json.

    Example: waybill export ./SmolLM2-135M-Instruct ./smollm2-onnx
    """
    import waybill
    from waybill.onnx.publish import require_free

    require_free(output, overwrite=overwrite)
    opened = read_checkpoint(checkpoint, dequantize=dequantize)
    bring = partial(download, wanted=not (quiet or as_json))
    package = waybill.build(
        opened, dtype=dtype, ep=ep, exact=exact, logits=logits, link=link, widen_mxfp4=widen_mxfp4, bring=bring
    )
    if not as_json:
        write_problems((), package.notices, quiet=quiet)
    with Progress("writing", package.nbytes, wanted=not (quiet or as_json)) as advance:
        receipt = package.save(output, overwrite=overwrite, link=link, progress=advance)
    unlinked = "nothing could be linked: no initializer lies in the checkpoint's files as it is; all was copied"
    notices = [*package.notices, unlinked] if link and not receipt.linked_bytes else package.notices
    if as_json:
        write_json("export", _answer(package, receipt, notices))
        return
    write_problems((), notices[len(package.notices) :], quiet=quiet)
    linked = f" and {size(receipt.linked_bytes)} linked" if receipt.linked_bytes else ""
    write_line(f"wrote {receipt.folder}: {size(receipt.data_bytes)} of weights{linked}")
    if len(package) > 1:
        write_table((name, size(component.nbytes)) for name, component in package.items())
    if package.shared_bytes:
        print(f"{size(package.shared_bytes)} used by several components, stored once")
    flush = f", {receipt.flush_seconds:.2f} s of it to flush" if receipt.flush_seconds >= 0.01 else ""
    if not quiet:
        print(f"{receipt.summary}; {receipt.seconds:.2f} s{flush}", file=sys.stderr)


def _answer(package: ModelPackage, receipt: Receipt, notices: Sequence[str]) -> dict[str, Any]:
    """The JSON form."""
    return {
        "package": str(receipt.folder),
        "components": list(package),
        "component_bytes": {name: component.nbytes for name, component in package.items()},
        "shared_bytes": package.shared_bytes,
        "data_bytes": receipt.data_bytes,
        "linked_bytes": receipt.linked_bytes,
        "seconds": round(receipt.seconds, 3),
        "flush_seconds": round(receipt.flush_seconds, 3),
        "summary": receipt.summary,
        "notices": notices,
    }
