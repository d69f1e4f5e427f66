"""Synthetic checkpoints, made once: random weights of real shapes. Standard library and numpy, no torch."""

from __future__ import annotations

import json
import math
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Shapes = dict[str, tuple[int, ...]]

QWEN3 = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
}
DENSE = QWEN3 | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}
MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 6,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "tie_word_embeddings": True,
}
LARGE = MOE | {
    "num_hidden_layers": 94,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 64,
    "num_experts": 128,
    "moe_intermediate_size": 1536,
    "tie_word_embeddings": False,
}
LARGE_SHARDS = 118


def dense() -> Path:
    """Qwen3-0.6B's shapes in one file of 1.5 GB: tied, and the head stored again with equal bytes, as published."""
    return _made("qwen3-0.6b-shaped", lambda folder: _write(folder, DENSE, {"lm_head.weight": _table(DENSE)}))


def moe() -> Path:
    """64 experts a layer, every expert's three matrices stored as tensors of 1 MB."""
    return _made("qwen3-moe-shaped", lambda folder: _write(folder, MOE, {}))


def large() -> Path:
    """Qwen3-235B-A22B's headers, 36,945 tensors in 118 files that have their full length and no blocks on disk."""
    return _made("qwen3-235b-shaped", _write_large)


def weights(folder: Path) -> Path:
    """The one weight file of a checkpoint."""
    return folder / "model.safetensors"


def home() -> Path:
    """Where they are kept."""
    if stated := os.environ.get("WAYBILL_BENCH_DIR"):
        return Path(stated)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "waybill" / "bench"


def _made(name: str, write: Callable[[Path], None]) -> Path:
    folder = home() / name
    if not folder.is_dir():
        staging = folder.with_name(f"{name}.{os.getpid()}.tmp")
        staging.mkdir(parents=True)
        try:
            write(staging)
            staging.rename(folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return folder


def _table(config: dict[str, Any]) -> tuple[int, ...]:
    return config["vocab_size"], config["hidden_size"]


def _shapes(config: dict[str, Any]) -> Shapes:
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes: Shapes = {"model.embed_tokens.weight": _table(config), "model.norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        path = f"model.layers.{layer}"
        attention = f"{path}.self_attn"
        shapes |= {
            f"{path}.input_layernorm.weight": (hidden,),
            f"{path}.post_attention_layernorm.weight": (hidden,),
            f"{attention}.q_proj.weight": (q, hidden),
            f"{attention}.k_proj.weight": (kv, hidden),
            f"{attention}.v_proj.weight": (kv, hidden),
            f"{attention}.o_proj.weight": (hidden, q),
            f"{attention}.q_norm.weight": (head_dim,),
            f"{attention}.k_norm.weight": (head_dim,),
        }
        if experts := config.get("num_experts"):
            shapes[f"{path}.mlp.gate.weight"] = (experts, hidden)
            for expert in range(experts):
                shapes |= _mlp(f"{path}.mlp.experts.{expert}", hidden, config["moe_intermediate_size"])
        else:
            shapes |= _mlp(f"{path}.mlp", hidden, config["intermediate_size"])
    return shapes


def _mlp(path: str, hidden: int, inner: int) -> Shapes:
    return {
        f"{path}.gate_proj.weight": (inner, hidden),
        f"{path}.up_proj.weight": (inner, hidden),
        f"{path}.down_proj.weight": (hidden, inner),
    }


def _header(shapes: Shapes) -> tuple[bytes, int]:
    """The header of a file that holds these BF16 tensors in name order, and the bytes of its data."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(shapes):
        start, end = end, end + 2 * math.prod(shapes[name])
        entries[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, end


def _write(folder: Path, config: dict[str, Any], extra: Shapes) -> None:
    shapes = _shapes(config) | extra
    with weights(folder).open("wb") as file:
        file.write(_header(shapes)[0])
        for name in sorted(shapes):
            for block in _values("model.embed_tokens.weight" if name in extra else name, math.prod(shapes[name])):
                file.write(block)
    (folder / "config.json").write_text(json.dumps(config, indent=1), "utf-8")


def _values(name: str, count: int) -> Iterator[Any]:
    """Random bfloat16 of magnitude 2⁻⁷ to 2⁻⁶, either sign, the same for the same name."""
    import numpy as np

    random = np.random.default_rng(zlib.crc32(name.encode()))
    for start in range(0, count, 1 << 22):
        bits = random.integers(0, 1 << 16, min(1 << 22, count - start), np.uint16)
        yield bits & np.uint16(0x807F) | np.uint16(0x3C00)


def _write_large(folder: Path) -> None:
    shapes = _shapes(LARGE) | {"lm_head.weight": _table(LARGE)}
    weight_map = {}
    ordered, width = sorted(shapes), -(-len(shapes) // LARGE_SHARDS)
    for number, start in enumerate(range(0, len(ordered), width), 1):
        names = ordered[start : start + width]
        file = f"model-{number:05d}-of-{LARGE_SHARDS:05d}.safetensors"
        header, data = _header({name: shapes[name] for name in names})
        with (folder / file).open("wb") as stream:
            stream.write(header)
            stream.truncate(len(header) + data)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    (folder / "config.json").write_text(json.dumps(LARGE, indent=1), "utf-8")
