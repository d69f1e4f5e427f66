"""How byte-level tokenizers cut text before merging, by the names GGUF files give to it.

A name stands for a published tokenizer's own pre-tokenizer: a pattern, and whether text is composed (NFC) first.
"""

from __future__ import annotations

from typing import NamedTuple

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class Splitting(NamedTuple):
    """A pattern of pieces; without one, that of the first byte-level tokenizer."""

    pattern: str | None = None
    digits: bool = False
    """Every digit is a piece."""
    composed: bool = False
    whole: bool = False
    """A piece that is a token is taken whole, whatever its merges."""


_LLAMA3 = Splitting(rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_REST}", whole=True)
_QWEN2 = Splitting(rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_REST}", composed=True)

SPLITTINGS = {
    "gpt-2": Splitting(),
    "smollm": Splitting(digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
}
