"""What a target parameter needs: its logical parts, and how each is cut across tensor-parallel ranks.

Sharding is declared here by the target and never inferred from a name. The order is fixed: shard, then merge, then
stack, so a rank's merged parameter is [q_local; k_local; v_local].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

SMALLEST_GROUP = 16
"""Elements of K a scale must cover at least."""

Kind = Literal["linear", "router", "embedding", "head", "positions", "conv", "vector", "experts"]
FLOAT_KINDS = ("router", "positions", "conv", "vector")
"""What no producer packs."""


class Cut(NamedTuple):
    """One rank's stretch of an axis: `length` positions from `start`, then zeros up to `padded`."""

    start: int
    length: int
    padded: int


class Shard(NamedTuple):
    """How one axis is cut across ranks.

    `groups` positions move together (the rows of one head); a group is replicated when there are fewer groups than
    ranks. `pad` lets an axis of any length be cut: the last ranks get zeros, which the layer keeps from winning.
    """

    axis: int
    groups: int | None = None
    pad: bool = False

    def cut(self, size: int, rank: int, tp: int) -> Cut:
        """This rank's stretch of an axis of `size`; the caller has refused sizes that do not divide."""
        if self.pad:
            length = -(-size // tp)
            start = min(rank * length, size)
            return Cut(start, min(length, size - start), length)
        groups = self.groups or size
        if groups < tp:
            width = size // groups
            return Cut(rank // (tp // groups) * width, width, width)
        width = size // tp
        return Cut(rank * width, width, width)


class Part(NamedTuple):
    """One logical weight inside a parameter: its whole shape, its shard, and the config fields that imply the shape."""

    shape: tuple[int, ...]
    shard: Shard | None
    basis: str

    def local_shape(self, rank: int, tp: int) -> tuple[int, ...]:
        """The shape one rank holds."""
        if self.shard is None:
            return self.shape
        axis = self.shard.axis
        padded = self.shard.cut(self.shape[axis], rank, tp).padded
        return (*self.shape[:axis], padded, *self.shape[axis + 1 :])


class Packing(NamedTuple):
    """How a packed parameter lies in memory: bits a code, elements of K a scale, the scales' dtype, explicit zeros.

    `symmetric`: the metadata says that every zero point is the midpoint, whether they are written out or not.
    """

    bits: int
    group: int
    scale_dtype: str
    zero_points: bool
    symmetric: bool = False

    def merges_with(self, other: Packing | None) -> bool:
        """Whether rows of both can share one parameter; missing zero points can be written out."""
        return other is not None and self[:3] == other[:3]


@dataclass(frozen=True, slots=True, kw_only=True)
class Merges:
    """What a target wants as one matrix: q, k and v, also where heads are normed by themselves; gate and up; and
    whether experts' gate and up rows alternate."""

    qkv: bool = True
    normed_qkv: bool = True
    gate_up: bool = True
    interleave: bool = False


AS_ENGINE = Merges()


def part_name(name: str, role: str) -> str:
    """The name of one tensor of a parameter: itself for a float, `codes` and so on beside it for a packed one."""
    return name if role == "weight" else f"{name.removesuffix('.weight')}.{role}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """A parameter of the target: parts joined along `axis`, `stack` of them side by side on a new first axis.

    `stack` 0 means no such axis. A parameter that is `tied_to` another may be absent from the checkpoint. A packed
    parameter is several tensors: codes, scales and perhaps zero points, under its name without `.weight`.
    """

    name: str
    kind: Kind
    parts: tuple[Part, ...]
    axis: int = 0
    stack: int = 0
    tied_to: str | None = None
    packing: Packing | None = None
    interleave: bool = False
    """The parts' rows alternate, instead of lying one part after the other: row 0 of each, row 1 of each, …"""
    apart: bool = False
    """Usually a member of a merged parameter, kept by itself because the members are packed differently."""

    def local_packing(self, tp: int) -> Packing | None:
        """The packing of one rank's cut: a cut along K that would split a group makes the groups smaller, exactly."""
        if self.packing is None:
            return None
        group = self.packing.group
        for part in self.parts:
            if part.shard is not None and part.shard.axis == len(part.shape) - 1:
                finer = math.gcd(group, part.shape[-1] // tp)
                group = finer if tp > 1 or finer >= SMALLEST_GROUP else group  # uncut, the last may stay short
        return self.packing._replace(group=group)

    def tensors(self, rank: int, tp: int) -> dict[str, tuple[tuple[int, ...], str | None]]:
        """Names, shapes and dtypes (None: the model's) of what one rank holds of this parameter."""
        shape = self.local_shape(rank, tp)
        packing = self.local_packing(tp)
        if packing is None:
            return {self.name: (shape, None)}
        groups = -(-shape[-1] // packing.group)
        held: dict[str, tuple[tuple[int, ...], str | None]] = {
            part_name(self.name, "codes"): ((*shape[:-1], groups, packing.group * packing.bits // 8), "U8"),
            part_name(self.name, "scales"): ((*shape[:-1], groups), packing.scale_dtype),
        }
        if packing.zero_points:
            held[part_name(self.name, "zero_points")] = (*shape[:-1], groups), "U8"
        return held

    def local_shape(self, rank: int, tp: int) -> tuple[int, ...]:
        """The shape one rank holds, merged and stacked."""
        shapes = [part.local_shape(rank, tp) for part in self.parts]
        joined = sum(shape[self.axis] for shape in shapes)
        merged = (*shapes[0][: self.axis], joined, *shapes[0][self.axis + 1 :])
        return (self.stack, *merged) if self.stack else merged
