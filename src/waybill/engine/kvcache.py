"""Keys and values of every layer, for a fixed set of requests."""

from __future__ import annotations

import torch

from waybill.config import ModelConfig


class KVCache:
    """`keys[layer]` and `values[layer]` are `[B, KV, L, D]`: requests, this rank's KV heads, positions, head_dim."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        requests: int,
        length: int,
        tp_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        heads = max(config.num_kv_heads // tp_size, 1)
        shape = (requests, heads, length, config.head_dim)
        # Zeros, not empty: a shorter request's unused positions are masked, and masking does not silence NaN.
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
