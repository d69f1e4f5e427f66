"""Matrices as layers use them: multiplied by, and looked up in. Float, or packed and kept packed.

N outputs, K inputs, G groups, B bytes a group, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from waybill.engine.layers.base import BaseOP, Parameters
from waybill.engine.layers.kernels import BLOCK_ELEMENTS, Affine, Kernel, fields, make_kernel
from waybill.engine.layers.lookup import looked_up
from waybill.plan.parameter import AffinePacking, CodebookPacking, Packing, part_name

_ONEDNN = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


FEW_OUTPUTS = 960
"""Outputs below which oneDNN shares the rows of a float32 matrix among threads badly."""


def linear(x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """x Wᵀ + b. In float32 on a CPU, oneDNN is almost twice as fast as the default BLAS."""
    if _ONEDNN and x_TK.dtype == torch.float32 and x_TK.device.type == "cpu":
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

    def prepare(self) -> None:
        """Lay a matrix of few outputs out along them: oneDNN then reads it 1.2 to 1.5 times as fast for one token."""
        weight = self.weight
        if _ONEDNN and weight.dtype == torch.float32 and weight.device.type == "cpu" and len(weight) < FEW_OUTPUTS:
            self.weight = weight.t().contiguous().t()


class PackedMatrix(Matrix):
    """W as codes U8 [N, G, B], scales [N, G], and perhaps zero_points U8 or minimums [N, G]; never resident as floats.

    Where one of PyTorch's kernels fits, `prepare` rearranges the weight for it once; elsewhere blocks of rows are
    unpacked, multiplied and forgotten. A bank [E, N, K] is a matrix for each expert.
    """

    def __init__(self, parameters: Parameters, name: str, packing: AffinePacking) -> None:
        self.codes = parameters.empty(part_name(name, "codes"))
        self.scales = parameters.empty(part_name(name, "scales"))
        if packing.zero_points:
            self.zero_points = parameters.empty(part_name(name, "zero_points"))
        if packing.minimums:
            self.minimums = parameters.empty(part_name(name, "minimums"))
        self._packing = packing
        self._in_features = parameters.in_features(name)
        self._dtype = torch.get_default_dtype()
        self._kernels: list[Kernel] = []

    def product(self, x_TK: torch.Tensor) -> torch.Tensor:
        """By the kernel if prepared, else block by block."""
        if self._kernels:
            return self._kernels[0].product(x_TK)
        return self._unpacked_product(x_TK, self._parts)

    @property
    def _parts(self) -> Affine:
        zeros, minimums = (getattr(self, name, None) for name in ("zero_points", "minimums"))
        return Affine(self._packing.bits, self.codes, self.scales, zeros, minimums)

    def rows(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Only the rows asked for are unpacked."""
        return unpacked(self._parts.at(ids_T), self._dtype)[:, : self._in_features]

    def expert(self, index: int, x_TK: torch.Tensor) -> torch.Tensor:
        """The product with one matrix of a bank."""
        if self._kernels:
            return self._kernels[index].product(x_TK)
        return self._unpacked_product(x_TK, self._parts.at(index))

    def _unpacked_product(self, x_TK: torch.Tensor, parts: Affine) -> torch.Tensor:
        def made(rows: slice) -> torch.Tensor:
            return unpacked(parts.at(rows), x_TK.dtype)[:, : x_TK.shape[-1]]

        return blockwise(x_TK, len(parts.codes), made)

    def prepare(self, *, keep: bool = False) -> None:
        """Rearrange for a kernel where one fits. The canonical tensors are given up, so nothing is held twice, unless
        they are to `keep`: rows of a table that also is the head are looked up in them."""
        parts, bank = self._parts, self.codes.dim() == 4
        for own in map(parts.at, range(len(self.codes))) if bank else (parts,):
            kernel = make_kernel(own, self._packing.group, self._in_features, self._dtype)
            if kernel is None:
                return
            self._kernels.append(kernel)
        if keep:
            return
        for name in ("codes", "scales", "zero_points", "minimums"):
            vars(self).pop(name, None)


def blockwise(x_TK: torch.Tensor, outputs: int, made: Callable[[slice], torch.Tensor]) -> torch.Tensor:
    """x Wᵀ with blocks of W's rows, [n, K], made one after another."""
    rows = max(BLOCK_ELEMENTS // max(x_TK.shape[-1], 1), 1)
    blocks = (slice(start, min(start + rows, outputs)) for start in range(0, outputs, rows))
    out = [F.linear(x_TK, made(block)) for block in blocks]
    return out[0] if len(out) == 1 else torch.cat(out, dim=-1)


def unpacked(parts: Affine, dtype: torch.dtype) -> torch.Tensor:
    """(code - zero) · scale, or code · scale + minimum, as [N, G·group]: the product is exact in float32, the sum and
    another dtype are rounded to once."""
    values = fields(parts.codes, parts.bits).float()
    if parts.minimums is None:
        values -= parts.zeros
    values *= parts.scales[..., None].float()
    if parts.minimums is not None:
        values += parts.minimums[..., None].float()
    return values.flatten(-2).to(dtype)


class CodebookMatrix(Matrix):
    """W as codes U8 [N, B] and scales, or divisors, [R, C] for blocks of it; never resident as floats.

    Blocks of rows are looked up in the table, multiplied and forgotten. A bank [E, N, K] is a matrix for each expert.
    """

    def __init__(self, parameters: Parameters, name: str, packing: CodebookPacking) -> None:
        self.codes = parameters.empty(part_name(name, "codes"))
        self._layout = packing.layout
        setattr(self, packing.layout.scale_role, parameters.empty(part_name(name, packing.layout.scale_role)))
        self._dtype = torch.get_default_dtype()

    @property
    def _scales(self) -> torch.Tensor:
        scales: torch.Tensor = getattr(self, self._layout.scale_role)
        return scales

    def product(self, x_TK: torch.Tensor) -> torch.Tensor:
        """Block by block."""
        return self._product(x_TK, self.codes, self._scales)

    def rows(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Only the rows asked for are looked up in the table."""
        return looked_up(self.codes[ids_T], self._scales, self._layout, ids_T, self._dtype)

    def expert(self, index: int, x_TK: torch.Tensor) -> torch.Tensor:
        """The product with one matrix of a bank."""
        return self._product(x_TK, self.codes[index], self._scales[index])

    def _product(self, x_TK: torch.Tensor, codes_NB: torch.Tensor, scales_RC: torch.Tensor) -> torch.Tensor:
        def made(rows: slice) -> torch.Tensor:
            numbers = torch.arange(rows.start, rows.stop, device=codes_NB.device)
            return looked_up(codes_NB[rows], scales_RC, self._layout, numbers, x_TK.dtype)

        return blockwise(x_TK, len(codes_NB), made)


def make_matrix(parameters: Parameters, name: str) -> FloatMatrix | PackedMatrix | CodebookMatrix:
    """The class a weight's plan asks for, before any tensor of it exists."""
    packing = parameters.packing(name)
    return FloatMatrix(parameters, name) if packing is None else make_packed(parameters, name, packing)


def make_packed(parameters: Parameters, name: str, packing: Packing) -> PackedMatrix | CodebookMatrix:
    """The same for a weight, or a bank, that is packed."""
    if isinstance(packing, CodebookPacking):
        return CodebookMatrix(parameters, name, packing)
    return PackedMatrix(parameters, name, packing)
