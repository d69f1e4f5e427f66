"""Grouped-query attention with a KV cache. T tokens, B requests, H query heads, K key-value heads, G = H/K, D head_dim,
L cached positions. Head counts are this rank's."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from waybill.engine.context import Batch, get_global_ctx
from waybill.engine.kvcache import KVCache
from waybill.engine.layers.base import BaseOP, Parameters
from waybill.engine.layers.linear import RowParallelLinear, attach_merged, project
from waybill.engine.layers.norm import RMSNorm
from waybill.engine.layers.rotary import rotate
from waybill.engine.layers.sinks import Sinks


class RopeAttention(BaseOP):
    """q, k, v in one product, optional per-head norms, rotation, attention, output projection."""

    def __init__(self, parameters: Parameters, path: str, layer: int) -> None:
        config, tp = parameters.config, parameters.tp.size
        self._qkv = attach_merged(self, parameters, path, "qkv_proj", ("q_proj", "k_proj", "v_proj"))
        self.o_proj = RowParallelLinear(parameters, f"{path}.o_proj")
        if config.qk_norm:
            self.q_norm = RMSNorm(parameters, f"{path}.q_norm")
            self.k_norm = RMSNorm(parameters, f"{path}.k_norm")
        self.sinks = parameters.optional(f"{path}.sinks")
        self._window = config.window(layer)
        self._qk_norm = config.qk_norm
        self._layer = layer
        self._q_heads = config.num_qo_heads // tp
        self._kv_heads = max(config.num_kv_heads // tp, 1)
        self._head_dim = config.head_dim

    def forward(self, x_TX: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        heads = self._q_heads + self._kv_heads
        qkv = project(self._qkv, x_TX).view(-1, heads + self._kv_heads, self._head_dim)
        qk, v_TKD = qkv[:, :heads], qkv[:, heads:]
        if self._qk_norm:
            q, k = qk[:, : self._q_heads], qk[:, self._q_heads :]
            qk = torch.cat((self.q_norm.forward(q), self.k_norm.forward(k)), dim=1)
        qk = rotate(qk, *angles)
        q_THD, k_TKD = qk[:, : self._q_heads], qk[:, self._q_heads :]
        context = get_global_ctx()
        sinks = None if self.sinks is None else Sinks(self.sinks, self._window)
        out_THD = attend(q_THD, k_TKD, v_TKD, context.batch, context.kv_cache, self._layer, sinks)
        return self.o_proj.forward(out_THD.flatten(1))


def attend(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    batch: Batch,
    cache: KVCache | None,
    layer: int,
    sinks: Sinks | None = None,
) -> torch.Tensor:
    """Causal attention of every request's new tokens over its cached and new ones, `[T, H, D]`."""
    if cache is not None and batch.is_decode:
        return _decode(q_THD, k_TKD, v_TKD, batch, cache.keys[layer], cache.values[layer], sinks)
    out, at = [], 0
    for request, (length, cached) in enumerate(zip(batch.lengths, batch.cached, strict=True)):
        rows = slice(at, at + length)
        at += length
        k_KLD, v_KLD = k_TKD[rows].transpose(0, 1), v_TKD[rows].transpose(0, 1)
        if cache is not None:
            keys, values = cache.keys[layer][request], cache.values[layer][request]
            keys[:, cached : cached + length] = k_KLD
            values[:, cached : cached + length] = v_KLD
            k_KLD, v_KLD = keys[:, : cached + length], values[:, : cached + length]
        causal = _causal if sinks is None else sinks.prefill
        out.append(causal(q_THD[rows].transpose(0, 1), k_KLD, v_KLD).transpose(0, 1))
    return out[0] if len(out) == 1 else torch.cat(out)


def _causal(q_HTD: torch.Tensor, k_KLD: torch.Tensor, v_KLD: torch.Tensor) -> torch.Tensor:
    """One request: its last T of L positions are queries."""
    new, total = q_HTD.shape[1], k_KLD.shape[1]
    mask = None
    if new < total:
        mask = torch.ones(new, total, dtype=torch.bool, device=q_HTD.device).tril(total - new)
    return F.scaled_dot_product_attention(
        q_HTD[None], k_KLD[None], v_KLD[None], attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )[0]


def _decode(
    q_BHD: torch.Tensor,
    k_BKD: torch.Tensor,
    v_BKD: torch.Tensor,
    batch: Batch,
    keys_BKLD: torch.Tensor,
    values_BKLD: torch.Tensor,
    sinks: Sinks | None,
) -> torch.Tensor:
    """One new token a request. The G query heads of a KV head are its query rows: no key is repeated."""
    requests, kv_heads, _ = k_BKD.shape
    length = max(batch.cached) + 1
    mask = batch.decode_mask(length)
    if mask is None:  # every request is at the same position
        keys_BKLD[:, :, length - 1] = k_BKD
        values_BKLD[:, :, length - 1] = v_BKD
    else:
        rows = torch.arange(requests, device=q_BHD.device)
        keys_BKLD[rows, :, batch.positions] = k_BKD
        values_BKLD[rows, :, batch.positions] = v_BKD
    q_BKGD = q_BHD.reshape(requests, kv_heads, -1, q_BHD.shape[-1])
    keys_BKLD, values_BKLD = keys_BKLD[:, :, :length], values_BKLD[:, :, :length]
    if sinks is not None:
        return sinks.decode(q_BKGD, keys_BKLD, values_BKLD, batch.positions).flatten(1, 2)
    out = F.scaled_dot_product_attention(q_BKGD, keys_BKLD, values_BKLD, attn_mask=mask)
    return out.flatten(1, 2)
