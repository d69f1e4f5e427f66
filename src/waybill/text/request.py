"""What is asked of a model, whatever runs it: the request, how to choose tokens, and the loop that collects them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from waybill.errors import BadOption, BadRequest

SMALLEST_TEMPERATURE = 1e-30
"""Below it, float32 knows no difference."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """temperature 0 is greedy. top_k 0 and top_p 1 keep everything. A seed makes a run repeatable."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        wrong = [
            f"{name} {getattr(self, name)}"
            for name, good in (
                ("temperature", 0 <= self.temperature < float("inf")),
                ("top_k", self.top_k >= 0),
                ("top_p", 0 < self.top_p <= 1),
                ("seed", self.seed is None or -(1 << 63) <= self.seed < 1 << 64),
            )
            if not good
        ]
        if wrong:
            raise BadOption(
                "sampling options are out of range",
                expected="temperature ≥ 0, top-k ≥ 0, 0 < top-p ≤ 1, a seed of 64 bits",
                found=", ".join(wrong),
                fix="choose values in range",
            )


@dataclass(frozen=True, slots=True)
class Generation:
    """New tokens of each request (a stop token is not among them), and how long the two phases took."""

    token_ids: list[list[int]]
    prefill_seconds: float
    decode_seconds: float
    decode_steps: int
    encode_seconds: float = 0.0
    """Of the graphs that ran before the decoder."""
    prompt_tokens: tuple[int, ...] = ()
    """Positions of each prompt, where they are not its tokens: a picture's place became many."""


def check_request(prompts: Sequence[Sequence[int]], max_new_tokens: int, *, vocab_size: int, max_position: int) -> None:
    """Refuse what cannot be served; needs no weight.

    Raises:
        BadRequest: a prompt is empty, holds an unknown token, or would outgrow the model's positions.
    """
    found = ""
    if max_new_tokens < 0 or not prompts:
        found = f"{len(prompts)} prompts, {max_new_tokens} new tokens"
    for number, prompt in enumerate(prompts):
        if not prompt:
            found = f"prompt {number + 1} has no tokens"
        elif unknown := [token for token in prompt if not 0 <= token < vocab_size]:
            found = f"prompt {number + 1} has token {unknown[0]}, vocab_size is {vocab_size}"
        elif len(prompt) + max_new_tokens > max_position:
            found = f"{len(prompt)} prompt tokens and {max_new_tokens} new ones, of {max_position} positions"
    if found:
        raise BadRequest(
            "the request cannot be served",
            expected="prompts of at least one known token, that end within the model's positions",
            found=found,
            fix="shorten the prompt, ask for fewer tokens, or use the tokenizer of this checkpoint",
        )


def collect(
    steps: Iterator[Sequence[int]],
    *,
    requests: int,
    max_new_tokens: int,
    stop_ids: Collection[int],
    on_token: Callable[[int, int], None],
) -> Generation:
    """Take tokens until every request has stopped or has `max_new_tokens`; `on_token(request, token)` hears of each.

    Each of `steps` is the next token of every request, computed when it is asked for. Stopped requests ride along in
    the batch: their tokens are computed and not looked at.
    """
    made: list[list[int]] = [[] for _ in range(requests)]
    open_requests = set(range(requests))
    clock = [time.perf_counter()]
    count = 0
    while open_requests and count < max_new_tokens:
        tokens = next(steps)
        count += 1
        if count == 1:
            clock.append(time.perf_counter())
        for request in sorted(open_requests):
            token = tokens[request]
            if token in stop_ids:
                open_requests.discard(request)
                continue
            made[request].append(token)
            on_token(request, token)
    clock.append(time.perf_counter())
    if len(clock) == 2:  # nothing was asked for
        clock.append(clock[-1])
    return Generation(made, clock[1] - clock[0], clock[2] - clock[1], max(count - 1, 0))
