"""The canonical affine form, and the algebra that is exact on it.

W[n, k] = (code[n, k] - zero[n, g]) · scale[n, g], or code[n, k] · scale[n, g] + minimum[n, g]; g = k // group. Leading
axes (experts) may stand before N.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from waybill.weights.lazy import Decoded, LazyTensor, concat, decoded, stack, stored

if TYPE_CHECKING:
    from waybill.weights.dtypes import Array


CENTRES = MappingProxyType({2: 2, 4: 8, 8: 16})
"""By bits of the container, a code in the middle of those that weights with minimums have: in 8 bits they are of 5."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AffineLayout:
    """How a weight is packed: bits a code, elements of K a scale, and whether every zero point is the midpoint."""

    bits: int
    group: int
    symmetric: bool

    def __str__(self) -> str:
        return f"{self.bits} bits, group {self.group}, {'symmetric' if self.symmetric else 'asymmetric'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AffinePackedWeight:
    """One packed weight in canonical form.

    codes: U8 [..., N, G, group·bits/8], the first element in the low bits; scales: float [..., N, G];
    zero_points: U8 [..., N, G], unpacked, or None: 2**(bits-1) everywhere; minimums: of the scales' dtype [..., N, G],
    in place of zero points: then a code's product with its scale is exact in float32, and the sum is rounded once.
    in_features is K before its last group is filled up.
    """

    layout: AffineLayout
    in_features: int
    codes: LazyTensor
    scales: LazyTensor
    zero_points: LazyTensor | None = None
    minimums: LazyTensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape [..., N, K]."""
        return (*self.codes.shape[:-2], self.in_features)

    @property
    def parts(self) -> dict[str, LazyTensor]:
        """What is stored of it, by role."""
        held = {"codes": self.codes, "scales": self.scales}
        if self.zero_points is not None:
            held["zero_points"] = self.zero_points
        if self.minimums is not None:
            held["minimums"] = self.minimums
        return held

    def narrow(self, axis: int, start: int, length: int) -> AffinePackedWeight:
        """Keep part of an axis of the logical shape; ValueError when a cut along K would split a group."""
        if axis != len(self.shape) - 1:
            return self.map(lambda value: value.narrow(axis, start, length))
        if start == 0 and length == self.in_features:
            return self
        group = self.layout.group
        if start % group or (length % group and start + length != self.in_features):
            raise ValueError(f"{start}:{start + length} splits a group of {group}")
        cut = self.map(lambda value: value.narrow(axis, start // group, -(-length // group)))
        return replace(cut, in_features=length)

    def select(self, axis: int, index: int) -> AffinePackedWeight:
        """Take one position of a leading axis and drop the axis."""
        return self.map(lambda value: value.select(axis, index))

    def pad(self, axis: int, length: int) -> AffinePackedWeight:
        """Append rows whose scale and minimum are zero, so that every element of them is."""
        return self.map(lambda value: value.pad(axis, length))

    @property
    def zeros(self) -> LazyTensor:
        """Zero points written out: the midpoint where none are stored, and the centre of codes that have minimums."""
        if self.zero_points is not None:
            return self.zero_points
        code = 1 << (self.layout.bits - 1) if self.minimums is None else CENTRES[self.layout.bits]
        return stored(Decoded("midpoint", "U8", self.scales.shape, "", 0, Constant(code)))

    def refine(self, group: int) -> AffinePackedWeight:
        """The same weight in smaller groups: each number of a group is repeated. `group` divides the present one."""
        repeat, rest = divmod(self.layout.group, group)
        if rest:
            raise ValueError(f"{group} does not divide {self.layout.group}")
        if repeat == 1:
            return self
        groups = -(-self.in_features // group)
        octets = group * self.layout.bits // 8

        def refined(value: LazyTensor, *last: int, split: bool) -> LazyTensor:
            return decoded(value, value.dtype, (*self.codes.shape[:-2], *last), Refined(value, repeat, split))

        codes = refined(self.codes, groups, octets, split=True)
        each = {role: refined(value, groups, split=False) for role, value in self.parts.items() if role != "codes"}
        layout = replace(self.layout, group=group)
        return AffinePackedWeight(layout=layout, in_features=self.in_features, codes=codes, **each)

    def map(self, change: Callable[[LazyTensor], LazyTensor]) -> AffinePackedWeight:
        """The same change to every part: it must be one of axes before the groups, or of both."""
        changed = {role: change(value) for role, value in self.parts.items()}
        return AffinePackedWeight(layout=self.layout, in_features=self.in_features, **changed)


def concat_affine(parts: Sequence[AffinePackedWeight], axis: int) -> AffinePackedWeight:
    """Join along N; the parts agree in bits, group and K (the caller has checked).

    ValueError where some have minimums and others have zero points.
    """
    return _join(parts, lambda values: concat(values, axis))


def stack_affine(parts: Sequence[AffinePackedWeight], axis: int = 0) -> AffinePackedWeight:
    """Lay equal weights side by side along a new axis before K."""
    return _join(parts, lambda values: stack(values, axis))


def _join(
    parts: Sequence[AffinePackedWeight], join: Callable[[Sequence[LazyTensor]], LazyTensor]
) -> AffinePackedWeight:
    minimums = [part.minimums for part in parts if part.minimums is not None]
    if minimums and len(minimums) < len(parts):
        raise ValueError("weights with minimums do not join weights with zero points")
    stated = any(part.zero_points is not None for part in parts)
    symmetric = all(part.layout.symmetric for part in parts)
    return replace(
        parts[0],
        layout=replace(parts[0].layout, symmetric=symmetric),
        codes=join([part.codes for part in parts]),
        scales=join([part.scales for part in parts]),
        zero_points=join([part.zeros for part in parts]) if stated else None,
        minimums=join(minimums) if minimums else None,
    )


@dataclass(frozen=True, slots=True)
class Refined:
    """Codes [..., G, B] to [..., G·r, B/r] (`split`), or numbers of groups [..., G] repeated to [..., G·r]."""

    value: LazyTensor
    repeat: int
    split: bool

    def inputs(self, start: tuple[int, ...], extent: tuple[int, ...]) -> tuple[LazyTensor, ...]:
        """The present groups around the wanted ones."""
        group_axis = len(start) - (2 if self.split else 1)
        value = self.value.box(start[:group_axis], extent[:group_axis])
        first = start[group_axis] // self.repeat
        last = -(-(start[group_axis] + extent[group_axis]) // self.repeat)
        return (value.narrow(group_axis, first, last - first),)

    def decode(self, arrays: Sequence[Array], start: tuple[int, ...], extent: tuple[int, ...]) -> Array:
        """Split or repeat, then cut to the wanted groups."""
        values = arrays[0]
        if not self.split:
            skip = start[-1] % self.repeat
            return values.repeat(self.repeat, axis=-1)[..., skip : skip + extent[-1]]
        skip = start[-2] % self.repeat
        finer = values.reshape(*values.shape[:-2], values.shape[-2] * self.repeat, values.shape[-1] // self.repeat)
        return finer[..., skip : skip + extent[-2], start[-1] : start[-1] + extent[-1]]


@dataclass(frozen=True, slots=True)
class Constant:
    """A decoder without inputs: one value everywhere."""

    value: int

    def inputs(self, start: tuple[int, ...], extent: tuple[int, ...]) -> tuple[LazyTensor, ...]:
        """Nothing is read."""
        return ()

    def decode(self, arrays: Sequence[Array], start: tuple[int, ...], extent: tuple[int, ...]) -> Array:
        """The value, `extent` times."""
        import numpy as np

        return np.full(extent, self.value, np.uint8)
