"""Quantization metadata: every place and form of it is read, and what makes no sense is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from waybill.config.quantization import ComponentQuantizationPlan, QuantizationConfig
from waybill.errors import BadConfig, BadPattern, ConfigConflict, UnsupportedQuantization, WaybillError
from waybill.families.decoder import decoder_components
from waybill.manifest.quantization import read_quantization

CHECKPOINTS = Path(__file__).parents[1] / "golden" / "checkpoints"
NUMBERS = {"bits": 4, "group_size": 32}
GPTQ = {"quant_method": "gptq", "sym": False, **NUMBERS}
AWQ = {"quant_method": "awq", "zero_point": True, "version": "gemm", **NUMBERS}
OLIVE = {"quant_method": "olive", "symmetric": False, **NUMBERS}
ROUND = {"quant_method": "auto-round", "sym": True, "packing_format": "auto_round:auto_gptq", **NUMBERS}
FORMS = [GPTQ, AWQ, OLIVE, ROUND]
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"


def read(
    config: Mapping[str, Any], side_files: Mapping[str, Any] | None = None
) -> tuple[ComponentQuantizationPlan | None, list[WaybillError]]:
    problems: list[WaybillError] = []
    return read_quantization(config, side_files or {}, decoder_components(config), problems).for_component(
        "decoder"
    ), problems


def problem(block: Mapping[str, Any], **changes: Any) -> WaybillError:
    stated = {key: value for key, value in {**block, **changes}.items() if value is not ...}
    found, problems = read({"quantization_config": stated})
    assert found is None
    (only,) = problems
    assert only.where.startswith("config.json: quantization_config")
    assert only.fix
    return only


def without(block: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in block.items() if key not in keys}


# Where it is stated


def test_a_float_checkpoint_states_nothing() -> None:
    for config in ({}, {"quantization_config": None}, {"quantization_config": {}}, {"text_config": {}}):
        assert read(config) == (None, [])


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": GPTQ},
        {"text_config": {"quantization_config": GPTQ}},
        {"quantization_config": GPTQ, "text_config": {"quantization_config": GPTQ}},
        {"quantization_config": {"components": {"decoder": GPTQ}}},
        {"quantization_config": {"components": {"decoder": GPTQ, "vision": None}}},
        {"component_quantization": {"decoder": GPTQ}},
        {"component_quantization": {"decoder": GPTQ, "vision": None}},
    ],
)
def test_every_place_in_the_config_is_read(config: dict[str, Any]) -> None:
    found, problems = read(config)
    assert not problems
    assert found is not None
    assert found.layout == QuantizationConfig(method="gptq", symmetric=False, zero_offset=1, **NUMBERS)


@pytest.mark.parametrize(
    ("file", "block", "method"),
    [
        ("quantize_config.json", without(GPTQ, "quant_method"), "gptq"),
        ("quantize_config.json", GPTQ, "gptq"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}, "awq"),
        ("quant_config.json", AWQ, "awq"),
        ("quantization_config.json", ROUND, "gptq"),
    ],
)
def test_a_file_beside_the_config_is_enough(file: str, block: dict[str, Any], method: str) -> None:
    found, problems = read({}, {file: block})
    assert not problems
    assert found is not None
    assert (found.layout.method, found.layout.bits, found.layout.group_size) == (method, 4, 32)


def test_a_copy_beside_the_config_that_agrees_is_accepted() -> None:
    copy = {"wbits": 4, "q_group_size": 32, "sym": False, "desc_act": False}
    found, problems = read({"quantization_config": GPTQ}, {"quantize_config.json": copy})
    assert found is not None
    assert not problems


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (GPTQ, {"bits": 8}, "bits: 4 and 8"),
        (GPTQ, {"w_bit": 8}, "bits: 4 and 8"),
        (GPTQ, {"group_size": 128}, "group_size: 32 and 128"),
        (GPTQ, {"q_group_size": -1}, "group_size: 32 and -1"),
        (GPTQ, {"sym": True}, "sym: False and True"),
        (GPTQ | {"checkpoint_format": "gptq"}, {"format": "gptq_v2"}, "checkpoint_format: 'gptq' and 'gptq_v2'"),
        (GPTQ | {"lm_head": True}, {"quantize_lm_head": False}, "lm_head: True and False"),
        (GPTQ | {"quantize_embeddings": True}, {"embeds": False}, "embeds: True and False"),
    ],
)
def test_two_places_that_disagree_are_refused_with_both_values(
    first: dict[str, Any], second: dict[str, Any], words: str
) -> None:
    for config, files in (
        ({"quantization_config": first}, {"quantize_config.json": second}),
        ({"quantization_config": first, "text_config": {"quantization_config": second}}, {}),
    ):
        _, (conflict,) = read(config, files)
        assert isinstance(conflict, ConfigConflict)
        assert conflict.code == "config-conflict"
        assert conflict.found == words
        assert "quantization_config and " in conflict.where


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (GPTQ, AWQ),
        (GPTQ, GPTQ | {"checkpoint_format": "gptq_v2"}),  # absent means version 1
        (AWQ, AWQ | {"zero_point": False}),
        (AWQ, AWQ | {"version": "gemv"}),
        (ROUND, ROUND | {"packing_format": "auto_round:gptqmodel"}),
    ],
)
def test_two_places_whose_meanings_differ_are_refused(first: dict[str, Any], second: dict[str, Any]) -> None:
    _, problems = read({"quantization_config": first, "text_config": {"quantization_config": second}})
    assert any(isinstance(found, ConfigConflict) for found in problems)


def test_spelling_is_no_conflict() -> None:
    for first, second in [(AWQ, AWQ | {"version": "GEMM"}), (GPTQ | {"format": "gptq"}, GPTQ | {"format": "GPTQ"})]:
        assert read({"quantization_config": first}, {"quantization_config.json": second})[1] == []


# What is missing, unknown or of the wrong kind


@pytest.mark.parametrize("method", ["bitsandbytes", "modelopt", "quark", "gguf", "x"])
def test_an_unknown_method_is_refused_by_name(method: str) -> None:
    refused = problem(NUMBERS, quant_method=method)
    assert isinstance(refused, UnsupportedQuantization)
    assert refused.found == repr(method)
    assert refused.expected == "gptq | awq | olive | auto-round | compressed-tensors | fp8 | mxfp4"


def test_a_block_without_a_method_is_refused() -> None:
    assert isinstance(problem(NUMBERS), UnsupportedQuantization)


@pytest.mark.parametrize("block", FORMS, ids=lambda block: block["quant_method"])
@pytest.mark.parametrize("key", ["bits", "group_size"])
@pytest.mark.parametrize("value", [..., None, "4", 4.5, True, -2, [4]], ids=str)
def test_a_missing_or_wrong_number_is_refused_with_its_key(block: dict[str, Any], key: str, value: Any) -> None:
    refused = problem(block, **{key: value})
    assert isinstance(refused, BadConfig)
    assert refused.where == f"config.json: quantization_config: {key}"


def test_all_that_is_missing_is_reported_together() -> None:
    _, problems = read({"quantization_config": {"quant_method": "olive"}})
    assert {found.where.rsplit(": ")[-1] for found in problems} == {"symmetric", "bits", "group_size"}


def test_olive_must_say_whether_it_is_symmetric() -> None:
    assert problem(OLIVE, symmetric=...).where.endswith("symmetric")
    assert problem(without(OLIVE, "symmetric"), sym=True).where.endswith("symmetric")


@pytest.mark.parametrize(("block", "bits"), [(GPTQ, 3), (GPTQ, 5), (AWQ, 8), (AWQ, 3), (OLIVE, 3), (ROUND, 6)])
def test_a_width_that_no_codec_reads_is_refused(block: dict[str, Any], bits: int) -> None:
    refused = problem(block, bits=bits)
    assert isinstance(refused, UnsupportedQuantization)
    assert refused.found == f"{bits} bits"


@pytest.mark.parametrize(
    ("block", "rules"),
    [
        (GPTQ, {"dynamic": {"+:model": {"bits": 3}}}),
        (OLIVE, {"overrides": {DOWN: {"bits": 3}}}),
        (ROUND, {"extra_config": {DOWN: {"bits": 3}}}),
        (ROUND | {"packing_format": "auto_round:auto_awq"}, {"extra_config": {DOWN: {"bits": 8}}}),
    ],
    ids=["gptq", "olive", "auto-round", "auto-round-awq"],
)
def test_a_rule_that_asks_for_a_width_no_codec_reads_is_refused(block: dict[str, Any], rules: dict[str, Any]) -> None:
    assert isinstance(problem(block, **rules), UnsupportedQuantization)


@pytest.mark.parametrize(
    ("block", "rules"),
    [
        (GPTQ, {"dynamic": ["-:lm_head"]}),
        (GPTQ, {"dynamic": {"+:model": 8}}),
        (GPTQ, {"dynamic": {"+:model": {"bits": "8"}}}),
        (OLIVE, {"overrides": {DOWN: 8}}),
        (OLIVE, {"overrides": {DOWN: {"group_size": 1.5}}}),
        (ROUND, {"extra_config": {DOWN: [8]}}),
        (GPTQ, {"modules_to_not_convert": [1]}),
        (GPTQ, {"modules_to_not_convert": {"lm_head": True}}),
        (OLIVE, {"lm_head": "yes"}),
    ],
)
def test_rules_of_the_wrong_kind_are_refused(block: dict[str, Any], rules: dict[str, Any]) -> None:
    assert isinstance(problem(block, **rules), BadConfig)


@pytest.mark.parametrize(
    ("block", "rules"),
    [
        (GPTQ, {"dynamic": {"-:(": {}}}),
        (GPTQ, {"dynamic": {"-:(?!model)": {}}}),
        (GPTQ, {"modules_to_not_convert": ["re:("]}),
        (AWQ, {"modules_to_not_convert": ["re:("]}),
        (OLIVE, {"modules_to_not_convert": ["re:("]}),
        (OLIVE, {"overrides": {"re:(": {"bits": 8}}}),
        (ROUND, {"extra_config": {"(": {"bits": 8}}}),
    ],
)
def test_a_bad_pattern_is_reported_among_the_other_problems(block: dict[str, Any], rules: dict[str, Any]) -> None:
    refused = problem(block, **rules)
    assert isinstance(refused, BadPattern)
    assert next(iter(rules)) in refused.where


# What producers wrote


@pytest.mark.parametrize("folder", sorted(path.name for path in CHECKPOINTS.iterdir()))
def test_the_metadata_of_a_producer_is_read_with_its_copy(folder: str) -> None:
    files = {path.name: json.loads(path.read_text()) for path in (CHECKPOINTS / folder).glob("*.json")}
    found, problems = read(files["config.json"], {k: v for k, v in files.items() if k.startswith("quant")})
    assert found is not None
    assert not problems
    assert found.layout.bits == 4
    eights = [name for name in (DOWN, DOWN.replace("0", "1")) if (c := found.for_module(name)) and c.bits == 8]
    assert len(eights) == (0 if folder in ("ar_auto_round_w4_asym", "ar_llm_compressor_w4_sym", "ol_moe_main") else 1)
