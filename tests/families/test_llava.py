"""What a config.json of a LLaVA says, what of a checkpoint its features need, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import CLIPVisionConfig, LlavaConfig, SiglipVisionConfig

import waybill
from llavas import IMAGE, TEXT, TOWER_LAYERS, VISION, make_llava
from waybill.config.architectures import PART_DEFAULTS
from waybill.errors import WaybillError
from waybill.families import family_of
from waybill.families import llava as module
from waybill.families.llava import LLAVA
from waybill.families.vision import ACTIVATIONS
from waybill.onnx.parts.activation import ACTIVATIONS as MADE
from waybill.plan import Plan

CONFIG: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "image_token_index": IMAGE,
    "text_config": {"model_type": "llama", "rope_theta": 10000.0} | TEXT,
    "vision_config": {"model_type": "clip_vision_model"} | VISION,
}


def read(**changes: Any) -> module.LlavaConfig:
    config, problems, _ = LLAVA.read(CONFIG | changes)
    assert problems == []
    assert isinstance(config, module.LlavaConfig)
    return config


def refused(**changes: Any) -> WaybillError:
    (problem,) = LLAVA.read(CONFIG | changes).problems
    return problem


def vision(**changes: Any) -> dict[str, Any]:
    return {"vision_config": CONFIG["vision_config"] | changes}


# Readings.


@pytest.mark.parametrize("kind", [CLIPVisionConfig, SiglipVisionConfig])
def test_defaults_of_towers_are_those_of_transformers(kind: Any) -> None:
    stated = kind()
    defaults = PART_DEFAULTS[kind.model_type]
    assert {key: getattr(stated, key) for key in defaults} == defaults


def test_defaults_of_the_whole_are_those_of_transformers() -> None:
    stated = LlavaConfig(vision_config={}, text_config={})
    defaults = PART_DEFAULTS["llava"]
    assert {key: getattr(stated, key) for key in defaults} == defaults


def test_inner_configs_without_a_type_are_what_transformers_takes_them_to_be() -> None:
    stated = LlavaConfig(vision_config={"hidden_size": 24}, text_config={"vocab_size": 40000})
    config = read(vision_config={"hidden_size": 24}, text_config={"vocab_size": 40000}, image_token_index=None)
    assert config.vision.model_type == stated.vision_config.model_type
    assert config.text.model_type == stated.text_config.model_type
    assert config.vision.num_layers == stated.vision_config.num_hidden_layers
    assert config.image_token == stated.image_token_index


def test_every_activation_that_is_read_can_be_made() -> None:
    assert set(ACTIVATIONS) == set(MADE)


PUBLISHED = {
    "clip": (vision(hidden_size=1024, num_attention_heads=16, num_hidden_layers=24, image_size=336), 576, 23),
    "siglip": (
        vision(model_type="siglip_vision_model", hidden_size=1152, num_attention_heads=16, intermediate_size=4304,
               num_hidden_layers=26, image_size=384)
        | {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        729,
        26,
    ),
}  # fmt: skip


@pytest.mark.parametrize("size", PUBLISHED)
def test_sizes_of_published_models_make_the_features_they_are_known_for(size: str) -> None:
    changes, tokens, layers = PUBLISHED[size]
    config = read(**changes)
    assert (config.image_tokens, config.tower_layers) == (tokens, layers)
    assert config.run_facts({}, {}) == {"image_token_id": IMAGE, "image_tokens": tokens}


@pytest.mark.parametrize(
    ("stated", "layers"),
    [(None, (2,)), (-2, (2,)), (-1, (3,)), (0, (0,)), (3, (3,)), (-4, (0,)), ([-1, 0, 1], (3, 0, 1))],
)
def test_feature_layers_count_from_the_embeddings_or_back_from_the_last_layer(
    stated: Any, layers: tuple[int, ...]
) -> None:
    assert read(vision_feature_layer=stated).feature_layers == layers


def test_what_the_language_model_says_is_said_of_the_whole() -> None:
    config = read()
    assert (config.vocab_size, config.hidden_size, config.context_length) == (128, 64, 64)
    assert not config.tie_word_embeddings
    assert read(tie_word_embeddings=True).tie_word_embeddings
    assert read(text_config=CONFIG["text_config"] | {"tie_word_embeddings": True}).tie_word_embeddings


def test_the_picture_token_has_two_names() -> None:
    assert read(image_token_index=None, image_token_id=7).image_token == 7
    assert refused(image_token_id=7).code == "config-conflict"


def test_the_family_is_found_by_architecture_and_by_model_type() -> None:
    assert family_of(CONFIG) is family_of({"model_type": "llava"}) is LLAVA


# Refusals.

WRONG: dict[str, tuple[dict[str, Any], str, str, str, str]] = {
    "another tower": (
        vision(model_type="pixtral"),
        "unsupported-feature", "vision_config: model_type", "clip_vision_model | siglip_vision_model", "'pixtral'",
    ),
    "pictures that are no squares": (
        vision(image_size=[224, 448]),
        "bad-config", "vision_config: image_size", "an integer from 1 to 2,147,483,647", "[224, 448]",
    ),
    "patches larger than a picture": (
        vision(patch_size=31), "bad-config", "vision_config: patch_size", "at most image_size 30", "31",
    ),
    "heads that do not divide": (
        vision(num_attention_heads=3),
        "bad-config", "vision_config: num_attention_heads", "a divisor of hidden_size 32", "3",
    ),
    "an activation of the tower": (
        vision(hidden_act="tanh"),
        "unsupported-feature", "vision_config: hidden_act", " | ".join(ACTIVATIONS), "'tanh'",
    ),
    "no tower": (
        {"vision_config": None},
        "bad-config", "vision_config", "an object with the sizes of that network", "no such field",
    ),
    "no language model": (
        {"text_config": 3}, "bad-config", "text_config", "an object with the sizes of that network", "3",
    ),
    "an activation of the projector": (
        {"projector_hidden_act": "tanh"},
        "unsupported-feature", "projector_hidden_act", " | ".join(ACTIVATIONS), "'tanh'",
    ),
    "a selection": (
        {"vision_feature_select_strategy": "cls"},
        "unsupported-feature", "vision_feature_select_strategy", "default | full", "'cls'",
    ),
    "a layer the tower does not have": (
        {"vision_feature_layer": [-2, -5]},
        "bad-config", "vision_feature_layer", "an integer or a list of integers, each from -4 to 3", "[-2, -5]",
    ),
    "no layers": (
        {"vision_feature_layer": []},
        "bad-config", "vision_feature_layer", "an integer or a list of integers, each from -4 to 3", "[]",
    ),
    "a layer by name": (
        {"vision_feature_layer": "last"},
        "bad-config", "vision_feature_layer", "an integer or a list of integers, each from -4 to 3", "'last'",
    ),
    "a token that is none": (
        {"image_token_index": 128}, "bad-config", "image_token_index", "a token below vocab_size 128", "128",
    ),
    "one position, left out": (
        vision(model_type="siglip_vision_model", patch_size=30),
        "bad-config", "vision_feature_select_strategy", "full, where a picture has one position", "'default'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_config_that_cannot_be_followed_is_refused_by_its_field(case: str) -> None:
    changes, code, where, expected, found = WRONG[case]
    problem = refused(**changes)
    assert (problem.code, problem.where) == (code, f"config.json: {where}")
    assert (problem.expected, problem.found) == (expected, found)
    assert problem.fix


ODD = [True, -1, 1 << 40, 0.5, "x", [], [1], ["a"], {"a": 1}, -(10**30)]


@pytest.mark.parametrize("inner", [None, "vision_config", "text_config"])
def test_no_value_of_any_field_breaks_reading(inner: str | None) -> None:
    fields = [*CONFIG, *PART_DEFAULTS["llava"], *PART_DEFAULTS["clip_vision_model"], *TEXT, "tie_word_embeddings"]
    for field in fields:
        for value in ODD:
            changes = {field: value} if inner is None else {inner: CONFIG[inner] | {field: value}}
            config, problems, _ = LLAVA.read(CONFIG | changes)
            assert config is not None or problems, (field, value)


def test_a_language_model_that_is_not_supported_is_refused_by_its_architecture() -> None:
    problem = refused(text_config=CONFIG["text_config"] | {"model_type": "mistral"})
    assert (problem.code, problem.where) == ("unsupported-architecture", "config.json: text_config: architectures")


# What of a checkpoint is needed.


@pytest.fixture(scope="module", params=["clip", "siglip"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    make_llava(request.param, "qwen2" if request.param == "siglip" else "llama").save_pretrained(folder)
    return folder


def edited(folder: Path, to: Path, *, without: str = "?", **more: Any) -> Plan:
    """The plan of the same checkpoint without the tensors whose name contains a word, and with others."""
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if without not in name}
    save_file(kept | {name.replace("__", "."): tensor for name, tensor in more.items()}, to / "model.safetensors")
    (to / "config.json").write_text((folder / "config.json").read_text())
    return waybill.plan(to, "onnx")


def test_what_features_do_not_need_is_dropped_by_name_and_with_a_reason(checkpoint: Path) -> None:
    ignored = waybill.plan(checkpoint, "onnx").ignored
    last = f"vision_tower.encoder.layers.{TOWER_LAYERS - 1}."
    unused = [last, "vision_tower.post_layernorm.", "vision_tower.head."]
    stored = load_file(checkpoint / "model.safetensors")
    assert set(ignored) == {name for name in stored if name.startswith(tuple(unused))}
    assert set(ignored.values()) == {"features are taken before it"}


def test_layers_that_features_do_not_need_may_be_missing(checkpoint: Path, tmp_path: Path) -> None:
    assert edited(checkpoint, tmp_path, without=f"encoder.layers.{TOWER_LAYERS - 1}.").problems == ()


def test_a_missing_layer_that_features_need_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    (problem,) = edited(checkpoint, tmp_path, without="encoder.layers.1.").problems
    assert problem.code == "missing-weight"
    assert problem.what == "1 layer has no weights"
    assert problem.where == "model.vision_tower.encoder.layers.1"
    assert problem.expected == "layers 0 to 1: the count that vision_feature_layer needs is 2"


@pytest.mark.parametrize("lost", ["patch_embedding.weight", "position_embedding", "layers.0.self_attn.out_proj.bias"])
def test_a_missing_weight_of_the_tower_is_refused(lost: str, checkpoint: Path, tmp_path: Path) -> None:
    (problem,) = edited(checkpoint, tmp_path, without=lost).problems
    assert problem.code == "missing-weight"
    assert lost in problem.where


def test_a_layer_that_the_config_does_not_count_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    name = f"vision_tower__encoder__layers__{TOWER_LAYERS}__mlp__fc1__bias"
    (problem,) = edited(checkpoint, tmp_path, **{name: np.zeros(64, np.float32)}).problems
    assert problem.code == "unclaimed-weight"
    assert name.replace("__", ".") in problem.where


def test_a_table_of_positions_for_other_pictures_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    name = "vision_tower__embeddings__position_embedding__weight"
    (problem,) = edited(checkpoint, tmp_path, **{name: np.zeros((10, 32), np.float32)}).problems
    assert problem.code == "shape-mismatch"
    assert "positions of image_size 30 in patches of 14" in problem.expected


def test_every_spelling_of_a_weight_is_the_same_weight() -> None:
    naming = LLAVA.naming(CONFIG)
    layer = "model.vision_tower.encoder.layers.0.mlp.fc1"
    for root in ("vision_tower", "vision_tower.vision_model", "model.vision_tower", "model.vision_tower.vision_model"):
        assert naming.runtime(f"{root}.encoder.layers.0.mlp.fc1") == layer
    assert naming.runtime("multi_modal_projector.linear_1") == "model.multi_modal_projector.linear_1"


def test_every_weight_has_one_owner() -> None:
    component = LLAVA.naming(CONFIG).component
    owners = {
        "vision_encoder": ("vision_tower.encoder.layers.0.mlp.fc1.weight", "multi_modal_projector.linear_2.bias"),
        "embedding": ("language_model.model.embed_tokens.weight",),
        "decoder": ("language_model.model.layers.0.mlp.up_proj.weight", "language_model.lm_head.weight"),
    }
    assert {owner: {component(name) for name in names} for owner, names in owners.items()} == {
        owner: {owner} for owner in owners
    }
