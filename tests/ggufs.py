"""Tiny GGUF files, written by gguf's own writer, beside the float checkpoint of exactly the values they hold."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from checkpoints import Array, Recipe

HIDDEN, INNER, HEADS, KV, HEAD_DIM, LAYERS, VOCAB = 256, 512, 4, 2, 64, 2, 96
EXPERTS, EXPERT_INNER = 4, 256
NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps", "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}  # fmt: skip
OUTER = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "rope_freqs": "rope_freqs",
}
CLASSES = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}  # fmt: skip

SCALES: dict[str, tuple[tuple[int, ...], int]] = {
    "Q2_K": ((80, 82), 45), "Q3_K": ((108,), 128), "Q4_K": ((0, 2), 945), "Q5_K": ((0, 2), 1953),
    "Q6_K": ((208,), 4096), "IQ4_NL": ((0,), 127), "IQ4_XS": ((0,), 4064), "IQ3_S": ((0,), 1), "IQ2_XXS": ((0,), 1),
}  # fmt: skip
"""Types that gguf reads and does not write: where a block's float16 scales lie, and how many of them a code counts."""
MIDDLE = {"Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}
"""Codes whose mean is near zero when the scale of minimums is so many times the other."""


@dataclass
class Model:
    """A model about to be written: edit freely first. `types` says what a matrix is stored as, by its GGUF name."""

    architecture: str
    weights: dict[str, Array]
    types: dict[str, str] = field(default_factory=dict)
    default: str = "F32"
    metadata: dict[str, tuple[str, Any]] = field(default_factory=dict)
    """More keys, or other values: key to the writer's method (`add_uint32`) and the value."""

    def type_of(self, name: str) -> Type:
        """What a tensor is stored as: vectors and routers are float."""
        plain = self.weights[name].ndim == 1 or "ffn_gate_inp" in gguf_name(name)
        return Type.F32 if plain else Type[self.types.get(gguf_name(name), self.default)]

    def write(self, path: Path) -> Recipe:
        """Write the file; returns the float checkpoint of what it holds."""
        writer = gguf.GGUFWriter(path, self.architecture)
        given = {
            "block_count": LAYERS, "context_length": 256, "embedding_length": HIDDEN, "feed_forward_length": INNER,
            "attention.head_count": HEADS, "attention.head_count_kv": KV, "attention.key_length": HEAD_DIM,
        }  # fmt: skip
        if self.architecture == "qwen3moe":
            given |= {"expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": EXPERT_INNER}
        keys = {f"{self.architecture}.{key}": ("add_uint32", value) for key, value in given.items()}
        keys[f"{self.architecture}.attention.layer_norm_rms_epsilon"] = ("add_float32", 1e-5)
        keys[f"{self.architecture}.rope.freq_base"] = ("add_float32", 10000.0)
        for key, (method, value) in (keys | self.metadata).items():
            getattr(writer, method)(key, value)
        held: dict[str, Array] = {}
        for name, value in self.weights.items():
            kind = self.type_of(name)
            rows = paired(value) if self._is_paired(name) else value
            raw, floats = packed(rows, kind)
            writer.add_tensor(gguf_name(name), raw, raw_dtype=kind)
            held[name] = halved(floats) if self._is_paired(name) else floats
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return Recipe(self._config(), _experts_apart(held))

    def _is_paired(self, name: str) -> bool:
        return self.architecture == "llama" and (".q_proj." in name or ".k_proj." in name)

    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "architectures": [CLASSES[self.architecture]], "hidden_size": HIDDEN, "intermediate_size": INNER,
            "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV,
            "head_dim": HEAD_DIM, "vocab_size": VOCAB, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "max_position_embeddings": 256, "hidden_act": "silu", "torch_dtype": "float32",
            "tie_word_embeddings": "lm_head.weight" not in self.weights,
        }  # fmt: skip
        if self.architecture == "qwen3moe":
            config |= {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": EXPERT_INNER,
                       "norm_topk_prob": True}  # fmt: skip
        return config


def model(architecture: str, default: str = "F32", *, tied: bool = False, seed: int = 0, **types: str) -> Model:
    """Lively random weights; `types` are of single tensors, by GGUF names with `__` for dots."""
    generator = np.random.default_rng(seed)
    q, kv = HEADS * HEAD_DIM, KV * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        inner: dict[str, tuple[int, ...]] = {
            "input_layernorm": (HIDDEN,), "self_attn.q_proj": (q, HIDDEN), "self_attn.k_proj": (kv, HIDDEN),
            "self_attn.v_proj": (kv, HIDDEN), "self_attn.o_proj": (HIDDEN, q), "post_attention_layernorm": (HIDDEN,),
        }  # fmt: skip
        if architecture == "qwen3moe":
            inner |= {"mlp.gate": (EXPERTS, HIDDEN), "mlp.experts.gate_proj": (EXPERTS, EXPERT_INNER, HIDDEN),
                      "mlp.experts.up_proj": (EXPERTS, EXPERT_INNER, HIDDEN),
                      "mlp.experts.down_proj": (EXPERTS, HIDDEN, EXPERT_INNER)}  # fmt: skip
        else:
            inner |= {"mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN),
                      "mlp.down_proj": (HIDDEN, INNER)}  # fmt: skip
        if architecture.startswith("qwen3"):
            inner |= {"self_attn.q_norm": (HEAD_DIM,), "self_attn.k_norm": (HEAD_DIM,)}
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in inner.items()}
        if architecture == "qwen2":
            rows = {"q": q, "k": kv, "v": kv}
            shapes |= {f"model.layers.{layer}.self_attn.{m}_proj.bias": (n,) for m, n in rows.items()}
    shapes["model.norm.weight"] = (HIDDEN,)
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    weights = {}
    for name, shape in shapes.items():
        noise = generator.standard_normal(shape)
        scaled = (
            1 + 0.2 * noise if "norm" in name else 0.2 * noise if len(shape) == 1 else noise * 1.5 / shape[-1] ** 0.5
        )
        weights[name] = (noise * 0.3 if "embed" in name else scaled).astype(np.float32)
    return Model(architecture, weights, {name.replace("__", "."): kind for name, kind in types.items()}, default)


def gguf_name(name: str) -> str:
    """`model.layers.0.mlp.up_proj.weight` -> `blk.0.ffn_up.weight`."""
    stem, _, leaf = name.rpartition(".")
    if stem in OUTER:
        return f"{OUTER[stem]}.{leaf}"
    layer, _, module = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{NAMES[module]}.{leaf}"


def packed(value: Array, kind: Type) -> tuple[Array, Array]:
    """The bytes of a matrix in a type, and the floats gguf reads from them.

    What gguf does not write has random codes and sub-scales, and scales of blocks that fit the values.
    """
    if kind.name in SCALES:
        elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
        shape = (*value.shape[:-1], value.shape[-1] // elements, nbytes)
        raw = np.random.default_rng(zlib.crc32(value.tobytes())).integers(0, 256, shape, dtype=np.uint8)
        places, largest = SCALES[kind.name]
        for at in places:
            times = MIDDLE.get(kind.name, 1) if at == places[-1] else 1
            scale = np.full((*shape[:-1], 1), 4 * times * float(value.std()) / largest, np.float16)
            raw[..., at : at + 2] = scale.view(np.uint8)
        raw = raw.reshape(*value.shape[:-1], -1)
    else:
        raw = gguf.quants.quantize(value, kind)
    with np.errstate(over="ignore"):  # random exponents
        floats: Array = gguf.quants.dequantize(raw, kind).astype(np.float32)
    return raw, floats.reshape(value.shape)


def paired(rows: Array) -> Array:
    """Each head's rows from half a head apart to side by side, as llama's converter lays them."""
    return np.ascontiguousarray(rows.reshape(-1, 2, HEAD_DIM // 2, *rows.shape[1:]).swapaxes(1, 2)).reshape(rows.shape)


def halved(rows: Array) -> Array:
    """The reverse."""
    return np.ascontiguousarray(rows.reshape(-1, HEAD_DIM // 2, 2, *rows.shape[1:]).swapaxes(1, 2)).reshape(rows.shape)


def _experts_apart(weights: Mapping[str, Array]) -> dict[str, Array]:
    out = {}
    for name, value in weights.items():
        if ".experts." in name:
            path, _, rest = name.partition(".experts.")
            out |= {f"{path}.experts.{e}.{rest}": np.ascontiguousarray(one) for e, one in enumerate(value)}
        else:
            out[name] = value
    return out
