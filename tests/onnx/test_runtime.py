"""Packages run by onnxruntime: the engine's tokens, whatever the batch, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import waybill
from checkpoints import VOCAB, lively, llama
from packages import write_package
from waybill.engine.generate import generate
from waybill.errors import BadPackage, BadRequest, MissingRuntime, NonFiniteWeight, Refused
from waybill.onnx.folder import read_package
from waybill.onnx.runtime.decoder import CACHE_STEP, OnnxDecoder
from waybill.text.request import Sampling

PROMPTS = [[5, 17, 9, 30], [2], [7, 7, 100, 3, 8, 64, 1]]
NEW_TOKENS = 12
POSITIONS = 256
FORMS: dict[str, dict[str, Any]] = {
    "all positions": {},
    "last position": {"last_only": True},
    "float16": {"dtype": np.float16},
    "float16, last position": {"dtype": np.float16, "last_only": True},
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What the engine makes of each prompt alone."""
    model = waybill.load(lively(llama(np.float32)).write(tmp_path_factory.mktemp("llama")))
    return [generate(model, [prompt], max_new_tokens=NEW_TOKENS).token_ids[0] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> OnnxDecoder:
    return open_package(write_package(tmp_path_factory.mktemp("package"), lively(llama(np.float32))))


def open_package(folder: Path) -> OnnxDecoder:
    return OnnxDecoder(read_package(folder))


@pytest.mark.parametrize("form", FORMS)
def test_a_package_continues_each_prompt_as_the_engine_does(
    tmp_path: Path, form: str, expected: list[list[int]]
) -> None:
    assert all(len(set(tokens)) > 3 for tokens in expected)
    decoder = open_package(write_package(tmp_path, lively(llama(np.float32)), **FORMS[form]))
    assert [decoder.generate([p], max_new_tokens=NEW_TOKENS).token_ids[0] for p in PROMPTS] == expected


@pytest.mark.parametrize("form", FORMS)
def test_a_ragged_batch_is_each_of_its_requests_alone(tmp_path: Path, form: str, expected: list[list[int]]) -> None:
    decoder = open_package(write_package(tmp_path, lively(llama(np.float32)), **FORMS[form]))
    assert decoder.generate(PROMPTS, max_new_tokens=NEW_TOKENS).token_ids == expected
    assert decoder.generate(PROMPTS[::-1], max_new_tokens=NEW_TOKENS).token_ids == expected[::-1]
    assert decoder.generate([PROMPTS[0]] * 3, max_new_tokens=NEW_TOKENS).token_ids == [expected[0]] * 3


def test_prompts_of_one_token_are_a_batch_too(decoder: OnnxDecoder) -> None:
    alone = [decoder.generate([[token]], max_new_tokens=4).token_ids[0] for token in (2, 9, 64)]
    assert decoder.generate([[2], [9], [64]], max_new_tokens=4).token_ids == alone


def test_a_run_is_the_beginning_of_a_longer_one(decoder: OnnxDecoder, expected: list[list[int]]) -> None:
    assert decoder.generate(PROMPTS, max_new_tokens=5).token_ids == [tokens[:5] for tokens in expected]
    onward = decoder.generate([PROMPTS[0] + expected[0][:5]], max_new_tokens=7).token_ids[0]
    assert onward == expected[0][5:]


def test_the_cache_may_be_longer_than_one_step_of_its_length(decoder: OnnxDecoder) -> None:
    long = decoder.generate(PROMPTS, max_new_tokens=3 * CACHE_STEP).token_ids
    short = decoder.generate(PROMPTS, max_new_tokens=CACHE_STEP).token_ids
    assert [tokens[:CACHE_STEP] for tokens in long] == short


def test_a_stop_token_ends_its_request_and_no_other(decoder: OnnxDecoder, expected: list[list[int]]) -> None:
    stop = expected[0][3]
    result = decoder.generate(PROMPTS, max_new_tokens=NEW_TOKENS, stop_ids={stop})
    assert result.token_ids == [tokens[: tokens.index(stop)] if stop in tokens else tokens for tokens in expected]
    assert len(result.token_ids[0]) == 3


def test_each_token_is_heard_as_it_is_made(decoder: OnnxDecoder, expected: list[list[int]]) -> None:
    heard: list[tuple[int, int]] = []
    decoder.generate(PROMPTS, max_new_tokens=4, on_token=lambda *what: heard.append(what))
    assert heard == [(request, expected[request][step]) for step in range(4) for request in range(3)]


def test_a_listener_that_fails_ends_the_run_and_leaves_the_decoder_usable(
    decoder: OnnxDecoder, expected: list[list[int]]
) -> None:
    def fail(_request: int, _token: int) -> None:
        raise KeyError

    with pytest.raises(KeyError):
        decoder.generate(PROMPTS, max_new_tokens=2, on_token=fail)
    assert decoder.generate(PROMPTS, max_new_tokens=NEW_TOKENS).token_ids == expected


def test_no_tokens_are_made_when_none_are_asked_for(decoder: OnnxDecoder) -> None:
    result = decoder.generate(PROMPTS, max_new_tokens=0)
    assert (result.token_ids, result.decode_steps, result.decode_seconds) == ([[], [], []], 0, 0)


def test_a_seed_makes_sampling_repeatable(decoder: OnnxDecoder, expected: list[list[int]]) -> None:
    runs = [
        decoder.generate(PROMPTS, max_new_tokens=NEW_TOKENS, sampling=Sampling(1.5, seed=seed)).token_ids
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]
    assert expected not in runs
    assert decoder.generate(PROMPTS, max_new_tokens=NEW_TOKENS, sampling=Sampling(2.0, 1)).token_ids == expected


def test_a_request_may_fill_every_position_and_not_one_more(decoder: OnnxDecoder) -> None:
    assert len(decoder.generate([[1] * (POSITIONS - 2)], max_new_tokens=2).token_ids[0]) == 2
    with pytest.raises(BadRequest, match="254 prompt tokens and 3 new ones, of 256 positions"):
        decoder.generate([[1] * (POSITIONS - 2)], max_new_tokens=3)


def test_the_context_of_the_package_counts_even_where_it_is_no_multiple_of_anything(tmp_path: Path) -> None:
    decoder = open_package(write_package(tmp_path, llama(np.float32), context_length=77))
    assert len(decoder.generate([[1] * 70], max_new_tokens=7).token_ids[0]) == 7
    with pytest.raises(BadRequest, match="of 77 positions"):
        decoder.generate([[1] * 70], max_new_tokens=8)


@pytest.mark.parametrize("prompts, found", [([[5], []], "prompt 2 has no tokens"), ([[VOCAB]], f"token {VOCAB}")])
def test_a_request_that_cannot_be_served_is_refused(decoder: OnnxDecoder, prompts: list[list[int]], found: str) -> None:
    with pytest.raises(BadRequest) as refused:
        decoder.generate(prompts, max_new_tokens=1)
    assert found in refused.value.found


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=0)], ids=["greedy", "sampled"])
def test_numbers_that_are_not_numbers_are_refused_and_not_continued(tmp_path: Path, sampling: Sampling) -> None:
    recipe = lively(llama(np.float32))
    recipe.tensors["model.norm.weight"][0] = np.nan
    with pytest.raises(NonFiniteWeight):
        open_package(write_package(tmp_path, recipe)).generate(PROMPTS, max_new_tokens=2, sampling=sampling)


def test_the_summary_says_what_runs(decoder: OnnxDecoder) -> None:
    assert decoder.summary() == "model.onnx: 2 layers, KV cache in float32"


def test_without_onnxruntime_a_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = read_package(write_package(tmp_path, llama(np.float32)))
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingRuntime, match="ONNX Runtime is not installed") as refused:
        OnnxDecoder(package)
    assert refused.value.fix == "pip install 'waybill[onnx]'"


@pytest.mark.parametrize("damage", ["no graph at all", "no data", "short data"])
def test_a_graph_that_cannot_be_opened_is_refused_once(
    tmp_path: Path, damage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = write_package(tmp_path, llama(np.float32))
    data = folder / "model.onnx.data"
    if damage == "no graph at all":
        (folder / "model.onnx").write_bytes(b"nothing like a graph")
    elif damage == "no data":
        data.unlink()
    else:
        data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(BadPackage, match="onnxruntime cannot open the graph") as refused:
        open_package(folder)
    assert "model.onnx" in refused.value.where
    assert capfd.readouterr() == ("", "")


def test_a_graph_with_other_inputs_is_refused(tmp_path: Path) -> None:
    folder = write_package(tmp_path, llama(np.float32))
    model = ir.load(folder / "model.onnx")
    extra = ir.Value(name="position_ids", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["b", "s"]))
    model.graph.inputs.append(extra)
    model.graph.outputs[0].name = "scores"
    ir.save(model, folder / "model.onnx")
    with pytest.raises(BadPackage, match="not a decoder that can be run here") as refused:
        open_package(folder)
    assert refused.value.found == (
        "no logits, position_ids tensor(int64)['b', 's'], scores tensor(float)['batch', 'positions', 128]"
    )


def test_logits_of_another_shape_are_refused(tmp_path: Path) -> None:
    folder = write_package(tmp_path, llama(np.float32))
    model = ir.load(folder / "model.onnx")
    logits = model.graph.outputs[0]
    logits.name = "unflattened"
    flatten = ir.node("Flatten", [logits], {"axis": 2})
    flatten.outputs[0].name, flatten.outputs[0].type = "logits", logits.type
    model.graph.append(flatten)
    model.graph.outputs[0] = flatten.outputs[0]
    ir.save(model, folder / "model.onnx")
    with pytest.raises(BadPackage, match="not a decoder that can be run here") as refused:
        open_package(folder).generate(PROMPTS, max_new_tokens=1)
    assert refused.value.found == "logits of shape [21, 128] for 3 prompts of 7 tokens, of 128 there are"


def test_a_graph_that_fails_when_it_runs_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = write_package(tmp_path, llama(np.float32))
    config = json.loads((folder / "genai_config.json").read_text())
    config["model"]["vocab_size"] = 200  # the table has 128 rows
    (folder / "genai_config.json").write_text(json.dumps(config))
    with pytest.raises(BadPackage, match="onnxruntime cannot run the graph"):
        open_package(folder).generate([[150]], max_new_tokens=1)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("size", ["num_key_value_heads", "head_size"])
def test_a_cache_of_another_size_than_the_graphs_is_refused(tmp_path: Path, size: str) -> None:
    folder = write_package(tmp_path, llama(np.float32))
    config = json.loads((folder / "genai_config.json").read_text())
    config["model"]["decoder"][size] = 3
    (folder / "genai_config.json").write_text(json.dumps(config))
    with pytest.raises(BadPackage, match="not a decoder that can be run here") as refused:
        open_package(folder)
    assert refused.value.found.startswith("past_key_values.0.key ['batch', 2, 'past', 16], and ")


def test_a_package_for_another_provider_says_why_it_does_not_run_here(tmp_path: Path) -> None:
    folder = llama(np.float32, eos_token_id=2).write(tmp_path / "checkpoint")
    package = tmp_path / "package"
    waybill.build(folder, dtype="bfloat16", ep="cuda").save(package)
    with pytest.raises(BadPackage, match="exported for another provider") as refused:
        OnnxDecoder(read_package(package))
    assert "its kernels know no bfloat16" in refused.value.found
    assert refused.value.fix.startswith("run it on a machine with that provider, or try waybill export --ep cpu")


def test_a_package_that_lost_its_description_is_refused_and_called_a_package(tmp_path: Path) -> None:
    package = tmp_path / "package"
    waybill.build(llama(np.float32).write(tmp_path / "checkpoint")).save(package)
    with pytest.raises(Refused, match="this is a package that was exported"):
        waybill.open(package)
    (package / "genai_config.json").unlink()
    with pytest.raises(BadPackage, match="does not say how it is run") as refused:
        read_package(package)
    assert refused.value.expected == "genai_config.json"
