"""What generating shows: text as it comes, and at the end texts, tokens and timings."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from waybill.cli.render import write_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from waybill.text.request import Generation, Sampling

OnToken = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the command was asked for, whatever is to run it."""

    prompts: Sequence[str]
    chat: bool
    max_new_tokens: int
    sampling: Sampling
    as_json: bool
    quiet: bool


def encode(folder: Path, request: Request) -> tuple[Tokenizer, list[list[int]]]:
    """The prompts as tokens, through the chat template if asked."""
    from waybill.text.chat import render_prompt
    from waybill.text.tokenizer import read_tokenizer, to_tokens

    tokenizer = read_tokenizer(folder)
    texts = [render_prompt(folder, text) for text in request.prompts] if request.chat else request.prompts
    return tokenizer, to_tokens(tokenizer, texts, complete=request.chat)


def answer(
    request: Request,
    tokenizer: Tokenizer,
    encoded: Sequence[Sequence[int]],
    load_seconds: float,
    run: Callable[[OnToken], Generation],
    labels: Sequence[str] = (),
) -> None:
    """Run, and show the outcome: one prompt streams, several are shown at the end, JSON is one document.

    `labels` stand above the texts of requests that have no prompt.
    """
    from waybill.text.tokenizer import to_text

    gc.freeze()
    gc.enable()  # generating may go on for long; what was loaded is looked through no more
    printer = _Printer(tokenizer) if not request.as_json and len(encoded) == 1 else None
    result = run(printer or _quiet)
    texts = [to_text(tokenizer, ids) for ids in result.token_ids]
    if printer:
        print(texts[0][printer.written :])  # what was held back for a character that never became whole
    lengths = result.prompt_tokens or tuple(map(len, encoded))
    _report(request, labels or request.prompts, lengths, texts, result, load_seconds)


def _quiet(_request: int, _token: int) -> None:
    """Hear of a token and say nothing."""


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


def _report(
    request: Request,
    labels: Sequence[str],
    lengths: Sequence[int],
    texts: list[str],
    result: Generation,
    load_seconds: float,
) -> None:
    tokens = len(texts) * result.decode_steps
    timings = {
        "load_seconds": round(load_seconds, 4),
        **({"encode_seconds": round(result.encode_seconds, 4)} if result.encode_seconds else {}),
        "prefill_seconds": round(result.prefill_seconds, 4),
        "prefill_tokens_per_second": round(sum(lengths) / max(result.prefill_seconds, 1e-9), 1),
        "decode_seconds": round(result.decode_seconds, 4),
        "decode_tokens_per_second": round(tokens / result.decode_seconds, 1) if result.decode_seconds else None,
    }
    outputs = [
        {"text": text, "token_ids": ids, "prompt_tokens": length}
        for text, ids, length in zip(texts, result.token_ids, lengths, strict=True)
    ]
    if request.as_json:
        answers = outputs[0] if len(outputs) == 1 else {"outputs": outputs}
        write_json("generate", {**answers, "timings": timings})
        return
    if len(outputs) > 1:
        for label, text in zip(labels, texts, strict=True):
            print(f"── {label}\n{text}\n")
    if request.quiet:
        return
    speed = timings["decode_tokens_per_second"]
    encoded = f"encode in {result.encode_seconds:.2f} s, " if result.encode_seconds else ""
    print(
        f"{encoded}prefill {sum(lengths)} tokens in {timings['prefill_seconds']:.2f} s"
        + (f", decode {speed} tokens/s" if speed else ""),
        file=sys.stderr,
    )
