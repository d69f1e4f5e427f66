"""Requests: options out of range, what cannot be served, and the loop that collects tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from waybill.errors import BadOption, BadRequest
from waybill.text.request import Sampling, check_request, collect


def quiet(_request: int, _token: int) -> None:
    pass


@pytest.mark.parametrize(
    "options, found",
    [
        ({"temperature": -0.1}, "temperature -0.1"),
        ({"temperature": math.inf}, "temperature inf"),
        ({"temperature": math.nan}, "temperature nan"),
        ({"top_k": -1}, "top_k -1"),
        ({"top_p": 0.0}, "top_p 0.0"),
        ({"top_p": 1.01}, "top_p 1.01"),
        ({"top_p": math.nan}, "top_p nan"),
        ({"temperature": -1.0, "top_k": -2, "top_p": 2.0}, "temperature -1.0, top_k -2, top_p 2.0"),
    ],
)
def test_options_out_of_range_are_refused_all_at_once(options: dict[str, Any], found: str) -> None:
    with pytest.raises(BadOption, match="sampling options are out of range") as refused:
        Sampling(**options)
    assert refused.value.found == found


@pytest.mark.parametrize(
    "prompts, new_tokens, found",
    [
        ([[5], []], 1, "prompt 2 has no tokens"),
        ([], 1, "0 prompts"),
        ([[5]], -1, "-1 new tokens"),
        ([[5, 128]], 1, "token 128, vocab_size is 128"),
        ([[5, -1]], 1, "token -1, vocab_size is 128"),
        ([[5] * 10], 1, "10 prompt tokens and 1 new ones, of 10 positions"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(prompts: list[list[int]], new_tokens: int, found: str) -> None:
    with pytest.raises(BadRequest, match="the request cannot be served") as refused:
        check_request(prompts, new_tokens, vocab_size=128, max_position=10)
    assert found in refused.value.found


def test_a_request_may_fill_every_position() -> None:
    check_request([[127] * 9, [0]], 1, vocab_size=128, max_position=10)


def test_steps_are_computed_only_while_a_request_is_open() -> None:
    computed: list[int] = []

    def steps() -> Iterator[list[int]]:
        for step in range(99):
            computed.append(step)
            yield [step, 10 + step]

    heard: list[tuple[int, int]] = []
    result = collect(
        steps(), requests=2, max_new_tokens=50, stop_ids={2, 14}, on_token=lambda *what: heard.append(what)
    )
    assert result.token_ids == [[0, 1], [10, 11, 12, 13]]
    assert heard == [(0, 0), (1, 10), (0, 1), (1, 11), (1, 12), (1, 13)]
    assert (computed, result.decode_steps) == ([0, 1, 2, 3, 4], 4)
    assert min(result.prefill_seconds, result.decode_seconds) > 0


def test_nothing_is_computed_when_nothing_is_asked_for() -> None:
    result = collect(iter(()), requests=2, max_new_tokens=0, stop_ids=(), on_token=quiet)
    assert (result.token_ids, result.decode_steps, result.decode_seconds) == ([[], []], 0, 0)
