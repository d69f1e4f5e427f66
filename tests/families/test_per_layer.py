"""Decoders whose layers have inputs of their own: what their config says, what they store, what does not run them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import waybill
from checkpoints import Recipe, llama, per_layer, qwen2, qwen3, qwen3_moe
from packing import Scheme, pack
from waybill.config import ModelConfig, read_model_config
from waybill.config.composite import read_text
from waybill.errors import Refused, WaybillError
from waybill.families.decoder import decoder_parameters

SIZE, ROWS = "hidden_size_per_layer_input", "vocab_size_per_layer_input"
TABLE = "model.embed_tokens_per_layer"
MODELS = {"llama": llama, "qwen2": qwen2, "qwen3": qwen3, "qwen3_moe": qwen3_moe}


def read(**changes: Any) -> tuple[ModelConfig, list[WaybillError]]:
    config, problems, _ = read_model_config(llama().config | changes)
    assert config is not None
    return config, problems


# The config.


@pytest.mark.parametrize("changes", [{}, {SIZE: None}, {SIZE: 0}, {SIZE: 0, ROWS: 7}, {ROWS: "many"}])
def test_without_a_size_there_is_no_such_input_and_its_vocabulary_says_nothing(changes: dict[str, Any]) -> None:
    config, problems = read(**changes)
    assert problems == []
    assert (config.hidden_size_per_layer_input, config.vocab_size_per_layer_input) == (0, 0)
    assert not [spec.name for spec in decoder_parameters(config) if "per_layer" in spec.name]


@pytest.mark.parametrize(("rows", "count"), [({}, 128), ({ROWS: None}, 128), ({ROWS: 128}, 128), ({ROWS: 150}, 150)])
def test_the_table_has_a_row_for_every_token_and_may_have_more(rows: dict[str, Any], count: int) -> None:
    config, problems = read(**{SIZE: 16, **rows})
    assert problems == []
    assert (config.hidden_size_per_layer_input, config.vocab_size_per_layer_input) == (16, count)


@pytest.mark.parametrize(
    ("changes", "where", "found"),
    [
        ({SIZE: -1}, SIZE, "-1"),
        ({SIZE: 2.5}, SIZE, "2.5"),
        ({SIZE: True}, SIZE, "True"),
        ({SIZE: "16"}, SIZE, "'16'"),
        ({SIZE: 16, ROWS: 0}, ROWS, "0"),
        ({SIZE: 16, ROWS: [128]}, ROWS, "[128]"),
    ],
)
def test_a_field_that_is_no_such_number_is_refused(changes: dict[str, Any], where: str, found: str) -> None:
    _, (problem,) = read(**changes)
    assert (problem.code, problem.where, problem.found) == ("bad-config", f"config.json: {where}", found)


def test_tokens_without_a_row_are_refused_and_not_clipped() -> None:
    _, (problem,) = read(**{SIZE: 16, ROWS: 127})
    assert (problem.code, problem.what) == ("bad-config", "some tokens have no per-layer input")
    assert problem.where == f"config.json: {ROWS}"
    assert problem.expected == "at least vocab_size 128: a row for every token"
    assert problem.found == "127"
    assert problem.fix == "state the number of rows the table is stored with; tokens from 127 on are not clipped"


def test_a_nested_config_that_states_it_differently_is_followed_and_it_is_said() -> None:
    inner = llama().config | {SIZE: 16}
    config, problems, notices = read_model_config({**inner, SIZE: 8, "text_config": inner})
    assert config is not None
    assert (config.hidden_size_per_layer_input, problems) == (16, [])
    assert notices == [f"config.json: text_config.{SIZE} is 16, top level 8; text_config is followed"]


def test_a_decoder_that_is_given_embeddings_cannot_have_such_inputs() -> None:
    problems: list[WaybillError] = []
    read_text({"text_config": llama().config | {SIZE: 16}}, problems, [])
    (problem,) = problems
    assert (problem.code, problem.found) == ("unsupported-feature", "16")
    assert problem.what == "per-layer inputs of a decoder that is given embeddings are not supported"
    assert problem.where == f"config.json: text_config: {SIZE}"
    assert (
        problem.expected == "0, or no such field: these inputs are looked up by tokens, which this decoder never sees"
    )
    assert problem.fix == "export the language model by itself"


# The parameters.


@pytest.mark.parametrize("kind", MODELS)
def test_a_plan_has_a_place_for_everything_that_is_stored(kind: str, tmp_path: Path) -> None:
    recipe = per_layer(MODELS[kind](np.float32), size=32, rows=150)
    plan = waybill.plan(recipe.write(tmp_path), target="onnx")
    assert plan.problems == ()
    found = {spec.name: spec for spec in plan.specs if "per_layer" in spec.name}
    assert {f"{name.removesuffix('.weight')}.weight" for name in found} == {
        n for n in recipe.tensors if "per_layer" in n
    }
    kinds = {name.removesuffix(".weight"): (spec.kind, spec.parts[0].shape) for name, spec in found.items()}
    assert kinds == {
        TABLE: ("embedding", (150, 64)),
        "model.per_layer_model_projection": ("linear", (64, 64)),
        "model.per_layer_projection_norm": ("vector", (32,)),
        **{f"model.layers.{n}.per_layer_input_gate": ("linear", (32, 64)) for n in range(2)},
        **{f"model.layers.{n}.per_layer_projection": ("linear", (64, 32)) for n in range(2)},
        **{f"model.layers.{n}.post_per_layer_input_norm": ("vector", (64,)) for n in range(2)},
    }


def without(name: str) -> Callable[[Recipe], object]:
    return lambda recipe: recipe.tensors.pop(name)


def reshaped(name: str, *shape: int) -> Callable[[Recipe], object]:
    return lambda recipe: recipe.tensors.update({name: np.zeros(shape, np.float32)})


@pytest.mark.parametrize(
    ("break_it", "code", "where", "expected"),
    [
        (
            without("model.layers.1.per_layer_input_gate.weight"),
            "missing-weight",
            "model.layers.1.per_layer_input_gate.weight",
            "[32, 64] (hidden_size_per_layer_input 32, hidden_size 64)",
        ),
        (
            without("model.per_layer_projection_norm.weight"),
            "missing-weight",
            "model.per_layer_projection_norm.weight",
            "[32] (hidden_size_per_layer_input 32)",
        ),
        (
            reshaped("model.per_layer_model_projection.weight", 32, 64),
            "shape-mismatch",
            "model.per_layer_model_projection.weight (model.safetensors)",
            "[64, 64] (num_hidden_layers 2 × hidden_size_per_layer_input 32, hidden_size 64)",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_fields_that_ask_for_it(
    break_it: Callable[[Recipe], object], code: str, where: str, expected: str, tmp_path: Path
) -> None:
    recipe = per_layer(llama(np.float32))
    break_it(recipe)
    (problem,) = waybill.plan(recipe.write(tmp_path), target="onnx").problems
    assert (problem.code, problem.where, problem.expected) == (code, where, expected)


def test_another_number_of_rows_names_the_field_of_this_table(tmp_path: Path) -> None:
    recipe = per_layer(llama(np.float32))
    reshaped(f"{TABLE}.weight", 150, 64)(recipe)
    (problem,) = waybill.plan(recipe.write(tmp_path), target="onnx").problems
    assert (problem.code, problem.found) == ("vocab-mismatch", f"[150, 64]: 150 rows, {ROWS} says 128")
    assert problem.fix.startswith(f"set {ROWS} to 150 ")


def test_weights_without_the_field_have_no_place(tmp_path: Path) -> None:
    recipe = per_layer(llama(np.float32))
    del recipe.config[SIZE]
    problems = waybill.plan(recipe.write(tmp_path), target="onnx").problems
    assert {problem.code for problem in problems} == {"unclaimed-weight"}


# Tables are packed only where the metadata says so.


def test_the_table_is_float_where_only_projections_are_packed(tmp_path: Path) -> None:
    recipe = pack(per_layer(llama(np.float32)), Scheme("olive")).packed
    plan = waybill.plan(recipe.write(tmp_path), target="onnx")
    packed = {spec.name for spec in plan.specs if spec.packing is not None}
    assert plan.problems == ()
    assert f"{TABLE}.weight" not in packed
    assert "model.per_layer_model_projection.weight" in packed


@pytest.mark.parametrize("field", ["embeds", "quantize_embeddings"])
def test_where_embeddings_are_packed_a_float_table_must_be_excluded(field: str, tmp_path: Path) -> None:
    recipe = pack(per_layer(llama(np.float32)), Scheme("olive"), table=True, keep=[TABLE]).packed
    metadata = recipe.config["quantization_config"]
    del metadata["embeds"], metadata["modules_to_not_convert"]
    metadata[field] = True
    (problem,) = waybill.plan(recipe.write(tmp_path / "a"), target="onnx").problems
    assert (problem.code, problem.where) == ("packing-mismatch", f"{TABLE}.weight (model.safetensors)")
    metadata["modules_to_not_convert"] = ["embed_tokens_per_layer"]
    assert waybill.plan(recipe.write(tmp_path / "b"), target="onnx").problems == ()


# The engine.


def test_the_engine_refuses_such_a_model_and_says_what_runs_it(tmp_path: Path) -> None:
    with pytest.raises(Refused) as refused:
        waybill.load(per_layer(llama(np.float32), size=16).write(tmp_path))
    (problem,) = refused.value.problems
    assert (problem.code, problem.what) == ("unsupported-feature", "the engine gives layers no inputs of their own")
    assert problem.where == f"config.json: {SIZE}"
    assert (problem.expected, problem.found) == ("0, or no such field", "16")
    assert problem.fix == "export it with waybill export, and run the package"
