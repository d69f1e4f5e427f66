"""One rank of a tensor-parallel run: `torchrun tp_worker.py FOLDER…` prints, as JSON, what every rank computed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

import waybill
from ranks import every_rank
from waybill.engine import create_model, load_weight, torch_dtype
from waybill.engine.context import Batch, get_global_ctx
from waybill.engine.distributed import get_tp_info
from waybill.engine.generate import generate
from waybill.engine.models.decoder import CausalLM
from waybill.text.request import Sampling

NEW_TOKENS = 8
SAMPLED_TOKENS = 4
LENGTHS = (7, 1, 12)


def play(folder: Path) -> dict[str, Any]:
    """Load, and continue three prompts in several ways; what this rank has to say of it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = waybill.load(folder, dtype="float32")
    vocab = model.config.vocab_size
    prompts = [[(3 + 5 * n + 7 * at) % vocab for at in range(length)] for n, length in enumerate(LENGTHS)]
    seeded = Sampling(temperature=1.0, top_k=20, top_p=0.95, seed=7)
    return {
        "rank": get_tp_info().rank,
        "warnings": [str(w.message) for w in caught],
        "tied": model.lm_head.is_tied,
        "logits": first_logits(model, prompts).tolist(),
        "greedy": generate(model, prompts, max_new_tokens=NEW_TOKENS).token_ids,
        "seeded": generate(model, prompts, max_new_tokens=SAMPLED_TOKENS, sampling=seeded).token_ids,
        "unseeded": generate(model, prompts, max_new_tokens=SAMPLED_TOKENS, sampling=Sampling(1.0)).token_ids,
        "by hand": first_logits(by_hand(folder, model), prompts).tolist(),
    }


@torch.inference_mode()
def first_logits(model: CausalLM, prompts: list[list[int]]) -> torch.Tensor:
    batch = Batch(torch.tensor([t for p in prompts for t in p]), tuple(map(len, prompts)))
    with get_global_ctx().forward_batch(batch):
        return model.forward()


def by_hand(folder: Path, like: CausalLM) -> CausalLM:
    """The same model, loaded the long way: `load_weight`, then `load_state_dict`."""
    with torch.device("meta"), torch_dtype(torch.float32):
        model = create_model(like.config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.load_state_dict({name: t.float() for name, t in load_weight(folder, torch.device("cpu"))})
    return model


if __name__ == "__main__":
    every_rank(play)
