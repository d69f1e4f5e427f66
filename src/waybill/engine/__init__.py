"""The PyTorch target: a small decoder engine with tensor parallelism. Names resolve lazily; planning needs no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from waybill.config import ModelConfig, RotaryConfig
    from waybill.engine.context import Batch, Context, get_global_ctx
    from waybill.engine.distributed import get_tp_info, join_group, set_tp_info
    from waybill.engine.layers.rotary import set_rope_device
    from waybill.engine.load import cached_load_hf_config, download_hf_weight, load_weight, torch_dtype
    from waybill.engine.models.register import create_model

_HOMES = {
    "ModelConfig": "waybill.config",
    "RotaryConfig": "waybill.config",
    "Batch": "waybill.engine.context",
    "Context": "waybill.engine.context",
    "get_global_ctx": "waybill.engine.context",
    "get_tp_info": "waybill.engine.distributed",
    "join_group": "waybill.engine.distributed",
    "set_tp_info": "waybill.engine.distributed",
    "set_rope_device": "waybill.engine.layers.rotary",
    "cached_load_hf_config": "waybill.engine.load",
    "download_hf_weight": "waybill.engine.load",
    "load_weight": "waybill.engine.load",
    "torch_dtype": "waybill.engine.load",
    "create_model": "waybill.engine.models.register",
}

__all__ = [
    "Batch",
    "Context",
    "ModelConfig",
    "RotaryConfig",
    "cached_load_hf_config",
    "create_model",
    "download_hf_weight",
    "get_global_ctx",
    "get_tp_info",
    "join_group",
    "load_weight",
    "set_rope_device",
    "set_tp_info",
    "torch_dtype",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
