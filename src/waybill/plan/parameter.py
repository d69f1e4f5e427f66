"""What a target parameter needs: its logical parts, and how each is cut across tensor-parallel ranks.

Sharding is declared here by the target and never inferred from a name. The order is fixed: shard, then merge, then
stack, so a rank's merged parameter is [q_local; k_local; v_local].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from waybill.weights import FloatWeight, Storage
from waybill.weights.codebook import CodebookLayout, CodebookWeight

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


class AffinePacking(NamedTuple):
    """How an affine parameter lies in memory: bits a code, elements of K a scale, the scales' dtype, explicit zeros.

    `symmetric`: the metadata says that every zero point is the midpoint, whether they are written out or not.
    `minimums`: in place of zero points, and of the scales' dtype.
    """

    bits: int
    group: int
    scale_dtype: str
    zero_points: bool
    symmetric: bool = False
    minimums: bool = False

    @property
    def _same(self) -> tuple[int, str, bool]:
        return self.bits, self.scale_dtype, self.minimums

    def merges_with(self, other: Packing | None) -> bool:
        """Whether rows of both can share one parameter; missing zero points can be written out."""
        return isinstance(other, AffinePacking) and (self.group, self._same) == (other.group, other._same)

    def joined(self, others: Sequence[Packing]) -> AffinePacking:
        """The packing of a parameter made of this and others it merges with: with zero points when any has them."""
        alike = [self, *(other for other in others if isinstance(other, AffinePacking))]
        zeros, symmetric = any(each.zero_points for each in alike), all(each.symmetric for each in alike)
        return self._replace(zero_points=zeros, symmetric=symmetric)

    def serves(self, wanted: Packing) -> bool:
        """Whether a weight packed like this can be had as `wanted`: smaller groups say the same."""
        return isinstance(wanted, AffinePacking) and self._same == wanted._same and self.group % wanted.group == 0

    def local(self, parts: Sequence[Part], tp: int) -> AffinePacking:
        """One rank's: a cut along K that would split a group makes the groups smaller, exactly."""
        group = self.group
        for part in parts:
            if part.shard is not None and part.shard.axis == len(part.shape) - 1:
                finer = math.gcd(group, part.shape[-1] // tp)
                group = finer if tp > 1 or finer >= SMALLEST_GROUP else group  # uncut, the last may stay short
        return self._replace(group=group)

    def keeps(self, parts: Sequence[Part], tp: int) -> bool:
        """Whether a cut into that many ranks leaves groups that are large enough."""
        return self.local(parts, tp).group >= SMALLEST_GROUP

    def tensors(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shapes and dtypes of what a weight of this logical shape is stored as, by role."""
        groups = (*shape[:-1], -(-shape[-1] // self.group))
        held = {"codes": ((*groups, self.group * self.bits // 8), "U8"), "scales": (groups, self.scale_dtype)}
        if self.zero_points:
            held["zero_points"] = groups, "U8"
        if self.minimums:
            held["minimums"] = groups, self.scale_dtype
        return held

    @property
    def form(self) -> str:
        """What weights packed like this have in common, in words."""
        return f"{self.bits}-bit, group {self.group}{', with minimums' if self.minimums else ''}"

    def __str__(self) -> str:
        return f"{self.bits} bits, group {self.group}, {self.scale_dtype}{', with minimums' if self.minimums else ''}"


class CodebookPacking(NamedTuple):
    """How a codebook weight lies in memory: what its codes mean, what a scale covers, and the scales' dtype."""

    layout: CodebookLayout
    scale_dtype: str

    def merges_with(self, other: Packing | None) -> bool:
        """Whether rows of both can share one parameter, as far as their blocks go: see `mergeable`."""
        return self == other

    def joined(self, others: Sequence[Packing]) -> CodebookPacking:
        """The packing of a parameter made of this and others it merges with."""
        return self

    def serves(self, wanted: Packing) -> bool:
        """Whether a weight packed like this can be had as `wanted`: a scale repeated for fewer rows says the same."""
        if isinstance(wanted, AffinePacking):
            return self.widened is not None and self.widened.serves(wanted)
        if self.scale_dtype != wanted.scale_dtype:
            return False
        rows = wanted.layout.rows
        return self.layout.rows % rows == 0 and self.layout._replace(rows=rows) == wanted.layout

    def is_exact_in(self, dtype: str | None) -> bool:
        """Whether every value is a number of this dtype: a 4-bit float times a power of two is a bfloat16 as well."""
        powers = self.layout.table == "E2M1" and self.scale_dtype == "F8_E8M0"
        return dtype == "F32" or (dtype == "BF16" and powers)

    @property
    def widened(self) -> AffinePacking | None:
        """The integers that mean the same numbers exactly, where there are any: see `waybill.weights.widened`."""
        exact = self.layout.table == "E2M1" and self.layout.rows == 1 and self.scale_dtype == "F8_E8M0"
        return AffinePacking(8, self.layout.columns, "F32", zero_points=False, symmetric=True) if exact else None

    def local(self, parts: Sequence[Part], tp: int) -> CodebookPacking:
        """One rank's: a block that spans a whole axis spans what is left of it; see `keeps` for the others."""
        layout = self.layout
        for part in parts:
            rows, columns = part.local_shape(0, tp)[-2:]
            layout = layout._replace(
                rows=rows if self.layout.rows >= part.shape[-2] else self.layout.rows,
                columns=columns if self.layout.columns >= part.shape[-1] else self.layout.columns,
            )
        return self._replace(layout=layout)

    def keeps(self, parts: Sequence[Part], tp: int) -> bool:
        """Whether a cut into that many ranks splits no block, and leaves the parts blocks of one size."""
        cuts = [part for part in parts if tp > 1 and part.shard is not None]
        sizes = ((self.layout.rows, -2), (self.layout.columns, -1))
        whole = all(
            part.local_shape(0, tp)[axis] % block == 0
            for part in cuts
            for block, axis in sizes
            if block < part.shape[axis] and part.local_shape(0, tp) != part.shape
        )
        return whole and len({self.local([part], tp) for part in parts}) == 1

    def tensors(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shapes and dtypes of what a weight of this logical shape is stored as, by role."""
        layout = self.layout
        blocks = (-(-shape[-2] // layout.rows), -(-shape[-1] // layout.columns))
        return {
            "codes": ((*shape[:-1], shape[-1] * layout.bits // 8), "U8"),
            layout.scale_role: ((*shape[:-2], *blocks), self.scale_dtype),
        }

    @property
    def form(self) -> str:
        """What weights packed like this have in common, in words."""
        return str(self.layout)

    def __str__(self) -> str:
        return f"{self.layout}, {self.scale_dtype}"


Packing = AffinePacking | CodebookPacking


def mergeable(packings: Sequence[Packing | None], parts: Sequence[Part]) -> bool:
    """Whether parts packed like this can be one parameter: all float, or packed alike, and no block would reach from
    one part into the next."""
    first = packings[0]
    if first is None:
        return all(packing is None for packing in packings)
    if not all(first.merges_with(packing) for packing in packings):
        return False
    rows = first.layout.rows if isinstance(first, CodebookPacking) else 1
    return all(part.shape[0] % rows == 0 for part in parts[:-1])


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
        """The packing of one rank's cut."""
        return None if self.packing is None else self.packing.local(self.parts, tp)

    def keeps_blocks(self, tp: int) -> bool:
        """Whether a cut into that many ranks leaves a packed weight that can be computed with."""
        return self.packing is None or self.packing.keeps(self.parts, tp)

    def tensors(self, rank: int, tp: int) -> dict[str, tuple[tuple[int, ...], str | None]]:
        """Names, shapes and dtypes (None: the model's) of what one rank holds of this parameter."""
        shape = self.local_shape(rank, tp)
        packing = self.local_packing(tp)
        if packing is None:
            return {self.name: (shape, None)}
        return {part_name(self.name, role): form for role, form in packing.tensors(shape).items()}

    def local_shape(self, rank: int, tp: int) -> tuple[int, ...]:
        """The shape one rank holds, merged and stacked."""
        shapes = [part.local_shape(rank, tp) for part in self.parts]
        joined = sum(shape[self.axis] for shape in shapes)
        merged = (*shapes[0][: self.axis], joined, *shapes[0][self.axis + 1 :])
        return (self.stack, *merged) if self.stack else merged


def packing_of(weight: Storage) -> Packing | None:
    """How a stored weight is packed, or None when it is float."""
    if isinstance(weight, FloatWeight):
        return None
    if isinstance(weight, CodebookWeight):
        return CodebookPacking(weight.layout, weight.scales.dtype)
    layout, zeros, minimums = weight.layout, weight.zero_points is not None, weight.minimums is not None
    return AffinePacking(layout.bits, layout.group, weight.scales.dtype, zeros, layout.symmetric, minimums)
