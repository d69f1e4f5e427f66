"""Codes to values by table lookup. N outputs, K inputs, B bytes of codes a row, R × C blocks of scales."""

from __future__ import annotations

import functools

import torch

from waybill.weights.codebook import CodebookLayout
from waybill.weights.dequantize import table_of


def looked_up(
    codes_NB: torch.Tensor, scales_RC: torch.Tensor, layout: CodebookLayout, rows_N: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """table[code] times, or divided by, its scale, as [N, K]: one float32 product, rounded once to another dtype.

    `rows_N` are the rows' numbers in their matrix: the scales of row n lie in row `n // layout.rows` of all scales.
    """
    values_NK = _values(codes_NB, layout.table)
    scales_NC = _floats(scales_RC)[rows_N // layout.rows]
    scales_NK = scales_NC.repeat_interleave(layout.columns, dim=1)[:, : values_NK.shape[1]]
    return (values_NK / scales_NK if layout.divides else values_NK * scales_NK).to(dtype)


def _floats(scales_RC: torch.Tensor) -> torch.Tensor:
    """Scales in float32; a byte is an exponent of two."""
    if scales_RC.dtype != torch.uint8:
        return scales_RC.float()
    return _by_byte("E8M0", scales_RC.device).index_select(0, scales_RC.flatten().int()).view(scales_RC.shape)


def _values(codes_NB: torch.Tensor, name: str) -> torch.Tensor:
    """float32 [N, K]. A byte of two codes is looked up once: its pair of values moves as one element of 64 bits."""
    values = _by_byte(name, codes_NB.device).index_select(0, codes_NB.flatten().int())
    return values.view(torch.float32).view(codes_NB.shape[0], -1)


@functools.cache
def _by_byte(name: str, device: torch.device) -> torch.Tensor:
    """What each of the 256 bytes means: a float32, or two of them in a float64 that is never computed with."""
    table = torch.from_numpy(table_of(name)).to(device)
    if len(table) == 256:
        return table
    octets = torch.arange(256, device=device)
    return torch.stack((table[octets & 15], table[octets >> 4]), dim=-1).view(torch.float64).flatten()
