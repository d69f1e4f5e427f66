"""How far a tokenizer.json may be trusted: it is a program of rewriting steps, run by a library that is not ours.

A few steps that each write ten characters for one turn a short prompt into gigabytes, and the library ends the process
when it gets no memory. Some contradictions make it panic, which is no ordinary exception.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any

from tokenizers import Tokenizer

from waybill.errors import NoTokenizer

MOST_GROWTH = 1 << 16
"""Characters or tokens that one may become, all steps of one kind together; real tokenizers stay far below."""
TABLE = 1 << 10
"""The same of a table of replacements that only the library can read."""


def require_modest(tokenizer: Tokenizer, where: str) -> None:
    """Refuse steps that multiply what they are given.

    Raises:
        NoTokenizer: they could turn a short text into a very long one.
    """
    for kind in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        part = getattr(tokenizer, kind)
        growth = _growth(json.loads(part.__getstate__())) if part is not None else 1
        if growth > MOST_GROWTH:
            raise broken("the tokenizer multiplies text", where, f"steps of its {kind} that make {growth:,} of one")


def _growth(step: Mapping[str, Any]) -> int:
    """How many characters or tokens one can become; any step can double them, if only by spelling bytes as letters."""
    if step["type"] == "Sequence":
        (steps,) = (inner for inner in step.values() if isinstance(inner, list))
        return prod(map(_growth, steps))
    written = {
        "Replace": lambda: 1 + len(step["content"]),
        "TemplateProcessing": lambda: sum("Sequence" in piece for piece in step["single"]),
        "Precompiled": lambda: TABLE,
    }
    return max(2, written.get(step["type"], lambda: 2)())


@contextmanager
def refusing_panics(where: str, what: str = "the tokenizer fails") -> Iterator[None]:
    """Where the library is called: what it raises of its own, panics among it, becomes a refusal.

    Raises:
        NoTokenizer: it failed.
    """
    try:
        yield
    except BaseException as error:  # a panic is no Exception
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise broken(what, where, str(error)[:200]) from None


def broken(what: str, where: str, found: str) -> NoTokenizer:
    """A tokenizer.json that cannot be used."""
    return NoTokenizer(
        what,
        where=where,
        expected="a file written by the tokenizers library",
        found=found,
        fix="download tokenizer.json again, from where the model was published",
    )
