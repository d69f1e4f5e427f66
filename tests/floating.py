"""FP8 checkpoints, made on the spot, each with its float twin; and values of small floats from their definitions."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from checkpoints import Array, Recipe
from packing import Twins

E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)


def float8(code: int, *, exponent: int = 4, mantissa: int = 3) -> float:
    """The value of an 8-bit float's bits: sign, exponent, mantissa. E4M3 has no infinity, and one NaN."""
    sign = -1.0 if code >> 7 else 1.0
    e, m = (code & 0x7F) >> mantissa, code & ((1 << mantissa) - 1)
    bias = (1 << (exponent - 1)) - 1
    if exponent == 4 and code & 0x7F == 0x7F:
        return math.nan
    if exponent == 5 and e == 31:
        return sign * math.inf if m == 0 else math.nan
    if e == 0:
        return sign * m * 2.0 ** (1 - bias - mantissa)
    return sign * (1 + m / (1 << mantissa)) * 2.0 ** (e - bias)


def float4(code: int) -> float:
    """The value of an E2M1 nibble: sign, two bits of exponent with bias 1, one of mantissa."""
    sign, e, m = -1.0 if code >> 3 else 1.0, code >> 1 & 3, code & 1
    return sign * (m / 2 if e == 0 else (1 + m / 2) * 2.0 ** (e - 1))


@dataclass(frozen=True)
class Blocks:
    """How weights are cut: rows and columns of a block, -1 for the whole axis; and who writes it."""

    rows: int = 32
    columns: int = 32
    scales: Any = np.float32
    codes: Any = E4M3
    gptqmodel: bool = False
    compressed: bool = False

    def __str__(self) -> str:
        name = (
            "gptqmodel"
            if self.gptqmodel
            else "compressed"
            if self.compressed
            else f"{self.codes}-{np.dtype(self.scales)}"
        )
        return f"{name}-{self.rows}x{self.columns}"

    @property
    def metadata(self) -> dict[str, Any]:
        """The quantization_config a producer writes."""
        if self.compressed:
            how = "block" if self.columns != -1 else "channel" if self.rows == 1 else "tensor"
            weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": how}
            weights |= {"block_structure": [self.rows, self.columns]} if how == "block" else {}
            group = {"targets": ["Linear"], "weights": weights, "format": "float-quantized"}
            return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"g": group}}
        size = None if self.columns == -1 else [self.rows, self.columns]
        block: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": size}
        if not self.gptqmodel:
            return block | {"activation_scheme": "dynamic", "fmt": "e4m3" if self.codes == E4M3 else "e5m2"}
        how = "block" if size else "row" if self.rows == 1 else "tensor"
        return block | {"method": "fp8", "bits": 8, "format": "float8_e4m3fn", "weight_scale_method": how,
                        "weight_scale_semantics": "inverse"}  # fmt: skip


def quantize(weight: Array, blocks: Blocks) -> tuple[Array, Array, Array]:
    """Codes, scales as they are written, and what both mean in float32."""
    *lead, rows, columns = weight.shape
    r, c = (size if size != -1 else whole for size, whole in ((blocks.rows, rows), (blocks.columns, columns)))
    grid = np.zeros((*lead, -(-rows // r), -(-columns // c)), np.float32)
    for i in range(grid.shape[-2]):
        for j in range(grid.shape[-1]):
            part = weight[..., i * r : (i + 1) * r, j * c : (j + 1) * c]
            grid[..., i, j] = np.abs(part).max((-1, -2)) / 400
    if blocks.scales == E8M0:
        grid = 2 ** np.ceil(np.log2(grid))
    grid = (1 / grid if blocks.gptqmodel else grid).astype(blocks.scales)
    spread = grid.astype(np.float32)[..., np.arange(rows)[:, None] // r, np.arange(columns) // c]
    codes = (weight * spread if blocks.gptqmodel else weight / spread).astype(np.float32).astype(blocks.codes)
    values = codes.astype(np.float32)
    stored = grid
    if blocks.compressed:
        stored = grid.reshape(1) if blocks.rows == blocks.columns == -1 else grid
    elif blocks.columns == -1:
        stored = grid.reshape(lead) if blocks.rows == -1 else grid[..., 0]
    return codes, stored, (values / spread if blocks.gptqmodel else values * spread).astype(np.float32)


def pack_fp8(recipe: Recipe, blocks: Blocks, *, keep: Collection[str] = ()) -> Twins:
    """Every projection of a float32 recipe in 8-bit floats, and its twin; `keep` are modules that stay float."""
    packed, dense = Recipe(dict(recipe.config)), Recipe(dict(recipe.config))
    for name, tensor in recipe.tensors.items():
        module = name.removesuffix(".weight")
        linear = name.endswith(("_proj.weight", "experts.gate_up_proj", "experts.down_proj"))
        if module in keep or not linear:
            packed.tensors[name] = dense.tensors[name] = tensor
            continue
        codes, scales, dense.tensors[name] = quantize(tensor, blocks)
        packed.tensors |= {name: codes, f"{name}_scale" if blocks.compressed else f"{name}_scale_inv": scales}
    excluded = "ignore" if blocks.compressed else "modules_to_not_convert"
    packed.config["quantization_config"] = blocks.metadata | {excluded: ["lm_head", *keep]}
    return Twins(packed, dense)


def pack_mxfp4(recipe: Recipe, *, compressed: bool = False) -> Twins:
    """Banks of experts in 4-bit floats, as gpt-oss lays them out, and their twin; its own float banks lie [E, K, N].

    Or projections, as compressed-tensors lays them out.
    """
    turned = recipe.config["model_type"] == "gpt_oss"
    packed, dense = Recipe(dict(recipe.config)), Recipe(dict(recipe.config))
    values = np.array([float4(code) for code in range(16)], np.float32)
    for name, tensor in recipe.tensors.items():
        packs = name.endswith("_proj.weight") if compressed else ".experts." in name and not name.endswith("_bias")
        if not packs:
            packed.tensors[name] = dense.tensors[name] = tensor
            continue
        matrices = tensor.swapaxes(-1, -2) if turned else tensor
        blocks = matrices.reshape(*matrices.shape[:-1], -1, 32)
        powers = np.ceil(np.log2(np.abs(blocks).max(-1) / 6)).astype(np.int64)
        scaled = blocks * np.float32(2.0) ** -powers[..., None]
        codes = np.abs(scaled[..., None] - values).argmin(-1).astype(np.uint8)
        plain = (values[codes] * np.float32(2.0) ** powers[..., None]).reshape(matrices.shape)
        dense.tensors[name] = np.ascontiguousarray(plain.swapaxes(-1, -2) if turned else plain)
        octets, exponents = codes[..., ::2] | codes[..., 1::2] << 4, (powers + 127).astype(np.uint8)
        if compressed:
            packed.tensors |= {f"{name}_packed": octets.reshape(len(tensor), -1), f"{name}_scale": exponents}
        else:
            packed.tensors |= {f"{name}_blocks": octets, f"{name}_scales": exponents}
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": 32, "strategy": "group"}
    packed.config["quantization_config"] = (
        {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "ignore": ["lm_head"],
         "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
        if compressed
        else {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    )  # fmt: skip
    return Twins(packed, dense)
