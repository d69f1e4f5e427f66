"""Rotary embeddings: two layouts, two spellings, and nothing silently taken for plain RoPE."""

from __future__ import annotations

import math
from typing import Any

import pytest

from checkpoints import llama
from waybill.config import RotaryConfig, read_model_config
from waybill.errors import WaybillError

BASE = {k: v for k, v in llama().config.items() if k != "rope_theta"}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
DEFAULT = {"rope_type": "default", "rope_theta": 1e6}


def _short(value: Any) -> str:
    return str(value)[:12]


def rotary(**fields: Any) -> RotaryConfig:
    config, problems, _ = read_model_config(BASE | fields)
    assert not problems
    assert config is not None
    return config.rotary_config


def problem(**fields: Any) -> WaybillError:
    _, problems, _ = read_model_config(BASE | fields)
    (found,) = problems
    assert found.where.startswith("config.json")
    assert found.fix
    return found


# Where the base is


@pytest.mark.parametrize(
    "layout",
    [
        {"rope_theta": 1e6},
        {"rope_theta": 1_000_000},
        {"rope_theta": 1e6, "rope_scaling": None},
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 1e6}},
        {"rope_theta": 1_000_000, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default"}},
        {"rope_theta": 1e6, "rope_scaling": {}},
    ],
)
def test_the_base_is_read_wherever_it_is_stated(layout: dict[str, Any]) -> None:
    config, problems, notices = read_model_config(BASE | layout)
    assert config is not None
    assert (config.rotary_config.base, config.rotary_config.scaling) == (1e6, None)
    assert config.rotary_config.rope_type == "default"
    assert not problems
    assert not notices


def test_a_missing_base_takes_the_class_default_and_says_so() -> None:
    config, problems, notices = read_model_config(BASE)
    assert config is not None
    assert config.rotary_config.base == 10000.0
    assert not problems
    (notice,) = notices
    assert notice == "config.json states no rope_theta; the class default 10000 is used"


@pytest.mark.parametrize("value", ["1e6", -1.0, 0, False, True, [], {}, math.nan, math.inf, 10**400], ids=_short)
@pytest.mark.parametrize("place", ["top", "rope_parameters", "rope_scaling"])
def test_a_base_that_is_no_positive_number_is_refused(place: str, value: Any) -> None:
    fields = {"rope_theta": value} if place == "top" else {place: {"rope_type": "default", "rope_theta": value}}
    found = read_model_config(BASE | fields)[1]
    assert len(found) == 1
    assert "rope_theta" in str(found[0]) or found[0].code == "unsupported-rope"


def test_two_bases_that_disagree_are_refused_with_both() -> None:
    found = problem(rope_theta=500000.0, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    assert found.code == "config-conflict"
    assert "500000" in found.found
    assert "10000" in found.found
    assert "rope_parameters.rope_theta" in found.found


# Which kind it is


@pytest.mark.parametrize("layout", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("spelling", [("type",), ("rope_type",), ("type", "rope_type")])
@pytest.mark.parametrize("block", [LINEAR, LLAMA3, YARN], ids=lambda b: str(b["rope_type"]))
def test_both_spellings_mean_the_same_in_both_layouts(
    block: dict[str, Any], spelling: tuple[str, ...], layout: str
) -> None:
    spelled = {k: v for k, v in block.items() if k != "rope_type"} | dict.fromkeys(spelling, block["rope_type"])
    found = rotary(rope_theta=5e5, **{layout: spelled})
    assert found.rope_type == block["rope_type"]
    assert found.scaling is not None
    assert found.scaling["factor"] == block["factor"]
    assert found.frequencies() == rotary(rope_theta=5e5, rope_scaling=block).frequencies()


def test_two_kinds_in_one_block_are_refused() -> None:
    found = problem(rope_theta=1e4, rope_scaling={"type": "linear", "rope_type": "yarn", "factor": 4.0})
    assert found.code == "config-conflict"
    assert "linear" in found.found
    assert "yarn" in found.found


def test_two_blocks_that_agree_are_one_and_two_that_differ_are_refused() -> None:
    assert rotary(rope_theta=1e4, rope_scaling=LINEAR, rope_parameters=LINEAR).rope_type == "linear"
    found = problem(rope_theta=1e4, rope_scaling=LINEAR, rope_parameters=LINEAR | {"factor": 8.0})
    assert found.code == "config-conflict"
    assert "4.0" in found.found
    assert "8.0" in found.found


@pytest.mark.parametrize("kind", ["magic", "dynamic", "longrope", "mrope", ""])
def test_an_unknown_kind_is_refused_by_name(kind: str) -> None:
    found = problem(rope_theta=1e4, rope_scaling={"rope_type": kind, "factor": 4.0})
    assert found.code == "unsupported-rope"
    assert repr(kind) in found.found
    assert "linear" in found.expected


@pytest.mark.parametrize("kind", [5, ["yarn"], {"name": "yarn"}, True])
@pytest.mark.parametrize("spelling", ["type", "rope_type"])
def test_a_kind_that_is_no_text_is_not_taken_for_plain(spelling: str, kind: Any) -> None:
    found = problem(rope_theta=1e4, rope_scaling={spelling: kind, "factor": 4.0})
    assert found.code in ("unsupported-rope", "bad-config")


def test_parameters_per_layer_type_are_refused() -> None:
    found = problem(rope_parameters={"full_attention": DEFAULT, "sliding_attention": DEFAULT | {"rope_theta": 1e4}})
    assert found.code == "unsupported-rope"
    assert "per layer type" in found.what
    assert found.where == "config.json: rope_parameters"


@pytest.mark.parametrize("block", ["yarn", 4, ["yarn"], True])
def test_a_rope_block_that_is_no_object_is_not_called_per_layer_type(block: Any) -> None:
    found = problem(rope_theta=1e4, rope_scaling=block)
    assert found.where == "config.json: rope_scaling"
    assert "per layer type" not in found.what


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_scaling": DEFAULT | {"mrope_section": [16, 24, 24]}},
        {"rope_parameters": DEFAULT | {"partial_rotary_factor": 0.5}},
        # With a scaling, transformers rotates half of each head for these two.
        {"rope_theta": 1e6, "partial_rotary_factor": 0.5, "rope_scaling": LINEAR},
        {"rope_theta": 1e6, "partial_rotary_factor": 0.5, "rope_scaling": YARN},
    ],
)
def test_arithmetic_that_is_not_implemented_is_refused(fields: dict[str, Any]) -> None:
    assert problem(**fields).code == "unsupported-rope"


def test_a_whole_rotary_factor_changes_nothing() -> None:
    assert rotary(rope_parameters=DEFAULT | {"partial_rotary_factor": 1.0}).scaling is None


# The numbers of a kind


@pytest.mark.parametrize("missing", ["factor", "low_freq_factor", "high_freq_factor"])
@pytest.mark.parametrize("value", [..., None, "4", 0, -1.0, True, math.inf])
def test_a_number_llama3_needs_is_asked_for_by_name(missing: str, value: Any) -> None:
    block = {k: v for k, v in (LLAMA3 | {missing: value}).items() if v is not ...}
    found = problem(rope_theta=5e5, rope_scaling=block)
    assert found.code == "bad-config"
    assert "llama3" in found.what
    assert f"{missing}: a positive number" in found.expected
    assert missing in found.found


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_a_scaling_without_its_factor_is_refused(kind: str) -> None:
    found = problem(rope_theta=1e4, rope_scaling={"rope_type": kind})
    assert (found.code, found.expected) == ("bad-config", "factor: a positive number")


def test_a_band_upside_down_is_refused() -> None:
    found = problem(rope_theta=5e5, rope_scaling=LLAMA3 | {"low_freq_factor": 4.0, "high_freq_factor": 1.0})
    assert found.code == "bad-config"
    assert "low below high" in found.expected


@pytest.mark.parametrize("key", ["original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"])
@pytest.mark.parametrize("value", ["x", -1, 0, [1]])
def test_an_optional_number_is_checked_when_it_is_given(key: str, value: Any) -> None:
    found = problem(rope_theta=1e4, rope_scaling=YARN | {key: value})
    assert found.code == "bad-config"
    assert key in found.expected


def test_the_original_length_is_found_in_the_block_beside_it_or_is_the_length() -> None:
    def original(**fields: Any) -> Any:
        return (rotary(rope_theta=1e4, **fields).scaling or {})["original_max_position_embeddings"]

    assert original(rope_scaling=YARN | {"original_max_position_embeddings": 64}) == 64
    assert original(rope_scaling=YARN, original_max_position_embeddings=64) == 64
    assert original(rope_scaling=YARN) == 256


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 1.0, "rope_scaling": YARN},
        {"rope_theta": 1e4, "rope_scaling": YARN | {"beta_slow": 1e-320}},
        {"rope_theta": 1e4, "rope_scaling": YARN | {"beta_slow": 1e308}},
        {"rope_theta": 1e4, "rope_scaling": YARN | {"attention_factor": 10**400}},
        {"rope_theta": 1e4, "rope_scaling": LINEAR | {"factor": 10**400}},
        {"rope_theta": 1e4, "rope_scaling": LINEAR | {"factor": 1e-320}},
        {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"high_freq_factor": 10**400}},
    ],
    ids=lambda f: ", ".join(f"{k} {_short(v)}" for k, v in f["rope_scaling"].items()),
)
def test_numbers_that_give_no_frequencies_are_refused_while_planning(fields: dict[str, Any]) -> None:
    assert problem(**fields).code == "bad-config"


# The frequencies


def test_plain_frequencies_fall_from_one() -> None:
    inverse, factor = rotary(rope_theta=10000.0).frequencies()
    assert inverse == pytest.approx([10000.0 ** (-2 * i / 16) for i in range(8)])
    assert factor == 1.0


def test_linear_scaling_divides_every_frequency() -> None:
    plain, _ = rotary(rope_theta=1e4).frequencies()
    scaled, _ = rotary(rope_theta=1e4, rope_scaling=LINEAR).frequencies()
    assert scaled == pytest.approx([f / 4 for f in plain])


@pytest.mark.parametrize(
    "block",
    [
        LINEAR,
        LLAMA3,
        LLAMA3 | {"original_max_position_embeddings": 64, "factor": 32.0},
        YARN,
        YARN | {"original_max_position_embeddings": 64},
        YARN | {"truncate": False},
        YARN | {"mscale": 0.7, "mscale_all_dim": 1.0},
        YARN | {"mscale": 0.7},
        YARN | {"attention_factor": 1.5, "beta_fast": 16.0, "beta_slow": 2.0},
    ],
)
def test_scaled_frequencies_are_those_of_transformers(block: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    peer = LlamaRotaryEmbedding(LlamaConfig(**BASE, rope_theta=1e4, rope_scaling=dict(block)))
    inverse, factor = rotary(rope_theta=1e4, rope_scaling=block).frequencies()
    assert inverse == pytest.approx(peer.inv_freq.tolist(), rel=1e-6)
    assert factor == pytest.approx(peer.attention_scaling)
