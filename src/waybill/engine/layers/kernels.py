"""PyTorch's own products with packed weights, where they fit: bfloat16 on the CPU.

N outputs, K inputs, G groups, B bytes a group, T tokens. A kernel holds the weight in a form of its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

BLOCK_ELEMENTS = 1 << 20
"""Elements unpacked at a time: a few megabytes, inside the outer cache."""
INT4_GROUPS = (32, 64, 128, 256)
"""Group sizes of the 4-bit kernel."""
INT4_ROWS = 64
"""Rows in the 4-bit kernel's widest block; narrower ones divide it."""


class Affine(NamedTuple):
    """The tensors of a packed matrix: codes U8 [N, G, B] of so many bits, scales [N, G], and U8 zero points or float
    minimums [N, G] where it has them."""

    bits: int
    codes: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor | None
    minimums: torch.Tensor | None

    def at(self, index: Any) -> Affine:
        """Some of its rows, or one matrix of a bank."""
        zeros, minimums = (None if part is None else part[index] for part in (self.zero_points, self.minimums))
        return Affine(self.bits, self.codes[index], self.scales[index], zeros, minimums)

    @property
    def zeros(self) -> torch.Tensor | float:
        """The codes that mean zero, float32 [N, G, 1], or the midpoint."""
        return float(1 << (self.bits - 1)) if self.zero_points is None else self.zero_points[..., None].float()

    def offsets(self, centre: int, scales_NG: torch.Tensor) -> torch.Tensor | None:
        """What the code `centre` means under these scales, which may have been rounded, float32 [N, G]; None: zero."""
        if self.minimums is not None:
            return centre * scales_NG.float() + self.minimums.float()
        if self.zero_points is None:
            shift = centre - (1 << (self.bits - 1))
            return shift * scales_NG.float() if shift else None
        return (centre - self.zero_points.float()) * scales_NG.float()


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
    """Codes less their centre, int8 [G, N, group]; scales bfloat16 [G, N]; what the centre means, float32 [G, N]."""

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


def make_kernel(parts: Affine, group: int, in_features: int, dtype: torch.dtype) -> Kernel | None:
    """The kernel form of a matrix, or None where no kernel fits."""
    codes_NGB = parts.codes
    whole = in_features == codes_NGB.shape[1] * group
    if dtype != torch.bfloat16 or codes_NGB.device.type != "cpu" or not whole:
        return None
    scales_NG = parts.scales.to(torch.bfloat16)
    if parts.bits == 8:
        most = int(codes_NGB.max())
        centre = 128 if most > 127 else (most + 1) // 2  # of 5 and 6 bits: far from 128 their sums would be rounded
        weight = (codes_NGB - centre).view(torch.int8).transpose(0, 1).contiguous()
        offsets = parts.offsets(centre, scales_NG)
        return Int8Kernel(weight, scales_NG.T.contiguous(), None if offsets is None else offsets.T.contiguous())
    if parts.bits != 4 or group not in INT4_GROUPS or codes_NGB.shape[0] % 16:
        return None
    offsets = parts.offsets(8, scales_NG)
    pair = torch.stack((scales_NG, torch.zeros_like(scales_NG) if offsets is None else offsets.to(torch.bfloat16)), -1)
    return Int4Kernel(_int4_form(codes_NGB), pair.transpose(0, 1).contiguous(), group)


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
