"""Tokenizers and chat templates that are traps: bombs, loops, contradictions. More: tests/cli/test_generate.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from checkpoints import llama, write_tokenizer
from strangers import GENERATE, judged, refused
from waybill.errors import NoTokenizer
from waybill.text.tokenizer import MAX_TOKENIZER_BYTES, read_tokenizer


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def template(*pieces: dict[str, Any]) -> dict[str, Any]:
    return {"type": "TemplateProcessing", "single": list(pieces), "pair": [], "special_tokens": {}}


TEN = replace({"String": "w"}, "w" * 10)
ITSELF = {"Sequence": {"id": "A", "type_id": 0}}
LETTERS = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
SPELLED = {"type": "BPEDecoder", "suffix": ""}
BOMBS: dict[str, dict[str, Any]] = {
    "nine replacements by ten characters": {"normalizer": {"type": "Sequence", "normalizers": [TEN] * 9}},
    "replacements within sequences": {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [TEN] * 3}] * 3}
    },
    "replacements of answers": {"decoder": {"type": "Sequence", "decoders": [TEN] * 9}},
    "prompts that contain themselves ten times": {
        "post_processor": {"type": "Sequence", "processors": [template(*[ITSELF] * 10)] * 6}
    },
    "bytes spelled as letters, thirty times": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [LETTERS] * 30}},
    "spaces between all letters, thirty times": {"decoder": {"type": "Sequence", "decoders": [SPELLED] * 30}},
}
CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "an expression that backtracks without end": {"normalizer": replace({"Regex": "(w|w)*$"}, "w")},
    "a special token that is not described": {"post_processor": template({"SpecialToken": {"id": "X", "type_id": 0}})},
    "the second of one text": {"post_processor": template({"Sequence": {"id": "B", "type_id": 0}})},
    "pieces of no length": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "merges that make no token": {
        "model": {"type": "BPE", "vocab": {"w": 0, "3": 1}, "merges": [["w", "3"]]}, "pre_tokenizer": None,
    },
    "merges of unknown tokens": {"model": {"type": "BPE", "vocab": {"w": 0}, "merges": [["w", "x"]]}},
    "no word for what is unknown": {"model": {"type": "WordLevel", "vocab": {"w3": 3}, "unk_token": "none"}},
    "an empty table of replacements": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "a table that points outside": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8="}},
    "sequences in each other": {
        "normalizer": json.loads('{"type": "Sequence", "normalizers": [' * 100 + '{"type": "NFC"}' + "]}" * 100)
    },
    "a step nobody knows": {"normalizer": {"type": "Exec", "command": "true"}},
    "a vocabulary of the wrong type": {"model": {"type": "WordLevel", "vocab": [["w0", 0]], "unk_token": "w0"}},
    "tokens of negative numbers": {"model": {"type": "WordLevel", "vocab": {"w0": -1}, "unk_token": "w0"}},
}  # fmt: skip


def stated(folder: Path, changes: dict[str, Any]) -> Path:
    write_tokenizer(llama(num_hidden_layers=1).write(folder))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | changes))
    return folder


@pytest.mark.parametrize("trap", BOMBS)
def test_a_tokenizer_that_multiplies_text_is_refused_before_it_is_given_any(tmp_path: Path, trap: str) -> None:
    folder = stated(tmp_path, BOMBS[trap])
    with pytest.raises(NoTokenizer, match="the tokenizer multiplies text") as told:
        read_tokenizer(folder)
    assert told.value.found.startswith("steps of its ")
    assert refused(folder, GENERATE) == {"no-tokenizer"}


@pytest.mark.parametrize("trap", CONTRADICTIONS)
def test_a_tokenizer_that_contradicts_itself_is_refused(tmp_path: Path, trap: str) -> None:
    prompt = ["generate", "-p", f"w3 {'w' * 40}b", "-n", "2"]
    assert refused(stated(tmp_path, CONTRADICTIONS[trap]), [prompt]) == {"no-tokenizer"}


FORMS = {"nothing": "", "a list": "[]", "an empty object": "{}", "no JSON": "{", "lists in each other": "[" * 100_000}


@pytest.mark.parametrize("form", FORMS)
def test_a_tokenizer_of_another_form_is_refused(tmp_path: Path, form: str) -> None:
    folder = stated(tmp_path, {})
    (folder / "tokenizer.json").write_text(FORMS[form])
    assert refused(folder, GENERATE) == {"no-tokenizer"}


def test_a_tokenizer_larger_than_any_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(MAX_TOKENIZER_BYTES + 1)
    with pytest.raises(NoTokenizer, match=r"tokenizer\.json is too large") as told:
        read_tokenizer(tmp_path)
    assert told.value.found == "268,435,457 bytes"


ORDINARY: dict[str, dict[str, Any]] = {
    "spaces as signs, and bytes for what is unknown": {
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"}, replace({"String": " "}, "▁"),
        ]},
        "decoder": {"type": "Sequence", "decoders": [
            replace({"String": "▁"}, " "), {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]},
    },
    "five ways to cut": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        *[{"type": "Split", "pattern": {"Regex": r"\p{N}{1,3}"}, "behavior": "Isolated", "invert": False}] * 3,
        {"type": "Digits", "individual_digits": True}, LETTERS,
    ]}},
}  # fmt: skip


@pytest.mark.parametrize("kind", ORDINARY)
def test_what_published_tokenizers_do_is_no_trap(tmp_path: Path, kind: str) -> None:
    assert isinstance(read_tokenizer(stated(tmp_path, ORDINARY[kind])), Tokenizer)


TEMPLATES = {
    "a text that doubles": "{% set n = namespace(x='a') %}{% for i in range(64) %}{% set n.x = n.x * 2 %}{% endfor %}",
    "a way to Python": "{{ ''.__class__.__base__.__subclasses__() }}",
    "a way to the disk": "{% include '/etc/passwd' %}",
    "a macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "brackets in each other": "{{ " + "(" * 50_000 + ")" * 50_000 + " }}",
    "half a character": "{{ '\\ud800' }}",
    "a huge sum": "{{ range(100000)|sum(start='x' * 1000) }}",
    "replacements of replacements": "{% set b = 'a' * 999 %}{{ b|replace('a', b)|replace('a', b)|replace('a', b) }}",
    "a regular format": "{{ '%1000000000d' % 1 }}",
}


@pytest.mark.parametrize("trap", TEMPLATES)
def test_a_template_that_is_a_trap_is_refused(tmp_path: Path, trap: str) -> None:
    folder = stated(tmp_path, {})
    (folder / "chat_template.jinja").write_text(TEMPLATES[trap])
    assert refused(folder, [[*GENERATE[0], "--chat"]]) == {"bad-template"}


SETTINGS: tuple[Any, ...] = ([], 1, {"default": "w3"}, [1], [{"name": 1, "template": 2}], [[]], "", {"a": "b"}, 1e308)


def test_templates_of_the_wrong_type_are_refused(tmp_path: Path) -> None:
    for at, value in enumerate(SETTINGS):
        folder = stated(tmp_path / str(at), {})
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
        assert refused(folder, [[*GENERATE[0], "--chat"]]) <= {"bad-template", "bad-request"}


def test_special_tokens_of_the_wrong_type_change_nothing(tmp_path: Path) -> None:
    for at, value in enumerate(([], 1e308, {"a": "b"}, None)):
        folder = stated(tmp_path / str(at), {})
        settings = {"chat_template": "w3 w5", "bos_token": value, "eos_token": {"content": value}}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        (outcome,) = judged(folder, [[*GENERATE[0], "--chat"]])
        assert outcome.exit == 0
