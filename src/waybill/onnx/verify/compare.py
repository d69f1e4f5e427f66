"""Rows of a package against rows of a checkpoint, and the first element that differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from waybill.checkpoint import TensorHeader
from waybill.config import RotaryConfig
from waybill.config.gguf import AS_FLOATS, METHOD
from waybill.errors import BadPackage, WaybillError
from waybill.onnx.verify.decoding import PackedMatrix, fields, packed_matrix, read_at
from waybill.onnx.verify.entries import Entry
from waybill.onnx.verify.origin import Member, Origin
from waybill.onnx.verify.structure import locate, mismatch
from waybill.weights.dtypes import NUMPY_DTYPES, Array

VALUES = 1 << 21
"""Unpacked values that are compared together."""
OTHER = "verify with the checkpoint the package was made from, or export it again"
FLOATS = ("scales", "minimums")
"""Parts of a packed weight that are floats, of one dtype."""
BITS = {"F32": np.uint32, "F16": np.uint16, "BF16": np.uint16}
ROUNDING = {"F32": 2.0**-22, "F16": 2.0**-10, "BF16": 2.0**-7}
"""How far a cosine may be from its exact value: machines compute the last bit differently."""


@dataclass(slots=True)
class Verdicts:
    """What is wrong with some initializers: the first problem of each."""

    problems: dict[str, WaybillError] = field(default_factory=dict)

    def add(self, entry: Entry, problem: WaybillError) -> None:
        """Keep the problem unless the initializer has one."""
        self.problems.setdefault(entry.name, problem)


@dataclass(frozen=True, slots=True)
class Held:
    """An initializer as the package holds it: `slabs` matrices of `rows` rows."""

    root: Path
    entry: Entry
    slabs: int
    rows: int
    verdicts: Verdicts

    def read(self, member: Member, start: int, stop: int) -> Array:
        """The bytes [stop - start, …] of some of a member's rows."""
        stride = self.entry.nbytes // (self.slabs * self.rows)
        first = member.slab * self.rows + member.start + start * member.step
        span = (stop - start - 1) * member.step + 1
        out = np.empty(span * stride, np.uint8)
        _fill(locate(self.root, self.entry.file), self.entry.offset + first * stride, out)
        return out.reshape(span, stride)[:: member.step]

    def differ(self, member: Member, start: int, differs: Array, expected: Array, found: Array) -> None:
        """Report the first of the elements that differ, by its place in the initializer."""
        row, column = (int(at) for at in np.argwhere(differs)[0])
        place = f"row {member.start + (start + row) * member.step}, column {column}"
        if self.slabs > 1:
            place = f"matrix {member.slab}, {place}"
        source = f", as in {member.weight} row {member.first + start + row}"
        what = "an initializer does not hold what the checkpoint does"
        problem = mismatch(
            what,
            self.entry,
            f"{expected[row, column]} at {place}{source}",
            f"{found[row, column]}; {int(differs.sum()):,} of {differs.size:,} values around it differ",
            OTHER,
        )
        self.verdicts.add(self.entry, problem)

    def refuse(self, expected: str, found: str) -> None:
        """Report something that keeps values from being compared."""
        problem = mismatch("an initializer has another form than its source", self.entry, expected, found, OTHER)
        self.verdicts.add(self.entry, problem)


def compare_floats(held: Held, member: Member, origin: Origin) -> None:
    """A float weight: equal bit by bit after the cast to the package's dtype."""
    header = origin.stored.headers.get(member.weight)
    floats = ("F64", "F32", "F16", "BF16", *AS_FLOATS)
    if header is None or header.dtype not in floats or held.entry.dtype not in BITS:
        held.refuse("a float initializer for float numbers", str(header or "a packed weight"))
        return
    columns = held.entry.nbytes // (held.slabs * held.rows * NUMPY_DTYPES[held.entry.dtype].itemsize)
    if columns != (header.shape[-2 if member.turned else -1] if len(header.shape) > 1 else 1):
        held.refuse(f"rows of {columns:,} elements", str(header))
        return
    rows = _rows(header, member, columns, origin)
    for start, stop in chunks(member.count, columns):
        expected = cast(rows(start, stop), held.entry.dtype)
        found = held.read(member, start, stop).copy().view(NUMPY_DTYPES[held.entry.dtype])
        bits = BITS[held.entry.dtype]
        differs = expected.view(bits) != found.view(bits)
        if differs.any():
            differs &= ~(np.isnan(expected) & np.isnan(found))
        if differs.any():
            held.differ(member, start, differs, expected, found)
            return


def _rows(header: TensorHeader, member: Member, columns: int, origin: Origin) -> Callable[[int, int], Array]:
    """Reads some of a member's rows, [stop - start, columns]; a matrix that lies turned is read whole."""
    if member.turned and member.expert is not None:
        whole = np.ascontiguousarray(origin.stored.read(member.weight, member.expert, member.expert + 1)[0].T)
        return lambda start, stop: whole[start:stop]
    axes = max(len(header.shape) - 1, 1)
    skip = member.first + (member.expert * header.shape[-2] if member.expert is not None else 0)
    return lambda start, stop: origin.floats(member.weight, skip + start, skip + stop, axes).reshape(-1, columns)


def cast(values: Array, dtype: str) -> Array:
    """Round to nearest even; a bfloat16 is the upper half of a float32."""
    if values.dtype == NUMPY_DTYPES["BF16"]:
        values = (values.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(NUMPY_DTYPES[dtype])


def compare_packed(held: Mapping[str, Held], member: Member, origin: Origin) -> None:
    """A packed weight: codes and zero points equal as integers, scales as numbers, block by block."""
    codes = held["codes"]
    config = origin.policy(member.weight)
    if config is None or not (origin.is_packed(member.weight) or config.method == METHOD):
        codes.refuse("a packed initializer for a packed weight", f"{member.weight} is float in the checkpoint")
        return
    matrix = origin.in_order(member.weight, packed_matrix(origin.stored, member.weight, config, member.expert))
    if not _blocks_fit(held, matrix):
        return
    entry, blocks = codes.entry, held["scales"].entry.shape[-1]
    group_of = np.arange(blocks) * entry.block // matrix.group
    for start, stop in chunks(member.count, blocks * entry.block):
        rows = slice(member.first + start, member.first + stop)
        wanted = np.zeros((stop - start, blocks * entry.block), np.uint8)
        wanted[:, : matrix.columns] = matrix.codes(rows.start, rows.stop)
        compare_values(codes, member, start, wanted, fields(codes.read(member, start, stop), entry.bits))
        for part, stated in ((held["scales"], matrix.scales), (held.get("minimums"), matrix.minimums)):
            if part is not None and stated is not None:
                found = part.read(member, start, stop).copy().view(NUMPY_DTYPES[part.entry.dtype])
                compare_values(part, member, start, numbers(stated[rows][:, group_of]), numbers(found))
        zeros = matrix.zeros[rows][:, group_of]
        if "zero_points" in held:
            packed = held["zero_points"].read(member, start, stop)
            wanted = np.zeros((stop - start, packed.shape[1] * 8 // entry.bits), np.uint8)
            wanted[:, :blocks] = zeros
            compare_values(held["zero_points"], member, start, wanted, fields(packed, entry.bits))
        else:
            midpoint = np.full_like(zeros, 1 << (entry.bits - 1))
            compare_values(codes, member, start, zeros, midpoint, "left out, and taken to be ")


def _blocks_fit(held: Mapping[str, Held], matrix: PackedMatrix) -> bool:
    """Whether the package's blocks lie inside the checkpoint's groups and cover K."""
    codes, scales = held["codes"], held["scales"]
    entry, blocks = codes.entry, scales.entry.shape[-1]
    inside = matrix.group % entry.block == 0 or matrix.group >= matrix.columns
    item = NUMPY_DTYPES[scales.entry.dtype].itemsize
    sizes = {
        "codes": blocks * entry.block * entry.bits // 8,
        "scales": blocks * item,
        "minimums": blocks * item,
        "zero_points": -(-blocks * entry.bits // 8),
    }
    fit = all(part.entry.nbytes == sizes[role] * part.slabs * part.rows for role, part in held.items())
    roles = ("minimums" in held) == (matrix.minimums is not None)
    floats = scales.entry.dtype != "U8" and all(
        part.entry.dtype == (scales.entry.dtype if role in FLOATS else "U8") for role, part in held.items()
    )
    whole = entry.bits == matrix.bits and inside and blocks == -(-matrix.columns // entry.block)
    if whole and fit and floats and roles:
        return True
    with_minimums = ", with minimums" if matrix.minimums is not None else ""
    found = f"{entry.bits} bits in {blocks} blocks of {entry.block}: {entry}, scales {scales.entry}; {', '.join(held)}"
    codes.refuse(f"{matrix.bits} bits, {matrix.columns} columns in groups of {matrix.group}{with_minimums}", found)
    return False


def compare_values(held: Held, member: Member, start: int, expected: Array, found: Array, note: str = "") -> None:
    """Rows from `start` on of a member, element by element."""
    if np.array_equal(expected, found):
        return
    shown: Any = np.char.add(note, found.astype(str)) if note else found
    held.differ(member, start, expected != found, expected, shown)


def numbers(values: Array) -> Array:
    """Any floats as float64, which holds them all."""
    with np.errstate(invalid="ignore"):
        return values.astype(np.float64)


def compare_table(held: Held, rotary: RotaryConfig | None) -> None:
    """A cosine or sine table, computed again in float64 from float32 angles, within rounding."""
    function = {"cos_cache": np.cos, "sin_cache": np.sin}.get(held.entry.name)
    if function is None or rotary is None or held.entry.dtype not in ROUNDING:
        held.refuse("cos_cache or sin_cache", "a table that cannot be computed from the config")
        return
    frequencies, factor = rotary.frequencies()
    if held.entry.shape != (rotary.max_position, len(frequencies)):
        held.refuse(f"[{rotary.max_position}, {len(frequencies)}]", str(held.entry))
        return
    member = Member(f"the config, {held.entry.name}", 0, held.rows)
    for start, stop in chunks(held.rows, len(frequencies)):
        angles = np.arange(start, stop, dtype=np.float32)[:, None] * np.asarray(frequencies, np.float32)
        expected = function(angles.astype(np.float64)) * factor
        found = numbers(held.read(member, start, stop).copy().view(NUMPY_DTYPES[held.entry.dtype]))
        differs = ~(np.abs(expected - found) <= ROUNDING[held.entry.dtype] * max(abs(factor), 1.0))
        if differs.any():
            held.differ(member, start, differs, expected, found)
            return


def chunks(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Runs of rows, which begin at multiples of 32."""
    each = max(VALUES // max(columns, 1) // 32, 1) * 32
    return ((start, min(start + each, rows)) for start in range(0, rows, each))


def _fill(path: Path, at: int, out: Array) -> None:
    done = read_at(path, at, out)
    if done < out.nbytes:
        raise BadPackage(
            "a file of the package changed while it was read",
            where=str(path),
            expected=f"{out.nbytes:,} bytes at {at:,}",
            found=f"{done:,} bytes",
            fix="leave the package alone while it is verified",
        )
