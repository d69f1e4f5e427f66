"""tokenizer.json, and where generation stops."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from waybill.checkpoint.opening import is_gguf, read_metadata
from waybill.errors import NoTokenizer
from waybill.text.gguf import tokenizer_of


def read_tokenizer(folder: Path) -> Tokenizer:
    """The checkpoint's fast tokenizer; `folder` may be a GGUF file, which holds its own.

    Raises:
        NoTokenizer: tokenizer.json is missing or broken, or the file's tokenizer is of a kind that is not read.
    """
    if is_gguf(folder):
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
    try:
        tokenizer: Tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for a malformed file
        raise NoTokenizer(
            "tokenizer.json cannot be read",
            where=str(path),
            expected="a file written by the tokenizers library",
            found=str(error)[:200],
            fix="download tokenizer.json again",
        ) from None
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


class TextStream:
    """Turns one request's tokens into text as they come, holding back incomplete characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def add(self, token: int) -> str:
        """The text that this token completes, possibly none."""
        return self._stream.step(self._tokenizer, token) or ""
