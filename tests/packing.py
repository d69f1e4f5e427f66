"""Packed checkpoints, made on the spot: a float32 recipe rounded to nearest, in the layouts producers write.

Written from the formats' descriptions and independent of the library. Every packed recipe comes with its twin: the
same checkpoint with float32(code - zero) · float32(scale) in the place of every packed weight.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from checkpoints import Array, Recipe

ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}
"""What GPTQ v1 subtracts from a word of zero points."""
AWQ_SLOTS = [0, 2, 4, 6, 1, 3, 5, 7]
"""Which of eight outputs the slots of an AWQ word hold."""
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
PER_LAYER_TABLE = "model.embed_tokens_per_layer.weight"


@dataclass(frozen=True)
class Scheme:
    """`form` is gptq, gptq_v2, auto_round, awq, olive (`weight_qweight`), olive_dotted (`qweight`), or one of
    compressed-tensors': ct (words), ct_old (words, and zero points as signed bytes), ct_int (signed bytes)."""

    form: str
    bits: int = 4
    group: int = 32
    symmetric: bool = False
    scales: Any = np.float16

    def __str__(self) -> str:
        return f"{self.form}-{self.bits}-g{self.group}-{'sym' if self.symmetric else 'asym'}"

    @property
    def is_olive(self) -> bool:
        return self.form.startswith("olive")

    @property
    def is_compressed(self) -> bool:
        return self.form.startswith("ct")


class Twins(NamedTuple):
    """A packed checkpoint and the float one it must equal."""

    packed: Recipe
    dense: Recipe


def pack(
    recipe: Recipe,
    scheme: Scheme,
    *,
    keep: Collection[str] = (),
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    table: bool = False,
    head: bool = False,
    tie: bool = False,
) -> Twins:
    """Pack every projection of `recipe`, and its twin.

    Args:
        recipe: weights in float32.
        scheme: how they are packed.
        keep: module names that stay float, and are excluded in the metadata.
        overrides: module names to the fields of the scheme they change.
        table: whether the input embedding is packed, and a table of per-layer inputs.
        head: whether the output head is packed.
        tie: the head is left out of the file, and only the quantization metadata says that it is tied (Olive).
    """
    overrides = overrides or {}
    packed = Recipe(dict(recipe.config))
    dense = Recipe(dict(recipe.config))
    moe = False
    for name, tensor in recipe.tensors.items():
        module = name.removesuffix(".weight")
        if tie and name == HEAD:
            continue
        if not _is_packed(name, tensor, table, head) or module in keep:
            packed.tensors[name] = dense.tensors[name] = tensor
            continue
        moe |= tensor.ndim == 3
        own = replace(scheme, **overrides.get(module, {}))
        codes, zeros, scales = quantize(tensor, own)
        dense.tensors[name] = dequantize(codes, zeros, scales, own.group)
        packed.tensors |= sidecars(name, codes, zeros, scales, own)
    packed.config["quantization_config"] = metadata(
        scheme, keep, overrides, table=table, head=head and not tie, moe=moe, tie=tie
    )
    if tie:
        packed.config["tie_word_embeddings"] = False
        dense.config["tie_word_embeddings"] = True
    return Twins(packed, dense)


def quantize(weight: Array, scheme: Scheme) -> tuple[Array, Array, Array]:
    """Round to nearest: codes [..., N, K], zero points and scales [..., N, G].

    Asymmetric groups of every seventh diagonal are made positive and of another one negative before, so that the least
    and the greatest zero point occur.
    """
    *rows, columns = weight.shape
    group = columns if scheme.group == -1 else scheme.group
    groups = -(-columns // group)
    w = np.pad(weight.astype(np.float32), [*[(0, 0)] * len(rows), (0, groups * group - columns)])
    w = w.reshape(*rows, groups, group)
    top = (1 << scheme.bits) - 1
    if scheme.symmetric:
        zeros = np.full(w.shape[:-1], (top + 1) // 2)
        scales = np.abs(w).max(-1) / max(top // 2, 1)
    else:
        diagonal = np.arange(rows[-1])[:, None] + np.arange(groups)
        w = np.where((diagonal % 7 == 2)[..., None], np.abs(w), np.where((diagonal % 7 == 5)[..., None], -np.abs(w), w))
        low, high = np.minimum(w.min(-1), 0), np.maximum(w.max(-1), 0)
        scales = (high - low) / top
        zeros = np.rint(-low / scales).clip(0, top)
    scales = scales.astype(scheme.scales)
    codes = np.rint(w / scales.astype(np.float32)[..., None] + zeros[..., None]).clip(0, top).astype(np.uint8)
    return codes.reshape(*rows, groups * group)[..., :columns], zeros.astype(np.uint8), scales


def dequantize(codes: Array, zeros: Array, scales: Array, group: int) -> Array:
    """What the codes mean, in float32."""
    columns = codes.shape[-1]
    of = np.arange(columns) // (columns if group == -1 else group)
    return (codes.astype(np.float32) - zeros[..., of].astype(np.float32)) * scales[..., of].astype(np.float32)


def sidecars(name: str, codes: Array, zeros: Array, scales: Array, scheme: Scheme) -> dict[str, Array]:
    """The tensors a producer writes for one weight."""
    bits = scheme.bits
    if scheme.is_olive:
        stem = f"{name.removesuffix('weight')}" if scheme.form == "olive_dotted" else f"{name}_"
        out = {"qweight": _packed(codes, bits, 8), "scales": scales}
        if not scheme.symmetric:
            out["qzeros"] = _packed(zeros, bits, 8)
    elif scheme.is_compressed:
        stem, out = name.removesuffix("weight"), _compressed(codes, zeros, scales, scheme)
    elif scheme.form == "awq":
        stem = name.removesuffix("weight")
        out = {"qweight": _interleaved(codes.T), "qzeros": _interleaved(zeros.T), "scales": scales.T}
    else:
        stem = name.removesuffix("weight")
        minus = 0 if scheme.form == "gptq_v2" else ONES[bits]
        words = _packed(zeros.T, bits, 32) - np.uint32(minus)
        out = {"qweight": _packed(codes, bits, 32).T.view(np.int32), "qzeros": words.view(np.int32), "scales": scales.T}
        if scheme.form != "auto_round":
            group = codes.shape[-1] if scheme.group == -1 else scheme.group
            out["g_idx"] = (np.arange(codes.shape[-1]) // group).astype(np.int32)
    return {f"{stem}{role}": np.ascontiguousarray(tensor) for role, tensor in out.items()}


def _compressed(codes: Array, zeros: Array, scales: Array, scheme: Scheme) -> dict[str, Array]:
    """Signed codes and zero points; in words they are raised by half their range, which is what ours are already."""
    half, signed = 1 << (scheme.bits - 1), zeros.astype(np.int16)
    if scheme.form == "ct_int":
        out = {"weight": (codes.astype(np.int16) - half).astype(np.int8), "weight_scale": scales}
    else:
        words = _packed(codes, scheme.bits, 32).view(np.int32)
        out = {"weight_packed": words, "weight_scale": scales, "weight_shape": np.array(codes.shape)}
    if not scheme.symmetric:
        packed = _packed(zeros.T, scheme.bits, 32).T.view(np.int32) if scheme.form == "ct" else None
        out["weight_zero_point"] = (signed - half).astype(np.int8) if packed is None else packed
    return out


def compressed_group(scheme: Scheme, targets: Collection[str]) -> dict[str, Any]:
    """One of config_groups."""
    size = None if scheme.group == -1 else scheme.group
    weights = {"num_bits": scheme.bits, "type": "int", "symmetric": scheme.symmetric, "group_size": size,
               "strategy": "channel" if size is None else "group", "dynamic": False}  # fmt: skip
    form = "int-quantized" if scheme.form == "ct_int" else "pack-quantized"
    return {"targets": list(targets), "weights": weights, "input_activations": None, "format": form}


def metadata(
    scheme: Scheme,
    keep: Collection[str],
    overrides: Mapping[str, Mapping[str, Any]],
    *,
    table: bool,
    head: bool,
    moe: bool,
    tie: bool,
) -> dict[str, Any]:
    """The quantization_config a producer writes."""
    common: dict[str, Any] = {"bits": scheme.bits, "group_size": scheme.group}
    if scheme.is_olive:
        changed = {module: _renamed(change, "symmetric") for module, change in overrides.items()}
        return common | {"quant_method": "olive", "symmetric": scheme.symmetric, "lm_head": head, "embeds": table,
                         "moe": moe, "modules_to_not_convert": list(keep) or None, "overrides": changed or None,
                         "tie_word_embeddings": tie}  # fmt: skip
    if scheme.is_compressed:
        targets = ["Linear", *(["Embedding"] if table else [])]
        groups = [compressed_group(scheme, targets)]
        groups += [compressed_group(replace(scheme, **change), [module]) for module, change in overrides.items()]
        return {"quant_method": "compressed-tensors", "quantization_status": "compressed", "kv_cache_scheme": None,
                "format": groups[0]["format"], "ignore": [*keep, *([] if head else ["lm_head"])],
                "config_groups": {f"group_{at}": group for at, group in enumerate(groups)}}  # fmt: skip
    if scheme.form == "awq":
        return common | {"quant_method": "awq", "version": "gemm", "zero_point": not scheme.symmetric,
                         "modules_to_not_convert": list(keep) or None}  # fmt: skip
    changed = {module: _renamed(change, "sym") for module, change in overrides.items()}
    if scheme.form == "auto_round":
        floats = {module: {"bits": 16} for module in keep}
        return common | {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq",
                         "sym": scheme.symmetric, "extra_config": changed | floats}  # fmt: skip
    rules: dict[str, Any] = {f"-:{re.escape(module)}$": {} for module in keep}
    rules |= {f"+:{re.escape(module)}$": change for module, change in changed.items()}
    return common | {"quant_method": "gptq", "sym": scheme.symmetric, "desc_act": False, "lm_head": head,
                     "checkpoint_format": scheme.form, "dynamic": rules}  # fmt: skip


def unpack(recipe: Recipe, bits: int, group: int, bits_of: Mapping[str, int]) -> Recipe:
    """The float twin of a checkpoint that a producer wrote: Olive, AWQ, GPTQ v1, or symmetric words of
    compressed-tensors; `bits_of` are the exceptions."""
    dense = Recipe({key: value for key, value in recipe.config.items() if key != "quantization_config"})
    stored = recipe.tensors
    for name, tensor in stored.items():
        if name.endswith("weight_packed"):
            scales = stored[name.replace("packed", "scale")]
            zeros = np.full(scales.shape, 1 << (bits - 1), np.uint8)
            dense.tensors[name.removesuffix("_packed")] = dequantize(_fields(tensor, bits), zeros, scales, group)
        if not name.endswith("qweight"):
            if not name.endswith(("scales", "qzeros", "g_idx", "_packed", "_scale", "_shape")):
                dense.tensors[name] = tensor
            continue
        stem = name.removesuffix("qweight")
        weight = stem.removesuffix("_") if stem.endswith("_") else f"{stem}weight"
        width = bits_of.get(weight.removesuffix(".weight"), bits)
        scales, qzeros = stored[f"{stem}scales"], stored.get(f"{stem}qzeros", np.zeros(0, np.int32))
        if tensor.dtype == np.uint8:
            codes, zeros = _fields(tensor, width), _fields(qzeros, width)[..., : scales.shape[-1]]
        elif tensor.shape[1] == scales.shape[1]:
            words = (qzeros.view(np.uint32) + np.uint32(ONES[width])).view(np.int32)
            codes, zeros, scales = _fields(tensor.T, width), _fields(words, width).T, scales.T
        else:
            codes, zeros, scales = _deinterleaved(tensor).T, _deinterleaved(qzeros).T, scales.T
        dense.tensors[weight] = dequantize(codes, zeros, scales, group)
    return dense


def _is_packed(name: str, tensor: Array, table: bool, head: bool) -> bool:
    if name in (TABLE, PER_LAYER_TABLE):
        return table
    if name == HEAD:
        return head
    linear = ("_proj.weight", "experts.gate_up_proj", "experts.down_proj", "_input_gate.weight", "_projection.weight")
    return name.endswith(linear) and tensor.ndim > 1


def _renamed(change: Mapping[str, Any], symmetric: str) -> dict[str, Any]:
    names: Callable[[str], str] = {"group": "group_size", "symmetric": symmetric}.get  # type: ignore[assignment]
    return {names(key) or key: value for key, value in change.items()}


def _packed(values: Array, bits: int, width: int) -> Array:
    """Fields along the last axis into bytes or words, the first in the low bits, zeros after the last."""
    each = width // bits
    short = -values.shape[-1] % each
    values = np.pad(values, [*[(0, 0)] * (values.ndim - 1), (0, short)])
    fields = values.reshape(*values.shape[:-1], -1, each).astype(np.uint32)
    words = (fields << (np.arange(each, dtype=np.uint32) * np.uint32(bits))).sum(-1, dtype=np.uint32)
    out: Array = words.astype(np.uint8) if width == 8 else words
    return out


def _interleaved(values: Array) -> Array:
    """4-bit fields along the last axis into int32 words in AWQ's order."""
    ordered = values.reshape(*values.shape[:-1], -1, 8)[..., AWQ_SLOTS].reshape(values.shape)
    return _packed(ordered, 4, 32).view(np.int32)


def _fields(words: Array, bits: int) -> Array:
    """Bytes or words to fields along the last axis."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    fields: Array = (octets[..., None] >> shifts) & np.uint8((1 << bits) - 1)
    return fields.reshape(*octets.shape[:-1], -1)


def _deinterleaved(words: Array) -> Array:
    fields = _fields(words, 4)
    out = np.empty_like(fields)
    for slot, output in enumerate(AWQ_SLOTS):
        out[..., output::8] = fields[..., slot::8]
    return out
