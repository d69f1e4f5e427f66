"""Quantization metadata beside a packed checkpoint: planned, reported, and every module asked what it is."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np

import waybill
from checkpoints import Recipe, llama
from fuzz.mutation import mutate_json as mutate
from packing import Scheme, pack
from waybill.checkpoint import read_checkpoint
from waybill.errors import Refused
from waybill.overview import describe

__all__ = ["SEEDS", "check", "mutate"]

SCHEMES = [Scheme("gptq", 4, 32), Scheme("awq", 4, 32), Scheme("olive", 4, 32), Scheme("auto_round", 4, 32),
           Scheme("ct", 4, 32)]  # fmt: skip
PACKED = [pack(llama(np.float32, num_hidden_layers=1), scheme).packed for scheme in SCHEMES]
FLOAT = {key: value for key, value in PACKED[0].config.items() if key != "quantization_config"}
FOLDERS = [Recipe(FLOAT, recipe.tensors).write(Path(tempfile.mkdtemp())) for recipe in PACKED]
BLOCKS = [recipe.config["quantization_config"] for recipe in PACKED]
RULES = {
    "modules_to_not_convert": ["lm_head", "re:.*mlp.*"], "dynamic": {"+:.*down.*": {"bits": 8}, "-:.*up.*": {}},
    "overrides": {"model.layers.0.mlp.down_proj": {"bits": 8}}, "extra_config": {".*down.*": {"bits": 16}},
    "ignore": ["re:.*lm_head"], "modules_in_block_to_quantize": [["self_attn.q_proj"]],
}  # fmt: skip
SEEDS = [json.dumps(block | more).encode() for block in BLOCKS for more in ({}, RULES)] + [
    json.dumps({"quant_method": method, "weight_block_size": [32, 32], "modules_to_not_convert": ["lm_head"]}).encode()
    for method in ("fp8", "mxfp4", "bitsandbytes", None)
]


def check(octets: bytes) -> None:
    """Plan packed checkpoints whose metadata this is."""
    problems = []
    for folder in FOLDERS:
        (folder / "quantize_config.json").write_bytes(octets)
        checkpoint = read_checkpoint(folder)
        json.dumps(describe(checkpoint).as_dict(), allow_nan=False)
        bill = waybill.plan(checkpoint)
        read = {source for binding in bill.bindings for source in binding.sources}
        assert bill.problems or read | bill.ignored.keys() == checkpoint.tensors.keys()
        problems += bill.problems
    raise Refused(problems)
