"""Matrices as layers use them: multiplied by, and looked up in. Float, or packed and kept packed.

N outputs, K inputs, G groups, B bytes a group, T tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from waybill.engine.layers.base import BaseOP, Parameters
from waybill.plan.parameter import Packing, part_name

BLOCK_ELEMENTS = 1 << 20
"""Elements unpacked at a time: a few megabytes, inside the outer cache."""
KERNEL_GROUPS = (32, 64, 128, 256)
"""Group sizes of PyTorch's 4-bit CPU kernel."""
KERNEL_ROWS = 64
"""Rows in the kernel's widest block; narrower ones divide it."""


FEW_ROWS = 16
"""Rows of input up to which a product is bound by reading the weight."""
_ONEDNN = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def linear(x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """x Wᵀ + b. For a few float32 rows on a CPU, oneDNN reads the weight almost twice as fast as the default BLAS."""
    if _ONEDNN and x_TK.shape[0] <= FEW_ROWS and x_TK.dtype == torch.float32 and x_TK.device.type == "cpu":
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x_TK, weight_NK, bias_N, "none", [], "")
        return out
    return F.linear(x_TK, weight_NK, bias_N)


class Matrix(BaseOP):
    """A weight [N, K] under its owner's path: its tensors appear as the owner's."""

    def product(self, x_TK: torch.Tensor) -> torch.Tensor:
        """x Wᵀ, [T, K] -> [T, N]."""
        raise NotImplementedError

    def rows(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Rows of W, [T] -> [T, K]."""
        raise NotImplementedError


class FloatMatrix(Matrix):
    """W as it is."""

    def __init__(self, parameters: Parameters, name: str) -> None:
        self.weight = parameters.empty(name)

    def product(self, x_TK: torch.Tensor) -> torch.Tensor:
        """One dense product."""
        return linear(x_TK, self.weight)

    def rows(self, ids_T: torch.Tensor) -> torch.Tensor:
        """A gather."""
        return F.embedding(ids_T, self.weight)


class PackedMatrix(Matrix):
    """W as codes U8 [N, G, B], scales [N, G] and perhaps zero_points U8 [N, G]; never resident as floats.

    Where PyTorch's 4-bit kernel fits (bfloat16 on the CPU), `prepare` rearranges the weight for it once; elsewhere
    blocks of rows are unpacked, multiplied and forgotten.
    """

    def __init__(self, parameters: Parameters, name: str, packing: Packing) -> None:
        self.codes = parameters.empty(part_name(name, "codes"))
        self.scales = parameters.empty(part_name(name, "scales"))
        if packing.zero_points:
            self.zero_points = parameters.empty(part_name(name, "zero_points"))
        self._packing = packing
        self._in_features = parameters.in_features(name)
        self._dtype = torch.get_default_dtype()
        self._kernel: tuple[torch.Tensor, torch.Tensor] | None = None

    def product(self, x_TK: torch.Tensor) -> torch.Tensor:
        """By the kernel if prepared, else block by block."""
        if self._kernel is not None:
            weight, scales_and_zeros = self._kernel
            group = self._packing.group
            out: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x_TK, weight, group, scales_and_zeros)
            return out
        return blockwise(x_TK, self.codes, self.scales, getattr(self, "zero_points", None), self._packing.bits)

    def rows(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Only the rows asked for are unpacked."""
        zeros = self.zero_points[ids_T] if self._packing.zero_points else None
        rows = unpacked(self.codes[ids_T], self.scales[ids_T], zeros, self._packing.bits, self._dtype)
        return rows[:, : self._in_features]

    def expert(self, index: int, x_TK: torch.Tensor) -> torch.Tensor:
        """The product with one matrix of a bank [E, N, K]."""
        zeros = self.zero_points[index] if self._packing.zero_points else None
        return blockwise(x_TK, self.codes[index], self.scales[index], zeros, self._packing.bits)

    def prepare(self) -> None:
        """Rearrange for the kernel where it fits; the canonical tensors are given up, so nothing is held twice."""
        packing = self._packing
        fits = (
            packing.bits == 4
            and packing.group in KERNEL_GROUPS
            and self._dtype == torch.bfloat16
            and self.codes.device.type == "cpu"
            and self.codes.dim() == 3
            and self.codes.shape[0] % 16 == 0
            and self._in_features == self.codes.shape[1] * packing.group
        )
        if not fits:
            return
        weight = _kernel_form(self.codes)
        scales = self.scales.float()
        zeros = self.zero_points.float() if packing.zero_points else torch.full_like(scales, 8.0)
        # The kernel computes (code - 8) · scale + offset.
        offsets = (8.0 - zeros) * scales
        pair = torch.stack((scales, offsets), dim=-1).to(torch.bfloat16).transpose(0, 1).contiguous()
        self._kernel = weight, pair
        del self.codes, self.scales
        if packing.zero_points:
            del self.zero_points


def _kernel_form(codes_NGB: torch.Tensor) -> torch.Tensor:
    """Codes as PyTorch's kernel wants them, U8 [N, K/2]; rows are rearranged within the kernel's blocks only.

    Unpacked to int32 a few blocks at a time: what lies between is small, and the holes it leaves in the heap too.
    """
    out = codes_NGB.new_empty(codes_NGB.shape[0], codes_NGB.shape[1] * codes_NGB.shape[2])
    rows = max(BLOCK_ELEMENTS // (2 * out.shape[1]) // KERNEL_ROWS, 1) * KERNEL_ROWS
    for start in range(0, out.shape[0], rows):
        block = slice(start, start + rows)
        fields = _fields(codes_NGB[block], 4).flatten(1).to(torch.int32)
        out[block] = torch.ops.aten._convert_weight_to_int4pack_for_cpu(fields, 1)
    return out


def blockwise(
    x_TK: torch.Tensor,
    codes_NGB: torch.Tensor,
    scales_NG: torch.Tensor,
    zeros_NG: torch.Tensor | None,
    bits: int,
) -> torch.Tensor:
    """x Wᵀ with blocks of W's rows unpacked one after another."""
    in_features = x_TK.shape[-1]
    rows = max(BLOCK_ELEMENTS // max(in_features, 1), 1)
    out = []
    for start in range(0, codes_NGB.shape[0], rows):
        block = slice(start, start + rows)
        zeros = None if zeros_NG is None else zeros_NG[block]
        weight = unpacked(codes_NGB[block], scales_NG[block], zeros, bits, x_TK.dtype)
        out.append(F.linear(x_TK, weight[:, :in_features]))
    return out[0] if len(out) == 1 else torch.cat(out, dim=-1)


def unpacked(
    codes_NGB: torch.Tensor,
    scales_NG: torch.Tensor,
    zeros_NG: torch.Tensor | None,
    bits: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """(code - zero) · scale as [N, G·group]: exact in float32, rounded once to another dtype."""
    fields = _fields(codes_NGB, bits).float()
    zeros = float(1 << (bits - 1)) if zeros_NG is None else zeros_NG[..., None].float()
    return ((fields - zeros) * scales_NG[..., None].float()).flatten(-2).to(dtype)


def _fields(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """U8 [..., B] to U8 [..., B·8/bits], the first field in the low bits."""
    if bits == 8:
        return codes
    mask = (1 << bits) - 1
    fields = [(codes >> shift) & mask for shift in range(0, 8, bits)]
    return torch.stack(fields, dim=-1).flatten(-2)


def make_matrix(parameters: Parameters, name: str) -> FloatMatrix | PackedMatrix:
    """The class a weight's plan asks for, before any tensor of it exists."""
    packing = parameters.packing(name)
    return FloatMatrix(parameters, name) if packing is None else PackedMatrix(parameters, name, packing)
