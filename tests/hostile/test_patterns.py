"""Quantization metadata that would hang, swallow or mislead whoever follows it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import Recipe, llama
from packing import Scheme, pack
from strangers import digest_of, read_or_refused, refused
from waybill.config.match import MOST_PATTERNS, fp8_exclusions, gptq_dynamic
from waybill.errors import BadPattern

PACKED = pack(llama(np.float32, num_hidden_layers=1), Scheme("gptq", 4, 32)).packed
METADATA = PACKED.config["quantization_config"]


def stated(folder: Path, **changes: Any) -> Path:
    block = {key: value for key, value in (METADATA | changes).items() if value is not ...}
    return Recipe(PACKED.config | {"quantization_config": block}, PACKED.tensors).write(folder)


PATTERNS: dict[str, list[str]] = {
    "that backtrack without end": ["re:(a+)+$", "re:(a|a)*b", "re:(.*)*x", "re:((a*)*)*$"],
    "that repeat themselves": ["re:((a{1000}){1000}){1000}"],
    "that look around and back": ["re:(?=a)b", "re:(?<!a)b", r"re:(a)\1", "re:(?(1)a|b)"],
    "of ten thousand alternatives": ["re:" + "|".join(f"a{i}b" for i in range(10_000))],
    "in a thousand brackets": ["re:" + "(" * 1000 + ")" * 1000],
    "that end in the middle": ["re:(", "re:[", "re:a{", "re:\\"],
    "of nothing": ["", "re:", "."],
    "of a zero byte and half a character": ["a\0b", "re:\0", "\ud800"],
    "of every letter there is, many times": ["re:(?i)" + r"\pL" * 6000],
    "one for each of a hundred thousand modules": [f"model.layers.{i}.x" for i in range(100_000)],
    "one expression for each of a hundred thousand modules": [f"re:.*layers\\.{i}\\..*x" for i in range(100_000)],
}
MEANINGS = {
    "exclusions": lambda patterns: {"modules_to_not_convert": patterns},
    "rules": lambda patterns: {"dynamic": {p.removeprefix("re:"): {"bits": 8} for p in patterns}},
    "exclusions of substrings": lambda patterns: {
        "quant_method": "olive", "symmetric": False, "modules_to_not_convert": patterns,
    },
    "rules by exact name": lambda patterns: {
        "quant_method": "olive", "symmetric": False, "overrides": {p: {"bits": 8} for p in patterns},
    },
    "exclusions of endings": lambda patterns: {
        "quant_method": "fp8", "weight_block_size": [32, 32],
        "modules_to_not_convert": [p.removeprefix("re:") for p in patterns],
    },
    "extra entries": lambda patterns: {
        "quant_method": "auto-round", "extra_config": {p.removeprefix("re:"): {"bits": 8} for p in patterns},
    },
    "targets": lambda patterns: {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": patterns,
        "config_groups": {"a": {"targets": patterns, "weights": {"num_bits": 4, "group_size": 32}}},
    },
}  # fmt: skip


@pytest.mark.parametrize("meaning", MEANINGS)
@pytest.mark.parametrize("patterns", PATTERNS)
def test_patterns_end_in_bounded_time_and_memory_with_the_same_weights(
    tmp_path: Path, patterns: str, meaning: str
) -> None:
    intended = digest_of(PACKED.write(tmp_path / "intended"))
    read_or_refused(intended, stated(tmp_path / "stranger", **MEANINGS[meaning](PATTERNS[patterns])))


WRONG = (None, True, -2, 0, 0.5, 1e308, 10**400, "", "\ud800", [], [[]], {}, {"a": []}, [None], ...)
FIELDS = (
    *METADATA, "dynamic", "modules_to_not_convert", "modules_in_block_to_quantize", "meta", "lm_head",
    "is_marlin_format", "overrides", "format", "components",
)  # fmt: skip


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_of_the_wrong_type_is_refused_or_changes_no_weight(tmp_path: Path, field: str) -> None:
    intended = digest_of(PACKED.write(tmp_path / "intended"))
    read_or_refused(intended, *(stated(tmp_path / str(at), **{field: value}) for at, value in enumerate(WRONG)))


@pytest.mark.parametrize("place", ["quantize_config.json", "quant_config.json", "quantization_config.json"])
@pytest.mark.parametrize("content", ["[]", "{", '{"bits": 3}', '{"bits": 8}', '{"quant_method": "awq", "bits": 4}'])
def test_a_side_file_that_contradicts_or_is_none_is_refused(tmp_path: Path, place: str, content: str) -> None:
    folder = stated(tmp_path)
    (folder / place).write_text(content)
    assert refused(folder) <= {"bad-json", "config-conflict", "unsupported-quantization", "bad-config"}


def test_too_many_patterns_are_refused_with_the_number_that_is_taken() -> None:
    with pytest.raises(BadPattern, match="the patterns are too large together") as told:
        fp8_exclusions(["a"] * (MOST_PATTERNS + 1), "config.json: quantization_config.modules_to_not_convert")
    assert told.value.expected == "at most 65,536 of 500,000 signs, which compile into 256 MiB"
    assert told.value.found == "65,537 patterns"


def test_patterns_that_do_not_fit_in_memory_are_refused() -> None:
    with pytest.raises(BadPattern, match="the patterns are too large together") as told:
        gptq_dynamic([str(i) + "a" * 300 for i in range(60_000)], "here")
    assert told.value.found == "60,000 patterns that do not fit in 256 MiB"


@pytest.mark.parametrize("pattern", ["{}[a-z]{{999}}", "({}a{{0,31}}){{0,31}}", "(?i){}abcdefghijklmnopqrstuvwxyz" * 9])
def test_patterns_that_stand_for_millions_of_letters_are_refused_before_they_are_compiled(pattern: str) -> None:
    with pytest.raises(BadPattern, match="the patterns are too large together") as told:
        gptq_dynamic([pattern.format(i, *"12345678") for i in range(3000)], "here")
    assert re.fullmatch(r"3,000 patterns of \d\.\d+e\+\d+ signs", told.value.found)


def test_an_expression_for_every_projection_of_every_expert_is_taken() -> None:
    rules = [rf"model\.layers\.{i // 256}\.mlp\.experts\.{i % 256}\.(gate|up)_proj" for i in range(40_000)]
    assert gptq_dynamic(rules, "here").first("model.layers.7.mlp.experts.8.up_proj") == 7 * 256 + 8


@pytest.mark.parametrize("pattern", [r"\pL", r"(?i)\P{Greek}*", r"[\x{0}-\x{10ffff}]", "ü.*"])
def test_an_expression_that_means_every_letter_there_is_is_refused(pattern: str) -> None:
    with pytest.raises(BadPattern, match="a pattern cannot be compiled") as told:
        gptq_dynamic([pattern], "here")
    assert told.value.where == f"here: {pattern}"
    assert told.value.found == "characters, or classes of them, that are not ASCII"
