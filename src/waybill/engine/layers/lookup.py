"""Codes to values by table lookup. N outputs, K inputs, B bytes of codes a row, R × C blocks of scales."""

from __future__ import annotations

import functools

import torch

from waybill.weights.codebook import CODE_BITS, CodebookLayout
from waybill.weights.dequantize import table_of


def looked_up(
    codes_NB: torch.Tensor, scales_RC: torch.Tensor, layout: CodebookLayout, rows_N: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """table[code] times, or divided by, its scale, as [N, K]: one float32 product, rounded once to another dtype.

    `rows_N` are the rows' numbers in their matrix: the scales of row n lie in row `n // layout.rows` of all scales.
    """
    values_NK = _values(codes_NB, layout.table)
    scales_NC = _floats(scales_RC)[rows_N // layout.rows]
    blocks = values_NK.shape[1] // layout.columns
    whole, rest = values_NK[:, : blocks * layout.columns], values_NK[:, blocks * layout.columns :]
    for values, scales in (
        (whole.view(len(whole), blocks, layout.columns), scales_NC[:, :blocks, None]),
        (rest, scales_NC[:, blocks:]),
    ):
        values.div_(scales) if layout.divides else values.mul_(scales)
    return values_NK.to(dtype)


def _floats(scales_RC: torch.Tensor) -> torch.Tensor:
    """Scales in float32; a byte is an exponent of two."""
    if scales_RC.dtype != torch.uint8:
        return scales_RC.float()
    return _by_code("E8M0", scales_RC.device).index_select(0, scales_RC.flatten().int()).view(scales_RC.shape)


def _values(codes_NB: torch.Tensor, name: str) -> torch.Tensor:
    """float32 [N, K]. Two codes are looked up at once where they lie so: their values move as one element of 64 bits,
    which takes little more time than a single one."""
    octets = codes_NB.flatten()
    if CODE_BITS[name] == 4:
        values = _pairs(name, octets.device).index_select(0, octets.int())
    elif octets.numel() % 2 == 0 and octets.storage_offset() % 2 == 0:
        values = _pairs(name, octets.device).index_select(0, octets.view(torch.uint16).int())
    else:
        values = _by_code(name, octets.device).index_select(0, octets.int())
    return values.view(torch.float32).view(codes_NB.shape[0], -1)


@functools.cache
def _by_code(name: str, device: torch.device) -> torch.Tensor:
    """float32: what each code means."""
    return torch.from_numpy(table_of(name)).to(device)


@functools.cache
def _pairs(name: str, device: torch.device) -> torch.Tensor:
    """What two codes side by side mean: two float32 in a float64 that is never computed with; 512 KiB for bytes."""
    table = _by_code(name, device)
    both = torch.arange(len(table) ** 2, device=device)
    return torch.stack((table[both % len(table)], table[both // len(table)]), dim=-1).view(torch.float64).flatten()
