"""What a forward pass reads: the batch, and the cache it extends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from waybill.engine.kvcache import KVCache


@dataclass(slots=True)
class Batch:
    """New tokens of one or more requests, laid end to end.

    input_ids: int64 `[T]`, T = sum(lengths). lengths: new tokens of each request. cached: tokens of each request that
    the KV cache already holds.
    """

    input_ids: torch.Tensor
    lengths: tuple[int, ...]
    cached: tuple[int, ...] = ()
    positions: torch.Tensor = field(init=False)
    ends: torch.Tensor = field(init=False)
    _mask: torch.Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.cached = self.cached or (0,) * len(self.lengths)
        device = self.input_ids.device
        ranges = [torch.arange(c, c + n) for n, c in zip(self.lengths, self.cached, strict=True)]
        self.positions = torch.cat(ranges).to(device)
        self.ends = (torch.tensor(self.lengths).cumsum(0) - 1).to(device)

    def decode_mask(self, length: int) -> torch.Tensor | None:
        """`[B, 1, 1, length]`, true where a request has a token; None when all requests are equally long."""
        if min(self.cached) == max(self.cached):
            return None
        if self._mask is None:
            self._mask = torch.arange(length, device=self.positions.device) <= self.positions[:, None, None, None]
        return self._mask

    @property
    def is_decode(self) -> bool:
        """Whether every request adds exactly one token to what it has."""
        return all(n == 1 for n in self.lengths) and all(c > 0 for c in self.cached)


class Context:
    """The one place a model's forward pass reads its input from."""

    def __init__(self) -> None:
        self._batch: Batch | None = None
        self.kv_cache: KVCache | None = None

    @property
    def batch(self) -> Batch:
        """The current batch; RuntimeError when none is set."""
        if self._batch is None:
            raise RuntimeError("no batch is set; use `with get_global_ctx().forward_batch(batch):`")
        return self._batch

    @contextmanager
    def forward_batch(self, batch: Batch, kv_cache: KVCache | None = None) -> Iterator[None]:
        """Make `batch` the current one; without a cache, requests attend to their own new tokens only."""
        before = self._batch, self.kv_cache
        self._batch, self.kv_cache = batch, kv_cache
        try:
            yield
        finally:
            self._batch, self.kv_cache = before


_context = Context()


def get_global_ctx() -> Context:
    """The process's context."""
    return _context
