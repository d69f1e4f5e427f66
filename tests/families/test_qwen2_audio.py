"""Qwen2-Audio as data: its config, its components, its names and its parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2AudioConfig, Qwen2AudioEncoderConfig, Qwen2AudioForConditionalGeneration

import waybill
from waybill.config.architectures import PART_DEFAULTS
from waybill.errors import BadConfig, ConfigConflict, UnsupportedFeature
from waybill.families.qwen2_audio import (
    QWEN2_AUDIO,
    audio_tokens,
    qwen2_audio_components,
    qwen2_audio_parameters,
    read_qwen2_audio,
)
from waybill.plan.parameter import Merges

APART = Merges(qkv=False, gate_up=False)
AUDIO = {
    "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "num_mel_bins": 16,
    "max_source_positions": 11,
}  # fmt: skip
TEXT = {
    "model_type": "qwen2", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 128, "max_position_embeddings": 64,
}  # fmt: skip
ARCHITECTURE = {"architectures": ["Qwen2AudioForConditionalGeneration"]}


def tiny() -> Qwen2AudioForConditionalGeneration:
    audio = {"model_type": "qwen2_audio_encoder"} | AUDIO
    return Qwen2AudioForConditionalGeneration(
        Qwen2AudioConfig(audio_config=audio, text_config=TEXT, audio_token_index=100)
    ).eval()


def raw(**changes: Any) -> dict[str, Any]:
    return ARCHITECTURE | {"audio_config": AUDIO, "text_config": TEXT, "audio_token_index": 100} | changes


@pytest.mark.parametrize(
    ("part", "peer"), [("qwen2_audio", Qwen2AudioConfig), ("qwen2_audio_encoder", Qwen2AudioEncoderConfig)]
)
def test_what_a_file_leaves_out_is_what_transformers_assumes(part: str, peer: Any) -> None:
    theirs = peer()
    assert {key: getattr(theirs, key) for key in PART_DEFAULTS[part]} == dict(PART_DEFAULTS[part])


def test_a_config_reads_as_its_parts() -> None:
    config, problems, _ = read_qwen2_audio(raw())
    assert config is not None and problems == []
    assert (config.vocab_size, config.context_length, config.hidden_size) == (128, 64, 64)
    assert config.run_facts({}, {}) == {"audio_token_id": 100}


def test_a_language_model_that_does_not_say_what_it_is_is_a_qwen2() -> None:
    silent = {key: value for key, value in TEXT.items() if key != "model_type"}
    assert read_qwen2_audio(raw(text_config=silent)) == read_qwen2_audio(raw())


def test_parameters_are_those_of_transformers_by_name_and_shape() -> None:
    config, *_ = read_qwen2_audio(raw())
    found = {spec.name: spec.local_shape(0, 1) for spec in qwen2_audio_parameters(config, {}, APART)}
    assert found == {name: tuple(tensor.shape) for name, tensor in tiny().state_dict().items()}


def test_every_stored_tensor_is_accounted_for(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path)
    plan = waybill.plan(tmp_path, "onnx")
    assert plan.problems == () and plan.ignored == {}
    sources = {source for binding in plan.bindings for source in binding.sources}
    assert sources == set(waybill.open(tmp_path).tensors)


@pytest.mark.parametrize(
    ("stored", "runtime", "component", "kind"),
    [
        ("audio_tower.layers.0.fc1", "model.audio_tower.layers.0.fc1", "audio_encoder", "linear"),
        ("audio_tower.conv1", "model.audio_tower.conv1", "audio_encoder", "conv"),
        ("audio_tower.embed_positions", "model.audio_tower.embed_positions", "audio_encoder", "positions"),
        ("multi_modal_projector.linear", "model.multi_modal_projector.linear", "audio_encoder", "linear"),
        ("language_model.model.embed_tokens", "model.language_model.embed_tokens", "embedding", "embedding"),
        ("language_model.model.layers.1.mlp.up_proj", "model.language_model.layers.1.mlp.up_proj", "decoder", "linear"),
        ("language_model.lm_head", "lm_head", "decoder", "head"),
    ],
)
def test_both_spellings_of_a_module_are_one(stored: str, runtime: str, component: str, kind: str) -> None:
    naming = QWEN2_AUDIO.naming(ARCHITECTURE)
    assert naming.runtime(stored) == naming.runtime(runtime) == runtime
    for name in (stored, runtime):
        assert (naming.component(name), naming.kind(name)) == (component, kind)


def test_the_encoder_hangs_where_transformers_has_it() -> None:
    paths = {c.name: c.module_attribute_path for c in qwen2_audio_components({}).components}
    assert paths["audio_encoder"] == "model.audio_tower"
    model = tiny()
    for path in paths.values():
        assert isinstance(model.get_submodule(path), torch.nn.Module)


def test_as_many_tokens_stand_for_a_recording_as_transformers_makes_features() -> None:
    frames = torch.arange(3001)
    _, theirs = tiny().model.audio_tower._get_feat_extract_output_lengths(frames)
    assert [audio_tokens(count) for count in frames.tolist()] == theirs.tolist()


@pytest.mark.parametrize("key", ["audio_config", "text_config"])
def test_a_part_that_is_missing_is_refused(key: str) -> None:
    found = read_qwen2_audio({name: value for name, value in raw().items() if name != key}).problems[0]
    assert isinstance(found, BadConfig)
    assert str(found) == (
        f"{key} is missing [bad-config]\n"
        f"  where    config.json: {key}\n"
        "  expected an object with the sizes of that network\n"
        "  found    no such field\n"
        f"  fix      state {key} in config.json as its producer published it"
    )


def test_an_audio_token_beyond_the_vocabulary_is_refused() -> None:
    (found,) = read_qwen2_audio(raw(audio_token_index=128)).problems
    assert found.what == "audio_token_index is not an integer from 0 to 127"
    assert found.found == "128"


def test_two_names_of_the_audio_token_must_agree() -> None:
    (found,) = read_qwen2_audio(raw(audio_token_id=99)).problems
    assert isinstance(found, ConfigConflict)
    assert found.what == "audio_token_index and audio_token_id disagree"


def test_an_encoder_that_cannot_be_is_refused_with_its_place() -> None:
    found = read_qwen2_audio(
        raw(audio_config=AUDIO | {"encoder_attention_heads": 5, "activation_function": "mish"})
    ).problems
    assert {(type(problem), problem.where) for problem in found} == {
        (UnsupportedFeature, "config.json: audio_config: activation_function"),
        (BadConfig, "config.json: audio_config: encoder_attention_heads"),
    }
