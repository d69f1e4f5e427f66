"""compressed-tensors' metadata: which modules its groups mean, what its schemes say, and what is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from packers import plan_of
from waybill.config.quantization import QuantizationConfig
from waybill.errors import BadConfig, BadPattern, UnsupportedQuantization, WaybillError
from waybill.families.decoder import decoder_components
from waybill.manifest.quantization import read_quantization

WHERE = "config.json: quantization_config"
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
GATE, DOWN, Q = (f"model.layers.1.{name}" for name in ("mlp.gate_proj", "mlp.down_proj", "self_attn.q_proj"))


def group(*targets: str, **changes: Any) -> dict[str, Any]:
    return {"targets": list(targets or ("Linear",)), "weights": WEIGHTS | changes}


def block(*groups: Any, **changes: Any) -> dict[str, Any]:
    """A whole block, one group by default."""
    named = {f"group_{at}": one for at, one in enumerate(groups or (group(),))}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": named,
        "ignore": ["lm_head"],
    } | changes


def scheme(**changes: Any) -> QuantizationConfig:
    """What a group's only scheme becomes."""
    config = plan_of(block(group(**changes))).for_module(DOWN)
    assert config is not None
    return config


def problem(stated: Mapping[str, Any]) -> WaybillError:
    problems: list[WaybillError] = []
    assert not read_quantization({"quantization_config": stated}, {}, decoder_components({}), problems).plans
    (only,) = problems
    assert only.fix
    return only


# Which modules


def test_a_class_selects_linear_modules_and_ignore_wins() -> None:
    plan = plan_of(block())
    assert plan.for_module(DOWN) == plan.layout
    assert plan.for_module("lm_head", "head") is None
    assert plan.reason("lm_head", "head") == "the exclusion 'lm_head'"
    assert plan.for_module("model.embed_tokens", "embedding") is None
    assert plan.reason("model.embed_tokens", "embedding") == "targets, none of which selects it"
    assert plan.reason(DOWN) == "the rule 'Linear'"


def test_the_head_is_a_linear_module_unless_it_is_ignored() -> None:
    assert plan_of(block(ignore=[])).for_module("lm_head", "head") is not None


def test_an_ignored_path_is_that_module_and_no_other() -> None:
    plan = plan_of(block(ignore=["model.layers.1", "model.layers.1.mlp.gate", Q]))
    assert [plan.for_module(name) is None for name in (Q, GATE, DOWN)] == [True, False, False]


def test_an_ignored_expression_is_open_at_its_end() -> None:
    plan = plan_of(block(ignore=[r"re:model\.layers\.1", "re:mlp"]))
    modules = ("model.layers.1.mlp.x", "model.layers.10.mlp.x", "model.layers.2.mlp.x")
    assert [plan.for_module(name) is None for name in modules] == [True, True, False]


def test_the_most_particular_target_decides_whatever_the_order_of_the_groups() -> None:
    groups = [group("Linear", num_bits=8), group("re:.*mlp.*", num_bits=2), group(DOWN), group("re:.*gate.*")]
    for ordered in (groups, groups[::-1]):
        plan = plan_of(block(*ordered))
        found = [plan.for_module(name) for name in (Q, "model.layers.1.mlp.up_proj", DOWN, GATE)]
        assert [config.bits if config else None for config in found] == [8, 2, 4, 4]
        assert plan.reason(GATE) == "the rule 're:.*gate.*'"


def test_of_two_groups_with_one_target_the_later_counts() -> None:
    plan = plan_of(block(group(num_bits=8), group(num_bits=2)))
    assert [config.bits for config in (plan.for_module(DOWN),) if config] == [2]


def test_a_module_no_target_selects_is_float() -> None:
    plan = plan_of(block(group(DOWN)))
    assert plan.for_module(DOWN) is not None
    assert plan.for_module(GATE) is None


def test_a_group_without_weights_makes_its_modules_float() -> None:
    plan = plan_of(block(group(), {"targets": [DOWN], "weights": None}))
    assert plan.for_module(GATE) is not None
    assert plan.for_module(DOWN) is None


# What a scheme says


@pytest.mark.parametrize(
    ("changes", "size", "rows"),
    [
        ({"strategy": "group", "group_size": 64}, 64, 1),
        ({"strategy": "channel", "group_size": None}, -1, 1),
        ({"strategy": "tensor", "group_size": None}, -1, -1),
        ({"strategy": "block", "block_structure": [16, 48]}, 48, 16),
        ({"strategy": "block", "block_structure": "128x64"}, 64, 128),
        ({"strategy": None, "group_size": 64}, 64, 1),
        ({"strategy": None, "group_size": -1}, -1, 1),
        ({"strategy": None, "group_size": None}, -1, -1),
    ],
)
def test_a_strategy_says_what_shares_a_scale(changes: dict[str, Any], size: int, rows: int) -> None:
    config = scheme(**changes)
    assert (config.group_size, config.scale_rows) == (size, rows)


@pytest.mark.parametrize(
    ("order", "permuted"),
    [(None, False), (False, False), ("weight", False), ("static", False), ("group", True), (True, True)],
)  # fmt: skip
def test_only_an_order_by_groups_changes_what_is_stored(order: Any, permuted: bool) -> None:
    assert scheme(actorder=order).desc_act is permuted


def test_what_is_not_stated_is_8_symmetric_bits() -> None:
    config = plan_of(block({"targets": ["Linear"], "weights": {"strategy": "channel"}})).layout
    assert (config.bits, config.symmetric, config.group_size) == (8, True, -1)


def test_a_groups_own_format_comes_before_the_whole_models() -> None:
    integers = group(DOWN, num_bits=8) | {"format": "int-quantized"}
    words = group() | {"format": "pack-quantized"}
    for whole in ("mixed-precision", "pack-quantized"):
        plan = plan_of(block(words, integers, format=whole))
        forms = [config.form for config in (plan.for_module(GATE), plan.for_module(DOWN)) if config]
        assert forms == ["pack-quantized", "int-quantized"]
    assert plan_of(block(group(num_bits=8), format="naive-quantized")).layout.form == "int-quantized"


@pytest.mark.parametrize(
    ("name", "bits", "size", "symmetric"),
    [("W4A16", 4, 128, True), ("w8a16", 8, 128, True), ("W4A16_ASYM", 4, 128, False), ("W4AFP8", 4, 128, True),
     ("W2A8", 2, 128, True), ("W8A8", 8, -1, True), ("INT8", 8, -1, True)],
)  # fmt: skip
def test_a_group_may_be_the_name_of_a_preset(name: str, bits: int, size: int, symmetric: bool) -> None:
    layout = plan_of(block(config_groups={name: ["Linear"]})).layout
    assert (layout.bits, layout.group_size, layout.symmetric) == (bits, size, symmetric)


@pytest.mark.parametrize(
    ("name", "form", "bits", "size"),
    [("FP8", "float-quantized", 8, (-1, -1)), ("FP8_DYNAMIC", "float-quantized", 8, (1, -1)),
     ("fp8_block", "float-quantized", 8, (128, 128)), ("MXFP4", "mxfp4-pack-quantized", 4, (1, 32)),
     ("MXFP4A16", "mxfp4-pack-quantized", 4, (1, 32))],
)  # fmt: skip
def test_a_preset_may_be_of_floats(name: str, form: str, bits: int, size: tuple[int, int]) -> None:
    layout = plan_of(block(format=form, config_groups={name: ["Linear"]})).layout
    assert (layout.form, layout.bits, layout.block, layout.is_floating) == (form, bits, size, True)


# What is for running the model


def test_what_is_said_of_running_the_model_is_a_notice_and_changes_no_weight() -> None:
    activations = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    plan = plan_of(block(group() | {"input_activations": activations}, kv_cache_scheme={"num_bits": 8}))
    assert plan.layout == plan_of(block()).layout
    assert plan.notices == (
        f"{WHERE}.config_groups.group_0.input_activations is for running the model; activations are not rounded to "
        "8-bit float here",
        f"{WHERE}.kv_cache_scheme is for running the model; the cache keeps its dtype here",
    )
    assert plan_of(block()).notices == ()


@pytest.mark.parametrize("form", ["float-quantized", "naive-quantized"])
@pytest.mark.parametrize(
    ("strategy", "size"),
    [({"strategy": "tensor"}, (-1, -1)), ({"strategy": "channel"}, (1, -1)),
     ({"strategy": "block", "block_structure": [16, 32]}, (16, 32)),
     ({"strategy": "group", "group_size": 32}, (1, 32))],
)  # fmt: skip
def test_8_bit_floats_have_blocks(form: str, strategy: dict[str, Any], size: tuple[int, int]) -> None:
    own = plan_of(block(group(type="float", num_bits=8, symmetric=True, **strategy), format=form)).layout
    assert own.is_floating
    assert (own.block, own.divides) == (size, False)


@pytest.mark.parametrize(
    ("changes", "found"),
    [({"num_bits": 4}, "float, 4 bits, symmetric"), ({"symmetric": False}, "float, 8 bits, asymmetric"),
     ({"type": "int"}, "int, 8 bits, symmetric")],
)  # fmt: skip
def test_other_floats_are_refused(changes: dict[str, Any], found: str) -> None:
    stated = {"type": "float", "num_bits": 8, "symmetric": True} | changes
    refused = problem(block(group(**stated), format="float-quantized"))
    assert isinstance(refused, UnsupportedQuantization)
    assert (refused.where, refused.found) == (f"{WHERE}.config_groups.group_0.weights.type", found)


MXFP4 = {"type": "float", "num_bits": 4, "symmetric": True, "group_size": 32}


def test_4_bit_floats_have_blocks_of_32() -> None:
    own = plan_of(block(group(**MXFP4), format="mxfp4-pack-quantized")).layout
    assert (own.bits, own.block, own.form, own.is_floating) == (4, (1, 32), "mxfp4-pack-quantized", True)


@pytest.mark.parametrize(
    ("changes", "where", "found"),
    [({"num_bits": 8}, "type", "float, 8 bits, symmetric"), ({"symmetric": False}, "type", "float, 4 bits, asymmetric"),
     ({"group_size": 16}, "group_size", "blocks of 1x16"), ({"strategy": "channel"}, "group_size", "blocks of 1x-1")],
)  # fmt: skip
def test_other_4_bit_floats_are_refused(changes: dict[str, Any], where: str, found: str) -> None:
    refused = problem(block(group(**(MXFP4 | changes)), format="mxfp4-pack-quantized"))
    assert isinstance(refused, UnsupportedQuantization)
    assert (refused.where, refused.found) == (f"{WHERE}.config_groups.group_0.weights.{where}", found)


# What is refused


@pytest.mark.parametrize(
    ("form", "kind"),
    [("nvfp4-pack-quantized", "float"), ("mxfp8-quantized", "float"), ("marlin-24", "int"), ("dense", "int"),
     ("sparse-24-bitmask", "int"), ("fakequant", "int"), ("mixed-precision", "int"), (None, "int"), ("new", "int")],
)  # fmt: skip
def test_another_format_is_refused_by_its_name_and_place(form: str | None, kind: str) -> None:
    whole = problem(block(group(type=kind, num_bits=8), format=form))
    assert isinstance(whole, UnsupportedQuantization)
    rounded = ": its scales are divided by another scale, and such a quotient is rounded"
    why = rounded if form == "nvfp4-pack-quantized" else ""
    assert (whole.where, whole.found) == (f"{WHERE}.format", f"{form or 'no format'}{why}")
    known = "pack-quantized | int-quantized | naive-quantized | float-quantized | mxfp4-pack-quantized"
    assert whole.expected == known
    if form is not None:
        own = problem(block(group(type=kind, num_bits=8) | {"format": form}))
        assert (own.where, own.found) == (f"{WHERE}.config_groups.group_0.format", f"{form}{why}")


@pytest.mark.parametrize(
    ("changes", "where", "found"),
    [
        ({"quantization_status": "frozen"}, "quantization_status", "'frozen'"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format", "'sparse-24-bitmask'"),
        ({"moe_sparsity_config": {"layers": {}}}, "moe_sparsity_config", "layers"),
        ({"transform_config": {"config_groups": {"R1": {}}}}, "transform_config", "config_groups"),
        ({"config_groups": {}}, "config_groups", "0 targets, and no scheme"),
        ({"config_groups": {"W9A16": ["Linear"]}}, "config_groups.W9A16", "the preset 'W9A16'"),
        ({"config_groups": {"NVFP4": ["Linear"]}}, "config_groups.NVFP4", "the preset 'NVFP4'"),
        ({"config_groups": {"UNQUANTIZED": ["Linear"]}}, "config_groups", "1 targets, and no scheme"),
    ],
)
def test_what_changes_the_meaning_of_the_tensors_is_refused(changes: dict[str, Any], where: str, found: str) -> None:
    refused = problem(block(**changes))
    assert isinstance(refused, UnsupportedQuantization)
    assert (refused.where, refused.found) == (f"{WHERE}.{where}", found)


@pytest.mark.parametrize(
    "changes", [{"sparsity_config": {}}, {"sparsity_config": {"format": "dense"}}, {"transform_config": None}]
)
def test_what_says_nothing_is_no_reason_to_refuse(changes: dict[str, Any]) -> None:
    assert plan_of(block(**changes)).layout == plan_of(block()).layout


@pytest.mark.parametrize(
    ("changes", "where", "found"),
    [
        ({"type": "float"}, ".type", "float"),
        ({"strategy": "tensor_group"}, ".strategy", "'tensor_group'"),
        ({"strategy": "block"}, ".block_structure", "None"),
        ({"strategy": "block", "block_structure": [16, 0]}, ".block_structure", "[16, 0]"),
        ({"actorder": "column"}, ".actorder", "'column'"),
    ],
)
def test_a_scheme_that_is_not_known_is_refused(changes: dict[str, Any], where: str, found: str) -> None:
    refused = problem(block(group(**changes)))
    assert isinstance(refused, UnsupportedQuantization)
    assert (refused.where, refused.found) == (f"{WHERE}.config_groups.group_0.weights{where}", found)


def test_another_width_is_refused_in_words_and_in_bytes() -> None:
    assert problem(block(group(num_bits=3))).found == "3 bits"
    refused = problem(block(group(), group(DOWN, num_bits=4) | {"format": "int-quantized"}))
    assert (refused.where, refused.found) == (f"{WHERE}.config_groups.group_1.weights.num_bits", "4 bits")


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"config_groups": ["Linear"]}, "config_groups"),
        ({"config_groups": {"group_0": "Linear"}}, "config_groups.group_0"),
        ({"config_groups": {"group_0": group() | {"targets": "Linear"}}}, "config_groups.group_0: targets"),
        ({"config_groups": {"group_0": group(num_bits="4")}}, "config_groups.group_0.weights: num_bits"),
        ({"config_groups": {"group_0": group(group_size=None)}}, "config_groups.group_0.weights: group_size"),
        ({"ignore": "lm_head"}, "ignore"),
    ],
)
def test_a_field_of_the_wrong_kind_is_refused_with_its_place(changes: dict[str, Any], where: str) -> None:
    refused = problem(block(**changes))
    assert isinstance(refused, BadConfig)
    assert refused.where.replace(f"{WHERE}: ", f"{WHERE}.") == f"{WHERE}.{where}"


@pytest.mark.parametrize("changes", [{"ignore": ["re:(?!x)"]}, {"config_groups": {"g": group("re:(")}}])
def test_an_expression_that_cannot_be_compiled_is_refused(changes: dict[str, Any]) -> None:
    assert isinstance(problem(block(**changes)), BadPattern)


def test_two_places_that_disagree_are_refused() -> None:
    for other in (block(ignore=[]), block(group(num_bits=8)), block(format="int-quantized")):
        problems: list[WaybillError] = []
        side = {"quantization_config.json": other}
        read_quantization({"quantization_config": block()}, side, decoder_components({}), problems)
        assert [found.code for found in problems] == ["config-conflict"]
