"""GGUF headers, whole ones and such that each break one promise of the format, and the words the refusal must hold."""

from __future__ import annotations

import struct

U32, STRING, ARRAY, U64 = 4, 8, 9, 10


def text(value: str | bytes) -> bytes:
    octets = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(octets)) + octets


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def info(name: str = "w", shape: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def header(
    *,
    version: int = 3,
    pairs: list[bytes] | None = None,
    infos: list[bytes] | None = None,
    keys: int | None = None,
    tensors: int | None = None,
    data: int = 16,
) -> bytes:
    """A whole file; `keys` and `tensors` are counts that may lie."""
    pairs, infos = pairs or [], [info()] if infos is None else infos
    counts = (len(infos) if tensors is None else tensors, len(pairs) if keys is None else keys)
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(infos)
    return head + bytes(-len(head) % 32 + data)


MALFORMED: dict[str, tuple[bytes, str]] = {
    "a version of long ago": (header(version=1), "version 1; 2 and 3 are read"),
    "the other byte order": (header(version=3 << 24), "a big-endian file"),
    "more tensors than bytes": (header(tensors=1 << 60), "the number of tensors needs 1,152,921,504,606,846,976 "),
    "more keys than bytes": (header(keys=1 << 60), "the number of metadata keys needs 1,152,921,504,606,846,976 "),
    "a key longer than the file": (
        header(pairs=[struct.pack("<Q", 1 << 62) + bytes(40)]),
        "a metadata key needs 4,611,686,018,427,387,904 bytes, and the file ends after",
    ),
    "a key that is no text": (header(pairs=[pair("", U32, bytes(4)).replace(text(""), text(b"\xff"))]), "not UTF-8"),
    "a key twice": (header(pairs=[pair("a", U32, bytes(4))] * 2), "the metadata key 'a' occurs twice"),
    "an unknown value type": (header(pairs=[pair("a", 13, bytes(8))]), "'a' has the unknown value type 13"),
    "a boolean of value two": (header(pairs=[pair("a", 7, b"\2")]), "'a' is a boolean of value 2"),
    "an array longer than the file": (
        header(pairs=[pair("a", ARRAY, struct.pack("<IQ", U64, 1 << 61))]),
        "'a' needs 2,305,843,009,213,693,952 entries of at least 8 bytes",
    ),
    "an array of strings longer than the file": (
        header(pairs=[pair("a", ARRAY, struct.pack("<IQ", STRING, 1 << 61))]),
        "'a' needs 2,305,843,009,213,693,952 entries of at least 8 bytes",
    ),
    "an array of nothing known": (header(pairs=[pair("a", ARRAY, struct.pack("<IQ", 99, 0))]), "value type 99"),
    "arrays without end": (
        header(pairs=[pair("a", ARRAY, struct.pack("<IQ", ARRAY, 1) * 200)]),
        "'a': arrays nested more than 4 deep",
    ),
    "an alignment of zero": (header(pairs=[pair("general.alignment", U32, bytes(4))]), "general.alignment is 0"),
    "an odd alignment": (
        header(pairs=[pair("general.alignment", U32, struct.pack("<I", 24))]), "is 24, not a power of two",
    ),
    "too many axes": (header(infos=[info(shape=(1,) * 5)]), "the tensor 'w' has 5 axes"),
    "axes without end": (
        header(infos=[text("w") + struct.pack("<I", 1 << 31) + bytes(64)]), "the tensor 'w' has 2,147,483,648 axes",
    ),
    "a shape beyond all numbers": (header(infos=[info(shape=(1 << 63,))]), "'w' has the shape [9223372036854775808]"),
    "an unknown tensor type": (header(infos=[info(kind=99)]), "the tensor 'w' has the unknown type 99"),
    "rows that end inside a block": (
        header(infos=[info(shape=(40, 2), kind=2)]), "'w' has rows of 40 elements, and a block of Q4_0 has 32",
    ),
    "no axis to cut into blocks": (header(infos=[info(shape=(), kind=2)]), "'w' has rows of 0 elements"),
    "an offset between places": (header(infos=[info(offset=4)]), "at data offset 4, which is no multiple of 32"),
    "a tensor twice": (header(infos=[info(), info(offset=32)], data=64), "the tensor 'w' occurs twice"),
    "tensors on top of each other": (
        header(infos=[info("a", (16,)), info("b", (16,), offset=32)], data=96), "'b' at data offset 32 overlaps",
    ),
    "a gap, as a smaller type leaves": (
        header(infos=[info("a", (16,), kind=1), info("b", offset=64)], data=80), "'b' at data offset 64 comes after a",
    ),
    "a gap before all": (header(infos=[info(offset=32)], data=48), "'w' at data offset 32 comes after a gap"),
}  # fmt: skip
