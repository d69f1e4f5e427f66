"""config.json from strangers: every wrong field is refused by name, and nothing is guessed where producers differ."""

from __future__ import annotations

import json
import math
import warnings
from typing import Any

import pytest

from checkpoints import gpt_oss, llama, qwen2, qwen2_moe, qwen3, qwen3_moe
from waybill.config import ModelConfig, read_model_config
from waybill.config.architectures import ARCHITECTURES
from waybill.errors import Refused, WaybillError

RECIPES = {"llama": llama, "qwen2": qwen2, "qwen3": qwen3, "qwen2_moe": qwen2_moe, "qwen3_moe": qwen3_moe}
RECIPES["gpt_oss"] = gpt_oss
CONFIGS = {name: recipe().config for name, recipe in RECIPES.items()}


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    """The family's tiny config with changes; a field changed to ... is left out."""
    return {k: v for k, v in (CONFIGS[family] | changes).items() if v is not ...}


def model(family: str, **changes: Any) -> ModelConfig:
    config, problems, _ = read_model_config(config_of(family, **changes))
    assert not problems
    assert config is not None
    return config


def problems(family: str, **changes: Any) -> list[WaybillError]:
    """What is wrong; `from_hf` must refuse with exactly the same."""
    raw = config_of(family, **changes)
    found = read_model_config(raw)[1]
    with pytest.raises(Refused) as refused:
        ModelConfig.from_hf(raw)
    assert [p.as_dict() for p in refused.value.problems] == [p.as_dict() for p in found]
    return found


def problem(family: str, **changes: Any) -> WaybillError:
    (found,) = problems(family, **changes)
    assert found.where.startswith("config.json")
    assert found.fix
    return found


def notices(family: str, **changes: Any) -> list[str]:
    return read_model_config(config_of(family, **changes))[2]


# What is read


def test_an_explicit_head_dim_wins_everywhere() -> None:
    config = model("qwen3")
    assert config.head_dim == config.rotary_config.head_dim == config.rotary_config.rotary_dim == 32
    assert config.kv_cache_bytes_per_token(2) == 2 * 2 * 2 * 32 * 2


@pytest.mark.parametrize("head_dim", [..., None])
def test_head_dim_is_shared_out_of_the_hidden_size_where_the_class_has_no_default(head_dim: Any) -> None:
    assert model("llama", head_dim=head_dim).head_dim == 16
    assert model("qwen3_moe", head_dim=head_dim).head_dim == 16


def test_an_omitted_head_dim_takes_the_class_default_and_says_so() -> None:
    assert model("qwen3", head_dim=...).head_dim == 128
    assert any("no head_dim" in n and "128" in n for n in notices("qwen3", head_dim=...))


def test_biases_follow_the_architecture_or_the_config() -> None:
    assert (model("qwen2").attention_bias, model("qwen2").attention_output_bias) == (True, False)
    assert (model("llama").attention_bias, model("llama").mlp_bias) == (False, False)
    stated = model("llama", attention_bias=True, mlp_bias=True)
    assert (stated.attention_bias, stated.attention_output_bias, stated.mlp_bias) == (True, True, True)
    assert model("qwen3", attention_bias=True).attention_output_bias


def test_key_value_heads_default_to_all_heads_where_the_class_says_so() -> None:
    assert model("llama", num_key_value_heads=...).num_kv_heads == 4


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_both_names_of_the_number_of_experts_are_read(name: str) -> None:
    config = model("qwen3_moe", **({"num_experts": ...} | {name: 4}))
    assert (config.num_experts, config.is_moe) == (4, True)


def test_two_equal_numbers_of_experts_are_no_conflict() -> None:
    assert model("qwen3_moe", num_local_experts=4).num_experts == 4


def test_two_numbers_of_experts_are_a_conflict() -> None:
    found = problem("qwen3_moe", num_local_experts=8)
    assert found.code == "config-conflict"
    assert "num_experts" in found.what
    assert found.found == "num_experts: 4, num_local_experts: 8"


def test_sparse_layers_are_those_the_step_and_the_exceptions_leave() -> None:
    config = model("qwen3_moe", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    assert [layer for layer in range(6) if config.is_moe_layer(layer)] == [1, 5]
    assert not model("llama").is_moe_layer(0)


def test_an_omitted_norm_topk_prob_is_false_and_said() -> None:
    assert not model("qwen3_moe", norm_topk_prob=...).norm_topk_prob
    assert any("norm_topk_prob" in n and "False" in n for n in notices("qwen3_moe", norm_topk_prob=...))


@pytest.mark.parametrize(
    ("stated", "tag"),
    [
        ({"torch_dtype": "float16"}, "F16"),
        ({"torch_dtype": ..., "dtype": "torch.bfloat16"}, "BF16"),
        ({"torch_dtype": None, "dtype": "float32"}, "F32"),
        ({"torch_dtype": ...}, None),
    ],
)
def test_the_dtype_is_read_under_both_names(stated: dict[str, Any], tag: str | None) -> None:
    assert model("llama", **stated).dtype == tag


def test_two_names_of_the_dtype_that_disagree_are_said() -> None:
    (notice,) = notices("llama", torch_dtype="bfloat16", dtype="float32")
    assert "bfloat16" in notice
    assert "float32" in notice


@pytest.mark.parametrize("dtype", ["float64", "int8", "float8_e4m3fn", "auto", 16])
def test_a_dtype_no_model_runs_in_is_said(dtype: Any) -> None:
    (notice,) = notices("llama", torch_dtype=dtype)
    assert str(dtype) in notice


# What is refused

INTEGERS = {
    "llama": ["num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "intermediate_size",
              "vocab_size", "max_position_embeddings", "head_dim"],
    "qwen2_moe": ["shared_expert_intermediate_size", "moe_intermediate_size"],
    "qwen3_moe": ["num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step",
                  "num_nextn_predict_layers"],
}  # fmt: skip
WRONG_INTEGERS = ["4", 4.0, 1e308, -4, True, [4], {}, math.nan, 2**31, 10**400]


@pytest.mark.parametrize(("family", "field"), [(f, field) for f, fields in INTEGERS.items() for field in fields])
@pytest.mark.parametrize("value", WRONG_INTEGERS, ids=lambda v: repr(v)[:8])
def test_a_wrong_integer_is_refused_by_name(family: str, field: str, value: Any) -> None:
    found = problems(family, **{field: value})
    (named,) = [p for p in found if p.where == f"config.json: {field}" and p.found == repr(value)[:120]]
    assert named.code == "bad-config"
    assert named.what.startswith(f"{field} is not an integer")
    assert field in named.fix


WRONG = {
    "rms_norm_eps": ["1e-6", 0, -1e-6, True, [], math.nan, math.inf, 10**400],
    "hidden_act": [5, ["silu"], True],
    "tie_word_embeddings": ["true", 0, 1, []],
    "attention_bias": ["no", 1],
    "mlp_bias": ["no", 0.0],
}


@pytest.mark.parametrize(
    ("field", "value"), [(f, v) for f, values in WRONG.items() for v in values], ids=lambda v: str(v)[:20]
)
def test_a_field_of_another_type_is_refused_by_name(field: str, value: Any) -> None:
    found = next(p for p in problems("llama", **{field: value}) if p.code == "bad-config")
    assert found.where == f"config.json: {field}"
    assert found.found == repr(value)[:120]


@pytest.mark.parametrize("value", ["1", {"1": 1}, [1.0], ["1"], [True], [0] * 5000])
def test_a_wrong_list_of_layers_is_refused(value: Any) -> None:
    found = problem("qwen3_moe", mlp_only_layers=value)
    assert (found.code, found.where) == ("bad-config", "config.json: mlp_only_layers")


@pytest.mark.parametrize(
    "field",
    ["num_hidden_layers", "num_attention_heads", "num_key_value_heads", "num_experts", "num_nextn_predict_layers"],
)
def test_a_count_no_model_has_is_refused_before_anything_loops_over_it(field: str) -> None:
    assert any(p.where == f"config.json: {field}" for p in problems("qwen3_moe", **{field: 2_000_000_000}))


def test_all_wrong_fields_are_reported_together() -> None:
    found = problems("llama", vocab_size="x", intermediate_size=-1, rms_norm_eps=0, hidden_act="gelu")
    assert {p.where.removeprefix("config.json: ") for p in found} == {
        "vocab_size", "intermediate_size", "rms_norm_eps", "hidden_act",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"), [("num_attention_heads", "4"), ("hidden_size", "64"), ("hidden_act", 5), ("head_dim", "15")]
)
def test_one_wrong_field_is_one_problem(field: str, value: Any) -> None:
    assert problem("llama", **{field: value}).where == f"config.json: {field}"


def test_null_counts_as_absent() -> None:
    stated = config_of("llama", hidden_act=None, rope_scaling=None, head_dim=None, mlp_bias=None, attention_bias=None)
    assert read_model_config(stated)[0] == model("llama")


@pytest.mark.parametrize(
    ("family", "changes", "where", "found"),
    [
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads", "4 query heads, 3 key-value heads"),
        ("llama", {"head_dim": 15}, "head_dim", "15"),
        ("qwen3_moe", {"num_experts_per_tok": 5}, "num_experts_per_tok", "5 of 4 experts"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(
    family: str, changes: dict[str, int], where: str, found: str
) -> None:
    refused = problem(family, **changes)
    assert (refused.code, refused.where, refused.found) == ("bad-config", f"config.json: {where}", found)


@pytest.mark.parametrize("act", ["gelu", "gelu_pytorch_tanh", "relu"])
def test_another_activation_is_refused(act: str) -> None:
    found = problem("llama", hidden_act=act)
    assert (found.code, found.expected, found.found) == ("unsupported-feature", "silu", repr(act))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 16}),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 16}),
        # The class default of sliding_window is 4096, not "none".
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
        ("qwen3_moe", {"use_sliding_window": True}),
    ],
)
def test_sliding_windows_are_refused(family: str, changes: dict[str, Any]) -> None:
    assert problem(family, **changes).code == "unsupported-feature"


def test_a_refusal_for_layer_types_names_them() -> None:
    found = problem("qwen3", layer_types=["full_attention", "sliding_attention"])
    assert "sliding_attention" in str(found)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2", {"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 0}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}),
        ("qwen3", {"layer_types": ["full_attention"] * 2}),
        ("llama", {"use_sliding_window": True, "sliding_window": 16}),
    ],
)
def test_windows_that_no_layer_uses_are_accepted(family: str, changes: dict[str, Any]) -> None:
    assert model(family, **changes).num_layers == 2


# Sinks, windows by layer, and a clamped SwiGLU


def test_windows_are_those_of_layer_types() -> None:
    kinds = ["full_attention", "sliding_attention"]
    assert model("gpt_oss", layer_types=kinds).windows == (0, 4)
    assert model("gpt_oss", layer_types=["full_attention"] * 2, sliding_window=None).windows == ()
    assert model("llama").window(1) == 0


def test_every_second_layer_has_a_window_where_no_layer_types_are_stated() -> None:
    assert model("gpt_oss", num_hidden_layers=3).windows == (4, 0, 4)
    assert model("gpt_oss", sliding_window=...).windows == (128, 0)


def test_experts_have_the_size_of_intermediate_size_and_the_numbers_of_their_activation() -> None:
    config = model("gpt_oss", swiglu_limit=3.5)
    assert (config.sinks, config.num_experts, config.moe_intermediate_size) == (True, 4, 64)
    assert config.swiglu == (1.702, 3.5)
    assert model("qwen3_moe").swiglu is None


def test_rotary_parameters_that_are_omitted_are_those_of_the_class() -> None:
    config = model("gpt_oss", rope_scaling=..., rope_theta=...)
    assert config.rotary_config.base == 150000
    assert config.rotary_config.scaling is not None
    assert (config.rotary_config.rope_type, config.rotary_config.scaling["factor"]) == ("yarn", 32)
    assert any("states no rope_parameters" in line for line in notices("gpt_oss", rope_scaling=...))
    assert model("gpt_oss", rope_scaling=..., rope_theta=5e5).rotary_config.base == 5e5


@pytest.mark.parametrize(
    ("changes", "code", "where"),
    [
        ({"layer_types": ["full_attention", "linear_attention"]}, "unsupported-feature", "layer_types"),
        ({"layer_types": ["full_attention"]}, "bad-config", "layer_types"),
        ({"layer_types": "sliding_attention"}, "bad-config", "layer_types"),
        ({"layer_types": [1, 2]}, "bad-config", "layer_types"),
        ({"sliding_window": None}, "bad-config", "sliding_window"),
        ({"sliding_window": 0}, "bad-config", "sliding_window"),
        ({"sliding_window": True}, "bad-config", "sliding_window"),
        ({"swiglu_limit": 0}, "bad-config", "swiglu_limit"),
        ({"swiglu_alpha": "1.702"}, "bad-config", "swiglu_alpha"),
        ({"intermediate_size": 0}, "bad-config", "intermediate_size"),
        ({"num_experts": 5}, "config-conflict", "config.json"),
        ({"num_experts_per_tok": 5}, "bad-config", "num_experts_per_tok"),
    ],
)
def test_what_cannot_be_right_is_refused_once(changes: dict[str, Any], code: str, where: str) -> None:
    found = problem("gpt_oss", **changes)
    assert found.code == code
    assert found.where.endswith(where)


# Architectures


def test_an_unknown_architecture_is_refused_with_the_known_ones() -> None:
    found = problem("llama", architectures=["MistralForCausalLM"])
    assert found.code == "unsupported-architecture"
    assert all(name in found.expected for name in ARCHITECTURES)
    assert "MistralForCausalLM" in found.found


def test_a_misspelt_architecture_is_answered_with_the_nearest() -> None:
    assert "LlamaForCausalLM" in problem("llama", architectures=["Lama3ForCausalLM"]).fix
    assert "Llama" not in problem("llama", architectures=["BertForCausalLM"]).fix


@pytest.mark.parametrize("architectures", [..., None, []])
@pytest.mark.parametrize("family", CONFIGS)
def test_the_model_type_stands_in_for_missing_architectures(family: str, architectures: Any) -> None:
    assert model(family, architectures=architectures) == model(family)


@pytest.mark.parametrize("model_type", [..., None, "mistral", {"a": 1}, 5])
def test_a_config_that_names_no_known_architecture_is_refused(model_type: Any) -> None:
    found = problem("llama", architectures=..., model_type=model_type)
    assert found.code == "unsupported-architecture"
    assert "none stated" in found.found


def test_an_empty_config_is_refused() -> None:
    with pytest.raises(Refused) as refused:
        ModelConfig.from_hf({})
    assert [p.code for p in refused.value.problems] == ["unsupported-architecture"]


# Nested configs


def nested(**outer: Any) -> dict[str, Any]:
    """A composite config: everything but the architecture lives in text_config."""
    text = {k: v for k, v in CONFIGS["qwen3"].items() if k != "architectures"}
    return {"architectures": ["Qwen3ForCausalLM"], "model_type": "composite", "text_config": text} | outer


def test_a_nested_text_config_gives_the_same_model() -> None:
    assert read_model_config(nested())[0] == model("qwen3")


def test_the_nested_tie_flag_wins_and_the_disagreement_is_said() -> None:
    config, found, lines = read_model_config(nested(tie_word_embeddings=False))
    assert config is not None
    assert config.tie_word_embeddings
    assert not found
    assert any("text_config.tie_word_embeddings is True, top level False" in line for line in lines)


@pytest.mark.parametrize(("key", "value"), [("vocab_size", 7), ("hidden_size", 7), ("rope_theta", 7.0),
                                            ("num_hidden_layers", 7), ("head_dim", 8)])  # fmt: skip
def test_any_disagreement_with_the_nested_config_is_said(key: str, value: float) -> None:
    config, _, lines = read_model_config(nested(**{key: value}))
    assert config == model("qwen3")
    assert any(f"text_config.{key}" in line for line in lines)


def test_a_null_in_the_nested_config_does_not_hide_the_outer_value() -> None:
    raw = nested(tie_word_embeddings=True)
    raw["text_config"]["tie_word_embeddings"] = None
    config = read_model_config(raw)[0]
    assert config is not None
    assert config.tie_word_embeddings


# transformers


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_default_is_that_of_the_transformers_class(name: str) -> None:
    import transformers

    peer = getattr(transformers, name.replace("ForCausalLM", "Config"))()
    stated = peer.to_dict() | {"rope_theta": peer.rope_parameters["rope_theta"]}
    if "num_local_experts" in stated:
        stated["num_experts"] = stated["num_local_experts"]
    theirs = {key: stated.get(key, "no such field") for key in ARCHITECTURES[name].defaults}
    assert theirs == {k: list(v) if isinstance(v, tuple) else v for k, v in ARCHITECTURES[name].defaults.items()}


@pytest.mark.parametrize("family", CONFIGS)
def test_a_transformers_object_and_its_json_give_one_config(family: str) -> None:
    import transformers

    raw = CONFIGS[family]
    kind = getattr(transformers, raw["architectures"][0].replace("ForCausalLM", "Config"))
    peer = kind(**{k: v for k, v in raw.items() if k != "model_type"})
    expected = ModelConfig.from_hf(raw)
    assert ModelConfig.from_hf(peer) == expected
    assert ModelConfig.from_hf(json.loads(peer.to_json_string(use_diff=False))) == expected
    assert ModelConfig.from_hf(peer.to_diff_dict()) == expected


def test_from_hf_says_what_it_assumed_as_warnings() -> None:
    with pytest.warns(UserWarning, match="states no head_dim; the class default 128"):
        ModelConfig.from_hf(config_of("qwen3", head_dim=...))


def test_from_hf_of_a_whole_config_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ModelConfig.from_hf(CONFIGS["llama"])
