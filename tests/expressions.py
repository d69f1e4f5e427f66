"""Random lazy expressions, each beside the same expression in numpy.

The numpy twin does not hold values but element numbers: `ids[x]` says which stored element lands at x, and -1 that
nothing does. Values, file places and byte counts all follow from the numbers, whatever the dtypes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from checkpoints import Recipe
from waybill.checkpoint import Checkpoint, TensorHeader, read_checkpoint
from waybill.weights import LazyTensor, concat, stack, stored

Array = np.ndarray[Any, np.dtype[Any]]
FLOATS: Final = {
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
SHAPES: Final = (
    (), (0,), (1,), (5,), (3, 0), (1, 7), (6, 1), (4, 5), (7, 600), (3, 4, 5), (2, 1, 6), (2, 3, 2, 5), (2, 5, 700),
    (2, 130, 3),
)  # fmt: skip
"""No axis, no element, one element, rows shorter and longer than 1024 bytes, up to four axes."""


@dataclass(frozen=True)
class Twin:
    """A lazy tensor, and the number of the stored element at each of its places."""

    lazy: LazyTensor
    ids: Array


@dataclass(frozen=True)
class Pool:
    """A real checkpoint of small tensors in every float dtype, whose elements are numbered through."""

    checkpoint: Checkpoint
    arrays: dict[str, Array]
    first: dict[str, int]

    def ids_of(self, header: TensorHeader) -> Array:
        """The numbers of a tensor's elements."""
        first = self.first[header.name]
        return np.arange(first, first + self.arrays[header.name].size).reshape(header.shape)

    def leaves(self) -> list[Twin]:
        """Every stored tensor as it is."""
        return [Twin(stored(header), self.ids_of(header)) for header in self.checkpoint.tensors.values()]

    def values(self, ids: Array, dtype: str) -> Array:
        """What a tensor of `dtype` holds when these elements land in it; the last one, number -1, is padding."""
        flat = [array.reshape(-1).astype(FLOATS[dtype]) for array in self.arrays.values()]
        return np.concatenate([*flat, np.zeros(1, FLOATS[dtype])])[ids]

    def byte_counts(self, ids: Array) -> Array:
        """How often each byte of the file is needed."""
        size = self.checkpoint.shards[0].size
        counts = np.zeros(size, int)
        for header in self.checkpoint.tensors.values():
            item = FLOATS[header.dtype].itemsize
            of_tensor = self.ids_of(header).reshape(-1)
            need = np.bincount(ids[(ids >= 0)].reshape(-1), minlength=int(of_tensor[-1]) + 1 if of_tensor.size else 0)
            counts[header.offset : header.offset + header.nbytes] = np.repeat(need[of_tensor], item)
        return counts


def write_pool(folder: Path) -> Pool:
    """Every shape in every dtype, in one file."""
    random = np.random.default_rng(7)
    arrays = {
        f"{tag}-{'x'.join(map(str, shape)) or 'scalar'}": np.asarray(random.standard_normal(shape)).astype(dtype)
        for tag, dtype in FLOATS.items()
        for shape in SHAPES
    }
    checkpoint = read_checkpoint(Recipe({}, arrays).write(folder))
    sizes = [array.size for array in arrays.values()]
    first = dict(zip(arrays, np.cumsum([0, *sizes[:-1]]).tolist(), strict=True))
    return Pool(checkpoint, arrays, first)


@st.composite
def twins(draw: st.DrawFn, leaves: list[Twin], depth: int = 4) -> Twin:
    """A composition of narrow, select, transpose, pad, concat and stack, at most `depth` deep."""
    if depth == 0 or draw(st.integers(0, 4)) == 0:
        return draw(st.sampled_from(leaves))
    twin = draw(twins(leaves, depth - 1))
    ndim = twin.ids.ndim
    kinds = ["stack"]
    if ndim:
        kinds += ["narrow", "narrow", "pad", "concat", "concat"]
        kinds += ["select"] if max(twin.ids.shape) > 0 else []
        kinds += ["transpose"] * 3 if ndim == 2 else []
    kind = draw(st.sampled_from(kinds))
    if kind == "transpose":
        return Twin(twin.lazy.transpose(), twin.ids.T)
    if kind in ("concat", "stack"):
        others = [draw(twins(leaves, depth - 1)) for _ in range(draw(st.integers(0, 2)))]
        parts = [twin, *(other if other.ids.ndim == ndim else twin for other in others)]
        axis = draw(st.integers(0, ndim - 1)) if kind == "concat" else None
        return _join(draw, parts, axis)
    axes = [axis for axis in range(ndim) if kind != "select" or twin.ids.shape[axis]]
    axis = draw(st.sampled_from(axes))
    size = twin.ids.shape[axis]
    if kind == "narrow":
        return _narrow(draw, twin, axis, size - draw(st.integers(0, size)))
    if kind == "select":
        index = draw(st.integers(0, size - 1))
        return Twin(twin.lazy.select(axis, index), twin.ids.take(index, axis))
    more = draw(st.integers(0, 5))
    width = [(0, more if a == axis else 0) for a in range(ndim)]
    return Twin(twin.lazy.pad(axis, size + more), np.pad(twin.ids, width, constant_values=-1))


def _narrow(draw: st.DrawFn, twin: Twin, axis: int, length: int) -> Twin:
    start = draw(st.integers(0, twin.ids.shape[axis] - length))
    return Twin(twin.lazy.narrow(axis, start, length), twin.ids.take(range(start, start + length), axis))


def _join(draw: st.DrawFn, parts: list[Twin], axis: int | None) -> Twin:
    """Cut the parts to a common shape (but for `axis`) and lay them together; without an axis, stack them."""
    for other in range(parts[0].ids.ndim):
        if other != axis:
            length = min(part.ids.shape[other] for part in parts)
            parts = [_narrow(draw, part, other, length) for part in parts]
    lazies, ids = [part.lazy for part in parts], [part.ids for part in parts]
    if axis is None:
        return Twin(stack(lazies), np.stack(ids))
    return Twin(concat(lazies, axis), np.concatenate(ids, axis))
