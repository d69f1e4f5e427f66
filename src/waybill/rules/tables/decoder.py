"""Llama, Qwen2, Qwen3 and Qwen3-MoE: what is on disk, in the family's Hugging Face module names.

These four already store one tensor per projection under the names quantizers speak, so most rows are silent identities.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from waybill.config import ModelConfig
from waybill.manifest import ComponentManifest, Task, resolve_components
from waybill.rules.table import Drop, DropUnder, Move, RuleTable

_LAYER = "model.layers.{i}"
_RECOMPUTED = "recomputed from the config"


TEXT_GENERATION = Task(name="text-generation", components={"decoder": ""}, roles={"decoder": "decoder"})
"""One component, which is the whole model."""
_SOURCES = {"decoder": ("",)}


def decoder_components(hf_config: Mapping[str, Any]) -> ComponentManifest:
    """A text model is a package of one component, which owns every weight."""
    return resolve_components(TEXT_GENERATION, _SOURCES, hf_config=hf_config)


def decoder_module_kind(module: str) -> str:
    """Which modules are tables or banks: quantizers have switches of their own for them."""
    if module == "lm_head":
        return "head"
    if module.endswith("embed_tokens"):
        return "embedding"
    return "experts" if module.endswith((".experts.gate_up_proj", ".experts.down_proj")) else "linear"


def decoder_source_rules(config: ModelConfig) -> RuleTable:
    """Disk names to Hugging Face module names, for one checkpoint of this family."""
    after = range(config.num_layers, config.num_layers + config.extra_layers)
    return RuleTable(
        (
            # transformers 5 can write a layer's experts as banks: [E, 2I, H] with the gate rows first, and [E, H, I].
            Move(f"{_LAYER}.mlp.experts.gate_up_proj", _LAYER + ".mlp.experts.{e}.{gate|up}_proj.weight"),
            Move(f"{_LAYER}.mlp.experts.down_proj", _LAYER + ".mlp.experts.{e}.down_proj.weight"),
            Drop(f"{_LAYER}.self_attn.rotary_emb.inv_freq", _RECOMPUTED),
            Drop("model.rotary_emb.inv_freq", _RECOMPUTED),
            Drop(f"{_LAYER}.self_attn.masked_bias", "a mask constant of old exports"),
            DropUnder("mtp", "multi-token prediction, not part of the decoder"),
            *(DropUnder(f"model.layers.{n}", "multi-token prediction, not part of the decoder") for n in after),
        )
    )
