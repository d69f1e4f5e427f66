"""Logical weights: lazy tensors over stored byte ranges, and the typed records that carry them."""

from waybill.weights.lazy import LazyTensor, Tile, concat, stack, stored
from waybill.weights.record import FloatWeight, Storage, WeightBundle, WeightRecord

__all__ = ["FloatWeight", "LazyTensor", "Storage", "Tile", "WeightBundle", "WeightRecord", "concat", "stack", "stored"]
