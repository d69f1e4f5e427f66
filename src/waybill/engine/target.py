"""What the engine asks of a plan. No torch here: planning a load must not wait for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from waybill.config import ModelConfig
from waybill.config.composite import Config
from waybill.errors import UnsupportedArchitecture, UnsupportedFeature, WaybillError
from waybill.plan import ParameterSpec, Target


def _refusals(config: Config, _specs: Sequence[ParameterSpec], _dtype: str) -> Iterator[WaybillError]:
    if not isinstance(config, ModelConfig):
        yield UnsupportedArchitecture(
            "the engine runs decoders only",
            where=f"config.json: architectures {config.architectures[0]}",
            expected="a decoder-only language model",
            found=f"a {config.model_type} model, which is several networks",
            fix="export it with waybill export, and run the package",
        )
    elif config.hidden_size_per_layer_input:
        yield UnsupportedFeature(
            "the engine gives layers no inputs of their own",
            where="config.json: hidden_size_per_layer_input",
            expected="0, or no such field",
            found=str(config.hidden_size_per_layer_input),
            fix="export it with waybill export, and run the package",
        )


def runs(config: Config) -> bool:
    """Whether the engine has a model for a config."""
    return not list(_refusals(config, (), ""))


TORCH = Target("torch", refusals=_refusals)
"""The PyTorch engine: q, k, v and gate, up merged; experts in banks."""
