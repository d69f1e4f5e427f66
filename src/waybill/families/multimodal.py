"""A language model that is also given pictures or sound: what such families have in common.

Three components: an encoder that turns the input into features, an embedding that puts them among those of the tokens,
and a decoder that is given embeddings. The hub's files and those of current transformers spell the roots differently.
"""

from __future__ import annotations

from collections.abc import Mapping

from waybill.config import ModelConfig
from waybill.families.decoder import (
    decoder_exclusions,
    decoder_merges,
    decoder_module_kind,
    decoder_parameters,
    decoder_rules,
)
from waybill.manifest.naming import Spelling
from waybill.plan.parameter import Merges, Packing, ParameterSpec
from waybill.rules import Drop, DropUnder, Move, RuleTable

ROOT = "model.language_model"
PROJECTOR = "model.multi_modal_projector"
EMBEDDING = f"{ROOT}.embed_tokens.weight"
SOURCES = {"embedding": (f"{ROOT}.embed_tokens",), "decoder": (ROOT,)}
ALIASES = {"decoder": {"lm_head": "lm_head"}}
HUB, TRANSFORMERS_5, TRANSFORMERS_4 = "the hub", "transformers 5", "modules of transformers 4"
"""Whose names differ. Files of the hub keep those of the classes that first wrote them."""
EVERY_FILE = f"{HUB}, {TRANSFORMERS_5}"
EXCLUSIONS = {"decoder": decoder_exclusions(ROOT)}
SPELLINGS = (
    Spelling("language_model.model", ROOT, EVERY_FILE),
    Spelling("language_model.lm_head", "lm_head", EVERY_FILE),
    Spelling("multi_modal_projector", PROJECTOR, EVERY_FILE),
)
MERGES = RuleTable(decoder_merges(ROOT))


def multimodal_module_kind(module: str) -> str:
    """Which modules are tables: a language model's, or learned positions."""
    if module.endswith(("position_embedding", "embed_positions")):
        return "positions"
    return decoder_module_kind(module)


def language_rules(text: ModelConfig) -> list[Move | Drop | DropUnder]:
    """What of the language model's stored weights is taken apart, and what is not needed."""
    return decoder_rules(text, ROOT)


def language_parameters(text: ModelConfig, packings: Mapping[str, Packing], merges: Merges) -> list[ParameterSpec]:
    """Every parameter of the language model; its table is the embedding's, and a tied head's."""
    return decoder_parameters(text, packings, merges, ROOT)
