"""Typed weights: what one logical weight is stored as. A weight moves whole, so rules map records, not tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from waybill.checkpoint import Checkpoint
from waybill.weights.affine import AffinePackedWeight, concat_affine, stack_affine
from waybill.weights.codebook import CodebookWeight, concat_codebooks, stack_codebooks
from waybill.weights.lazy import LazyTensor, concat, stack


@dataclass(frozen=True, slots=True)
class FloatWeight:
    """A weight stored as the numbers themselves."""

    value: LazyTensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape."""
        return self.value.shape

    @property
    def parts(self) -> dict[str, LazyTensor]:
        """What is stored of it, by role."""
        return {"weight": self.value}

    def narrow(self, axis: int, start: int, length: int) -> FloatWeight:
        """Keep part of an axis."""
        return FloatWeight(self.value.narrow(axis, start, length))

    def select(self, axis: int, index: int) -> FloatWeight:
        """Take one position of an axis and drop the axis."""
        return FloatWeight(self.value.select(axis, index))

    def transpose(self) -> FloatWeight:
        """Swap the last two axes."""
        return FloatWeight(self.value.transpose())

    def pad(self, axis: int, length: int) -> FloatWeight:
        """Append zeros."""
        return FloatWeight(self.value.pad(axis, length))


PackedStorage = AffinePackedWeight | CodebookWeight
Storage = FloatWeight | PackedStorage


def concat_weights(parts: Sequence[Storage], axis: int) -> Storage:
    """Join weights of one kind and layout."""
    packed = [part for part in parts if isinstance(part, AffinePackedWeight)]
    if packed:
        return concat_affine(packed, axis)
    coded = [part for part in parts if isinstance(part, CodebookWeight)]
    if coded:
        return concat_codebooks(coded, axis)
    return FloatWeight(concat([part.value for part in parts if isinstance(part, FloatWeight)], axis))


def stack_weights(parts: Sequence[Storage], axis: int = 0) -> Storage:
    """Stack weights of one kind and layout along a new axis."""
    packed = [part for part in parts if isinstance(part, AffinePackedWeight)]
    if packed:
        return stack_affine(packed, axis)
    coded = [part for part in parts if isinstance(part, CodebookWeight)]
    if coded:
        return stack_codebooks(coded, axis)
    return FloatWeight(stack([part.value for part in parts if isinstance(part, FloatWeight)], axis))


@dataclass(frozen=True, slots=True)
class WeightRecord:
    """One logical weight: its name, the component that owns it, its storage, the stored tensors it is made of, and
    the checkpoint they lie in."""

    source_name: str
    component: str
    storage: Storage
    tensors: tuple[str, ...]
    origin: Checkpoint

    @property
    def file(self) -> str:
        """The file that holds the first of its tensors."""
        return self.origin.tensors[self.tensors[0]].file


@dataclass(frozen=True, slots=True)
class WeightBundle:
    """The records of one component, which is all that the rules for its weights are given; "" owns what nobody does."""

    component: str
    records: tuple[WeightRecord, ...]


def bundled(records: Iterable[WeightRecord]) -> list[WeightBundle]:
    """One bundle for each component, in the order of its first record."""
    owned: dict[str, list[WeightRecord]] = {}
    for record in records:
        owned.setdefault(record.component, []).append(record)
    return [WeightBundle(component, tuple(own)) for component, own in owned.items()]
