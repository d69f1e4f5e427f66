"""A package against its checkpoint: every initializer, value by value.

Codes and zero points are compared as integers, scales as numbers, floats bit by bit after the stated cast. One weight
at a time is in memory, and of its unpacked values a few rows.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from waybill.errors import PackageMismatch, WaybillError, some
from waybill.onnx.verify.compare import OTHER, Held, Verdicts, compare_floats, compare_packed, compare_table
from waybill.onnx.verify.entries import Check, ComponentEntries, Entry, PackageEntries
from waybill.onnx.verify.float8 import compare_floats8
from waybill.onnx.verify.origin import BANKS, TURNED, Origin, members_of, rows_of, weight_of
from waybill.onnx.verify.structure import mismatch

THREADS = 2
"""Weights in memory at once."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a package says of one weight: it is these initializers, each made from these stored tensors."""

    weight: str
    parts: Mapping[str, Entry]
    sources: tuple[frozenset[str], ...]


def prove(
    root: Path, component: ComponentEntries, sound: Sequence[Entry], origin: Origin, progress: Callable[[int], None]
) -> tuple[int, list[WaybillError]]:
    """How many weights were compared, and everything that differs; only what is `sound` can be read."""
    claims = list(_claims(component, {entry.name for entry in sound}))

    def one(claim: Claim) -> list[WaybillError]:
        verdicts = Verdicts()
        entry = next(iter(claim.parts.values()))
        try:
            _prove(root, claim, origin, verdicts)
        except WaybillError as error:
            verdicts.add(entry, error)
        progress(sum(part.nbytes for part in claim.parts.values()))
        return list(verdicts.problems.values())

    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), "waybill-prove") as pool:
        found = [problem for problems in pool.map(one, claims) for problem in problems]
    tables = Verdicts()
    for entry in sound:
        if entry.role == "table":
            compare_table(Held(root, entry, 1, entry.shape[0], tables), origin.rotary)
            progress(entry.nbytes)
    found += tables.problems.values()
    return len(claims), found


def unaccounted(package: PackageEntries, origin: Origin) -> Iterator[WaybillError]:
    """Stored tensors that no initializer was made from, and sources that are not stored."""
    named = set(package.dropped)
    for component in package.components.values():
        named |= component.made_from | {name for check in _shared(component) for name in check.sources}
    held = {header.name for header in origin.stored.headers.values()}
    for names, what, expected, found in (
        (held - named, "the package does not account for every tensor of the checkpoint",
         "an initializer made from it, or a reason to drop it", "no word of"),
        (named - held, "the package was made from tensors the checkpoint does not have",
         "tensors of the checkpoint", "no tensor of this name for"),
    ):  # fmt: skip
        if names:
            yield PackageMismatch(
                what, where=some(sorted(names)), expected=expected, found=f"{found} {len(names)} tensors", fix=OTHER
            )


def _claims(component: ComponentEntries, sound: set[str]) -> Iterator[Claim]:
    """The package's weights, and those it leaves out because they are another's."""
    parts: dict[str, dict[str, Entry]] = defaultdict(dict)
    for entry in component.initializers.values():
        if entry.role != "table":
            parts[weight_of(entry.name, entry.role)][entry.role] = entry
    whole = {weight: entries for weight, entries in parts.items() if all(e.name in sound for e in entries.values())}
    for weight, entries in whole.items():
        yield Claim(weight, entries, tuple(frozenset(entry.sources) for entry in entries.values()))
    shared: dict[str, Claim] = {}
    for check in _shared(component):
        twin, weight = _weights(check)
        if twin in whole:
            shared[weight] = Claim(weight, whole[twin], (frozenset(check.sources),))
    yield from shared.values()


def _shared(component: ComponentEntries) -> list[Check]:
    """Weights that are left out because a weight that is there is the same."""
    held = {weight_of(entry.name, entry.role) for entry in component.initializers.values()}
    return [check for check in component.checked if check.same_as is not None and _weights(check)[0] in held]


def _weights(check: Check) -> tuple[str, str]:
    """The weight that is there, and the one that is left out."""
    role = "weight" if check.name.endswith(".weight") else "part"
    return weight_of(check.same_as or "", role), weight_of(check.name, role)


def _prove(root: Path, claim: Claim, origin: Origin, verdicts: Verdicts) -> None:
    """Compare one weight with its sources."""
    entry = claim.parts.get("scales") or next(iter(claim.parts.values()))
    slabs = entry.shape[0] if claim.weight.endswith((*BANKS, *TURNED)) else 1
    members = list(members_of(claim.weight, slabs, origin))
    if absent := [member.weight for member in members if not origin.names(member.weight)]:
        found = f"no tensor of {some(absent)}"
        verdicts.add(entry, mismatch("a weight is not in the checkpoint", entry, claim.weight, found, OTHER))
        return
    rows = rows_of(claim.weight, entry.shape)
    brought = sum(member.count for member in members)
    if brought != slabs * rows:
        expected, found = f"{brought:,} rows, as in the checkpoint", f"{slabs * rows:,} rows"
        verdicts.add(entry, mismatch("an initializer has other rows than its sources", entry, expected, found, OTHER))
        return
    wanted = {name for member in members for name in origin.names(member.weight)}
    for stated in claim.sources:
        if differ := sorted(wanted ^ stated):
            expected, found = some(sorted(wanted)), f"other sources: {some(differ)}"
            verdicts.add(entry, mismatch("a weight was made from other tensors", entry, expected, found, OTHER))
    forms = {"weight"}, {"codes", "scales"}, {"codes", "scales", "zero_points"}
    if claim.parts.keys() - {"minimums"} not in forms or claim.parts.keys() == {"weight", "minimums"}:
        found = ", ".join(sorted(claim.parts))
        verdicts.add(entry, mismatch("a weight lacks a part", entry, "codes and scales", found))
        return
    held = {role: Held(root, part, slabs, rows, verdicts) for role, part in claim.parts.items()}
    for member in members:
        if "weight" in held:
            compare_floats(held["weight"], member, origin)
        elif entry.table:
            compare_floats8(held, member, origin)
        else:
            compare_packed(held, member, origin)
