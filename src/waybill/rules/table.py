"""Rule types and their compiled form.

One notation says it all: what a rule's source has and its target lacks is merged (members are concatenated, an index
is stacked), what the target has and the source lacks is split. So "q, k, v make qkv" and "a bank of experts falls
apart into experts" are the same kind of row, read in opposite directions, and composing the two cancels.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from waybill.rules.template import Template, lift


@dataclass(frozen=True, slots=True)
class Move:
    """Rename, concat, stack or split, by comparing two templates; members lie along `axis` of the unstacked tensor.

    `turned`, of a mere rename: matrices lie [K, N] where they are float, and [N, K] where they are packed.
    """

    source: str
    target: str
    axis: int = 0
    turned: bool = False


@dataclass(frozen=True, slots=True)
class Drop:
    """Tensors of this name are not needed, for the stated reason."""

    source: str
    why: str


@dataclass(frozen=True, slots=True)
class DropUnder:
    """Everything below this literal path is not needed, for the stated reason."""

    path: str
    why: str


class Place(NamedTuple):
    """Where a name goes: a target, the position in its stack, and the member of its concat (None: not merged).

    `turned`: its float matrices have their axes swapped.
    """

    target: str
    stack: int | None = None
    member: int | None = None
    turned: bool = False


class Split(NamedTuple):
    """A name falls apart: its target template, the indices already known, the new index and the member axis."""

    template: Template
    indices: dict[str, int]
    variable: str | None
    axis: int


class _Row(NamedTuple):
    source: Template
    target: Template
    member: int | None
    stacked: str | None
    split: str | None
    axis: int
    turned: bool


class RuleTable:
    """A compiled table: looks names up in constant time; a name no row mentions keeps its name."""

    def __init__(self, rules: Iterable[Move | Drop | DropUnder]) -> None:
        self._rows: dict[str, _Row] = {}
        self._drops: dict[str, str] = {}
        self._under: dict[str, str] = {}
        self._merges: dict[str, _Row] = {}
        for rule in rules:
            if isinstance(rule, DropUnder):
                self._under[rule.path] = rule.why
                continue
            for key, row in _compile(rule):
                if key in self._rows or key in self._drops:
                    raise ValueError(f"two rules claim {key}")
                if isinstance(row, str):
                    self._drops[key] = row
                else:
                    self._rows[key] = row
                    if not row.split and not row.target.members:
                        self._merges[row.target.forms()[0]] = row
        self._deepest = max((path.count(".") + 1 for path in self._under), default=0)

    def dropped(self, name: str) -> str | None:
        """Why this name is not needed, or None when it is."""
        if (why := self._drops.get(lift(name)[0])) is not None:
            return why
        segments = name.split(".", self._deepest)
        for end in range(1, len(segments)):
            if (why := self._under.get(".".join(segments[:end]))) is not None:
                return why
        return None

    def route(self, name: str) -> Place | Split:
        """Where a name goes."""
        key, numbers = lift(name)
        row = self._rows.get(key)
        if row is None:
            return Place(name)
        indices = dict(zip(row.source.variables, numbers, strict=True))
        if row.split is not None or (row.target.members and not row.source.members):
            return Split(row.target, indices, row.split, row.axis)
        same_members = row.member if row.target.members else None
        stack = indices[row.stacked] if row.stacked else None
        member = None if row.target.members else row.member
        return Place(row.target.fill(indices, same_members), stack, member, row.turned)

    def is_made(self, name: str) -> bool:
        """Whether this name is one that the rules make from others: nothing may arrive under it."""
        key, _ = lift(name)
        return key in self._merges and key not in self._rows

    def sources_of(self, target: str, stack: int = 0) -> list[str]:
        """The names that make one target, by member, at one position of its stack."""
        key, numbers = lift(target)
        row = self._merges.get(key)
        if row is None:
            return [target]
        indices = dict(zip(row.target.variables, numbers, strict=True))
        if row.stacked:
            indices[row.stacked] = stack
        members = range(len(row.source.members)) if row.source.members else (None,)
        return [row.source.fill(indices, member) for member in members]


def _compile(rule: Move | Drop) -> Iterable[tuple[str, _Row | str]]:
    source = Template.parse(rule.source)
    if isinstance(rule, Drop):
        return [(key, rule.why) for key in source.forms()]
    target = Template.parse(rule.target)
    stacked = [v for v in source.variables if v not in target.variables]
    split = [v for v in target.variables if v not in source.variables]
    both_ways = (stacked or (source.members and not target.members)) and (
        split or (target.members and not source.members)
    )
    renamed = source.members and target.members
    if len(stacked) > 1 or len(split) > 1 or both_ways or (renamed and len(source.members) != len(target.members)):
        raise ValueError(f"a rule merges or splits, not both: {rule}")
    members = range(len(source.members)) if source.members else (None,)
    stack, apart = (found[0] if found else None for found in (stacked, split))
    row = _Row(source, target, None, stack, apart, rule.axis, rule.turned)
    return [(key, row._replace(member=member)) for key, member in zip(source.forms(), members, strict=True)]
