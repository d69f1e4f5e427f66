"""The tokenizer and chat template inside a GGUF file, as the files of a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from waybill.errors import NoTokenizer
from waybill.text.splitting import SPLITTINGS

_PREFIX = "tokenizer.ggml"
_CONTROL, _USER_DEFINED = 3, 4
_ROLES = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
"""Roles of tokens in tokenizer_config.json and in the metadata."""


def tokenizer_of(metadata: Mapping[str, Any], where: str) -> Tokenizer:
    """The tokenizer a file holds.

    Raises:
        NoTokenizer: there is none, it is of a kind or cut in a way that is not known, or its parts do not fit.
    """
    kind = metadata.get(f"{_PREFIX}.model")
    if kind != "gpt2":
        raise _none(
            "the file has no tokenizer that is read" if kind else "the file has no tokenizer",
            where,
            "tokenizer.ggml.model gpt2: byte-level merges",
            f"tokenizer.ggml.model {kind!r}"[:160] if kind else "no tokenizer.ggml.model",
        )
    splitting = metadata.get(f"{_PREFIX}.pre", "default")
    if not isinstance(splitting, str) or splitting not in SPLITTINGS:
        known = " | ".join(SPLITTINGS)
        raise _none(
            "the tokenizer cuts text in an unknown way", where, known, f"tokenizer.ggml.pre {splitting!r}"[:160]
        )
    tokens = _strings(metadata, "tokens", where)
    numbers = {token: number for number, token in enumerate(tokens)}
    merges = _merges(_strings(metadata, "merges", where), numbers, where)
    tokenizer = Tokenizer(models.BPE(numbers, merges, ignore_merges=SPLITTINGS[splitting].whole))
    _cut(tokenizer, splitting)
    kinds = metadata.get(f"{_PREFIX}.token_type")
    if isinstance(kinds, list):
        marked = [(t, k) for t, k in zip(tokens, kinds, strict=False) if k in (_CONTROL, _USER_DEFINED)]
        tokenizer.add_tokens([AddedToken(t, normalized=False, special=k == _CONTROL) for t, k in marked])
    first = _token(metadata, "bos")
    if metadata.get(f"{_PREFIX}.add_bos_token") is True and first is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[first, "$A"], pair=[first, "$A", "$B"], special_tokens=[(first, tokens.index(first))]
        )
    return tokenizer


def documents(metadata: Mapping[str, Any], where: str) -> dict[str, Any]:
    """tokenizer.json and tokenizer_config.json, by name; see `tokenizer_of`."""
    return {
        "tokenizer.json": json.loads(tokenizer_of(metadata, where).to_str()),
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **settings_of(metadata)},
    }


def settings_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What tokenizer_config.json would say: the chat template and the tokens it may name."""
    named = {f"{role}_token": token for role in _ROLES if (token := _token(metadata, role)) is not None}
    template = metadata.get("tokenizer.chat_template")
    return named | ({"chat_template": template} if isinstance(template, str) else {})


def _merges(merges: list[str], numbers: Mapping[str, int], where: str) -> list[tuple[str, str]]:
    """Pairs of tokens that make a token; judged here, because the library ends the process over some others."""
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    for left, right in pairs:
        if left not in numbers or right not in numbers or left + right not in numbers:
            found = f"the merge {left!r} + {right!r}"[:160]
            raise _none("the tokenizer's parts do not fit", where, "merges of two tokens into a token", found)
    return pairs


def _cut(tokenizer: Tokenizer, name: str) -> None:
    splitting = SPLITTINGS[name]
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if splitting.digits else []
    if splitting.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(splitting.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if splitting.composed:
        tokenizer.normalizer = normalizers.NFC()


def _strings(metadata: Mapping[str, Any], name: str, where: str) -> list[str]:
    value = metadata.get(f"{_PREFIX}.{name}")
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        found = "no such key" if value is None else f"a value of type {type(value).__name__}"
        raise _none("the tokenizer's parts do not fit", where, f"tokenizer.ggml.{name}: a list of strings", found)
    return value


def _token(metadata: Mapping[str, Any], role: str) -> str | None:
    tokens, number = metadata.get(f"{_PREFIX}.tokens"), metadata.get(f"{_PREFIX}.{_ROLES[role]}_token_id")
    if isinstance(tokens, list) and type(number) is int and 0 <= number < len(tokens):
        token = tokens[number]
        return token if isinstance(token, str) else None
    return None


def _none(what: str, where: str, expected: str, found: str) -> NoTokenizer:
    fix = "put the tokenizer.json of this model into a folder with its safetensors files, and use that"
    return NoTokenizer(what, where=where, expected=expected, found=found, fix=fix)
