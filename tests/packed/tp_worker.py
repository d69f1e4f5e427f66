"""One rank of a tensor-parallel run: `torchrun tp_worker.py FOLDER…` prints, as JSON, what every rank computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import waybill
from ranks import every_rank
from waybill.engine.context import Batch, get_global_ctx
from waybill.engine.generate import generate

NEW_TOKENS = 24
LENGTHS = (7, 1, 12)


@torch.inference_mode()
def play(folder: Path) -> dict[str, Any]:
    """Load, and continue three prompts; what this rank has to say of it."""
    model = waybill.load(folder, dtype="float32")
    vocab = model.config.vocab_size
    prompts = [[(3 + 5 * n + 7 * at) % vocab for at in range(length)] for n, length in enumerate(LENGTHS)]
    batch = Batch(torch.tensor([t for p in prompts for t in p]), tuple(map(len, prompts)))
    with get_global_ctx().forward_batch(batch):
        logits = model.forward().tolist()
    state = model.state_dict()
    return {
        "logits": logits,
        "tokens": generate(model, prompts, max_new_tokens=NEW_TOKENS).token_ids,
        "packed": sum(name.endswith(".codes") for name in state),
        "bytes": sum(tensor.nbytes for tensor in state.values()),
    }


if __name__ == "__main__":
    every_rank(play)
