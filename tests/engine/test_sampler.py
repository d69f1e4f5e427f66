"""Choosing tokens: greedy, temperature, top-k, top-p, seeds."""

from __future__ import annotations

import pytest
import torch

from waybill.engine.sampler import Sampler
from waybill.errors import BadOption, WaybillError
from waybill.text.request import Sampling

LOGITS = torch.tensor([[0.0, 3.0, 1.0, 2.0, -1.0]]).log_softmax(-1)
DRAWS = 4000


def shares(options: Sampling) -> list[float]:
    """How often each token is drawn."""
    drawn = Sampler(options)(LOGITS.expand(DRAWS, -1))
    return [count / DRAWS for count in drawn.bincount(minlength=5).tolist()]


def test_without_a_temperature_the_likeliest_token_of_each_request_is_chosen() -> None:
    logits = torch.tensor([[1.0, 5.0, 2.0], [9.0, 0.0, 3.0]])
    assert Sampler(Sampling(top_k=2, top_p=0.1, seed=3))(logits).tolist() == [1, 0]


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    assert shares(Sampling(1.0, seed=0)) == pytest.approx(LOGITS.exp()[0].tolist(), abs=0.03)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_the_temperature_divides_the_logits(temperature: float) -> None:
    expected = (LOGITS / temperature).softmax(-1)[0].tolist()
    assert shares(Sampling(temperature, seed=0)) == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize("top_k, kept", [(1, {1}), (2, {1, 3}), (3, {1, 2, 3}), (5, {*range(5)}), (99, {*range(5)})])
def test_top_k_keeps_the_likeliest_tokens(top_k: int, kept: set[int]) -> None:
    found = shares(Sampling(5.0, top_k=top_k, seed=0))
    assert {token for token, share in enumerate(found) if share} == kept


@pytest.mark.parametrize("top_p, kept", [(0.1, {1}), (0.63, {1}), (0.65, {1, 3}), (0.9, {1, 2, 3}), (1.0, {*range(5)})])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: set[int]) -> None:
    """The probabilities are 0.636, 0.234, 0.086, 0.032 and 0.012."""
    found = shares(Sampling(1.0, top_p=top_p, seed=0))
    assert {token for token, share in enumerate(found) if share} == kept


def test_top_p_reads_the_probabilities_that_temperature_and_top_k_left() -> None:
    # At 3 the likeliest two share 0.58 and 0.42 once the others are gone; of all five they would have 0.36 and 0.26.
    assert {t for t, share in enumerate(shares(Sampling(3.0, top_k=2, top_p=0.5, seed=0))) if share} == {1}


def test_what_is_kept_keeps_its_proportions() -> None:
    found = shares(Sampling(1.0, top_k=3, top_p=0.95, seed=0))
    rest = LOGITS.exp()[0] * torch.tensor([0, 1, 1, 1, 0])
    assert found == pytest.approx((rest / rest.sum()).tolist(), abs=0.03)


def test_each_request_is_cut_by_its_own_probabilities() -> None:
    logits = torch.tensor([[9.0, 0.0, 0.0, 0.0], [0.0, 0.0, 9.0, 0.0]]).repeat(200, 1)
    assert Sampler(Sampling(1.0, top_p=0.5, seed=0))(logits).tolist() == [0, 2] * 200


def test_a_seed_makes_a_whole_run_repeatable_and_its_steps_different() -> None:
    logits = torch.zeros(1, 1000)
    first, second = Sampler(Sampling(1.0, seed=5)), Sampler(Sampling(1.0, seed=5))
    run = [int(first(logits)) for _ in range(8)]
    assert run == [int(second(logits)) for _ in range(8)]
    assert len(set(run)) > 4
    assert run != [int(t) for t in map(Sampler(Sampling(1.0, seed=6)), [logits] * 8)]


def test_without_a_seed_runs_differ() -> None:
    logits = torch.zeros(8, 100_000)
    assert Sampler(Sampling(1.0))(logits).tolist() != Sampler(Sampling(1.0))(logits).tolist()


def test_sampling_leaves_the_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    Sampler(Sampling(1.0, seed=1))(LOGITS)
    Sampler(Sampling(1.0))(LOGITS)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_sampled_in_single(dtype: torch.dtype) -> None:
    assert shares(Sampling(1.0, seed=0)) == pytest.approx(LOGITS.exp()[0].tolist(), abs=0.03)
    drawn = Sampler(Sampling(1.0, top_p=0.9, seed=0))(LOGITS.to(dtype).expand(DRAWS, -1))
    assert set(drawn.tolist()) == {1, 2, 3}


@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 1e-40, 1e-300])
def test_the_colder_the_surer_down_to_the_smallest_temperature(temperature: float) -> None:
    assert Sampler(Sampling(temperature, seed=0))(LOGITS).tolist() == [1]


@pytest.mark.parametrize("top_p", [1e-9, 1e-30, 1e-300])
def test_the_likeliest_token_stays_whatever_top_p_is(top_p: float) -> None:
    assert Sampler(Sampling(1.0, top_p=top_p, seed=0))(LOGITS).tolist() == [1]


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 - 1, 2**64, -(2**63) - 1, 10**30])
def test_a_seed_is_used_or_refused_as_an_option(seed: int) -> None:
    try:
        first, second = (Sampler(Sampling(1.0, seed=seed))(torch.zeros(1, 1000)) for _ in range(2))
    except WaybillError as refused:
        assert isinstance(refused, BadOption)
        assert str(seed) in refused.found
    else:
        assert first.equal(second)
