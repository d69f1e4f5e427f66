"""Choosing tokens without torch: the same tokens kept as in the engine, with the same proportions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from waybill.engine import sampler as engine
from waybill.errors import NonFiniteWeight
from waybill.onnx.runtime.sampler import Sampler, kept
from waybill.text.request import Sampling

Array = np.ndarray[Any, np.dtype[Any]]
LOGITS = np.array([[0.0, 3.0, 1.0, 2.0, -1.0]], np.float32)
PROBABILITIES = np.exp(LOGITS[0]) / np.exp(LOGITS[0]).sum()
DRAWS = 4000


def shares(options: Sampling, logits: Array = LOGITS) -> list[float]:
    """How often each token is drawn."""
    drawn = Sampler(options)(np.broadcast_to(logits, (DRAWS, logits.shape[1])))
    return [count / DRAWS for count in np.bincount(drawn, minlength=logits.shape[1]).tolist()]


def dense(logits: Array, options: Sampling) -> Array:
    """The probability of every token, zero where it was left out."""
    tokens, probabilities = kept(logits, options)
    spread = np.zeros(logits.size, np.float32)
    spread[tokens] = probabilities
    return spread


def drawn(options: Sampling) -> set[int]:
    return {token for token, share in enumerate(shares(options)) if share}


@given(
    st.integers(2, 300),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.01, 0.5, 1.0, 3.0, 30.0]),
    st.one_of(st.just(0), st.integers(1, 320)),
    st.one_of(st.just(1.0), st.floats(0.001, 0.999)),
    st.booleans(),
)
def test_the_same_tokens_are_kept_as_by_the_engine(
    vocabulary: int, seed: int, temperature: float, top_k: int, top_p: float, ties: bool
) -> None:
    random = np.random.default_rng(seed)
    logits = random.standard_normal(vocabulary).astype(np.float32) * 4
    if ties:  # top-k keeps all that tie for its last place; which of them top-p keeps, neither promises
        logits, top_p = logits.round(), 1.0
    options = Sampling(temperature, top_k, top_p)
    ordered = np.sort(dense(logits, Sampling(temperature, top_k)))[::-1].cumsum(dtype=np.float64)
    assume(np.abs(ordered - top_p).min() > 1e-5 or top_p == 1)  # where rounding decides
    theirs: list[torch.Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch, "multinomial", lambda p, *_, **__: theirs.append(p) or torch.zeros(1, 1, dtype=torch.int64)
        )
        engine.Sampler(options)(torch.from_numpy(logits)[None])
    expected, found = theirs[0][0].numpy(), dense(logits, options)
    meant = expected > 1e-12  # the rest no draw will ever hit, and neither side promises
    assert np.array_equal(found > 1e-12, meant)
    np.testing.assert_allclose(found[meant] / found.sum(), expected[meant] / expected.sum(), rtol=1e-3)


def test_without_a_temperature_the_likeliest_token_of_each_request_is_chosen() -> None:
    logits = np.array([[1.0, 5.0, 2.0], [9.0, 0.0, 3.0]], np.float32)
    assert Sampler(Sampling(top_k=2, top_p=0.1, seed=3))(logits) == [1, 0]


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    assert shares(Sampling(1.0, seed=0)) == pytest.approx(PROBABILITIES.tolist(), abs=0.03)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_the_temperature_divides_the_logits(temperature: float) -> None:
    expected = np.exp(LOGITS[0] / temperature)
    assert shares(Sampling(temperature, seed=0)) == pytest.approx((expected / expected.sum()).tolist(), abs=0.03)


@pytest.mark.parametrize("top_k, kept", [(1, {1}), (2, {1, 3}), (3, {1, 2, 3}), (5, {*range(5)}), (99, {*range(5)})])
def test_top_k_keeps_the_likeliest_tokens(top_k: int, kept: set[int]) -> None:
    assert drawn(Sampling(5.0, top_k=top_k, seed=0)) == kept


@pytest.mark.parametrize("top_p, kept", [(0.1, {1}), (0.63, {1}), (0.65, {1, 3}), (0.9, {1, 2, 3}), (1.0, {*range(5)})])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: set[int]) -> None:
    """The probabilities are 0.636, 0.234, 0.086, 0.032 and 0.012."""
    assert drawn(Sampling(1.0, top_p=top_p, seed=0)) == kept


def test_top_p_reads_the_probabilities_that_temperature_and_top_k_left() -> None:
    # At 3 the likeliest two share 0.58 and 0.42 once the others are gone; of all five they would have 0.36 and 0.26.
    assert drawn(Sampling(3.0, top_k=2, top_p=0.5, seed=0)) == {1}


def test_what_is_kept_keeps_its_proportions() -> None:
    rest = PROBABILITIES * [0, 1, 1, 1, 0]
    assert shares(Sampling(1.0, top_k=3, top_p=0.95, seed=0)) == pytest.approx((rest / rest.sum()).tolist(), abs=0.03)


def test_each_request_is_cut_by_its_own_probabilities() -> None:
    logits = np.tile(np.array([[9.0, 0, 0, 0], [0, 0, 9.0, 0]], np.float32), (200, 1))
    assert Sampler(Sampling(1.0, top_p=0.5, seed=0))(logits) == [0, 2] * 200


def test_a_seed_makes_a_whole_run_repeatable_and_its_steps_different() -> None:
    logits = np.zeros((1, 1000), np.float32)
    first, second = Sampler(Sampling(1.0, seed=5)), Sampler(Sampling(1.0, seed=5))
    run = [first(logits) for _ in range(8)]
    assert run == [second(logits) for _ in range(8)]
    assert len({token for (token,) in run}) > 4
    assert run != list(map(Sampler(Sampling(1.0, seed=6)), [logits] * 8))


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**63, 2**64 - 1])
def test_every_seed_of_64_bits_is_used(seed: int) -> None:
    first, second = (Sampler(Sampling(1.0, seed=seed))(np.zeros((4, 1000), np.float32)) for _ in range(2))
    assert first == second


def test_without_a_seed_runs_differ() -> None:
    logits = np.zeros((8, 100_000), np.float32)
    assert Sampler(Sampling(1.0))(logits) != Sampler(Sampling(1.0))(logits)


def test_sampling_leaves_the_global_random_state_alone() -> None:
    before = np.random.get_state(legacy=False)["state"]["pos"]
    Sampler(Sampling(1.0, seed=1))(LOGITS)
    assert np.random.get_state(legacy=False)["state"]["pos"] == before


def test_half_precision_logits_are_sampled_in_single() -> None:
    half = LOGITS.astype(np.float16)
    assert shares(Sampling(1.0, seed=0), half) == pytest.approx(PROBABILITIES.tolist(), abs=0.03)
    assert Sampler(Sampling())(half) == [1]


@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 1e-40, 1e-300])
def test_the_colder_the_surer_down_to_the_smallest_temperature(temperature: float) -> None:
    assert Sampler(Sampling(temperature, seed=0))(LOGITS) == [1]


@pytest.mark.parametrize("top_p", [1e-9, 1e-30, 1e-300])
def test_the_likeliest_token_stays_whatever_top_p_is(top_p: float) -> None:
    assert Sampler(Sampling(1.0, top_p=top_p, seed=0))(LOGITS) == [1]


def test_a_token_that_was_cut_is_never_drawn_not_even_at_the_end() -> None:
    class Last:
        def random(self) -> float:
            return 1 - 2**-53

    sampler = Sampler(Sampling(1.0, top_k=1))
    sampler._random = Last()  # type: ignore[assignment]
    assert sampler(np.array([[2.0, 9.0, 1.0]], np.float32)) == [1]


@pytest.mark.parametrize("options", [Sampling(), Sampling(1.0, 3, 0.5, 0)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("place", [0, 2, 4])
def test_logits_that_are_not_numbers_are_refused(options: Sampling, place: int) -> None:
    logits = np.concatenate([LOGITS, LOGITS])
    logits[1, place] = np.nan
    with pytest.raises(NonFiniteWeight, match="the logits are not numbers"):
        Sampler(options)(logits)
