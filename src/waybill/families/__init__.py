"""One file an architecture family: its config, its names, its components and its parameters. Data, hardly any code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from waybill.config.architectures import FAMILY_OF, GGUF_ARCHITECTURE
from waybill.families.decoder import DECODER
from waybill.families.llava import LLAVA
from waybill.families.qwen2_audio import QWEN2_AUDIO
from waybill.families.t5 import T5
from waybill.families.whisper import WHISPER
from waybill.plan.family import Family

__all__ = ["FAMILIES", "family_of"]

FAMILIES = {family.name: family for family in (DECODER, T5, LLAVA, WHISPER, QWEN2_AUDIO)}


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """The family of the architecture a config.json names, by itself or by its model type.

    An architecture nobody knows is the decoder family's to refuse, and of GGUF files it is the only one.
    """
    if GGUF_ARCHITECTURE in hf_config:
        return DECODER
    names = hf_config.get("architectures")
    name = names[0] if isinstance(names, list) and names else hf_config.get("model_type")
    return FAMILIES[FAMILY_OF.get(str(name), "decoder")]
