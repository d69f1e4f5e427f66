"""Metadata of small floats: what its fields mean, and which modules its lists mean."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.quantizers.quantizers_utils import should_convert_module

from packers import layout, plan_of
from waybill.config.match import fp8_exclusions

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
GPTQMODEL = {"quant_method": "fp8", "format": "float8_e4m3fn", "weight_scale_semantics": "inverse"}
NAMES = [
    "model.layers.1.mlp.gate",
    "model.layers.1.mlp.gate_proj",
    "model.layers.10.mlp.gate",
    "model.layers.1.self_attn.q_proj",
    "lm_head",
    "model.layers.11.mlp.experts.3.up_proj",
    "visual.blocks.0.attn.proj",
]
PATTERNS = [
    "model.layers.1", "mlp.gate", "model.layers.1.", r"model\.layers\.1\d", "gate", "lm_head", "layers", "model",
    "model.layers.*gate", "proj", "q_proj|visual", "experts",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_an_exclusion_means_the_modules_that_transformers_takes_it_for(pattern: str) -> None:
    matcher = fp8_exclusions([pattern], "modules_to_not_convert")
    found = [name for name in NAMES if matcher.first(name) is not None]
    assert found == [name for name in NAMES if not should_convert_module(name, [pattern])]


@pytest.mark.parametrize(
    ("block", "size", "divides"),
    [
        (FP8 | {"weight_block_size": [128, 64]}, (128, 64), False),
        (FP8 | {"weight_block_size": None}, (-1, -1), False),
        (FP8, (-1, -1), False),
        (GPTQMODEL | {"weight_scale_method": "row"}, (1, -1), True),
        (GPTQMODEL | {"weight_scale_method": "tensor", "weight_block_size": None}, (-1, -1), True),
        (GPTQMODEL | {"weight_scale_method": "block", "weight_block_size": [16, 32]}, (16, 32), True),
    ],
)
def test_a_scale_covers_what_the_metadata_says(block: dict[str, Any], size: tuple[int, int], divides: bool) -> None:
    config = layout(block)
    assert (config.block, config.divides) == (size, divides)


@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers"])
def test_modules_that_are_excluded_are_float_under_either_name_of_the_list(key: str) -> None:
    plan = plan_of(FP8, **{key: ["lm_head", "model.layers.1"]})
    assert plan.for_module("model.layers.1.mlp.up_proj") is None
    assert plan.for_module("model.layers.10.mlp.up_proj") is not None


def test_only_modules_that_are_listed_are_packed_where_they_are() -> None:
    plan = plan_of(FP8, modules_to_convert=["model.layers.0.mlp"])
    assert plan.for_module("model.layers.0.mlp.up_proj") is not None
    assert plan.for_module("model.layers.0.self_attn.q_proj") is None


def test_mxfp4_is_about_banks_of_experts_alone() -> None:
    plan = plan_of({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]})
    assert plan.for_module("model.layers.0.mlp.experts.down_proj", "experts") is not None
    assert plan.for_module("model.layers.0.mlp.up_proj") is None
    assert plan.for_module("lm_head", "head") is None
