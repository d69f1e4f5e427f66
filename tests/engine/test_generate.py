"""The generation loop: batches, stop tokens, limits, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import waybill
from checkpoints import lively, llama
from waybill.engine.context import get_global_ctx
from waybill.engine.generate import generate
from waybill.engine.models.decoder import CausalLM
from waybill.errors import BadRequest, WaybillError
from waybill.text.request import Sampling

PROMPTS = [[5, 17, 9, 30], [2], [7, 7, 100, 3, 8, 64, 1]]
POSITIONS = 256


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    return waybill.load(lively(llama(np.float32)).write(tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def free(model: CausalLM) -> list[list[int]]:
    """What each prompt is continued with when nothing stops it."""
    return [generate(model, [prompt], max_new_tokens=12).token_ids[0] for prompt in PROMPTS]


def test_a_batch_is_each_of_its_requests_alone(model: CausalLM, free: list[list[int]]) -> None:
    assert all(len(set(tokens)) > 3 for tokens in free)
    assert generate(model, PROMPTS, max_new_tokens=12).token_ids == free
    assert generate(model, PROMPTS[::-1], max_new_tokens=12).token_ids == free[::-1]
    assert generate(model, [PROMPTS[0]] * 3, max_new_tokens=12).token_ids == [free[0]] * 3


def test_a_run_is_the_beginning_of_a_longer_one(model: CausalLM, free: list[list[int]]) -> None:
    assert generate(model, PROMPTS, max_new_tokens=5).token_ids == [tokens[:5] for tokens in free]
    onward = generate(model, [PROMPTS[0] + free[0][:5]], max_new_tokens=7).token_ids[0]
    assert onward == free[0][5:]


def test_a_stop_token_ends_its_request_and_no_other(model: CausalLM, free: list[list[int]]) -> None:
    stop = free[0][3]
    result = generate(model, PROMPTS, max_new_tokens=12, stop_ids={stop})
    assert result.token_ids == [tokens[: tokens.index(stop)] if stop in tokens else tokens for tokens in free]
    assert len(result.token_ids[0]) <= 3


def test_generation_ends_when_every_request_has_stopped(model: CausalLM, free: list[list[int]]) -> None:
    result = generate(model, PROMPTS, max_new_tokens=12, stop_ids=[tokens[2] for tokens in free])
    assert all(len(tokens) <= 2 for tokens in result.token_ids)
    assert result.decode_steps <= 2


def test_a_first_token_that_stops_leaves_nothing(model: CausalLM, free: list[list[int]]) -> None:
    result = generate(model, PROMPTS[:1], max_new_tokens=12, stop_ids=(free[0][0],))
    assert (result.token_ids, result.decode_steps) == ([[]], 0)


def test_each_token_is_heard_as_it_is_made_and_stop_tokens_are_not(model: CausalLM, free: list[list[int]]) -> None:
    heard: list[tuple[int, ...]] = []
    stop = free[1][4]
    made = generate(
        model, PROMPTS, max_new_tokens=6, stop_ids={stop}, on_token=lambda *what: heard.append(what)
    ).token_ids
    assert len(made[1]) < 6
    assert heard == [(r, made[r][step]) for step in range(6) for r in range(3) if step < len(made[r])]


def test_no_tokens_are_made_when_none_are_asked_for(model: CausalLM) -> None:
    result = generate(model, PROMPTS, max_new_tokens=0)
    assert (result.token_ids, result.decode_steps, result.decode_seconds) == ([[], [], []], 0, 0)


def test_a_request_may_fill_every_position_and_not_one_more(model: CausalLM) -> None:
    assert len(generate(model, [[1] * (POSITIONS - 2)], max_new_tokens=2).token_ids[0]) == 2
    with pytest.raises(BadRequest, match="254 prompt tokens and 3 new ones, of 256 positions"):
        generate(model, [[1] * (POSITIONS - 2)], max_new_tokens=3)


@pytest.mark.parametrize(
    "prompts, new_tokens, found",
    [
        ([[5], []], 1, "prompt 2 has no tokens"),
        ([], 1, "0 prompts"),
        ([[5]], -1, "-1 new tokens"),
        ([[5, 128]], 1, "token 128, vocab_size is 128"),
        ([[5, -1]], 1, "token -1, vocab_size is 128"),
        ([[5] * 257], 0, "257 prompt tokens and 0 new ones"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(
    model: CausalLM, prompts: list[list[int]], new_tokens: int, found: str
) -> None:
    with pytest.raises(BadRequest) as refused:
        generate(model, prompts, max_new_tokens=new_tokens)
    assert found in refused.value.found


def test_a_seed_makes_sampling_repeatable(model: CausalLM, free: list[list[int]]) -> None:
    options = Sampling(temperature=1.5, seed=11)
    runs = [generate(model, PROMPTS, max_new_tokens=12, sampling=options).token_ids for _ in range(2)]
    assert runs[0] == runs[1] != free
    assert generate(model, PROMPTS, max_new_tokens=12, sampling=Sampling(1.5, seed=12)).token_ids != runs[0]


def test_top_k_of_one_is_greedy(model: CausalLM, free: list[list[int]]) -> None:
    assert generate(model, PROMPTS, max_new_tokens=12, sampling=Sampling(2.0, top_k=1)).token_ids == free


def test_generation_takes_no_gradients_and_leaves_no_batch_behind(model: CausalLM) -> None:
    generate(model, PROMPTS, max_new_tokens=2)
    assert torch.is_grad_enabled()
    assert get_global_ctx().kv_cache is None
    with pytest.raises(RuntimeError, match="no batch is set"):
        _ = get_global_ctx().batch


def test_a_listener_that_fails_ends_the_run_and_leaves_the_model_usable(model: CausalLM, free: list[list[int]]) -> None:
    def fail(_request: int, _token: int) -> None:
        raise KeyError

    with pytest.raises(KeyError):
        generate(model, PROMPTS, max_new_tokens=2, on_token=fail)
    assert generate(model, PROMPTS, max_new_tokens=12).token_ids == free


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=0)], ids=["greedy", "sampled"])
def test_numbers_that_are_not_numbers_are_refused_and_not_continued(tmp_path: Path, sampling: Sampling) -> None:
    recipe = lively(llama(np.float32))
    recipe.tensors["model.norm.weight"][0] = np.nan
    broken = waybill.load(recipe.write(tmp_path))
    with pytest.raises(WaybillError):
        generate(broken, PROMPTS, max_new_tokens=2, sampling=sampling)
