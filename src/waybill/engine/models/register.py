"""Which class runs which architecture."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from waybill.config import ModelConfig
from waybill.config.architectures import ARCHITECTURES
from waybill.engine.distributed import get_tp_info
from waybill.engine.models.decoder import CausalLM
from waybill.errors import UnsupportedArchitecture
from waybill.plan.parameter import Packing

MODELS: dict[str, type[CausalLM]] = dict.fromkeys(ARCHITECTURES, CausalLM)
"""All supported architectures are one decoder; a family that is not gets a class of its own here."""


def create_model(config: ModelConfig, packings: Mapping[str, Packing] = MappingProxyType({})) -> CausalLM:
    """An empty model of this rank's shapes, in the current default dtype and device (use the meta device).

    `packings` (a plan's) says which weights are packed and how; without it all are float.

    Raises:
        UnsupportedArchitecture: no class runs `config.architectures[0]`.
    """
    name = config.architectures[0]
    if name not in MODELS:
        raise UnsupportedArchitecture(
            "no engine class runs this architecture",
            where="architectures",
            expected=" | ".join(MODELS),
            found=name,
            fix="use a checkpoint of a supported architecture",
        )
    return MODELS[name](config, get_tp_info(), packings)
