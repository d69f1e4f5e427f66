"""waybill generate: text from a checkpoint, alone or as one rank under torchrun."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from waybill.cli.render import write_json, write_problems
from waybill.errors import BadRequest

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from waybill.engine.generate import Generation
    from waybill.engine.models.decoder import CausalLM
    from waybill.plan import Plan


def generate(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint folder.")],
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="The text to continue; repeat for a batch.")
    ] = None,
    prompts_file: Annotated[
        Path | None, typer.Option(help="A file with one prompt a line, run as one batch.", dir_okay=False)
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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of streaming.")] = False,
) -> None:
    """Continue text. Under `torchrun --nproc-per-node N -m waybill generate …` the model is cut into N ranks.

    Example: waybill generate ./SmolLM2-135M-Instruct --chat --prompt "What is a waybill?" -n 64
    """
    prompts = _prompts(prompt, prompts_file)
    # Heavy imports start here, after usage errors have been found.
    from waybill.engine.distributed import get_tp_info, join_group, leave_group
    from waybill.engine.sampler import Sampling

    sampling = Sampling(temperature, top_k, top_p, seed)
    try:
        join_group(device)
        speaks = get_tp_info().is_primary()
        model, tokenizer, bill, encoded, load_seconds = _prepare(
            checkpoint, prompts, max_new_tokens, chat, dtype, device, check_finite, speaks
        )
        printer = _Printer(tokenizer) if speaks and not as_json and len(prompts) == 1 else None
        result = _run(model, encoded, max_new_tokens, bill, sampling, printer or _quiet)
        if speaks:
            texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in result.token_ids]
            if printer:
                print(texts[0][printer.written :])  # what was held back for a character that never became whole
            _report(prompts, encoded, texts, result, load_seconds, as_json)
    finally:
        leave_group()


def _prompts(prompt: list[str] | None, file: Path | None) -> list[str]:
    prompts = list(prompt or [])
    if file is not None:
        try:
            prompts += [line for line in file.read_text("utf-8").splitlines() if line]
        except (OSError, UnicodeDecodeError) as error:
            raise BadRequest(
                "the prompts file cannot be read", where=str(file), expected="UTF-8 text, one prompt a line",
                found=str(error), fix="check the path and the encoding",
            ) from None  # fmt: skip
    if not prompts:
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


def _prepare(
    checkpoint: Path,
    prompts: list[str],
    max_new_tokens: int,
    chat: bool,
    dtype: str | None,
    device: str,
    check_finite: bool,
    speaks: bool,
) -> tuple[CausalLM, Tokenizer, Plan, list[list[int]], float]:
    """Everything that can be refused cheaply is, before weights are read."""
    import waybill
    from waybill.engine.distributed import get_tp_info
    from waybill.engine.generate import check_request
    from waybill.engine.load import load_model
    from waybill.text.chat import render_chat
    from waybill.text.tokenizer import read_tokenizer

    tp = get_tp_info()
    bill = waybill.plan(checkpoint, tp=tp.size, rank=tp.rank, dtype=dtype)
    bill.require_clean()
    tokenizer = read_tokenizer(checkpoint)
    texts = [render_chat(checkpoint, [{"role": "user", "content": text}]) for text in prompts] if chat else prompts
    # A rendered template already holds its special tokens.
    encoded = [list(tokenizer.encode(text, add_special_tokens=not chat).ids) for text in texts]
    if bill.config:
        check_request(bill.config, encoded, max_new_tokens)
    if speaks:
        write_problems((), bill.notices)
    start = time.perf_counter()
    with _progress(bill.result_bytes, speaks) as advance:
        model = load_model(checkpoint, device=device, check_finite=check_finite, bill=bill, progress=advance)
    seconds = time.perf_counter() - start
    if speaks:
        print(f"{bill.summary()}; loaded in {seconds:.2f} s", file=sys.stderr)
    return model, tokenizer, bill, encoded, seconds


class _progress:
    """A bar in bytes on a terminal, nothing elsewhere: the summary line follows anyway."""

    def __init__(self, total: int, wanted: bool) -> None:
        self._bar: Any = None
        if wanted and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
                TransferSpeedColumn,
            )

            columns = (
                TextColumn("loading"),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("loading", total=total)

    def __enter__(self) -> Callable[[int], None]:
        if self._bar is None:
            return lambda _: None
        self._bar.start()
        return lambda nbytes: self._bar.advance(self._task, nbytes)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _quiet(_request: int, _token: int) -> None:
    pass


class _Printer:
    """Streams the text of a single request; a batch is printed whole at the end."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        from waybill.text.tokenizer import TextStream

        self._stream = TextStream(tokenizer)
        self.written = 0

    def __call__(self, _request: int, token: int) -> None:
        text = self._stream.add(token)
        self.written += len(text)
        sys.stdout.write(text)
        sys.stdout.flush()


def _run(
    model: CausalLM,
    encoded: list[list[int]],
    max_new_tokens: int,
    bill: Plan,
    sampling: Any,
    on_token: Callable[[int, int], None],
) -> Generation:
    from waybill.engine.generate import generate as run
    from waybill.text.tokenizer import stop_tokens

    stops = stop_tokens(bill.checkpoint.generation_config, bill.checkpoint.config)
    return run(model, encoded, max_new_tokens=max_new_tokens, stop_ids=stops, sampling=sampling, on_token=on_token)


def _report(
    prompts: list[str],
    encoded: list[list[int]],
    texts: list[str],
    result: Generation,
    load_seconds: float,
    as_json: bool,
) -> None:
    tokens = len(prompts) * result.decode_steps
    timings = {
        "load_seconds": round(load_seconds, 4),
        "prefill_seconds": round(result.prefill_seconds, 4),
        "prefill_tokens_per_second": round(sum(map(len, encoded)) / max(result.prefill_seconds, 1e-9), 1),
        "decode_seconds": round(result.decode_seconds, 4),
        "decode_tokens_per_second": round(tokens / result.decode_seconds, 1) if result.decode_seconds else None,
    }
    outputs = [
        {"text": text, "token_ids": ids, "prompt_tokens": len(prompt)}
        for text, ids, prompt in zip(texts, result.token_ids, encoded, strict=True)
    ]
    if as_json:
        write_json(
            {**outputs[0], "timings": timings} if len(outputs) == 1 else {"outputs": outputs, "timings": timings}
        )
        return
    if len(outputs) > 1:
        for prompt, text in zip(prompts, texts, strict=True):
            print(f"── {prompt}\n{text}\n")
    speed = timings["decode_tokens_per_second"]
    print(
        f"prefill {sum(map(len, encoded))} tokens in {timings['prefill_seconds']:.2f} s"
        + (f", decode {speed} tokens/s" if speed else ""),
        file=sys.stderr,
    )
