"""What loaded or exported weights mean, in float32, to be compared value by value with a checkpoint's float twin."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import waybill
from checkpoints import Array
from packing import Twins, dequantize
from ranks import streamed
from waybill.plan import Plan
from waybill.weights.dtypes import NUMPY_DTYPES

MEMBERS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def fields(octets: Array, bits: int) -> Array:
    """Bytes to fields along the last axis, the first in the low bits."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    every: Array = (octets[..., None] >> shifts) & np.uint8((1 << bits) - 1)
    return every.reshape(*octets.shape[:-1], -1)


def canonical(codes: Array, scales: Array, zeros: Array | None, bits: int) -> Array:
    """codes [..., N, G, B], scales and zeros [..., N, G] to [..., N, K]."""
    values = fields(codes, bits)
    zeros = np.full(scales.shape, 1 << (bits - 1), np.uint8) if zeros is None else zeros
    return dequantize(values.reshape(*values.shape[:-2], -1), zeros, scales, values.shape[-1])


def held(bill: Plan) -> dict[str, Array]:
    """What one rank's parameters mean, by name without `.weight`."""
    bill.require_clean()
    octets, _ = streamed(bill)
    tensors = {b.target: octets[b.target].view(NUMPY_DTYPES[b.dtype]).reshape(b.shape) for b in bill.bindings}
    out = {}
    for binding in bill.bindings:
        if binding.role == "weight":
            out[binding.target.removesuffix(".weight")] = tensors[binding.target].astype(np.float32)
        elif binding.role == "codes":
            stem = binding.target.removesuffix("codes")
            source = binding.sources[0]
            bits = next(p.bits for n, p in bill.packings.items() if source.startswith(n.removesuffix("weight")))
            zeros = tensors.get(f"{stem}zero_points")
            out[stem.removesuffix(".")] = canonical(tensors[binding.target], tensors[f"{stem}scales"], zeros, bits)
    return out


def exported(checkpoint: Path, folder: Path, **options: Any) -> dict[str, Array]:
    """What the matrices of a package mean, read from its file without the exporter."""
    import onnx_ir as ir

    waybill.build(checkpoint, **options).save(folder)
    graph = ir.load(folder / "model.onnx").graph
    arrays = {name: value.const_value.numpy() for name, value in graph.initializers.items() if value.const_value}
    out = {name.removesuffix(".weight"): array for name, array in arrays.items() if name.endswith(".weight")}
    for node in graph:
        if node.op_type != "MatMulNBits":
            continue
        codes, scales, zeros = (arrays[value.name] if value else None for value in (*node.inputs, None, None)[1:4])
        bits = node.attributes["bits"].as_int()
        if zeros is not None:
            zeros = fields(zeros.reshape(len(codes), -1), bits)[:, : codes.shape[1]]
        name = node.inputs[1].name.removesuffix(".codes")
        out[name] = canonical(codes, scales.reshape(codes.shape[:2]), zeros, bits)
    return out


def joined(values: Mapping[str, Array]) -> dict[str, Array]:
    """With every merge whose members are all there."""
    out = dict(values)
    for name in values:
        path, _, leaf = name.partition("_proj")
        path, _, member = path.rpartition(".")
        for kind, members in MEMBERS.items():
            names = [f"{path}.{each}{leaf}" for each in members]
            if f"{member}_proj" == members[0] and all(each in values for each in names):
                out[f"{path}.{kind}{leaf}"] = np.concatenate([values[each] for each in names])
    return out


def assert_means(got: Mapping[str, Array], want: Mapping[str, Array]) -> None:
    """Every wanted weight is there, by itself or merged, with exactly these values; K may be filled up."""
    ours, theirs = joined(got), joined(want)
    seen = ours.keys() & theirs.keys()
    for name in seen:
        np.testing.assert_array_equal(ours[name][..., : theirs[name].shape[-1]], theirs[name], err_msg=name)
    merged = {member: kind for kind, members in MEMBERS.items() for member in members}
    for name in want:
        member = next((m for m in merged if f".{m}" in name), "")
        assert name in seen or name.replace(member, merged[member]) in seen, name


def assert_every_rank_holds(twins: Twins, folder: Path, tp: int = 1) -> list[dict[str, Array]]:
    """Each rank of the packed checkpoint holds the values that it holds of the float twin; returns them."""
    packed, dense = twins.packed.write(folder / "packed"), twins.dense.write(folder / "dense")
    ranks = []
    for rank in range(tp):
        bill = waybill.plan(packed, tp=tp, rank=rank, dtype="float32")
        ranks.append(held(bill))
        assert any(binding.role == "codes" for binding in bill.bindings)
        assert_means(ranks[-1], held(waybill.plan(dense, tp=tp, rank=rank, dtype="float32")))
    return ranks


def assert_exported(twins: Twins, folder: Path) -> None:
    """The package of the packed checkpoint has the values of the float twin."""
    got = exported(twins.packed.write(folder / "exported"), folder / "package")
    assert_means(got, {name.removesuffix(".weight"): t for name, t in twins.dense.tensors.items() if t.ndim > 1})
