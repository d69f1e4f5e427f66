"""config.json, read tolerantly where producers differ and strictly where a guess would be wrong."""

from waybill.config.model import ModelConfig, read_model_config
from waybill.config.rope import RotaryConfig

__all__ = ["ModelConfig", "RotaryConfig", "read_model_config"]
