"""Safetensors headers, parsed as untrusted input.

The format (https://huggingface.co/docs/safetensors): 8 bytes little-endian header length N, N bytes of JSON
mapping names to dtype, shape and data_offsets, then the data, covered exactly once and without gaps.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from waybill.checkpoint.jsonfile import parse_object
from waybill.errors import BadHeader, CheckpointError, NotSafetensors, WrongLength

MAX_HEADER_BYTES = 100_000_000
"""The limit the reference implementation sets."""

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
"""Bits per element of every dtype safetensors 0.8 can write."""


class TensorHeader(NamedTuple):
    """One stored tensor: its name, dtype tag, shape, and place in a file (absolute offset, bytes)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


class FileHeader(NamedTuple):
    """All tensors of one file in file order, and what identifies the file if it is on this disk."""

    tensors: list[TensorHeader]
    size: int
    mtime_ns: int = 0
    inode: int = 0

    def read_from(self, stat: os.stat_result) -> FileHeader:
        """The header, as that of the file with this status."""
        return self._replace(mtime_ns=stat.st_mtime_ns, inode=stat.st_ino)


_DISGUISES = (
    (b"version https://git-lfs", "a Git LFS pointer", "run `git lfs pull` in the checkpoint folder"),
    (b"<!doctype", "an HTML page", "download the file itself, not the web page that shows it"),
    (b"<html", "an HTML page", "download the file itself, not the web page that shows it"),
    (
        b"PK\x03\x04",
        "a zip archive (a PyTorch .bin or .pt file?)",
        "convert it with safetensors.torch.save_file",
    ),
    *(
        (bytes((0x80, protocol)), "a Python pickle", "convert it with safetensors.torch.save_file")
        for protocol in (2, 3, 4, 5)
    ),
    (b"GGUF", "a GGUF file", "name it .gguf and give its path, or use the safetensors files of this model"),
)


def read_header(path: Path, file: str) -> FileHeader:
    """Read and check one file's header; `file` is the name used in messages and in the returned tensors.

    Raises:
        NotSafetensors: the file is something else, and the error says what.
        BadHeader: the header breaks a promise of the format.
        WrongLength: the file is truncated, or has bytes after its data.
    """
    if not path.is_file():  # opening a pipe would wait for ever
        raise NotSafetensors(
            "a weight file is not a regular file",
            where=file,
            expected="a file",
            found="a directory, device or pipe",
            fix="replace it by the file it stands for",
        )
    try:
        with path.open("rb") as stream:
            stat = os.fstat(stream.fileno())
            return header_of(stream, file, stat.st_size).read_from(stat)
    except OSError as error:
        raise BadHeader(
            "a shard cannot be read",
            where=file,
            expected="a readable file",
            found=error.strerror or str(error),
            fix="check the file's permissions and the disk",
        ) from error


def header_of(stream: BinaryIO, file: str, size: int) -> FileHeader:
    """Read and check the header at the beginning of a stream of `size` bytes; see `read_header`."""
    prefix = stream.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise _unreadable(file, size, prefix + stream.read(56), length)
    text = stream.read(length)
    try:
        tensors, end = _parse(text, file, data_start=8 + length)
    except ValueError as error:
        raise BadHeader(
            "a safetensors header is malformed",
            where=file,
            expected="a JSON header whose tensors cover the data exactly once",
            found=str(error),
            fix="download this file again; if it stays so, the file was written wrongly",
        ) from None
    if end != size:
        raise _wrong_length(file, expected=end, found=size)
    return FileHeader(tensors, size)


def _parse(text: bytes, file: str, data_start: int) -> tuple[list[TensorHeader], int]:
    """The tensors in file order and the file size they imply; ValueError names the broken promise."""
    if not text.startswith(b"{"):
        raise ValueError("the header does not start with '{'")
    entries = parse_object(text)
    entries.pop("__metadata__", None)
    tensors = [_tensor(name, entry, file, data_start) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    end = data_start
    for tensor in tensors:
        if tensor.offset != end:
            kind = "overlaps the tensor before it" if tensor.offset < end else "leaves a gap before it"
            raise ValueError(f"{tensor.name!r} at data offset {tensor.offset - data_start} {kind}")
        end += tensor.nbytes
    return tensors, end


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_unicode(name: str) -> bool:
    """Whether a name can be written down: JSON can escape half a character."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _tensor(name: str, entry: Any, file: str, data_start: int) -> TensorHeader:
    if not name.isascii() and not _is_unicode(name):
        raise ValueError(f"{name[:120]!r} is no Unicode name")
    if not isinstance(entry, dict) or not entry.keys() >= {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name[:120]!r} lacks dtype, shape or data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    bits = DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        raise ValueError(f"{name[:120]!r} has the unknown dtype {str(dtype)[:40]!r}")
    if not isinstance(shape, list) or len(shape) > 16 or not all(map(_is_size, shape)):
        raise ValueError(f"{name[:120]!r} has the shape {str(shape)[:80]}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise ValueError(f"{name[:120]!r} has the data_offsets {str(offsets)[:80]}")
    begin, end = offsets
    need, rest = divmod(math.prod(shape) * bits, 8)
    if rest:
        raise ValueError(f"{name[:120]!r} {dtype}{shape} ends inside a byte: {math.prod(shape) * bits:,} bits")
    if end - begin != need:
        raise ValueError(f"{name[:120]!r} {dtype}{shape} needs {need:,} bytes and is given {end - begin:,}")
    return TensorHeader(name, dtype, tuple(shape), file, data_start + begin, need)


def disguise(start: bytes) -> tuple[str, str] | None:
    """What a file with this beginning really is, and what to do about it."""
    begin = start.lstrip().lower()
    return next(((what, fix) for magic, what, fix in _DISGUISES if begin.startswith(magic.lower())), None)


def _unreadable(file: str, size: int, start: bytes, length: int) -> CheckpointError:
    """The file ends before its header does: say what it really is."""
    if (known := disguise(start)) is not None:
        what, fix = known
        return NotSafetensors(
            f"a file named .safetensors is {what}",
            where=file,
            expected="safetensors data",
            found=f"{what}, {size:,} bytes",
            fix=fix,
        )
    if size < 8:
        return NotSafetensors(
            "a file named .safetensors is empty" if size == 0 else "a file is too short to be safetensors",
            where=file,
            expected="at least the 8 bytes of the header length",
            found=f"{size} bytes",
            fix="download this file again",
        )
    if length > MAX_HEADER_BYTES:
        return BadHeader(
            "a safetensors header is impossibly long",
            where=file,
            expected=f"at most {MAX_HEADER_BYTES:,} bytes",
            found=f"{length:,} bytes in a file of {size:,}",
            fix="the file is damaged or not safetensors; download it again",
        )
    return _wrong_length(file, expected=8 + length, found=size, least=True)


def _wrong_length(file: str, *, expected: int, found: int, least: bool = False) -> WrongLength:
    if found < expected:
        what, note = "a shard is truncated", f"{expected - found:,} bytes are missing"
    else:
        what, note = "a shard has bytes after its data", f"{found - expected:,} bytes too many"
    return WrongLength(
        what,
        where=file,
        expected=f"{'at least ' if least else ''}{expected:,} bytes, by its header",
        found=f"{found:,} bytes: {note}",
        fix=f"download {file} again",
    )
