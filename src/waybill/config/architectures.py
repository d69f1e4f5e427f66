"""What is particular about each supported architecture: the one place that knows them by name.

`defaults` are the values transformers' config class assumes when config.json omits a field (it writes nested
configs as differences); a test compares them with the installed classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One row: the switches in which decoder layers differ, and the defaults of omitted fields."""

    name: str
    model_type: str
    defaults: Mapping[str, Any]
    qk_norm: bool = False
    """Per-head RMS norms on q and k, before the rotary embedding."""
    qkv_bias: bool | None = None
    """Fixed by the architecture, or None: the config decides, by attention_bias for q, k, v and o alike, or by a field
    qkv_bias of its own for q, k and v."""
    mlp_bias: bool = False
    """Whether the config field mlp_bias exists."""
    moe: bool = False
    sliding_window: bool = False
    """Whether the config class knows sliding windows (older files of others carry the keys without meaning)."""
    sinks: bool = False
    """Whether heads have sinks, layers windows where layer_types says so, and experts biases and a clamped SwiGLU."""


_COMMON = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_QWEN = _COMMON | {
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
}
_QWEN_DENSE = _QWEN | {
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_window_layers": 28,
}

ARCHITECTURES = {
    row.name: row
    for row in (
        Architecture(
            name="LlamaForCausalLM",
            model_type="llama",
            mlp_bias=True,
            defaults=_COMMON
            | {
                "vocab_size": 32000,
                "hidden_size": 4096,
                "intermediate_size": 11008,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "max_position_embeddings": 2048,
                "attention_bias": False,
                "mlp_bias": False,
            },
        ),
        Architecture(
            name="Qwen2ForCausalLM",
            model_type="qwen2",
            qkv_bias=True,
            sliding_window=True,
            defaults=_QWEN_DENSE,
        ),
        Architecture(
            name="Qwen3ForCausalLM",
            model_type="qwen3",
            qk_norm=True,
            sliding_window=True,
            defaults=_QWEN_DENSE | {"head_dim": 128, "attention_bias": False},
        ),
        Architecture(
            name="Qwen2MoeForCausalLM",
            model_type="qwen2_moe",
            moe=True,
            sliding_window=True,
            defaults=_QWEN
            | {
                "hidden_size": 2048,
                "intermediate_size": 5632,
                "num_hidden_layers": 24,
                "num_attention_heads": 16,
                "num_key_value_heads": 16,
                "max_window_layers": 28,
                "qkv_bias": True,
                "decoder_sparse_step": 1,
                "moe_intermediate_size": 1408,
                "shared_expert_intermediate_size": 5632,
                "num_experts": 60,
                "num_experts_per_tok": 4,
                "norm_topk_prob": False,
                "mlp_only_layers": (),
            },
        ),
        Architecture(
            name="Qwen3MoeForCausalLM",
            model_type="qwen3_moe",
            qk_norm=True,
            moe=True,
            sliding_window=True,
            defaults=_QWEN
            | {
                "hidden_size": 2048,
                "intermediate_size": 6144,
                "num_hidden_layers": 24,
                "num_attention_heads": 32,
                "num_key_value_heads": 4,
                "attention_bias": False,
                "decoder_sparse_step": 1,
                "moe_intermediate_size": 768,
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "norm_topk_prob": False,
                "mlp_only_layers": (),
            },
        ),
        Architecture(
            name="GptOssForCausalLM",
            model_type="gpt_oss",
            moe=True,
            sinks=True,
            defaults={
                "vocab_size": 201088,
                "hidden_size": 2880,
                "intermediate_size": 2880,
                "num_hidden_layers": 36,
                "num_attention_heads": 64,
                "num_key_value_heads": 8,
                "head_dim": 64,
                "hidden_act": "silu",
                "rms_norm_eps": 1e-5,
                "max_position_embeddings": 131072,
                "tie_word_embeddings": False,
                "attention_bias": True,
                "sliding_window": 128,
                "num_experts": 128,
                "num_experts_per_tok": 4,
                "swiglu_alpha": 1.702,
                "swiglu_limit": 7.0,
                "rope_theta": 150000.0,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 150000.0,
                    "factor": 32.0,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "truncate": False,
                    "original_max_position_embeddings": 4096,
                },
            },
        ),
    )
}
BY_MODEL_TYPE = {row.model_type: row for row in ARCHITECTURES.values()}

GGUF_ARCHITECTURE = "general.architecture"
"""The key of GGUF metadata that names an architecture, in one of these words."""
BY_GGUF_NAME = {
    name: BY_MODEL_TYPE[model_type]
    for name, model_type in {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}.items()
}
GGUF_DEFAULTS = (
    "hidden_act", "rope_theta", "attention_bias", "mlp_bias", "use_sliding_window", "max_window_layers",
    "decoder_sparse_step", "mlp_only_layers",
)  # fmt: skip
"""Fields that GGUF metadata leaves out where they have their usual values; what it should state is not guessed."""


def class_name(config: Mapping[str, Any]) -> str | None:
    """The class that a config names, if it does."""
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def architecture_of(config: Mapping[str, Any]) -> Architecture | None:
    """The row a config names, by its class, or by its model type where it names none."""
    name = class_name(config)
    return BY_MODEL_TYPE.get(str(config.get("model_type"))) if name is None else ARCHITECTURES.get(name)


FAMILY_OF = {
    name: family
    for family, names in {
        "t5": ("T5ForConditionalGeneration", "t5"),
        "whisper": ("WhisperForConditionalGeneration", "whisper"),
        "llava": ("LlavaForConditionalGeneration", "llava"),
        "qwen2_audio": ("Qwen2AudioForConditionalGeneration", "qwen2_audio"),
    }.items()
    for name in names
}
"""Architecture, and model type for files that name none, to family; every other is a decoder's."""
KNOWN = (*ARCHITECTURES, *(name for name in FAMILY_OF if name[0].isupper()))
"""Every architecture that can be planned."""

PART_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "t5": {
        "vocab_size": 32128,
        "d_model": 512,
        "d_kv": 64,
        "d_ff": 2048,
        "num_layers": 6,
        "num_decoder_layers": None,
        "num_heads": 8,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
        "layer_norm_epsilon": 1e-6,
        "feed_forward_proj": "relu",
    },
    "whisper": {
        "vocab_size": 51865,
        "num_mel_bins": 80,
        "encoder_layers": 4,
        "encoder_attention_heads": 6,
        "decoder_layers": 4,
        "decoder_attention_heads": 6,
        "decoder_ffn_dim": 1536,
        "encoder_ffn_dim": 1536,
        "activation_function": "gelu",
        "d_model": 384,
        "max_source_positions": 1500,
        "max_target_positions": 448,
        "tie_word_embeddings": True,
        "decoder_start_token_id": 50257,
    },
    "clip_vision_model": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_channels": 3,
        "image_size": 224,
        "patch_size": 32,
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5,
    },
    "siglip_vision_model": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_channels": 3,
        "image_size": 224,
        "patch_size": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
        "vision_use_head": True,
    },
    "qwen2_audio_encoder": {
        "num_mel_bins": 128,
        "encoder_layers": 32,
        "encoder_attention_heads": 20,
        "encoder_ffn_dim": 5120,
        "d_model": 1280,
        "activation_function": "gelu",
        "max_source_positions": 1500,
    },
    "llava": {
        "image_token_index": 32000,
        "projector_hidden_act": "gelu",
        "vision_feature_select_strategy": "default",
        "vision_feature_layer": -2,
        "multimodal_projector_bias": True,
    },
    "qwen2_audio": {"audio_token_index": 151646},
}
"""By model type, what transformers' classes of models of several networks, and of their parts, assume."""
