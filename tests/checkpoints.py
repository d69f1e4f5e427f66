"""Tiny checkpoints, made on the spot: random weights in the layouts and with the configs of the hub.

The writer is independent of the library: it packs bytes by the format's own description, and can be told to lie.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
BF16 = np.dtype(ml_dtypes.bfloat16)
TAGS = {
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(np.float64): "F64",
    BF16: "BF16",
    np.dtype(np.int32): "I32",
    np.dtype(np.uint8): "U8",
    np.dtype(np.int8): "I8",
    np.dtype(np.int64): "I64",
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
    np.dtype(ml_dtypes.float8_e5m2): "F8_E5M2",
    np.dtype(ml_dtypes.float8_e8m0fnu): "F8_E8M0",
}
HIDDEN, HEADS, KV, LAYERS, INNER, VOCAB = 64, 4, 2, 2, 96, 128


@dataclass
class Recipe:
    """A checkpoint about to be written: edit `config` and `tensors` freely first."""

    config: dict[str, Any]
    tensors: dict[str, Array] = field(default_factory=dict)

    def write(
        self, folder: Path, *, shard_of: Callable[[str], int] | None = None, index: bool = True, **files: Any
    ) -> Path:
        """Write one file, or a shard for each number `shard_of` gives, with an index; `files` are extra JSON files."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        for name, content in files.items():
            (folder / f"{name}.json").write_text(json.dumps(content))
        if shard_of is None:
            (folder / "model.safetensors").write_bytes(safetensors_bytes(self.tensors))
            return folder
        numbers = {name: shard_of(name) for name in self.tensors}
        count = max(numbers.values()) + 1
        names = {n: f"model-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)}
        for number, file in names.items():
            held = {name: tensor for name, tensor in self.tensors.items() if numbers[name] == number}
            (folder / file).write_bytes(safetensors_bytes(held))
        if index:
            weight_map = {name: names[number] for name, number in numbers.items()}
            content = {"metadata": {}, "weight_map": weight_map}
            (folder / "model.safetensors.index.json").write_text(json.dumps(content))
        return folder


def safetensors_bytes(tensors: Mapping[str, Array]) -> bytes:
    """A safetensors file holding `tensors` in the given order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        offsets = [at, at + tensor.nbytes]
        header[name] = {"dtype": TAGS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        at += tensor.nbytes
    return file_bytes(header, b"".join(tensor.tobytes() for tensor in tensors.values()))


def file_bytes(header: Mapping[str, Any] | bytes, data: bytes = b"") -> bytes:
    """A file with this header, whatever it says, before this data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def llama(dtype: Any = BF16, **config: Any) -> Recipe:
    """F-LLAMA: head_dim 16, untied, no biases."""
    return _decoder("LlamaForCausalLM", "llama", 16, dtype, config)


def qwen2(dtype: Any = BF16, **config: Any) -> Recipe:
    """F-QWEN2: biases on q, k and v that the config does not mention."""
    recipe = _decoder("Qwen2ForCausalLM", "qwen2", 16, dtype, config)
    for layer in range(recipe.config["num_hidden_layers"]):
        _add_biases(recipe, f"model.layers.{layer}", dtype)
    return recipe


def qwen3(dtype: Any = BF16, **config: Any) -> Recipe:
    """F-QWEN3: head_dim 32, not hidden/heads; per-head norms; tied."""
    return _decoder("Qwen3ForCausalLM", "qwen3", 32, dtype, {"head_dim": 32, "tie_word_embeddings": True} | config)


def qwen3_moe(dtype: Any = BF16, *, banks: bool = False, **config: Any) -> Recipe:
    """F-Q3MOE: 4 experts, 2 a token; one tensor a projection, or `banks` of them."""
    moe = {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
           "norm_topk_prob": True, "tie_word_embeddings": False}  # fmt: skip
    recipe = _decoder("Qwen3MoeForCausalLM", "qwen3_moe", 32, dtype, moe | config)
    for layer in range(recipe.config["num_hidden_layers"]):
        _replace_by_experts(recipe, f"model.layers.{layer}.mlp", dtype, banks)
    return recipe


def qwen2_moe(dtype: Any = BF16, *, banks: bool = False, **config: Any) -> Recipe:
    """F-Q2MOE: 4 experts, 2 a token, and a shared one of 48 behind a gate; biases on q, k and v."""
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": False,
           "shared_expert_intermediate_size": 48}  # fmt: skip
    recipe = _decoder("Qwen2MoeForCausalLM", "qwen2_moe", 16, dtype, moe | config)
    inner = recipe.config["shared_expert_intermediate_size"]
    for layer in range(recipe.config["num_hidden_layers"]):
        path = f"model.layers.{layer}"
        _add_biases(recipe, path, dtype)
        if layer in recipe.config.get("mlp_only_layers", ()):
            continue
        _replace_by_experts(recipe, f"{path}.mlp", dtype, banks)
        shared = {"gate_proj": (inner, HIDDEN), "up_proj": (inner, HIDDEN), "down_proj": (HIDDEN, inner)}
        names = {f"shared_expert.{name}": shape for name, shape in shared.items()} | {"shared_expert_gate": (1, HIDDEN)}
        recipe.tensors |= {f"{path}.mlp.{name}.weight": _random(dtype, *shape) for name, shape in names.items()}
    return recipe


def gpt_oss(dtype: Any = BF16, **config: Any) -> Recipe:
    """F-GPTOSS: 4 experts, 2 a token, as banks that lie [E, K, N]; sinks, biases, and windows of 4 in every second
    layer."""
    sizes = {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64,
             "sliding_window": 4, "attention_bias": True, "swiglu_limit": 7.0, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
             "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
                              "truncate": False, "original_max_position_embeddings": 32}}  # fmt: skip
    recipe = _decoder("GptOssForCausalLM", "gpt_oss", 16, dtype, sizes | config)
    heads, inner, experts = (
        recipe.config[key] for key in ("num_attention_heads", "intermediate_size", "num_local_experts")
    )
    shapes = {
        "router.weight": (experts, HIDDEN), "router.bias": (experts,),
        "experts.gate_up_proj": (experts, HIDDEN, 2 * inner), "experts.gate_up_proj_bias": (experts, 2 * inner),
        "experts.down_proj": (experts, inner, HIDDEN), "experts.down_proj_bias": (experts, HIDDEN),
    }  # fmt: skip
    for layer in range(recipe.config["num_hidden_layers"]):
        path = f"model.layers.{layer}"
        _add_biases(recipe, path, dtype)
        recipe.tensors[f"{path}.self_attn.o_proj.bias"] = _random(dtype, HIDDEN)
        recipe.tensors[f"{path}.self_attn.sinks"] = _random(dtype, heads)
        for projection in ("gate", "up", "down"):
            del recipe.tensors[f"{path}.mlp.{projection}_proj.weight"]
        recipe.tensors |= {f"{path}.mlp.{name}": _random(dtype, *shape) for name, shape in shapes.items()}
    return recipe


def _add_biases(recipe: Recipe, path: str, dtype: Any) -> None:
    for member in "qkv":
        rows = recipe.tensors[f"{path}.self_attn.{member}_proj.weight"].shape[0]
        recipe.tensors[f"{path}.self_attn.{member}_proj.bias"] = _random(dtype, rows)


def _replace_by_experts(recipe: Recipe, mlp: str, dtype: Any, banks: bool) -> None:
    """A router and its experts in the place of a dense network."""
    experts, inner = recipe.config["num_experts"], recipe.config["moe_intermediate_size"]
    for projection in ("gate", "up", "down"):
        del recipe.tensors[f"{mlp}.{projection}_proj.weight"]
    recipe.tensors[f"{mlp}.gate.weight"] = _random(dtype, experts, HIDDEN)
    gate_up = _random(dtype, experts, 2 * inner, HIDDEN)
    down = _random(dtype, experts, HIDDEN, inner)
    if banks:
        recipe.tensors[f"{mlp}.experts.gate_up_proj"] = gate_up
        recipe.tensors[f"{mlp}.experts.down_proj"] = down
        return
    for e in range(experts):
        recipe.tensors[f"{mlp}.experts.{e}.gate_proj.weight"] = gate_up[e, :inner]
        recipe.tensors[f"{mlp}.experts.{e}.up_proj.weight"] = gate_up[e, inner:]
        recipe.tensors[f"{mlp}.experts.{e}.down_proj.weight"] = down[e]


def per_layer(recipe: Recipe, size: int = 32, rows: int | None = None) -> Recipe:
    """The same decoder, whose layers are given inputs of their own; `rows` of their table, when it is stated."""
    config, dtype = recipe.config, recipe.tensors["model.norm.weight"].dtype
    config["hidden_size_per_layer_input"] = size
    if rows is not None:
        config["vocab_size_per_layer_input"] = rows
    layers, vocab = config["num_hidden_layers"], config["vocab_size"] if rows is None else rows
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens_per_layer": (vocab, layers * size),
        "per_layer_model_projection": (layers * size, HIDDEN),
        "per_layer_projection_norm": (size,),
    }
    for layer in range(layers):
        shapes[f"layers.{layer}.per_layer_input_gate"] = (size, HIDDEN)
        shapes[f"layers.{layer}.per_layer_projection"] = (HIDDEN, size)
        shapes[f"layers.{layer}.post_per_layer_input_norm"] = (HIDDEN,)
    recipe.tensors |= {f"model.{name}.weight": _random(dtype, *shape) for name, shape in shapes.items()}
    return recipe


_generator = np.random.default_rng(0)


def _random(dtype: Any, *shape: int) -> Array:
    return (_generator.standard_normal(shape) * 0.1).astype(dtype)


def _decoder(architecture: str, model_type: str, head_dim: int, dtype: Any, overrides: dict[str, Any]) -> Recipe:
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "torch_dtype": {np.dtype(np.float32): "float32", np.dtype(np.float16): "float16"}.get(
            np.dtype(dtype), "bfloat16"
        ),
    } | overrides
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    tensors = {"model.embed_tokens.weight": _random(dtype, config["vocab_size"], HIDDEN)}
    for layer in range(config["num_hidden_layers"]):
        path = f"model.layers.{layer}"
        shapes = {
            "input_layernorm": (HIDDEN,),
            "mlp.down_proj": (HIDDEN, INNER),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "post_attention_layernorm": (HIDDEN,),
            "self_attn.k_proj": (kv, HIDDEN),
            "self_attn.o_proj": (HIDDEN, q),
            "self_attn.q_proj": (q, HIDDEN),
            "self_attn.v_proj": (kv, HIDDEN),
        }
        if model_type.startswith("qwen3"):
            shapes |= {"self_attn.k_norm": (head_dim,), "self_attn.q_norm": (head_dim,)}
        tensors |= {f"{path}.{name}.weight": _random(dtype, *shape) for name, shape in sorted(shapes.items())}
    tensors["model.norm.weight"] = _random(dtype, HIDDEN)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = _random(dtype, config["vocab_size"], HIDDEN)
    return Recipe(config, tensors)


def lively(recipe: Recipe, seed: int = 0) -> Recipe:
    """The same recipe with weights at a scale where every layer matters, so that greedy tokens are diverse."""
    generator = np.random.default_rng(seed)
    for name, tensor in recipe.tensors.items():
        noise = generator.standard_normal(tensor.shape)
        if "norm" in name:
            noise = 1 + 0.2 * noise
        elif name.endswith("bias"):
            noise *= 0.2
        elif "embed_tokens" in name:
            noise *= 0.3
        else:
            noise *= 1.5 / tensor.shape[-1] ** 0.5
        recipe.tensors[name] = noise.astype(tensor.dtype)
    return recipe


def write_tokenizer(folder: Path, words: int = VOCAB, **settings: Any) -> Path:
    """A tokenizer.json of the words w0, <s>, w2, w3, …: any other word is w0, <s> is special; `settings` go beside."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {f"w{n}": n for n in range(words) if n != 1} | {"<s>": 1}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
