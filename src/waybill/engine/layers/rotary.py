"""Rotary position embedding, in the half-split form of Hugging Face weights: pairs are (x[d], x[d + D/2])."""

from __future__ import annotations

import torch

from waybill.config import RotaryConfig

_device = torch.device("cpu")


def set_rope_device(device: torch.device) -> None:
    """Where rotary tables live. They are computed, not loaded, so a model built on the meta device needs real ones."""
    global _device  # noqa: PLW0603 - set once, before models are created
    _device = device


class Rotary:
    """Angles for positions. Not a BaseOP: it has nothing to load."""

    def __init__(self, config: RotaryConfig) -> None:
        frequencies, self._factor = config.frequencies()
        self._frequencies_F = torch.tensor(frequencies, dtype=torch.float32, device=_device)

    def angles(self, positions_T: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, `[T, 1, D/2]`: computed in float32, once a forward pass for all layers."""
        angles_TF = positions_T.to(torch.float32)[:, None, None] * self._frequencies_F
        return (angles_TF.cos() * self._factor).to(dtype), (angles_TF.sin() * self._factor).to(dtype)


def rotate(x_THD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn every head of every token by its position's angles."""
    a, b = x_THD.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
