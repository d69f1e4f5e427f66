"""Decoders as GGUF files store them: names, and the order of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from waybill.config.architectures import GGUF_ARCHITECTURE
from waybill.plan.family import Dialect

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_BANKS = {
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
"""Experts of one projection in one tensor [E, N, K]; a bank has no leaf."""
_PAIRED = (".q_proj.weight", ".k_proj.weight", ".q_proj.bias", ".k_proj.bias")


def runtime_name(stored: str) -> str:
    """`blk.0.attn_q.weight` -> `model.layers.0.self_attn.q_proj.weight`; a name that is not known stays."""
    segments = stored.split(".")
    if segments[0] in _OUTER:
        return ".".join([_OUTER[segments[0]], *segments[1:]])
    if segments[0] != "blk" or len(segments) < 3:
        return stored
    layer, module, *leaf = segments[1:]
    if module in _BANKS and leaf in ([], ["weight"]):
        return f"model.layers.{layer}.{_BANKS[module]}"
    return ".".join(["model.layers", layer, _INNER[module], *leaf]) if module in _INNER else stored


def _paired(hf_config: Mapping[str, Any], name: str) -> bool:
    """Llama's converter lays the two rows of a rotary pair side by side; others keep them half a head apart."""
    return hf_config.get(GGUF_ARCHITECTURE) == "llama" and name.endswith(_PAIRED)


DIALECT = Dialect(runtime=runtime_name, paired=_paired)
