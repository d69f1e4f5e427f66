"""tokenizer.json, and where generation stops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from waybill.checkpoint.opening import is_gguf, read_metadata
from waybill.checkpoint.places import require_inside
from waybill.errors import NoTokenizer
from waybill.text.gguf import tokenizer_of
from waybill.text.trust import broken, refusing_panics, require_modest

MAX_TOKENIZER_BYTES = 256 << 20
"""Several times the largest there is."""


def read_tokenizer(folder: Path) -> Tokenizer:
    """The checkpoint's fast tokenizer; `folder` may be a GGUF file, which holds its own.

    Raises:
        NoTokenizer: tokenizer.json is missing, broken or a trap, or the file's tokenizer is of a kind that is not read.
    """
    if is_gguf(folder):
        with refusing_panics(str(folder)):
            return tokenizer_of(read_metadata(folder), folder.name)
    path = folder / "tokenizer.json"
    if not path.is_file():
        others = sorted(p.name for p in folder.glob("*token*")) + sorted(p.name for p in folder.glob("vocab*"))
        raise NoTokenizer(
            "there is no tokenizer.json",
            where=str(folder),
            expected="tokenizer.json, the fast tokenizer",
            found=", ".join(others) or "no tokenizer files",
            fix="download tokenizer.json, or convert the slow tokenizer with transformers' save_pretrained",
        )
    require_inside(path)
    if path.stat().st_size > MAX_TOKENIZER_BYTES:
        raise broken("tokenizer.json is too large", str(path), f"{path.stat().st_size:,} bytes")
    with refusing_panics(str(path), "tokenizer.json cannot be read"):
        tokenizer: Tokenizer = Tokenizer.from_file(str(path))
    require_modest(tokenizer, str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def stop_tokens(generation_config: Mapping[str, Any], config: Mapping[str, Any]) -> frozenset[int]:
    """eos_token_id of generation_config.json when it states one, else of config.json: a number or a list."""
    for source in (generation_config, config):
        stated = source.get("eos_token_id")
        if stated is not None:
            return frozenset(i for i in (stated if isinstance(stated, list) else [stated]) if type(i) is int)
    return frozenset()


def to_tokens(tokenizer: Tokenizer, texts: Sequence[str], *, complete: bool) -> list[list[int]]:
    """Texts as tokens; what is complete, as a rendered template is, holds its special tokens already.

    Raises:
        NoTokenizer: the tokenizer contradicts itself.
    """
    with refusing_panics("tokenizer.json"):
        return [list(tokenizer.encode(text, add_special_tokens=not complete).ids) for text in texts]


def to_text(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Tokens as text, special ones left out.

    Raises:
        NoTokenizer: the tokenizer contradicts itself.
    """
    with refusing_panics("tokenizer.json"):
        return str(tokenizer.decode(tokens, skip_special_tokens=True))


class TextStream:
    """Turns one request's tokens into text as they come, holding back incomplete characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def add(self, token: int) -> str:
        """The text that this token completes, possibly none."""
        with refusing_panics("tokenizer.json"):
            return self._stream.step(self._tokenizer, token) or ""
