"""Packers and readers of quantized layers, written from the formats' descriptions, independently of the library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints import safetensors_bytes
from waybill.checkpoint import Checkpoint, RangeReader, TensorHeader
from waybill.checkpoint.folder import Shard
from waybill.checkpoint.header import read_header
from waybill.codecs.registry import CODECS
from waybill.config.quantization import ComponentQuantizationPlan, QuantizationConfig
from waybill.errors import WaybillError
from waybill.families.decoder import decoder_components
from waybill.manifest.quantization import read_quantization
from waybill.plan.boxes import materialize
from waybill.weights.affine import AffinePackedWeight
from waybill.weights.dequantize import dequantize_arrays

Array = np.ndarray[Any, np.dtype[Any]]
ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}
AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)


def pack(values: Array, bits: int, width: int) -> Array:
    """Integers along the last axis in words of `width` bits, the first in the low bits, zeros at the end."""
    per = width // bits
    rest = -values.shape[-1] % per
    filled = np.concatenate([values, np.zeros((*values.shape[:-1], rest), values.dtype)], axis=-1).astype(np.uint64)
    parts = filled.reshape(*values.shape[:-1], -1, per) << (np.arange(per, dtype=np.uint64) * np.uint64(bits))
    return parts.sum(-1, dtype=np.uint64).astype({8: np.uint8, 32: np.uint32}[width])


def gptq(q: Array, z: Array, s: Array, bits: int, *, version: int, g_idx: Array | None = None) -> dict[str, Array]:
    """q [N, K], z and s [N, G]; version 1 subtracts one from every field of a word at once."""
    zeros = pack(np.ascontiguousarray(z.T), bits, 32)
    if version == 1:
        zeros = (zeros.astype(np.int64) - ONES[bits]).astype(np.uint64).astype(np.uint32)
    words = np.ascontiguousarray(pack(q, bits, 32).T)
    out = {"qweight": words.view(np.int32), "qzeros": zeros.view(np.int32), "scales": np.ascontiguousarray(s.T)}
    return out if g_idx is None else out | {"g_idx": g_idx.astype(np.int32)}


def awq(q: Array, z: Array, s: Array) -> dict[str, Array]:
    """4 bits along N; slot i of a word holds output AWQ_OUTPUTS[i] of its eight."""

    def words(values: Array) -> Array:
        eights = values.reshape(values.shape[0], -1, 8)[:, :, AWQ_OUTPUTS]
        return pack(eights.reshape(values.shape), 4, 32).view(np.int32)

    return {"qweight": words(q.T), "qzeros": words(z.T), "scales": np.ascontiguousarray(s.T)}


def olive(q: Array, z: Array | None, s: Array, bits: int) -> dict[str, Array]:
    """Bytes along K and along the groups; leading axes stay."""
    out = {"qweight": pack(q, bits, 8), "scales": s}
    return out if z is None else out | {"qzeros": pack(z, bits, 8)}


def compressed(q: Array, z: Array | None, s: Array, bits: int, form: str) -> dict[str, Array]:
    """compressed-tensors: words along K (`ct`, `ct_old`) or signed bytes (`ct_int`); zero points along N, or signed."""
    half = 1 << (bits - 1)
    if form == "ct_int":
        out = {"weight": (q.astype(np.int16) - half).astype(np.int8), "weight_scale": s}
    else:
        words = pack(q, bits, 32).view(np.int32)
        out = {"weight_packed": words, "weight_scale": s, "weight_shape": np.array(q.shape)}
    if z is not None and form == "ct":
        out["weight_zero_point"] = np.ascontiguousarray(pack(np.ascontiguousarray(z.T), bits, 32).T).view(np.int32)
    elif z is not None:
        out["weight_zero_point"] = (z.astype(np.int16) - half).astype(np.int8)
    return out


def formula(q: Array, z: Array, s: Array, group: int) -> Array:
    """float32(q - z) · float32(s), the group of column k being k // group."""
    column = np.arange(q.shape[-1]) // group
    return (q.astype(np.int32) - z.astype(np.int32)[..., column]).astype(np.float32) * s.astype(np.float32)[..., column]


@contextmanager
def opened(folder: Path, file: str) -> Iterator[tuple[dict[str, TensorHeader], RangeReader]]:
    """The headers of one file, and a reader of it."""
    header = read_header(folder / file, file)
    tensors = {tensor.name: tensor for tensor in header.tensors}
    shard = Shard.of(file, header)
    with RangeReader(Checkpoint(folder, {}, {}, tensors, (shard,))) as reader:
        yield tensors, reader


@contextmanager
def written(folder: Path, **layers: Mapping[str, Array]) -> Iterator[tuple[list[dict[str, TensorHeader]], RangeReader]]:
    """The layers in one file: the headers of each by role, and a reader."""
    tensors = {f"{name}.{role}": value for name, parts in layers.items() for role, value in parts.items()}
    (folder / "layers.safetensors").write_bytes(safetensors_bytes(tensors))
    with opened(folder, "layers.safetensors") as (headers, reader):
        yield [{role: headers[f"{name}.{role}"] for role in parts} for name, parts in layers.items()], reader


def plan_of(block: Mapping[str, Any], **changes: Any) -> ComponentQuantizationPlan:
    """What a metadata block that must be accepted says, with these changes."""
    problems: list[WaybillError] = []
    config = {"quantization_config": {**block, **changes}}
    plan = read_quantization(config, {}, decoder_components({}), problems).for_component("decoder")
    assert not problems
    assert plan is not None
    return plan


def layout(block: Mapping[str, Any]) -> QuantizationConfig:
    """The model-wide layout of a metadata block that must be accepted."""
    return plan_of(block).layout


def normalized(sidecars: Mapping[str, TensorHeader], config: QuantizationConfig) -> AffinePackedWeight:
    """Through the codec: headers must be accepted."""
    codec = CODECS[config.method]
    assert not codec.check("w", sidecars, config)
    return codec.normalize("w", sidecars, config)


def arrays(weight: AffinePackedWeight, reader: RangeReader) -> tuple[Array, Array, Array | None]:
    """The bytes of its codes, scales and zero points."""
    zeros = None if weight.zero_points is None else materialize(weight.zero_points, reader)
    return materialize(weight.codes, reader), materialize(weight.scales, reader), zeros


def decoded(weight: AffinePackedWeight, reader: RangeReader) -> Array:
    """The weight as float32."""
    return dequantize_arrays(*arrays(weight, reader), weight.layout.bits, weight.in_features)


def same(found: Array, wanted: Array) -> bool:
    """Equal bit for bit, signs of zeros too."""
    wanted = np.ascontiguousarray(wanted)
    found = np.ascontiguousarray(found)
    return found.shape == wanted.shape and np.array_equal(found.view(np.uint32), wanted.view(np.uint32))


def roles(tensors: Mapping[str, TensorHeader], names: Sequence[str]) -> dict[str, TensorHeader]:
    """The sidecars of the one layer among `tensors`, whatever stands before the role."""
    ends = {name: role for name in tensors for role in names if name.replace(".", "_").endswith(role)}
    return {role: tensors[name] for name, role in ends.items()}
