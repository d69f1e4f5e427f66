"""GGUF metadata as the fields of a config.json, so that one reader judges both.

Keys are `{architecture}.{name}`. What the metadata does not state stays absent; nothing here knows an architecture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from waybill.checkpoint.header import TensorHeader

ARCHITECTURE = "general.architecture"
"""The key that makes a config one of a GGUF file: it stays in it, in place of `architectures` and `model_type`."""

_FIELDS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_SCALING = {
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
_OTHER_SCALING = ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor",
                  "rope.scaling.yarn_log_multiplier", "rope.scale_linear", "rope.dimension_sections")  # fmt: skip
"""Numbers that change angles in ways a config.json has no field for."""
_TOKENS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}
_STOPS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
EMBEDDING, HEAD, FREQUENCIES = "token_embd.weight", "output.weight", "rope_freqs.weight"
FACTORS = "a factor for each frequency"
"""The rope type of a file that keeps them, under the key `factors`."""


def config_of(
    metadata: Mapping[str, Any], tensors: Mapping[str, TensorHeader], factors: Sequence[float] | None = None
) -> dict[str, Any]:
    """What config.json would say; biases, a head and the rows of the table are evident from the tensors alone.

    `factors` are those of the rotary frequencies, which some files keep as a tensor.
    """
    architecture = metadata.get(ARCHITECTURE)

    def stated(name: str) -> Any:
        return metadata.get(f"{architecture}.{name}")

    config: dict[str, Any] = {ARCHITECTURE: architecture if isinstance(architecture, str) else ""}
    config |= {field: value for key, field in _FIELDS.items() if (value := stated(key)) is not None}
    if "vocab_size" not in config:
        table = tensors.get(EMBEDDING)
        tokens = metadata.get("tokenizer.ggml.tokens")
        rows = (
            table.shape[0] if table is not None and table.shape else len(tokens) if isinstance(tokens, list) else None
        )
        config |= {} if rows is None else {"vocab_size": rows}
    config["tie_word_embeddings"] = HEAD not in tensors
    config["attention_bias"] = any(f"blk.0.attn_{member}.bias" in tensors for member in ("q", "k", "v", "output"))
    config["mlp_bias"] = any(f"blk.0.ffn_{member}.bias" in tensors for member in ("gate", "up", "down"))
    if "num_experts" in config:
        weights_sum_to_one = stated("expert_weights_norm")
        config["norm_topk_prob"] = True if weights_sum_to_one is None else weights_sum_to_one
    config["rope_parameters"] = _rope(stated, config, factors)
    return config | generation_of(metadata)


def _rope(stated: Any, config: Mapping[str, Any], factors: Sequence[float] | None) -> dict[str, Any]:
    """The rotary embedding; what cannot be said is a kind that nobody knows, and is refused by that name."""
    kind = stated("rope.scaling.type")
    kind = "default" if kind in (None, "none") else str(kind)
    rope = {name: value for key, name in _SCALING.items() if kind != "default" and (value := stated(key)) is not None}
    if (base := stated("rope.freq_base")) is not None:
        rope["rope_theta"] = base
    if factors is not None:
        kind = FACTORS if kind == "default" else f"{kind}, with {FACTORS}"
        rope["factors"] = list(factors)
    kind += "".join(f", with {key} {value}" for key in _OTHER_SCALING if (value := stated(key)) not in (None, 0, 1))
    rope["rope_type"] = kind
    heads, hidden, turned = config.get("num_attention_heads"), config.get("hidden_size"), stated("rope.dimension_count")
    if type(turned) is type(heads) is type(hidden) is int and heads:
        head_dim = config.get("head_dim", hidden // heads)
        if type(head_dim) is int and head_dim and turned != head_dim:
            rope["partial_rotary_factor"] = turned / head_dim
    return rope


def generation_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What generation_config.json would say: the tokens that begin, end and fill."""
    stops = [value for key in _STOPS if type(value := metadata.get(key)) is int]
    out = {field: metadata[key] for field, key in _TOKENS.items() if type(metadata.get(key)) is int}
    if stops:
        unique = list(dict.fromkeys(stops))
        out["eos_token_id"] = unique[0] if len(unique) == 1 else unique
    return out
