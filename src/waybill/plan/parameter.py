"""What a target parameter needs: its logical parts, and how each is cut across tensor-parallel ranks.

Sharding is declared here by the target and never inferred from a name. The order is fixed: shard, then merge, then
stack, so a rank's merged parameter is [q_local; k_local; v_local].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["linear", "embedding", "head", "vector", "experts"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """A parameter of the target: parts joined along `axis`, `stack` of them side by side on a new first axis.

    `stack` 0 means no such axis. A parameter that is `tied_to` another may be absent from the checkpoint.
    """

    name: str
    kind: Kind
    parts: tuple[Part, ...]
    axis: int = 0
    stack: int = 0
    tied_to: str | None = None

    def local_shape(self, rank: int, tp: int) -> tuple[int, ...]:
        """The shape one rank holds, merged and stacked."""
        shapes = [part.local_shape(rank, tp) for part in self.parts]
        joined = sum(shape[self.axis] for shape in shapes)
        merged = (*shapes[0][: self.axis], joined, *shapes[0][self.axis + 1 :])
        return (self.stack, *merged) if self.stack else merged
