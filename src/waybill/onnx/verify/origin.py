"""Where an initializer's rows come from: names and order, stated a second time and independently of the exporter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from waybill.config import RotaryConfig
from waybill.config.quantization import QuantizationConfig
from waybill.onnx.verify.decoding import PackedMatrix, StoredTensors
from waybill.weights.dtypes import Array

BANKS = (".experts.gate_up_proj", ".experts.down_proj", ".experts.gate_proj", ".experts.up_proj")
TURNED = (".experts.gate_up_proj.weight", ".experts.down_proj.weight")
"""Banks whose float matrices the checkpoint stores [K, N], gate and up alternating already."""


@dataclass(frozen=True, slots=True)
class Origin:
    """A checkpoint as a prover sees it, by runtime names. `policy` says how a packed weight is packed.

    `paired` gives the rows of a head for a weight that is stored with its rotary pairs side by side, 0 for others.
    """

    stored: StoredTensors
    policy: Callable[[str], QuantizationConfig | None]
    rotary: RotaryConfig | None
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What genai_config.json must say of the model: its tokens, and how many positions it has."""
    paired: Callable[[str], int] = lambda _: 0

    def names(self, weight: str) -> list[str]:
        """The stored tensors of a weight, as the checkpoint spells them; none when it does not have it."""
        return [self.stored.headers[key].name for key in self._keys(weight)]

    def slabs(self, weight: str) -> list[int]:
        """The first axis of each stored tensor of a bank."""
        return [self.stored.headers[key].shape[0] for key in self._keys(weight) if self.stored.headers[key].shape]

    def is_packed(self, weight: str) -> bool:
        """Whether a weight has sidecars, be it under its own name."""
        parts = self.stored.sidecars(weight)
        return bool(parts) and ("weight" in parts or weight not in self.stored.headers)

    def _keys(self, weight: str) -> list[str]:
        if self.is_packed(weight):
            return list(self.stored.sidecars(weight).values())
        return [weight] if weight in self.stored.headers else []

    def floats(self, weight: str, start: int, stop: int, axes: int) -> Array:
        """Rows of a float weight, in the order they have at run time."""
        head = self.paired(weight)
        if not head:
            return self.stored.floats(weight, start, stop, axes)
        places = _stored_row(np.arange(start, stop), head)
        first, last = int(places.min()), int(places.max()) + 1
        rows: Array = self.stored.floats(weight, first, last, axes)[places - first]
        return rows

    def in_order(self, weight: str, matrix: PackedMatrix) -> PackedMatrix:
        """A packed weight whose rows have the order they have at run time."""
        head = self.paired(weight)
        if not head:
            return matrix
        places = _stored_row(np.arange(matrix.rows), head)
        minimums = None if matrix.minimums is None else matrix.minimums[places]
        packed, zeros, scales = (part[places] for part in (matrix.packed, matrix.zeros, matrix.scales))
        return replace(matrix, packed=packed, zeros=zeros, scales=scales, minimums=minimums)

    def rows(self, weight: str) -> int:
        """Rows of one matrix, as its headers state them."""
        if (header := self.stored.headers.get(weight)) is not None:
            return rows_of(weight, header.shape)
        parts, config = self.stored.sidecars(weight), self.policy(weight)
        if "weight_packed" in parts:
            return self.stored.headers[parts["weight_packed"]].shape[0]
        scales = parts.get("scales")
        if scales is None or config is None or len(self.stored.headers[scales].shape) < 2:
            return 0
        return self.stored.headers[scales].shape[-2 if config.method in ("olive", "mxfp4") else -1]


def _stored_row(row: Array, head: int) -> Array:
    """Where a row lies when the pairs of each head are side by side: element i of one half is pair i's."""
    inside = row % head
    return np.asarray(row - inside + 2 * (inside % (head // 2)) + inside // (head // 2))


@dataclass(frozen=True, slots=True)
class Member:
    """A run of rows of a stored matrix, and the rows of the initializer it fills.

    Rows `first` to `first + count` of `weight`, or of one `expert` of a stored bank, become rows `start`,
    `start + step`, … of the initializer's matrix number `slab`. `turned`: they are columns of what is stored.
    """

    weight: str
    first: int
    count: int
    slab: int = 0
    start: int = 0
    step: int = 1
    expert: int | None = None
    turned: bool = False


def rows_of(weight: str, shape: Sequence[int]) -> int:
    """Rows of one matrix of a bank, or else of the whole weight: of a kernel [N, C, k, …] all but its last axis."""
    if len(shape) < 2:
        return math.prod(shape)
    return shape[-2] if weight.endswith((*BANKS, *TURNED)) else math.prod(shape[:-1])


def weight_of(name: str, role: str) -> str:
    """The weight an initializer is a part of: `x.codes` -> `x.weight`; banks have no such ending."""
    if role == "weight":
        return name
    stem = name.rpartition(".")[0]
    return stem if stem.endswith(BANKS) else f"{stem}.weight"


def members_of(weight: str, slabs: int, origin: Origin) -> Iterator[Member]:
    """What a weight of the graph is made of, in any order; names alone decide it."""
    path, _, leaf = weight.rpartition(".")
    if weight.endswith(BANKS):
        banks = {weight, *(f"{path}.{letter}_proj" for letter in ("gate", "up", "down"))}
        if any(count != slabs for bank in banks for count in origin.slabs(bank)):
            return  # another number of experts
        for expert in range(slabs):
            yield from _expert(weight, expert, origin)
    elif weight.endswith(TURNED):
        yield from _turned(path, slabs, origin)
    elif path.endswith(BANKS):
        yield Member(f"{path}_{leaf}", 0, origin.rows(f"{path}_{leaf}"))
    elif path.endswith(".self_attn.qkv_proj"):
        start = 0
        for letter in "qkv":
            name = f"{path.removesuffix('qkv_proj')}{letter}_proj.{leaf}"
            count = origin.rows(name)
            yield Member(name, 0, count, start=start)
            start += count
    else:
        yield Member(weight, 0, origin.rows(weight))


def _expert(bank: str, expert: int, origin: Origin) -> Iterator[Member]:
    """One expert: a slice of a stored bank, gate rows before up rows, or of a bank for each, or projections of their
    own. They alternate. A bank that has biases beside it lies as it is wanted.
    """
    path, _, name = bank.rpartition(".")
    letters = ("gate", "up") if name == "gate_up_proj" else ("down",)
    step = len(letters)
    if f"{bank}_bias" in origin.stored.headers:
        yield Member(bank, 0, origin.rows(bank), expert, expert=expert)
        return
    if origin.names(bank):
        count = origin.rows(bank) // step
        for at in range(step):
            yield Member(bank, at * count, count, expert, at, step, expert)
        return
    for at, letter in enumerate(letters):
        if origin.names(own := f"{path}.{letter}_proj"):
            yield Member(own, 0, origin.rows(own), expert, at, step, expert)
            continue
        weight = f"{path}.{expert}.{letter}_proj.weight"
        yield Member(weight, 0, origin.rows(weight), expert, at, step)


def _turned(bank: str, slabs: int, origin: Origin) -> Iterator[Member]:
    """Every expert of a bank [E, K, N]; nothing where there is another number of them."""
    header = origin.stored.headers.get(bank)
    if header is None or len(header.shape) != 3:
        yield Member(bank, 0, 0)
    elif header.shape[0] == slabs:
        for expert in range(slabs):
            yield Member(bank, 0, header.shape[-1], expert, expert=expert, turned=True)
