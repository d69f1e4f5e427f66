"""Prefill, then one token at a time for every request of a batch, until each has stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from waybill.config import ModelConfig
from waybill.engine.context import Batch, get_global_ctx
from waybill.engine.distributed import broadcast, get_tp_info
from waybill.engine.kvcache import KVCache
from waybill.engine.models.decoder import CausalLM
from waybill.engine.sampler import Sampler, Sampling
from waybill.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Generation:
    """New tokens of each request (a stop token is not among them), and how long the two phases took."""

    token_ids: list[list[int]]
    prefill_seconds: float
    decode_seconds: float
    decode_steps: int


def generate(
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    sampling: Sampling | None = None,
    on_token: Callable[[int, int], None] = lambda _request, _token: None,
) -> Generation:
    """Continue every prompt by up to `max_new_tokens`; `on_token(request, token)` hears of each as it is made.

    Raises:
        BadRequest: a prompt is empty, holds an unknown token, or would outgrow the model's positions.
    """
    check_request(model.config, prompts, max_new_tokens)
    cache = KVCache(
        model.config,
        requests=len(prompts),
        length=max(map(len, prompts)) + max_new_tokens,
        tp_size=get_tp_info().size,
        dtype=model.dtype,
        device=model.device,
    )
    sampler = Sampler(sampling or Sampling())
    made: list[list[int]] = [[] for _ in prompts]
    open_requests = set(range(len(prompts)))
    lengths = [len(prompt) for prompt in prompts]
    batch = Batch(torch.tensor([t for p in prompts for t in p], device=model.device), tuple(lengths))
    clock = [time.perf_counter()]
    steps = 0
    while open_requests and steps < max_new_tokens:
        tokens = _step(model, batch, cache, sampler)
        steps += 1
        if steps == 1:
            clock.append(time.perf_counter())
        for request in sorted(open_requests):
            token = int(tokens[request])
            if token in stop_ids:
                open_requests.discard(request)
                continue
            made[request].append(token)
            on_token(request, token)
        # Stopped requests ride along in the batch: their tokens are computed and not looked at.
        batch = Batch(tokens.to(model.device), (1,) * len(prompts), tuple(n + steps - 1 for n in lengths))
    clock.append(time.perf_counter())
    if len(clock) == 2:  # nothing was asked for
        clock.append(clock[-1])
    return Generation(made, clock[1] - clock[0], clock[2] - clock[1], max(steps - 1, 0))


@torch.inference_mode()
def _step(model: CausalLM, batch: Batch, cache: KVCache, sampler: Sampler) -> torch.Tensor:
    """One forward pass and one choice; every rank gets the primary's."""
    with get_global_ctx().forward_batch(batch, cache):
        logits = model.forward()
    chosen = sampler(logits)
    return broadcast(chosen.to(logits.device)).cpu() if get_tp_info().size > 1 else chosen


def check_request(config: ModelConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Refuse what cannot be served; needs the config alone.

    Raises:
        BadRequest: a prompt is empty, holds an unknown token, or would outgrow the model's positions.
    """
    positions = config.rotary_config.max_position
    found = ""
    if max_new_tokens < 0 or not prompts:
        found = f"{len(prompts)} prompts, {max_new_tokens} new tokens"
    for number, prompt in enumerate(prompts):
        if not prompt:
            found = f"prompt {number + 1} has no tokens"
        elif unknown := [token for token in prompt if not 0 <= token < config.vocab_size]:
            found = f"prompt {number + 1} has token {unknown[0]}, vocab_size is {config.vocab_size}"
        elif len(prompt) + max_new_tokens > positions:
            found = f"{len(prompt)} prompt tokens and {max_new_tokens} new ones, of {positions} positions"
    if found:
        raise BadRequest(
            "the request cannot be served",
            expected="prompts of at least one known token, that end within max_position_embeddings",
            found=found,
            fix="shorten the prompt, ask for fewer tokens, or use the tokenizer of this checkpoint",
        )
