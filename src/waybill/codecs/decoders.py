"""Decoders: pure functions from boxes of stored sidecars to boxes of the canonical form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from waybill.codecs.words import AWQ_ORDER, ROWS, fields, transpose, transpose_nibbles
from waybill.errors import ActOrder, PackingMismatch, ZeroPointMismatch
from waybill.weights.dtypes import Array
from waybill.weights.lazy import LazyTensor

Box = tuple[int, ...]

STRIP = 1 << 15
"""Words of each slot that are transposed together."""


class ColumnWords(NamedTuple):
    """Codes packed along K in the words of a column: int32 [K·bits/32, N] to bytes [N, G, group·bits/8].

    A word transposed is a word of the result: on both sides the first element lies in the low bits.
    """

    words: LazyTensor
    bits: int
    group: int
    g_idx: LazyTensor | None = None
    name: str = ""

    def inputs(self, start: Box, extent: Box) -> tuple[LazyTensor, ...]:
        """The word rows of the wanted groups, the columns of the wanted outputs, the group numbers of the rows."""
        per_group = self.group * self.bits
        first = start[1] * per_group // 32
        last = min(-(-(start[1] + extent[1]) * per_group // 32), self.words.shape[0])
        words = self.words.narrow(0, first, last - first).narrow(1, start[0], extent[0])
        if self.g_idx is None:
            return (words,)
        rows = min(extent[1] * self.group, self.g_idx.shape[0] - start[1] * self.group)
        return words, self.g_idx.narrow(0, start[1] * self.group, rows)

    def decode(self, arrays: Sequence[Array], start: Box, extent: Box) -> Array:
        """Transpose; a last group that K does not fill is filled with zeros."""
        if self.g_idx is not None:
            _require_trivial(arrays[1], start[1], self)
        words = arrays[0].view(np.uint32)
        out = np.empty(words.shape[::-1], np.uint32)
        transpose(words, out)
        return _grouped(out.view(np.uint8), extent)


class RowNibbles(NamedTuple):
    """4-bit codes packed along N in interleaved order: int32 [K, N/8] to bytes [N, G, group/2]."""

    words: LazyTensor
    group: int

    def inputs(self, start: Box, extent: Box) -> tuple[LazyTensor, ...]:
        """The rows of the wanted groups, the words that hold the wanted outputs."""
        first, last = start[0] // 8, -(-(start[0] + extent[0]) // 8)
        rows = min(extent[1] * self.group, self.words.shape[0] - start[1] * self.group)
        return (self.words.narrow(0, start[1] * self.group, rows).narrow(1, first, last - first),)

    def decode(self, arrays: Sequence[Array], start: Box, extent: Box) -> Array:
        """Transpose nibbles within words, then words; output 8c + AWQ_ORDER[s] comes from slot s.

        A strip of rows at a time, so that what lies between stays in the cache.
        """
        words = arrays[0].view(np.uint32)
        rows, columns = words.shape
        out = np.empty((columns * 8, rows // 8), np.uint32)
        height = max(STRIP // columns // ROWS, 1) * ROWS
        for first in range(0, rows // 8, height):
            strip = out[:, first : first + height]
            for slot, part in enumerate(transpose_nibbles(words[8 * first : 8 * (first + height)])):
                transpose(part, strip[AWQ_ORDER[slot] :: 8])
        skip = start[0] % 8
        return _grouped(out[skip : skip + extent[0]].view(np.uint8), extent)


@dataclass(frozen=True, slots=True)
class RowBytes:
    """Codes already packed along K in bytes, rows of any length: uint8 [..., N, ceil(K·bits/8)] to whole groups."""

    octets: LazyTensor
    per_group: int
    flip: int = 0
    """Bits to turn in every byte: the sign, where bytes are signed."""

    def inputs(self, start: Box, extent: Box) -> tuple[LazyTensor, ...]:
        """The bytes of the wanted groups."""
        value = self.octets.box(start[:-2], extent[:-2])
        first = start[-2] * self.per_group
        last = min((start[-2] + extent[-2]) * self.per_group, value.shape[-1])
        return (value.narrow(len(value.shape) - 1, first, last - first),)

    def decode(self, arrays: Sequence[Array], start: Box, extent: Box) -> Array:
        """Fill up the last group with zeros."""
        octets = arrays[0] ^ np.uint8(self.flip) if self.flip else arrays[0]
        return _grouped(octets, extent)


class ZeroPoints(NamedTuple):
    """Zero points packed along N, [G, N·bits/32] words, or along G, [..., N, ceil(G·bits/8)] bytes; to [..., N, G].

    `plus` is added to every word before its fields are taken: some producers subtract a constant from the whole word.
    """

    packed: LazyTensor
    bits: int
    along_outputs: bool
    plus: int = 0
    order: tuple[int, ...] = ()
    midpoint_of: str = ""
    """Set for a weight that the metadata calls symmetric: its name, should a zero point not be the midpoint."""

    def inputs(self, start: Box, extent: Box) -> tuple[LazyTensor, ...]:
        """Whole words or bytes around the wanted fields."""
        group, groups = start[-1], extent[-1]
        if self.along_outputs:
            per_word = 32 // self.bits
            first, last = start[0] // per_word, -(-(start[0] + extent[0]) // per_word)
            return (self.packed.narrow(0, group, groups).narrow(1, first, last - first),)
        value = self.packed.box(start[:-1], extent[:-1])
        per_byte = 8 // self.bits
        first, last = group // per_byte, -(-(group + groups) // per_byte)
        return (value.narrow(len(value.shape) - 1, first, last - first),)

    def decode(self, arrays: Sequence[Array], start: Box, extent: Box) -> Array:
        """Unpack, reorder, cut."""
        group, groups = start[-1], extent[-1]
        if not self.along_outputs:
            skip = group % (8 // self.bits)
            values = fields(arrays[0], self.bits)[..., skip : skip + groups]
        else:
            values = fields(arrays[0].view(np.uint32) + np.uint32(self.plus), self.bits)
            if self.order:
                in_order = np.empty_like(values)
                for slot, output in enumerate(self.order):
                    in_order[:, output :: len(self.order)] = values[:, slot :: len(self.order)]
                values = in_order
            skip = start[0] % (32 // self.bits)
            values = values[:, skip : skip + extent[0]].T
        if self.midpoint_of and (values != 1 << (self.bits - 1)).any():
            raise _not_symmetric(self.midpoint_of, self.bits, values)
        return values


@dataclass(frozen=True, slots=True)
class Raised:
    """Signed zero points int8 [n, G], raised by half of their range."""

    zeros: LazyTensor
    bits: int
    name: str
    is_symmetric: bool

    def inputs(self, start: Box, extent: Box) -> tuple[LazyTensor, ...]:
        """The same box."""
        return (self.zeros.box(start, extent),)

    def decode(self, arrays: Sequence[Array], start: Box, extent: Box) -> Array:
        """Raise; what the codes could not hold is damage."""
        midpoint = 1 << (self.bits - 1)
        values = arrays[0].astype(np.int16) + np.int16(midpoint)
        if ((values < 0) | (values >= 2 * midpoint)).any():
            raise ZeroPointMismatch(
                "a zero point lies outside the range of the codes",
                where=self.name,
                expected=f"{-midpoint} to {midpoint - 1}",
                found=f"{int(arrays[0].min())} to {int(arrays[0].max())}",
                fix="correct num_bits in the quantization metadata, or download the file again",
            )
        if self.is_symmetric and (values != midpoint).any():
            raise _not_symmetric(self.name, self.bits, values)
        return values.astype(np.uint8)


@dataclass(frozen=True, slots=True)
class Spread:
    """Numbers [ceil(N/rows), G] that `rows` outputs share, to [N, G]."""

    value: LazyTensor
    rows: int

    def inputs(self, start: Box, extent: Box) -> tuple[LazyTensor, ...]:
        """The numbers of the wanted outputs."""
        first, last = start[0] // self.rows, -(-(start[0] + extent[0]) // self.rows)
        return (self.value.narrow(0, first, last - first).narrow(1, start[1], extent[1]),)

    def decode(self, arrays: Sequence[Array], start: Box, extent: Box) -> Array:
        """Repeat, cut."""
        skip = start[0] % self.rows
        return arrays[0].repeat(self.rows, axis=0)[skip : skip + extent[0]]


@dataclass(frozen=True, slots=True)
class Witnessed:
    """Scales [N, G] as they are, and with them whatever the file says once more about the weight: they are few and
    always read, so that the codes may go straight to their place."""

    scales: LazyTensor
    shape: LazyTensor | None
    g_idx: LazyTensor | None
    size: tuple[int, int]
    group: int
    name: str

    def inputs(self, start: Box, extent: Box) -> tuple[LazyTensor, ...]:
        """The same box; the stated shape; the group numbers of the wanted groups."""
        wanted = [self.scales.box(start, extent)]
        if self.shape is not None:
            wanted.append(self.shape)
        if self.g_idx is not None:
            first = start[1] * self.group
            wanted.append(self.g_idx.narrow(0, first, min(extent[1] * self.group, self.size[1] - first)))
        return tuple(wanted)

    def decode(self, arrays: Sequence[Array], start: Box, extent: Box) -> Array:
        """Hear the witnesses."""
        if self.shape is not None and tuple(arrays[1].tolist()) != self.size:
            raise PackingMismatch(
                "a packed weight states another shape than its parts have",
                where=self.name,
                expected=f"weight_shape {list(self.size)}",
                found=str(arrays[1].tolist()),
                fix="download the file again; rows that do not fill whole words are not supported",
            )
        if self.g_idx is not None:
            _require_trivial(arrays[-1], start[1], self)
        return arrays[0]


def _require_trivial(g_idx: Array, first_group: int, decoder: ColumnWords | Witnessed) -> None:
    """Group numbers must run in order: a permutation is act-order, whatever the metadata says."""
    expected = np.arange(len(g_idx), dtype=np.int32) // decoder.group + first_group
    if not np.array_equal(g_idx, expected):
        at = int(np.flatnonzero(g_idx != expected)[0])
        raise ActOrder(
            "the groups of a packed weight are permuted",
            where=decoder.name,
            expected="g_idx[k] = k // group",
            found=f"g_idx[{at + first_group * decoder.group}] = {int(g_idx[at])}",
            fix="use an export with desc_act false or static_groups true",
        )


def _not_symmetric(name: str, bits: int, values: Array) -> ZeroPointMismatch:
    midpoint = 1 << (bits - 1)
    found = int(values[values != midpoint].flat[0])
    return ZeroPointMismatch(
        "a weight that the metadata calls symmetric has other zero points",
        where=name,
        expected=f"{midpoint} everywhere",
        found=f"{found} among them"
        + ("; is checkpoint_format right?" if found in (midpoint - 1, midpoint + 1) else ""),
        fix="correct sym or checkpoint_format in the quantization metadata",
    )


def _grouped(octets: Array, extent: Box) -> Array:
    """Bytes [..., N, n] as [..., N, G, B], zeros after the last."""
    whole = extent[-2] * extent[-1]
    if octets.shape[-1] == whole:
        return octets.reshape(extent)
    out = np.zeros((*extent[:-2], whole), np.uint8)
    out[..., : octets.shape[-1]] = octets
    return out.reshape(extent)
