"""Whisper as data: its config, its components, its parameters, and what it is told before it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration

import waybill
from waybill.config.architectures import PART_DEFAULTS
from waybill.errors import BadConfig, Refused, UnsupportedFeature
from waybill.families.dictation import dictation_facts
from waybill.families.whisper import WHISPER, read_whisper, whisper_components, whisper_parameters
from waybill.plan.parameter import AS_ENGINE

TINY = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 80, "vocab_size": 64, "num_mel_bins": 16,
    "max_source_positions": 10, "max_target_positions": 12, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 3, "begin_suppress_tokens": None,
}  # fmt: skip


def tiny(**config: Any) -> WhisperForConditionalGeneration:
    return WhisperForConditionalGeneration(WhisperConfig(**TINY | config)).eval()


def test_what_a_file_leaves_out_is_what_transformers_assumes() -> None:
    theirs = WhisperConfig()
    assert {key: getattr(theirs, key) for key in PART_DEFAULTS["whisper"]} == dict(PART_DEFAULTS["whisper"])


def test_an_empty_config_is_the_class_of_transformers() -> None:
    config, problems, _ = read_whisper({"architectures": ["WhisperForConditionalGeneration"]})
    assert config is not None and problems == []
    assert (config.vocab_size, config.context_length, config.hidden_size) == (51865, 448, 384)
    assert config.tie_word_embeddings


def test_parameters_are_those_of_transformers_by_name_and_shape() -> None:
    config, *_ = read_whisper(WhisperConfig(**TINY).to_dict())
    found = {spec.name: spec.local_shape(0, 1) for spec in whisper_parameters(config, {}, AS_ENGINE)}
    theirs = {name: tuple(tensor.shape) for name, tensor in tiny().state_dict().items()}
    assert found == theirs


def test_every_stored_tensor_is_accounted_for(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path)
    plan = waybill.plan(tmp_path, "onnx")
    assert plan.problems == () and plan.ignored == {}
    missing = {spec.name for spec in plan.specs} - {binding.target for binding in plan.bindings}
    assert missing == {"proj_out.weight"}  # the table serves for it


def test_the_decoder_owns_the_table_and_the_head() -> None:
    components = whisper_components({})
    owners = {
        "model.encoder.conv1": "encoder",
        "model.encoder.layers.0.fc1": "encoder",
        "model.decoder.embed_tokens": "decoder",
        "model.decoder.layers.0.encoder_attn.q_proj": "decoder",
        "proj_out": "decoder",
    }
    for module, owner in owners.items():
        found = components.owner_of(module)
        assert found is not None and found.name == owner
    assert components.by_name("decoder").source_module_names("proj_out") == ("proj_out",)
    assert components.by_name("decoder").source_module_names("layers.0") == ("model.decoder.layers.0",)


@pytest.mark.parametrize(
    ("module", "kind"),
    {
        "proj_out": "head", "model.decoder.embed_tokens": "embedding", "model.encoder.embed_positions": "positions",
        "model.encoder.conv2": "conv", "model.encoder.layers.0.fc1": "linear",
    }.items(),
)  # fmt: skip
def test_tables_and_kernels_are_not_linear(module: str, kind: str) -> None:
    assert WHISPER.kind_of(module) == kind


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_heads_that_do_not_divide_the_width_are_refused(side: str) -> None:
    (found,) = read_whisper(TINY | {f"{side}_attention_heads": 5}).problems
    assert isinstance(found, BadConfig)
    assert str(found) == (
        f"{side}_attention_heads cannot be right [bad-config]\n"
        f"  where    config.json: {side}_attention_heads\n"
        "  expected a divisor of d_model 32\n"
        "  found    5\n"
        "  fix      check the field against the model's published config"
    )


def test_an_unknown_activation_is_refused() -> None:
    (found,) = read_whisper(TINY | {"activation_function": "mish"}).problems
    assert isinstance(found, UnsupportedFeature)
    assert found.what == "activation_function 'mish' is not supported"
    assert "gelu | gelu_new" in found.expected


def test_a_size_that_is_no_size_is_refused() -> None:
    (found,) = read_whisper(TINY | {"max_source_positions": "many"}).problems
    assert found.what == "max_source_positions is not an integer from 2 to 2,147,483,647"
    assert found.found == "'many'"


LANGUAGES = {"<|en|>": 10, "<|de|>": 11}
TASKS = {"transcribe": 20, "translate": 21}
MULTILINGUAL: dict[str, Any] = {"lang_to_id": LANGUAGES, "task_to_id": TASKS, "no_timestamps_token_id": 30}


@pytest.mark.parametrize(
    ("stated", "prompt"),
    [
        pytest.param({"forced_decoder_ids": [[1, 10], [2, 21], [3, 30]]}, [10, 21, 30], id="listed"),
        pytest.param({"forced_decoder_ids": [[1, 30]], "no_timestamps_token_id": 30}, [30], id="one language only"),
        pytest.param(MULTILINGUAL | {"forced_decoder_ids": [[1, None], [2, 20]]}, [None, 20, 30], id="language open"),
        pytest.param(MULTILINGUAL | {"forced_decoder_ids": [[1, 11], [2, 20]]}, [11, 20, 30], id="language listed"),
        pytest.param(MULTILINGUAL, [None, 30], id="nothing but tables"),
        pytest.param(MULTILINGUAL | {"task": "translate"}, [None, 21, 30], id="a task"),
        pytest.param(MULTILINGUAL | {"language": "de"}, [11, 20, 30], id="a language"),
        pytest.param(MULTILINGUAL | {"language": "<|en|>", "task": "translate"}, [10, 21, 30], id="both"),
        pytest.param(
            MULTILINGUAL | {"language": "de", "forced_decoder_ids": [[1, 10], [2, 21]]}, [11, 20, 30], id="both ways"
        ),
        pytest.param(MULTILINGUAL | {"language": "de", "return_timestamps": True}, [11, 20], id="timestamps"),
    ],
)
def test_an_answer_begins_as_in_transformers(stated: dict[str, Any], prompt: list[int | None]) -> None:
    """None is the language, which the model finds by itself."""
    facts = dictation_facts({}, {"decoder_start_token_id": 3} | stated, start=0, vocab_size=64)
    found = [None] * ("language_token_ids" in facts) + facts["prompt_ids"]
    assert (facts["decoder_start_token_id"], found) == (3, prompt)
    assert facts.get("language_token_ids", [10, 11]) == [10, 11]
    model = tiny()
    wanted = {"return_timestamps": False, "decoder_start_token_id": 3} | stated
    settings = GenerationConfig(**wanted)
    for key, value in wanted.items():
        setattr(settings, key, value)
    features = torch.zeros(1, 16, 20)
    (theirs,) = model._retrieve_init_tokens(features, 1, settings, model.config, 20, {}).tolist()
    assert [None if at in (10, 11) and None in prompt else at for at in theirs] == [3, *prompt]


def test_generation_config_speaks_first_and_config_where_it_is_silent() -> None:
    config = {"forced_decoder_ids": [[1, 5]], "suppress_tokens": [6], "begin_suppress_tokens": [7]}
    facts = dictation_facts(config, {"suppress_tokens": [8]}, start=4, vocab_size=64)
    assert facts == {"decoder_start_token_id": 4, "prompt_ids": [5], "suppress_tokens": [8],
                     "begin_suppress_tokens": [7]}  # fmt: skip


def test_ids_beyond_the_vocabulary_suppress_nothing() -> None:
    facts = dictation_facts({}, {"suppress_tokens": [63, 64, 50256]}, start=0, vocab_size=64)
    assert facts["suppress_tokens"] == [63]


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("suppress_tokens", [1, -1], "a list of token ids"),
        ("suppress_tokens", 7, "a list of token ids"),
        ("begin_suppress_tokens", ["a"], "a list of token ids"),
        ("forced_decoder_ids", [[2, 5]], "a list of [position, token id or null], positions 1, 2, … in order"),
        ("forced_decoder_ids", [5, 6], "a list of [position, token id or null], positions 1, 2, … in order"),
        ("forced_decoder_ids", {"1": 5}, "a list of [position, token id or null], positions 1, 2, … in order"),
        ("lang_to_id", ["en"], "an object of names and token ids"),
        ("language", "klingon", "one of the 0 that lang_to_id has a token for, by its code there"),
        ("language", ["de"], "one of the 0 that lang_to_id has a token for, by its code there"),
        ("task", ["sing"], "one of the 0 that task_to_id has a token for, by its code there"),
    ],
)
def test_what_means_nothing_is_refused(key: str, value: Any, expected: str) -> None:
    with pytest.raises(BadConfig) as refused:
        dictation_facts({}, {key: value}, start=0, vocab_size=64)
    found = refused.value
    assert (found.what, found.where) == (f"{key} cannot be used", f"generation_config.json: {key}")
    assert found.expected == expected
    assert found.fix == f"correct {key} in generation_config.json, or remove it"


def test_a_prompt_of_tokens_that_do_not_exist_is_refused() -> None:
    with pytest.raises(BadConfig) as refused:
        dictation_facts({}, {"forced_decoder_ids": [[1, 64]]}, start=0, vocab_size=64)
    found = refused.value
    assert found.what == "the prompt of every answer cannot be used"
    assert (found.expected, found.found) == ("tokens below vocab_size 64", "[64]")


def test_a_package_with_a_senseless_prompt_is_not_written(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"suppress_tokens": "all"}))
    (problem,) = waybill.plan(tmp_path / "model", "onnx").problems  # before a weight is read
    assert problem.where == "generation_config.json: suppress_tokens"
    with pytest.raises(Refused, match="suppress_tokens cannot be used"):
        waybill.build(tmp_path / "model").save(tmp_path / "package")
    assert not (tmp_path / "package").exists()
