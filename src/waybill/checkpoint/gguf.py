"""GGUF headers, parsed as untrusted input.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): magic, version, counts, key-value metadata,
tensor infos, then the data at aligned offsets. A tensor's type says how its rows are cut into blocks. Every length is
held against the file before anything is read or looped over.
"""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from waybill.checkpoint.header import MAX_HEADER_BYTES, FileHeader, TensorHeader, disguise
from waybill.errors import BadHeader, CheckpointError, WrongLength

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_VALUES = 1 << 22
"""Metadata values at most, elements of arrays included: several times the largest vocabulary with its merges."""
MAX_DEPTH = 4
"""Arrays in arrays."""
DEFAULT_ALIGNMENT = 32

BLOCKS = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip
"""Type number to its name, the elements of a block and the bytes of one."""
BLOCK_TYPES = {tag: (elements, nbytes) for tag, elements, nbytes in BLOCKS.values() if elements > 1}
"""The types that pack several elements: (elements, bytes) of a block by name."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY, _BOOLEAN, _FLOAT = 8, 9, 7, 6
_LEAST = {_STRING: 8, _ARRAY: 12} | {kind: struct.calcsize(code) for kind, code in _SCALARS.items()}
"""Bytes a value takes at least."""


class GgufHeader(NamedTuple):
    """One file: its metadata as Python values, and its tensors in file order."""

    metadata: dict[str, Any]
    file: FileHeader


class _Broken(ValueError):
    """A promise of the format that the file breaks, in words."""


class _Cursor:
    """Reads forward through a header; nothing is asked for that the file has no room for."""

    def __init__(self, stream: BinaryIO, size: int) -> None:
        self._stream = stream
        self._end = min(size, MAX_HEADER_BYTES)
        self._whole = size <= MAX_HEADER_BYTES
        self._values = MAX_VALUES
        self.at = 0

    def take(self, nbytes: int, what: str) -> bytes:
        """The next bytes."""
        octets = self._stream.read(nbytes) if nbytes <= self._end - self.at else b""
        if len(octets) < nbytes:
            raise self._too_short(what, f"{nbytes:,} bytes")
        self.at += nbytes
        return octets

    def number(self, code: str, what: str) -> Any:
        """One little-endian number."""
        return struct.unpack(f"<{code}", self.take(struct.calcsize(code), what))[0]

    def count(self, least: int, what: str) -> int:
        """A number of things that follow, each of at least so many bytes."""
        count: int = self.number("Q", what)
        if count * least > self._end - self.at:
            raise self._too_short(what, f"{count:,} entries of at least {least} bytes")
        self._values -= count
        if self._values < 0:
            raise _Broken(f"{what}: more than {MAX_VALUES:,} values in all")
        return count

    def text(self, what: str) -> str:
        """A length and UTF-8 text."""
        octets = self.take(self.number("Q", what), what)
        try:
            return octets.decode()
        except UnicodeDecodeError:
            raise _Broken(f"{what} is not UTF-8: {octets[:40]!r}") from None

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        """A metadata value of a numbered type."""
        if kind == _STRING:
            return self.text(what)
        if kind == _ARRAY:
            return self._array(what, depth + 1)
        if kind == _BOOLEAN:
            return _boolean(self.take(1, what), what)
        if kind not in _SCALARS:
            raise _Broken(f"{what} has the unknown value type {kind}")
        number = self.number(_SCALARS[kind], what)
        return shortest(number) if kind == _FLOAT else number

    def _array(self, what: str, depth: int) -> list[Any]:
        kind: int = self.number("I", what)
        if kind not in _LEAST or depth > MAX_DEPTH:
            raise _Broken(f"{what}: arrays nested more than {MAX_DEPTH} deep" if kind in _LEAST
                          else f"{what} holds the unknown value type {kind}")  # fmt: skip
        count = self.count(_LEAST[kind], what)
        if kind in (_STRING, _ARRAY):
            return [self.value(kind, what, depth) for _ in range(count)]
        octets = self.take(count * _LEAST[kind], what)
        if kind == _BOOLEAN:
            return [_boolean(octets[at : at + 1], what) for at in range(count)]
        return list(struct.unpack(f"<{count}{_SCALARS[kind]}", octets))

    def _too_short(self, what: str, wanted: str) -> _Broken:
        left = f"{self._end - self.at:,} bytes"
        rest = f"the file ends after {left}" if self._whole else f"a header has {left} left of {MAX_HEADER_BYTES:,}"
        return _Broken(f"{what} needs {wanted}, and {rest}")


def _boolean(octet: bytes, what: str) -> bool:
    if octet not in (b"\0", b"\1"):
        raise _Broken(f"{what} is a boolean of value {octet[0]}")
    return octet == b"\1"


def shortest(number: float) -> float:
    """The shortest decimal that is this float32: 1e-05 for 0.0000099999997, as it was published."""
    if not math.isfinite(number):
        return number
    own = struct.pack("<f", number)
    candidates = (float(f"{number:.{digits}g}") for digits in range(1, 10))
    return next((short for short in candidates if abs(short) < 3.4e38 and struct.pack("<f", short) == own), number)


def read_gguf(path: Path, file: str) -> GgufHeader:
    """Read and check one file's header; `file` is the name used in messages and in the returned tensors.

    Shapes are reversed, to [rows, columns]; the dtype of a tensor is the name of its block type; offsets are absolute.

    Raises:
        BadHeader: the file is something else, or its header breaks a promise of the format.
        WrongLength: the file is truncated, or has bytes after its data.
    """
    try:
        with path.open("rb") as stream:
            stat = os.fstat(stream.fileno())
            header = gguf_of(stream, file, stat.st_size)
            return header._replace(file=header.file.read_from(stat))
    except OSError as error:
        raise _bad(file, "a GGUF file cannot be read", "a readable file", error.strerror or str(error)) from error


def gguf_of(stream: BinaryIO, file: str, size: int) -> GgufHeader:
    """Read and check the header at the beginning of a stream of `size` bytes; see `read_gguf`."""
    start = stream.read(64)
    if not start.startswith(MAGIC):
        raise _not_gguf(file, start, size)
    stream.seek(0)
    try:
        metadata, tensors, data = _parse(_Cursor(stream, size), file)
    except _Broken as error:
        expected = "metadata and tensors that lie inside the file, each once"
        raise _bad(file, "a GGUF header is malformed", expected, str(error)) from None
    _check_length(file, tensors, data, size, _alignment(metadata))
    return GgufHeader(metadata, FileHeader(tensors, size))


def _parse(cursor: _Cursor, file: str) -> tuple[dict[str, Any], list[TensorHeader], int]:
    """Metadata, tensors in file order, and where the data begins."""
    cursor.take(4, "the magic")
    version: int = cursor.number("I", "the version")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        raise _Broken("a big-endian file" if swapped else f"version {version}; 2 and 3 are read")
    tensor_count = cursor.count(24, "the number of tensors")
    metadata: dict[str, Any] = {}
    for _ in range(cursor.count(13, "the number of metadata keys")):
        key = cursor.text("a metadata key")
        if key in metadata:
            raise _Broken(f"the metadata key {key[:80]!r} occurs twice")
        metadata[key] = cursor.value(cursor.number("I", key[:80]), repr(key[:80]))
    alignment = _alignment(metadata)
    infos = [_info(cursor) for _ in range(tensor_count)]
    data = _aligned(cursor.at, alignment)
    tensors = [_tensor(*info, file, data, alignment) for info in infos]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    names: set[str] = set()
    end = data
    for tensor in tensors:
        if tensor.name in names:
            raise _Broken(f"the tensor {tensor.name[:120]!r} occurs twice")
        names.add(tensor.name)
        if tensor.offset != _aligned(end, alignment):  # ggml wants the same: a gap is a type or shape misread
            how = "overlaps the tensor before it" if tensor.offset < end else "comes after a gap"
            raise _Broken(f"{tensor.name[:120]!r} at data offset {tensor.offset - data:,} {how}")
        end = tensor.offset + tensor.nbytes
    return metadata, tensors, data


def _alignment(metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
        raise _Broken(f"general.alignment is {str(alignment)[:40]}, not a power of two")
    return alignment


def _aligned(at: int, alignment: int) -> int:
    return -(-at // alignment) * alignment


def _info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape as stored, type number and offset of one tensor."""
    name = cursor.text("a tensor's name")
    what = f"the tensor {name[:120]!r}"
    axes: int = cursor.number("I", what)
    if axes > 4:
        raise _Broken(f"{what} has {axes:,} axes")
    shape = struct.unpack(f"<{axes}Q", cursor.take(8 * axes, what))
    return name, shape, cursor.number("I", what), cursor.number("Q", what)


def _tensor(
    name: str, stored: tuple[int, ...], kind: int, offset: int, file: str, data: int, alignment: int
) -> TensorHeader:
    what = f"the tensor {name[:120]!r}"
    if kind not in BLOCKS:
        raise _Broken(f"{what} has the unknown type {kind}")
    tag, elements, octets = BLOCKS[kind]
    if any(length >= 1 << 63 for length in stored) or offset >= 1 << 63:
        raise _Broken(f"{what} has the shape {list(stored)} at offset {offset}")
    if elements > 1 and (not stored or stored[0] % elements):
        raise _Broken(
            f"{what} has rows of {stored[0] if stored else 0:,} elements, and a block of {tag} has {elements}"
        )
    if offset % alignment:
        raise _Broken(f"{what} lies at data offset {offset:,}, which is no multiple of {alignment}")
    return TensorHeader(name, tag, stored[::-1], file, data + offset, math.prod(stored) // elements * octets)


def _check_length(file: str, tensors: list[TensorHeader], data: int, size: int, alignment: int) -> None:
    end = max((tensor.offset + tensor.nbytes for tensor in tensors), default=min(data, size))
    if size < end or size > _aligned(end, alignment):
        missing = end - size
        raise WrongLength(
            "a GGUF file is truncated" if missing > 0 else "a GGUF file has bytes after its data",
            where=file,
            expected=f"{end:,} bytes, by its header",
            found=f"{size:,} bytes: {abs(missing):,} bytes {'are missing' if missing > 0 else 'too many'}",
            fix=f"download {file} again",
        )


def _not_gguf(file: str, start: bytes, size: int) -> CheckpointError:
    what, fix = disguise(start) or ("something else", "download this file again")
    return BadHeader(
        "a file named .gguf is not GGUF",
        where=file,
        expected="the letters GGUF at its beginning",
        found=f"{what if size else 'nothing'}, {size:,} bytes",
        fix=fix,
    )


def _bad(file: str, what: str, expected: str, found: str) -> BadHeader:
    fix = "download this file again; if it stays so, the file was written wrongly"
    return BadHeader(what, where=file, expected=expected, found=found, fix=fix)
