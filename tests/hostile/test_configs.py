"""config.json with every field of every wrong type, and files of every wrong form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from checkpoints import Recipe, llama, qwen3_moe
from strangers import digest_of, read_or_refused, refused

RECIPES = {"llama": llama(num_hidden_layers=1), "qwen3-moe": qwen3_moe(num_hidden_layers=1)}
FIELDS = [("qwen3-moe", field) for field in RECIPES["qwen3-moe"].config] + [
    ("llama", field)
    for field in (
        "rope_scaling", "rope_parameters", "head_dim", "layer_types", "sliding_window", "num_nextn_predict_layers",
        "quantization_config", "text_config", "eos_token_id", "hidden_size_per_layer_input", "component_quantization",
        "vision_config", "attention_bias",
    )
]  # fmt: skip
WRONG: tuple[Any, ...] = (
    True, -1, 0, 0.5, 1e308, 1 << 31, 10**400, "", "\ud800", "x" * 70_000, [], [None], [1] * 5000, {},
    {"rope_type": []}, {"quant_method": ["gptq"]},
)  # fmt: skip


def named(recipe: Recipe, folder: Path, **changes: Any) -> Path:
    return Recipe(recipe.config | changes, recipe.tensors).write(folder)


@pytest.mark.parametrize(("name", "field"), FIELDS, ids=lambda value: value)
def test_a_field_of_the_wrong_type_is_refused_or_changes_no_weight(tmp_path: Path, name: str, field: str) -> None:
    recipe = RECIPES[name]
    intended = digest_of(recipe.write(tmp_path / "intended"))
    read_or_refused(intended, *(named(recipe, tmp_path / str(at), **{field: v}) for at, v in enumerate(WRONG)))


COUNTS = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "num_experts", "hidden_size", "vocab_size",
          "moe_intermediate_size", "head_dim")  # fmt: skip


@pytest.mark.parametrize("value", [1e308, 10**300, (1 << 31) - 1, -4, 4096], ids=str)
@pytest.mark.parametrize("field", COUNTS)
def test_sizes_that_no_model_has_are_refused_in_bounded_memory(tmp_path: Path, field: str, value: float) -> None:
    assert refused(named(RECIPES["qwen3-moe"], tmp_path, **{field: value}))


def test_as_many_layers_and_experts_as_may_be_stated_are_refused_in_bounded_memory(tmp_path: Path) -> None:
    folder = named(RECIPES["qwen3-moe"], tmp_path, num_hidden_layers=2048, num_experts=2048)
    assert refused(folder, (["plan"],))


FORMS: dict[str, str | bytes] = {
    "nothing": b"",
    "not a number": '{"hidden_size": NaN}',
    "infinity": '{"rope_theta": -Infinity}',
    "a number beyond all": '{"hidden_size": 1e999}',
    "a number of five thousand digits": '{"hidden_size": ' + "9" * 5000 + "}",
    "a key twice": '{"hidden_size": 64, "hidden_size": 32}',
    "a key twice, deep inside": '{"text_config": {"rope_scaling": {"factor": 1, "factor": 2}}}',
    "a hundred megabytes": b'{"a": "' + b"x" * (100 << 20) + b'"}',
    "a hundred thousand lists in each other": '{"a":' + "[" * 100_000,
    "two bytes a character": json.dumps({"hidden_size": 64}).encode("utf-16"),
    "latin letters": b'{"a": "\xe9"}',
    "a byte order mark": b"\xef\xbb\xbf{}",
    "two documents": "{}{}",
    "a comment": '{"hidden_size": 64 /* or 32 */}',
    "a list": "[{}]",
    "a text": '"config"',
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "quantize_config.json"])
def test_a_file_of_another_form_is_refused(tmp_path: Path, file: str, form: str) -> None:
    content = FORMS[form]
    folder = RECIPES["llama"].write(tmp_path)
    (folder / file).write_bytes(content.encode() if isinstance(content, str) else content)
    if form != "a number beyond all":  # is an infinity, which only a field that is read can refuse
        assert refused(folder) == {"bad-json"}
    elif file == "config.json":
        assert "unsupported-architecture" in refused(folder)


@pytest.mark.parametrize("depth", [65, 900, 970, 2000])
def test_nesting_is_refused_long_before_python_gives_up(tmp_path: Path, depth: int) -> None:
    folder = RECIPES["llama"].write(tmp_path)
    for field in ("hidden_size", "rope_scaling", "quantization_config"):
        nested = json.dumps(RECIPES["llama"].config | {field: "HERE"}).replace('"HERE"', "[" * depth + "]" * depth)
        (folder / "config.json").write_text(nested)
        assert refused(folder, (["inspect", "--json"], ["plan"])) == {"bad-json"}
