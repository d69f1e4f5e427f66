"""An export needs memory for pieces of weights, not for weights."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from checkpoints import Recipe, file_bytes, llama

MIB = 1 << 20
PROGRAM = """
import os, resource, sys, waybill, waybill.onnx.package
os.fsync = lambda _: None  # the disk's speed is not what is measured
with open("/proc/self/statm") as statm:
    held = int(statm.read().split()[0]) * resource.getpagesize()
limit = held + int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
waybill.build(sys.argv[1], dtype=sys.argv[4]).save(sys.argv[2])
"""


def sparse(recipe: Recipe, rows: int, folder: Path) -> Path:
    """The checkpoint with bfloat16 tables of so many rows: zeros, of which the disk holds nothing."""
    recipe.config["vocab_size"] = rows
    recipe.write(folder)
    header: dict[str, object] = {}
    end = 0
    for name, tensor in recipe.tensors.items():
        shape = [rows, *tensor.shape[1:]] if tensor.shape[0] == 128 else list(tensor.shape)
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    octets = file_bytes(header)
    (folder / "model.safetensors").write_bytes(octets)
    os.truncate(folder / "model.safetensors", len(octets) + end)
    return folder


def export_within(nbytes: int, checkpoint: Path, out: Path, dtype: str) -> str:
    """Standard error of an export whose address space may grow by this once everything is imported."""
    command = [sys.executable, "-c", PROGRAM, checkpoint, out, str(nbytes), dtype]
    environment = os.environ | {"MALLOC_ARENA_MAX": "1"}  # an arena reserves addresses that it does not use
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)
    return done.stderr


def test_a_table_larger_than_the_memory_is_cast_piece_by_piece(tmp_path: Path) -> None:
    rows = 150 * MIB // 2 // 64
    recipe = llama(tie_word_embeddings=True, max_position_embeddings=1 << 17)  # 8 MiB of angles
    checkpoint = sparse(recipe, rows, tmp_path / "checkpoint")
    out = tmp_path / "package"
    assert export_within(150 * MIB, checkpoint, out, "float32") == ""
    bill = json.loads((out / "waybill.json").read_text())
    table = bill["components"]["decoder"]["initializers"]["model.embed_tokens.weight"]
    assert table["bytes"] == rows * 64 * 4 > 2 * 149 * MIB
    with (out / table["file"]).open("rb") as file:
        file.seek(table["offset"] + table["bytes"] - MIB)
        assert not np.frombuffer(file.read(MIB), np.float32).any()
    (out / table["file"]).unlink()  # a third of a gigabyte


def test_the_limit_is_one(tmp_path: Path) -> None:
    """A program that held the table would not get this far."""
    recipe = llama(tie_word_embeddings=True)
    checkpoint = sparse(recipe, 1024, tmp_path / "checkpoint")
    assert export_within(0, checkpoint, tmp_path / "package", "float32") != ""
