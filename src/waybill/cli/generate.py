"""waybill generate: text from a checkpoint, alone or as one rank under torchrun, or from an exported package."""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from waybill.cli.answers import Request, answer, encode
from waybill.cli.options import AsJson, Dequantize, Quiet
from waybill.cli.package import Media, refuse_choices_of_the_export, run_package
from waybill.cli.progress import Progress, download
from waybill.cli.render import count, write_problems
from waybill.errors import BadOption, BadRequest
from waybill.text.request import Sampling, check_request

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from waybill.engine.models.decoder import CausalLM
    from waybill.plan import Plan


class Loading(NamedTuple):
    """How a checkpoint's weights are wanted."""

    dtype: str | None
    device: str
    check_finite: bool
    dequantize: bool


def generate(
    checkpoint: Annotated[
        str, typer.Argument(help="A checkpoint folder, a GGUF file, a Hugging Face id, or an exported package.")
    ],
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="The text to continue; repeat for a batch.")
    ] = None,
    prompts_file: Annotated[
        Path | None, typer.Option(help="A file with one prompt a line, run as one batch.", dir_okay=False)
    ] = None,
    image: Annotated[
        list[Path] | None, typer.Option(help="A picture, for a package that sees; repeat in the order of places.")
    ] = None,
    audio: Annotated[
        list[Path] | None, typer.Option(help="A recording, for a package that hears; repeat in the order of places.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("-n", "--max-new-tokens", help="New tokens at most.", min=0)] = 128,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put each prompt through the checkpoint's chat template.")
    ] = False,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens of this total probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep this many likeliest tokens; 0 keeps all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Makes a sampled run repeatable.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, float16 or bfloat16; by default what the config says.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    check_finite: Annotated[
        bool, typer.Option("--check-finite", help="Refuse weights that hold NaN or infinity.")
    ] = False,
    dequantize: Dequantize = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Continue text. Under `torchrun --nproc-per-node N -m waybill generate …` the model is cut into N ranks.

    Example: waybill generate ./SmolLM2-135M-Instruct --chat --prompt "What is a waybill?" -n 64
    """
    # Heavy imports wait until usage errors have been found.
    from waybill.onnx.folder import is_package

    media = Media(image or [], audio or [])
    prompts = _prompts(prompt, prompts_file, optional=bool(media.audio))
    request = Request(
        prompts=prompts,
        chat=chat,
        max_new_tokens=max_new_tokens,
        sampling=Sampling(temperature, top_k, top_p, seed),
        as_json=as_json,
        quiet=quiet,
    )
    if is_package(Path(checkpoint)):
        refuse_choices_of_the_export(dtype, device, check_finite, dequantize)
        run_package(Path(checkpoint), request, media)
    elif media.image or media.audio:
        raise _no_media(media)
    else:
        _run_checkpoint(checkpoint, request, Loading(dtype, device, check_finite, dequantize))


def _no_media(media: Media) -> BadOption:
    return BadOption(
        "the engine reads text alone",
        expected="a package that was exported",
        found=f"{count(len(media.image) + len(media.audio), 'file')} for a checkpoint",
        fix="export the checkpoint with waybill export, and generate from the package",
    )


def _prompts(prompt: list[str] | None, file: Path | None, *, optional: bool) -> list[str]:
    prompts = list(prompt or [])
    if file is not None:
        try:
            prompts += [line for line in file.read_text("utf-8").splitlines() if line]
        except (OSError, UnicodeDecodeError) as error:
            raise BadRequest(
                "the prompts file cannot be read", where=str(file), expected="UTF-8 text, one prompt a line",
                found=str(error), fix="check the path and the encoding",
            ) from None  # fmt: skip
    if not prompts and not optional:
        raise typer.BadParameter("give at least one --prompt, or a --prompts-file", param_hint="--prompt")
    for number, text in enumerate(prompts, 1):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadRequest(
                "a prompt is not Unicode text", where=f"prompt {number}", expected="UTF-8", found=str(error),
                fix="check the terminal's encoding",
            ) from None  # fmt: skip
    return prompts


def _run_checkpoint(checkpoint: str, request: Request, loading: Loading) -> None:
    from waybill.engine.distributed import get_tp_info, join_group, leave_group
    from waybill.engine.generate import generate as run
    from waybill.text.tokenizer import stop_tokens

    try:
        join_group(loading.device)
        speaks = get_tp_info().is_primary()
        model, tokenizer, bill, encoded, load_seconds = _load(checkpoint, request, loading, speaks)
        generated = partial(
            run,
            model,
            encoded,
            max_new_tokens=request.max_new_tokens,
            stop_ids=stop_tokens(bill.checkpoint.generation_config, bill.checkpoint.config),
            sampling=request.sampling,
        )
        if speaks:
            answer(request, tokenizer, encoded, load_seconds, lambda on_token: generated(on_token=on_token))
        else:
            generated()
    finally:
        leave_group()


def _load(
    checkpoint: str, request: Request, loading: Loading, speaks: bool
) -> tuple[CausalLM, Tokenizer, Plan, list[list[int]], float]:
    """Everything that can be refused cheaply is, before weights are read."""
    import waybill
    from waybill.checkpoint import read_checkpoint
    from waybill.engine.distributed import agreeing, get_tp_info
    from waybill.engine.load import fetch, load_model
    from waybill.plan import Plan
    from waybill.text.gguf import tokenizer_of

    tp = get_tp_info()
    speaks = speaks and not (request.quiet or request.as_json)
    bring = partial(download, wanted=speaks)
    with agreeing():
        opened = read_checkpoint(checkpoint, dequantize=loading.dequantize)
        bill = waybill.plan(opened, tp=tp.size, rank=tp.rank, dtype=loading.dtype)
        bill.require_clean()
        if opened.remote is not None and opened.metadata is not None:
            tokenizer_of(opened.metadata, opened.name)
    # The tokenizer comes before the weights, unless they are one file, and is judged first: prompts may be refused.
    bill = fetch(bill, partial(Plan.fetched, files=()) if opened.metadata is None else bring)
    with agreeing():
        tokenizer, encoded = encode(opened.location, request)
        if bill.config and bill.config.text:
            text = bill.config.text
            check_request(
                encoded,
                request.max_new_tokens,
                vocab_size=text.vocab_size,
                max_position=text.rotary_config.max_position,
            )
    if speaks:
        write_problems((), bill.notices)
    bill = fetch(bill, bring)
    start = time.perf_counter()
    with Progress("loading", bill.result_bytes, wanted=speaks) as advance:
        model = load_model(
            bill.checkpoint, device=loading.device, check_finite=loading.check_finite, bill=bill, progress=advance
        )
    seconds = time.perf_counter() - start
    if speaks:
        print(f"{bill.summary()}; loaded in {seconds:.2f} s", file=sys.stderr)
    return model, tokenizer, bill, encoded, seconds
