"""genai_config.json: what ONNX Runtime's generation library must know of a package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from waybill.config import ModelConfig
from waybill.text.tokenizer import stop_tokens

SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty")
"""Fields of generation_config.json that mean the same there."""


def genai_config(
    config: ModelConfig, hf_config: Mapping[str, Any], generation: Mapping[str, Any], file: str, ep: str
) -> dict[str, Any]:
    """The smallest file the library accepts, and what runtimes otherwise would have to guess.

    Token ids come from generation_config.json first. Several stop tokens stay a list; pad is one.
    """
    stops = sorted(stop_tokens(generation, hf_config))
    context = config.rotary_config.max_position
    begin = _first_id(generation.get("bos_token_id"), hf_config.get("bos_token_id"))
    pad = _first_id(generation.get("pad_token_id"), hf_config.get("pad_token_id"), *stops)
    ids: dict[str, Any] = {"bos_token_id": begin, "eos_token_id": stops[0] if len(stops) == 1 else stops or None}
    ids["pad_token_id"] = pad if pad is not None else 0
    providers: list[dict[str, Any]] = [] if ep == "cpu" else [{ep: {}}]
    return {
        "model": {
            "type": "decoder",
            "vocab_size": config.vocab_size,
            "context_length": context,
            **{name: value for name, value in ids.items() if value is not None},
            "decoder": {
                "filename": file,
                "hidden_size": config.hidden_size,
                "head_size": config.head_dim,
                "num_attention_heads": config.num_qo_heads,
                "num_key_value_heads": config.num_kv_heads,
                "num_hidden_layers": config.num_layers,
                "session_options": {"provider_options": providers},
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {
            "max_length": context,
            "past_present_share_buffer": True,
            **{name: generation[name] for name in SAMPLING if generation.get(name) is not None},
        },
    }


def _first_id(*stated: Any) -> int | None:
    """The first that is a token id; of a list, its first."""
    for value in stated:
        first = value[0] if isinstance(value, list) and value else value
        if type(first) is int and first >= 0:
            return first
    return None
