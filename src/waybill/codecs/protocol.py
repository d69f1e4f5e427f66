"""What a codec is: which sidecars belong together, what headers must say, and producer layout to canonical layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from waybill.checkpoint import TensorHeader
from waybill.config.quantization import QuantizationConfig
from waybill.errors import WaybillError
from waybill.weights.record import PackedStorage

Sidecars = Mapping[str, TensorHeader]
"""The stored tensors of one packed weight, by role: the end of its name, or `weight` for the name itself."""


class QuantizationCodec(Protocol):
    """One producer format. Judges headers, then describes a lazy normalization: a rank decodes what it narrows to."""

    @property
    def roles(self) -> frozenset[str]:
        """The roles it knows; a sidecar of another is a part of something else."""

    def check(self, name: str, sidecars: Sidecars, config: QuantizationConfig) -> Sequence[WaybillError]:
        """Everything the headers of one weight break; empty when `normalize` may be called."""

    def normalize(self, name: str, sidecars: Sidecars, config: QuantizationConfig) -> PackedStorage:
        """The canonical form, lazily."""
