"""Prefill, then one token at a time for every request of a batch, until each has stopped."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch

from waybill.engine.context import Batch, get_global_ctx
from waybill.engine.distributed import broadcast, get_tp_info
from waybill.engine.kvcache import KVCache
from waybill.engine.models.decoder import CausalLM
from waybill.engine.sampler import Sampler
from waybill.text.request import Generation, Sampling, check_request, collect


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
    check_request(
        prompts,
        max_new_tokens,
        vocab_size=model.config.vocab_size,
        max_position=model.config.rotary_config.max_position,
    )
    cache = KVCache(
        model.config,
        requests=len(prompts),
        length=max(map(len, prompts)) + max_new_tokens,
        tp_size=get_tp_info().size,
        dtype=model.dtype,
        device=model.device,
    )
    return collect(
        _steps(model, prompts, cache, Sampler(sampling or Sampling())),
        requests=len(prompts),
        max_new_tokens=max_new_tokens,
        stop_ids=stop_ids,
        on_token=on_token,
    )


def _steps(
    model: CausalLM, prompts: Sequence[Sequence[int]], cache: KVCache, sampler: Sampler
) -> Iterator[Sequence[int]]:
    """The next token of every request, for as long as somebody asks."""
    lengths = [len(prompt) for prompt in prompts]
    batch = Batch(torch.tensor([t for p in prompts for t in p], device=model.device), tuple(lengths))
    while True:
        tokens = _step(model, batch, cache, sampler)
        yield tokens.tolist()
        batch = Batch(tokens.to(model.device), (1,) * len(prompts), tuple(lengths))
        lengths = [length + 1 for length in lengths]


@torch.inference_mode()
def _step(model: CausalLM, batch: Batch, cache: KVCache, sampler: Sampler) -> torch.Tensor:
    """One forward pass and one choice; every rank gets the primary's."""
    with get_global_ctx().forward_batch(batch, cache):
        logits = model.forward()
    chosen = sampler(logits)
    return broadcast(chosen.to(logits.device)).cpu() if get_tp_info().size > 1 else chosen
