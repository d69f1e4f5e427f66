"""Typed weights: what one logical weight is stored as. A weight moves whole, so rules map records, not tensors."""

from __future__ import annotations

from dataclasses import dataclass

from waybill.weights.lazy import LazyTensor


@dataclass(frozen=True, slots=True)
class FloatWeight:
    """A weight stored as the numbers themselves."""

    value: LazyTensor


@dataclass(frozen=True, slots=True)
class WeightRecord:
    """One logical weight: the name it is stored under, the component that owns it, and its storage."""

    source_name: str
    component: str
    storage: FloatWeight
