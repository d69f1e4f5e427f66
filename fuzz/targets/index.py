"""Index files: whatever they say, only files inside the folder are read, and every tensor comes from one of them."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from checkpoints import llama
from fuzz.mutation import mutate_json as mutate
from waybill.checkpoint import read_checkpoint
from waybill.errors import Refused

__all__ = ["SEEDS", "check", "mutate"]

FOLDER = llama(num_hidden_layers=1).write(Path(tempfile.mkdtemp()), shard_of=lambda name: len(name) % 3)
INDEX = FOLDER / "model.safetensors.index.json"
WHOLE = json.loads(INDEX.read_text())
NORM = "model.norm.weight"
SEEDS = [json.dumps(WHOLE).encode()] + [
    json.dumps({"weight_map": WHOLE["weight_map"] | {NORM: entry}}).encode()
    for entry in ("/etc/passwd", "../x", "a/../../b", "a\0b", "", ".", 1, None, "model-00001-of-00003.safetensors")
]


def check(octets: bytes) -> None:
    """Describe a checkpoint with this index."""
    INDEX.write_bytes(octets)
    checkpoint = read_checkpoint(FOLDER)
    for shard in checkpoint.shards:
        assert (FOLDER / shard.name).resolve().parent == FOLDER.resolve(), shard
    assert {tensor.file for tensor in checkpoint.tensors.values()} <= {shard.name for shard in checkpoint.shards}
    if checkpoint.problems:
        raise Refused(checkpoint.problems)
