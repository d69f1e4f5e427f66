"""PyTorch's own products with packed weights, where they fit: bfloat16 on the CPU.

N outputs, K inputs, G groups, B bytes a group, T tokens. A kernel holds the weight in a form of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from waybill.plan.parameter import AffinePacking

BLOCK_ELEMENTS = 1 << 20
"""Elements unpacked at a time: a few megabytes, inside the outer cache."""
INT4_GROUPS = (32, 64, 128, 256)
"""Group sizes of the 4-bit kernel."""
INT4_ROWS = 64
"""Rows in the 4-bit kernel's widest block; narrower ones divide it."""


class Int4Kernel(NamedTuple):
    """4-bit codes in blocks of rows; scales and offsets bfloat16 [G, N, 2]: (code - 8) · scale + offset."""

    weight: torch.Tensor
    scales_and_offsets: torch.Tensor
    group: int

    def product(self, x_TK: torch.Tensor) -> torch.Tensor:
        """x Wᵀ."""
        out: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x_TK, self.weight, self.group, self.scales_and_offsets
        )
        return out


class Int8Kernel(NamedTuple):
    """8-bit codes less 128, int8 [G, N, group]; scales bfloat16 [G, N]; what other zero points add, float32 [G, N]."""

    weight: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None

    def product(self, x_TK: torch.Tensor) -> torch.Tensor:
        """x Wᵀ: the kernel knows one scale a row, so each group is a product of its own, summed in float32."""
        parts = x_TK.view(x_TK.shape[0], len(self.weight), -1).transpose(0, 1).contiguous()
        out = torch.zeros(x_TK.shape[0], self.weight.shape[1], dtype=torch.float32)
        for part, weight, scales in zip(parts, self.weight, self.scales, strict=True):
            out += torch.ops.aten._weight_int8pack_mm(part, weight, scales)
        if self.offsets is not None:
            out += parts.float().sum(dim=-1).T @ self.offsets
        return out.to(x_TK.dtype)


Kernel = Int4Kernel | Int8Kernel


def make_kernel(
    codes_NGB: torch.Tensor,
    scales_NG: torch.Tensor,
    zeros_NG: torch.Tensor | None,
    packing: AffinePacking,
    in_features: int,
    dtype: torch.dtype,
) -> Kernel | None:
    """The kernel form of a matrix, or None where no kernel fits."""
    whole = in_features == codes_NGB.shape[1] * packing.group
    if dtype != torch.bfloat16 or codes_NGB.device.type != "cpu" or not whole:
        return None
    midpoint = 1 << (packing.bits - 1)
    offsets = None if zeros_NG is None else (midpoint - zeros_NG.float()) * scales_NG.float()
    if packing.bits == 8:
        weight = (codes_NGB ^ 128).view(torch.int8).transpose(0, 1).contiguous()
        scales = scales_NG.T.to(torch.bfloat16).contiguous()
        return Int8Kernel(weight, scales, None if offsets is None else offsets.T.contiguous())
    if packing.bits != 4 or packing.group not in INT4_GROUPS or codes_NGB.shape[0] % 16:
        return None
    pair = torch.stack((scales_NG.float(), torch.zeros_like(scales_NG.float()) if offsets is None else offsets), dim=-1)
    return Int4Kernel(_int4_form(codes_NGB), pair.to(torch.bfloat16).transpose(0, 1).contiguous(), packing.group)


def _int4_form(codes_NGB: torch.Tensor) -> torch.Tensor:
    """Codes as the 4-bit kernel wants them, U8 [N, K/2]; rows are rearranged within its blocks only.

    Unpacked to int32 a few blocks at a time: what lies between is small, and the holes it leaves in the heap too.
    """
    out = codes_NGB.new_empty(codes_NGB.shape[0], codes_NGB.shape[1] * codes_NGB.shape[2])
    rows = max(BLOCK_ELEMENTS // (2 * out.shape[1]) // INT4_ROWS, 1) * INT4_ROWS
    for start in range(0, out.shape[0], rows):
        block = slice(start, start + rows)
        wide = fields(codes_NGB[block], 4).flatten(1).to(torch.int32)
        out[block] = torch.ops.aten._convert_weight_to_int4pack_for_cpu(wide, 1)
    return out


def fields(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """U8 [..., B] to U8 [..., B·8/bits], the first field in the low bits."""
    if bits == 8:
        return codes
    mask = (1 << bits) - 1
    parts = [(codes >> shift) & mask for shift in range(0, 8, bits)]
    return torch.stack(parts, dim=-1).flatten(-2)
