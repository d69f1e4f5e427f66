"""config.json: planned for both targets and reported; a clean plan binds every tensor of the file it does not drop."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import waybill
from checkpoints import llama, qwen2_moe, qwen3_moe
from fuzz.mutation import mutate_json as mutate
from waybill.checkpoint import read_checkpoint
from waybill.errors import Refused
from waybill.overview import describe

__all__ = ["SEEDS", "check", "mutate"]

RECIPES = [recipe(num_hidden_layers=1) for recipe in (llama, qwen2_moe, qwen3_moe)]
FOLDERS = [recipe.write(Path(tempfile.mkdtemp())) for recipe in RECIPES]
ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}  # fmt: skip
SEEDS = [json.dumps(recipe.config | more).encode() for recipe in RECIPES for more in (
    {}, {"rope_scaling": ROPE}, {"rope_parameters": ROPE | {"rope_theta": 1e4}}, {"text_config": recipe.config},
    {"layer_types": ["full_attention"], "sliding_window": 8, "use_sliding_window": True}, {"head_dim": 16},
)]  # fmt: skip


def check(octets: bytes) -> None:
    """Report and plan each of a few checkpoints under this config."""
    problems = []
    for folder in FOLDERS:
        (folder / "config.json").write_bytes(octets)
        checkpoint = read_checkpoint(folder)
        json.dumps(describe(checkpoint).as_dict(), allow_nan=False)
        for target in ("torch", "onnx"):
            bill = waybill.plan(checkpoint, target)
            json.dumps(bill.as_dict(), allow_nan=False)
            read = {source for binding in bill.bindings for source in binding.sources}
            assert bill.problems or read | bill.ignored.keys() == checkpoint.tensors.keys()
            problems += bill.problems
    raise Refused(problems)
