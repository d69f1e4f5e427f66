"""What each producer's metadata says of one module: defaults, spellings, exclusions, overrides, and their order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from packers import plan_of as plan
from waybill.config.quantization import QuantizationConfig
from waybill.errors import UnsupportedQuantization, WaybillError
from waybill.families.decoder import decoder_components
from waybill.manifest.quantization import read_quantization

NUMBERS = {"bits": 4, "group_size": 32}
GPTQ = {"quant_method": "gptq", "sym": False, **NUMBERS}
AWQ = {"quant_method": "awq", "zero_point": True, "version": "gemm", **NUMBERS}
OLIVE = {"quant_method": "olive", "symmetric": False, **NUMBERS}
ROUND = {"quant_method": "auto-round", "sym": True, "packing_format": "auto_round:auto_gptq", **NUMBERS}
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"


def problem(block: Mapping[str, Any], **changes: Any) -> WaybillError:
    problems: list[WaybillError] = []
    assert not read_quantization(
        {"quantization_config": {**block, **changes}}, {}, decoder_components({}), problems
    ).plans
    (only,) = problems
    assert only.where.startswith("config.json: quantization_config")
    assert only.fix
    return only


def without(block: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in block.items() if key not in keys}


# GPTQ


@pytest.mark.parametrize(
    ("changes", "offset"),
    [
        ({}, 1),
        ({"checkpoint_format": "gptq"}, 1),
        ({"format": "gptq"}, 1),
        ({"checkpoint_format": "gptq_v2", "format": "gptq_v2"}, 0),
        ({"format": "gptq_v2"}, 0),
        ({"checkpoint_format": "GPTQ_V2"}, 0),
    ],
)
def test_the_checkpoint_format_says_what_was_subtracted(changes: dict[str, Any], offset: int) -> None:
    assert plan(GPTQ, **changes).layout.zero_offset == offset


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"checkpoint_format": "marlin"}, "marlin"),
        ({"is_marlin_format": True}, "marlin"),
        ({"checkpoint_format": "bitblas"}, "bitblas"),
        ({"checkpoint_format": "gptq_p"}, "gptq_p"),
        ({"format": "exl2"}, "exl2"),
    ],
)
def test_another_checkpoint_format_is_refused_by_name(changes: dict[str, Any], found: str) -> None:
    refused = problem(GPTQ, **changes)
    assert isinstance(refused, UnsupportedQuantization)
    assert refused.found == found


def test_the_numbers_have_other_names() -> None:
    for bits, group in [("w_bit", "q_group_size"), ("wbits", "group_size")]:
        layout = plan(without(GPTQ, "bits", "group_size"), **{bits: 8, group: -1}).layout
        assert (layout.bits, layout.group_size) == (8, -1)


def test_gptq_is_symmetric_unless_it_says_otherwise() -> None:
    assert plan(without(GPTQ, "sym")).layout.symmetric
    assert plan(GPTQ, sym=True).layout.symmetric
    assert not plan(GPTQ).layout.symmetric


@pytest.mark.parametrize(
    ("changes", "symmetric"),
    [({"zero_point": True}, False), ({"zero_point": False}, True), ({"zero_point": True, "sym": True}, True)],
)
def test_a_gptq_file_that_states_no_sym_may_state_zero_point(changes: dict[str, Any], symmetric: bool) -> None:
    assert plan(without(GPTQ, "sym") | changes).layout.symmetric is symmetric


def test_modules_of_a_block_that_are_not_listed_are_float() -> None:
    listed = [["self_attn.q_proj", "self_attn.k_proj"], ["mlp.down_proj"]]
    layouts = plan(GPTQ | {"modules_in_block_to_quantize": listed})
    for name, packed in (("self_attn.q_proj", True), ("self_attn.o_proj", False), ("mlp.down_proj", True)):
        assert (layouts.for_module(f"model.layers.3.{name}") is not None) is packed
    assert layouts.for_module("model.layers.3.other_mlp.down_proj") is None


@pytest.mark.parametrize("listed", [7, [], [["self_attn.q_proj", 7]], {"a": 1}])
def test_a_list_of_packed_modules_that_is_none_is_refused(listed: Any) -> None:
    assert problem(GPTQ, modules_in_block_to_quantize=listed).where.endswith(".modules_in_block_to_quantize")


@pytest.mark.parametrize(
    ("changes", "permuted"),
    [
        ({}, False),
        ({"desc_act": False}, False),
        ({"desc_act": True}, True),
        ({"desc_act": True, "static_groups": True}, False),
        ({"desc_act": True, "meta": {"static_groups": True}}, False),
        ({"desc_act": True, "static_groups": False}, True),
    ],
)
def test_act_order_with_static_groups_permutes_nothing(changes: dict[str, Any], permuted: bool) -> None:
    assert plan(GPTQ, **changes).layout.desc_act is permuted


def test_the_first_dynamic_rule_wins_and_the_rest_is_inherited() -> None:
    dynamic = {
        r"-:.*layers\.1\.": {},
        r"+:.*down_proj": {"bits": 8},
        r".*layers\.0\.": {"group_size": 64, "sym": True},
        r"-:.*q_proj": {},
        r"+:lm_head": {"bits": 8, "group_size": -1},
    }
    found = plan(GPTQ, dynamic=dynamic)
    changed = {name: found.for_module(f"model.layers.{name}") for name in ("0.down_proj", "1.down_proj", "0.q_proj")}
    eight, excluded, first = changed.values()
    assert eight == QuantizationConfig(method="gptq", bits=8, group_size=32, symmetric=False, zero_offset=1)
    assert excluded is None
    assert first == QuantizationConfig(method="gptq", bits=4, group_size=64, symmetric=True, zero_offset=1)
    assert found.for_module("model.layers.2.q_proj") is None
    assert found.for_module("model.layers.2.k_proj") == found.layout
    head = found.for_module("lm_head", "head")
    assert head is not None
    assert (head.bits, head.group_size) == (8, -1)
    assert found.reason("model.layers.1.down_proj") == r"the rule '.*layers\\.1\\.'"


# AWQ


@pytest.mark.parametrize("changes", [{}, {"version": "GEMM"}, {"version": ...}, {"version": ..., "format": "gemm"}])
def test_awq_gemm_is_read_however_it_is_spelled(changes: dict[str, Any]) -> None:
    block = {key: value for key, value in {**AWQ, **changes}.items() if value is not ...}
    assert plan(block).layout == QuantizationConfig(method="awq", symmetric=False, **NUMBERS)


@pytest.mark.parametrize("version", ["gemv", "GEMV", "gemv_fast", "marlin", "llm-awq"])
def test_another_awq_version_is_refused_by_name(version: str) -> None:
    changes = {"backend": "llm-awq"} if version == "llm-awq" else {"version": version}
    refused = problem(AWQ, **changes)
    assert isinstance(refused, UnsupportedQuantization)
    assert refused.found == version.lower()


def test_awq_is_asymmetric_unless_it_has_no_zero_point() -> None:
    assert not plan(without(AWQ, "zero_point")).layout.symmetric
    assert plan(AWQ, zero_point=False, sym=True).layout.symmetric


@pytest.mark.parametrize("block", [GPTQ, AWQ], ids=["gptq", "awq"])
@pytest.mark.parametrize(
    ("excluded", "floats"),
    [(None, ""), ([], ""), ("model.layers.1", "b"), (["model.layers.1"], "b"), (["re:.*down_proj"], "abc"), ([""], "")],
)
def test_exclusions_are_null_a_string_or_a_list(block: dict[str, Any], excluded: Any, floats: str) -> None:
    found = plan(block, modules_to_not_convert=excluded)
    modules = {"a": DOWN, "b": "model.layers.1.mlp.down_proj", "c": "model.layers.10.mlp.down_proj"}
    assert "".join(key for key, name in modules.items() if found.for_module(name) is None) == floats


# Olive


def test_olive_exclusions_are_substrings_and_come_before_overrides() -> None:
    found = plan(
        OLIVE, modules_to_not_convert=["layers.1", "re:.*q_proj"], overrides={DOWN: {"bits": 8}, Q: {"bits": 8}}
    )
    assert found.for_module("model.layers.10.mlp.up_proj") is None
    assert found.for_module(Q) is None
    down = found.for_module(DOWN)
    assert down is not None
    assert down.bits == 8


def test_olive_overrides_are_exact_or_expressions_and_the_first_wins() -> None:
    overrides = {"re:.*0.*_proj": {"symmetric": True}, DOWN: {"bits": 8}, "up_proj": {"bits": 2}}
    found = plan(OLIVE, overrides=overrides)
    assert found.for_module(DOWN) == QuantizationConfig(method="olive", symmetric=True, **NUMBERS)
    assert found.for_module("model.layers.1.mlp.up_proj") == found.layout


@pytest.mark.parametrize("changes", [{}, {"overrides": None, "modules_to_not_convert": None}])
@pytest.mark.parametrize(("flag", "kind"), [("lm_head", "head"), ("embeds", "embedding"), ("moe", "experts")])
def test_olive_flags_say_which_tables_and_banks_are_packed(changes: dict[str, Any], flag: str, kind: str) -> None:
    assert plan(OLIVE, **changes).for_module("x", kind) is None
    assert plan(OLIVE, **changes, **{flag: False}).for_module("x", kind) is None
    packed = plan(OLIVE, **changes, **{flag: True})
    assert packed.for_module("x", kind) == packed.layout
    assert [k for k in ("head", "embedding", "experts") if packed.for_module("x", k)] == [kind]


def test_the_head_flag_of_gptq_says_that_the_head_is_packed() -> None:
    assert plan(GPTQ).for_module("lm_head", "head") is None
    assert plan(GPTQ, lm_head=True).for_module("lm_head", "head") == plan(GPTQ).layout
    assert plan(AWQ, lm_head=True).for_module("model.embed_tokens", "embedding") is None


# auto-round


@pytest.mark.parametrize(
    ("form", "method", "offset"),
    [
        ("auto_round:auto_gptq", "gptq", 1),
        ("auto_round:gptq", "gptq", 1),
        ("auto_round:auto_gptq:exllamav2", "gptq", 1),
        (None, "gptq", 1),
        ("auto_round:gptqmodel", "gptq", 0),
        ("auto_round", "gptq", 0),
        ("auto_round:exllamav2", "gptq", 0),
        ("auto_round:auto_awq", "awq", 0),
        ("auto_round:awq", "awq", 0),
    ],
)
@pytest.mark.parametrize("key", ["packing_format", "backend"])
@pytest.mark.parametrize("method_name", ["auto-round", "intel/auto-round"])
def test_the_packing_format_says_which_layout(form: str, method: str, offset: int, key: str, method_name: str) -> None:
    block = without(ROUND, "packing_format") | {"quant_method": method_name}
    assert plan(block, **{key: form}).layout == QuantizationConfig(
        method=method, symmetric=True, zero_offset=offset, **NUMBERS
    )


@pytest.mark.parametrize(
    "form", ["auto_round:llm_compressor", "auto_round:fp8", "auto_round:mx_fp4", "auto_round:mlx", "other"]
)
def test_another_packing_format_is_refused_by_name(form: str) -> None:
    refused = problem(ROUND, packing_format=form)
    assert isinstance(refused, UnsupportedQuantization)
    assert refused.found == form


def test_an_exact_name_comes_before_an_expression() -> None:
    found = plan(ROUND, extra_config={"down_proj": {"bits": 2}, DOWN: {"bits": 8}, r"layers\.1\.": {"bits": 16}})
    down, other = found.for_module(DOWN), found.for_module("model.layers.2.mlp.down_proj")
    assert down is not None
    assert other is not None
    assert (down.bits, other.bits) == (8, 2)
    assert found.for_module("model.layers.1.mlp.up_proj") is None
    assert found.reason(DOWN) == f"the entry {DOWN!r}"


@pytest.mark.parametrize("bits", [16, 32])
def test_sixteen_bits_and_more_mean_float(bits: int) -> None:
    assert plan(ROUND, extra_config={DOWN: {"bits": bits, "data_type": "float"}}).for_module(DOWN) is None


@pytest.mark.parametrize("key", ["block_name_to_quantize", "to_quant_block_names"])
@pytest.mark.parametrize(
    ("blocks", "packed"),
    [
        ("model.layers", [True, False, True]),
        ("model.layers, visual.blocks", [True, True, True]),
        (["visual.blocks"], [False, True, True]),
        (["model.layers", "visual.blocks"], [True, True, True]),
        (None, [True, True, True]),
    ],
)
def test_modules_outside_the_quantized_blocks_are_float_unless_named(key: str, blocks: Any, packed: list[bool]) -> None:
    found = plan(ROUND, **{key: blocks}, extra_config={"projector": {"bits": 8}})
    assert [found.for_module(name) is not None for name in (Q, "visual.blocks.0.fc1", "projector")] == packed


def test_a_head_named_in_extra_config_is_packed() -> None:
    assert plan(ROUND).for_module("lm_head", "head") is None
    assert plan(ROUND, extra_config={"lm_head": {"bits": 4}}).for_module("lm_head", "head") == plan(ROUND).layout
