"""What an ONNX package asks of a plan: which matrices are one, how packed weights are cut into blocks and laid out."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from waybill.onnx.providers import refusals
from waybill.plan.parameter import AffinePacking, CodebookPacking, Merges, ParameterSpec
from waybill.plan.target import Target
from waybill.weights import FloatWeight, LazyTensor, Storage
from waybill.weights.affine import CENTRES
from waybill.weights.codebook import CodebookWeight
from waybill.weights.dtypes import Array
from waybill.weights.lazy import decoded

LARGEST_BLOCK = {2: 256, 4: 1024, 8: 1024}
"""Elements of K a scale may cover, by bits: what the CPU kernels take. Blocks are powers of two."""
LARGEST_UNEVEN_BLOCK = 256
"""The same where an expert's two banks have unequal bits: what the kernel that unpacks both takes."""


def in_blocks(specs: Sequence[ParameterSpec]) -> list[ParameterSpec]:
    """The same parameters, whose groups become blocks the operators know: smaller groups say the same exactly."""
    blocks = {spec.name: _block(spec) for spec in specs if isinstance(spec.packing, AffinePacking)}
    layers: dict[str, list[ParameterSpec]] = defaultdict(list)
    for spec in specs:
        if spec.kind == "experts" and spec.name in blocks:
            layers[spec.name.rpartition(".")[0]].append(spec)
    for banks in layers.values():  # one operator, one block size
        uneven = len({bank.packing.bits for bank in banks if isinstance(bank.packing, AffinePacking)}) > 1
        most = LARGEST_UNEVEN_BLOCK if uneven else max(LARGEST_BLOCK.values())
        blocks |= dict.fromkeys((bank.name for bank in banks), min(most, *(blocks[bank.name] for bank in banks)))
    return [_legal(spec, blocks.get(spec.name, 0)) for spec in specs]


def _block(spec: ParameterSpec) -> int:
    """The largest power of two that divides a packed weight's groups and that its operator takes."""
    packing = spec.local_packing(1)  # as the plan refines it
    if not isinstance(packing, AffinePacking):
        raise ValueError(f"{spec.name} has no groups")
    block = math.gcd(packing.group, LARGEST_BLOCK[packing.bits])
    whole_rows = spec.kind in ("embedding", "head", "experts")  # no short last block
    return math.gcd(block, spec.parts[0].shape[-1]) if whole_rows else block


def _legal(spec: ParameterSpec, block: int) -> ParameterSpec:
    packing = spec.packing
    if isinstance(packing, CodebookPacking):  # blocks of one row: the operator knows no others
        return replace(spec, packing=packing._replace(layout=packing.layout._replace(rows=1)))
    if packing is None:
        return spec
    zeros = packing.zero_points and not packing.symmetric
    if packing.minimums:
        zeros = CENTRES[packing.bits] != 1 << (packing.bits - 1)
    return replace(spec, packing=packing._replace(group=block, zero_points=zeros or spec.kind == "embedding"))


def arrange(spec: ParameterSpec, weight: Storage) -> Mapping[str, LazyTensor]:
    """A finished weight as the operators' inputs. Zero points that all are the midpoint are checked and left out."""
    if isinstance(weight, CodebookWeight):
        return {"codes": _as_floats(weight), "scales": weight.row_by_row().scales}
    if isinstance(weight, FloatWeight) or not isinstance(spec.packing, AffinePacking):
        return weight.parts
    parts = {role: value for role, value in weight.parts.items() if role != "zero_points"}
    if spec.packing.zero_points:
        parts["zero_points"] = _packed_fields(weight.zeros, weight.layout.bits)
    elif weight.zero_points is not None:
        parts["midpoint"] = weight.zero_points
    return parts


def widen(specs: Sequence[ParameterSpec]) -> list[ParameterSpec]:
    """The same parameters, whose banks of 4-bit floats are 8-bit integers of the same values, where rows are whole
    blocks."""

    def one(spec: ParameterSpec) -> ParameterSpec:
        packing = spec.packing
        wide = packing.widened if isinstance(packing, CodebookPacking) and spec.kind == "experts" else None
        return replace(spec, packing=wide) if wide and spec.parts[0].shape[-1] % wide.group == 0 else spec

    return [one(spec) for spec in specs]


def onnx_target(ep: str = "cpu", *, link: bool = False, widen_mxfp4: bool = False) -> Target:
    """ONNX Runtime on one execution provider. To link to the checkpoint's bytes, q, k and v stay apart as stored.

    `widen_mxfp4`: experts that are 4-bit floats become integers of twice their size.
    """
    return Target(
        "onnx",
        Merges(qkv=not link, normed_qkv=False, gate_up=False, interleave=True),
        adjust=(lambda specs: in_blocks(widen(specs))) if widen_mxfp4 else in_blocks,
        arrange=arrange,
        refusals=partial(refusals, ep),
        casts_scales=True,
        holds_result=False,
    )


def _as_floats(weight: CodebookWeight) -> LazyTensor:
    """Codes U8 [N, K] as the 8-bit floats they are."""
    dtype, codes = f"F8_{weight.layout.table}", weight.codes
    return LazyTensor(dtype, codes.shape, tuple(t._replace(source=t.source._replace(dtype=dtype)) for t in codes.tiles))


def _packed_fields(value: LazyTensor, bits: int) -> LazyTensor:
    """U8 [..., G] with a field each to U8 [..., ceil(G·bits/8)]."""
    shape = (*value.shape[:-1], math.ceil(value.shape[-1] * bits / 8))
    return decoded(value, "U8", shape, PackedFields(value, bits))


@dataclass(frozen=True, slots=True)
class PackedFields:
    """Fields to bytes along the last axis, the first in the low bits; unused bits of the last byte are zero."""

    value: LazyTensor
    bits: int

    def inputs(self, start: tuple[int, ...], extent: tuple[int, ...]) -> tuple[LazyTensor, ...]:
        """The fields of the wanted bytes."""
        per_byte = 8 // self.bits
        last = len(start) - 1
        first, end = start[-1] * per_byte, min((start[-1] + extent[-1]) * per_byte, self.value.shape[-1])
        return (self.value.box(start[:-1], extent[:-1]).narrow(last, first, end - first),)

    def decode(self, arrays: Sequence[Array], start: tuple[int, ...], extent: tuple[int, ...]) -> Array:
        """Pack."""
        per_byte = 8 // self.bits
        whole = np.zeros((*extent[:-1], extent[-1] * per_byte), np.uint8)
        whole[..., : arrays[0].shape[-1]] = arrays[0]
        shifts = np.arange(0, 8, self.bits, dtype=np.uint8)
        fields = whole.reshape(*extent, per_byte) << shifts
        packed: Array = np.bitwise_or.reduce(fields, axis=-1)
        return packed
