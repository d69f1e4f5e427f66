"""RMS normalisation (arXiv 1910.07467)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from waybill.engine.layers.base import BaseOP, Parameters


class RMSNorm(BaseOP):
    """x / rms(x) · weight over the last axis; the mean of squares is taken in float32."""

    def __init__(self, parameters: Parameters, path: str) -> None:
        self.weight = parameters.empty(f"{path}.weight")
        self._eps = parameters.config.rms_norm_eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape whose last axis is the weight's."""
        return F.rms_norm(x, self.weight.shape, self.weight, self._eps)
