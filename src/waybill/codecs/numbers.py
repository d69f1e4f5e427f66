"""GGUF blocks with a minimum as the numbers they mean, code · scale + minimum in float32: only when asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from waybill.checkpoint import TensorHeader
from waybill.checkpoint.gguf import BLOCK_TYPES
from waybill.codecs.gguf import half, nibbles, two_bits
from waybill.weights.dtypes import Array
from waybill.weights.lazy import Decoded, LazyTensor, stored

Box = tuple[int, ...]


def _float(blocks: Array, at: int) -> Array:
    """The float16 at a byte of every block, [..., 1]."""
    return half(blocks, at).astype(np.float32)


def _q4_1(blocks: Array) -> Array:
    values: Array = _float(blocks, 0) * nibbles(blocks[..., 4:]) + _float(blocks, 2)
    return values


def _q5_1(blocks: Array) -> Array:
    fifth = np.unpackbits(blocks[..., 4:8], axis=-1, bitorder="little") << np.uint8(4)
    values: Array = _float(blocks, 0) * (nibbles(blocks[..., 8:]) | fifth) + _float(blocks, 2)
    return values


def _sixes(octets: Array) -> tuple[Array, Array]:
    """Twelve bytes to eight 6-bit scales and eight 6-bit minima; the last four have their upper bits elsewhere."""
    first, second, third = octets[..., 0:4], octets[..., 4:8], octets[..., 8:12]
    low, top = np.uint8(63), np.uint8(6)
    scales = np.concatenate([first & low, (third & np.uint8(15)) | first >> top << np.uint8(4)], axis=-1)
    minima = np.concatenate([second & low, third >> np.uint8(4) | second >> top << np.uint8(4)], axis=-1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _with_sixes(blocks: Array, codes: Array) -> Array:
    """Codes [..., 8, 32], each row with a scale and a minimum of its own."""
    scales, minima = _sixes(blocks[..., 4:16])
    step, offset = _float(blocks, 0) * scales, _float(blocks, 2) * minima
    values: Array = step[..., None] * codes - offset[..., None]
    return values.reshape(*blocks.shape[:-1], 256)


def _rows_of_nibbles(octets: Array) -> Array:
    """Four runs of 32 bytes: low nibbles of each, then its high ones; [..., 8, 32]."""
    lead = octets.shape[:-1]
    return nibbles(octets.reshape(*lead, 4, 32)).reshape(*lead, 8, 32)


def _q4_k(blocks: Array) -> Array:
    return _with_sixes(blocks, _rows_of_nibbles(blocks[..., 16:]))


def _q5_k(blocks: Array) -> Array:
    fifth = np.stack([blocks[..., 16:48] >> np.uint8(bit) & np.uint8(1) for bit in range(8)], axis=-2)
    return _with_sixes(blocks, _rows_of_nibbles(blocks[..., 48:]) | fifth << np.uint8(4))


def _q2_k(blocks: Array) -> Array:
    """Sixteen bytes of a 4-bit scale and a 4-bit minimum each; two halves of two-bit codes."""
    lead = blocks.shape[:-1]
    codes = two_bits(blocks[..., 16:80].reshape(*lead, 2, 32)).reshape(*lead, 16, 16)
    step = _float(blocks, 80) * (blocks[..., :16] & np.uint8(15)).astype(np.float32)
    offset = _float(blocks, 82) * (blocks[..., :16] >> np.uint8(4)).astype(np.float32)
    values: Array = step[..., None] * codes - offset[..., None]
    return values.reshape(*lead, 256)


NUMBERS: dict[str, Callable[[Array], Array]] = {
    "Q4_1": _q4_1, "Q5_1": _q5_1, "Q2_K": _q2_k, "Q4_K": _q4_k, "Q5_K": _q5_k,
}  # fmt: skip
"""The types that can be read so: blocks U8 [..., bytes] to float32 [..., elements]."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """Rows of blocks U8 [..., N, bytes] to float32 [..., N, K]."""

    octets: LazyTensor
    block_type: str

    def inputs(self, start: Box, extent: Box) -> tuple[LazyTensor, ...]:
        """The blocks around the wanted columns."""
        last, (elements, nbytes) = len(start) - 1, BLOCK_TYPES[self.block_type]
        first, end = start[-1] // elements, -(-(start[-1] + extent[-1]) // elements)
        return (self.octets.box(start[:-1], extent[:-1]).narrow(last, first * nbytes, (end - first) * nbytes),)

    def decode(self, arrays: Sequence[Array], start: Box, extent: Box) -> Array:
        """Compute, then cut to the wanted columns."""
        elements, nbytes = BLOCK_TYPES[self.block_type]
        values = NUMBERS[self.block_type](arrays[0].reshape(*extent[:-1], -1, nbytes))
        skip = start[-1] % elements
        return values.reshape(*extent[:-1], -1)[..., skip : skip + extent[-1]]


def numbers(header: TensorHeader) -> LazyTensor:
    """A tensor of one of NUMBERS as float32, lazily; its header has been judged."""
    elements, nbytes = BLOCK_TYPES[header.dtype]
    *rows, columns = header.shape
    octets = stored(header._replace(dtype="U8", shape=(*rows, columns // elements * nbytes)))
    decoder = Numbers(octets, header.dtype)
    return stored(Decoded(header.name, "F32", header.shape, header.file, header.offset, decoder))
