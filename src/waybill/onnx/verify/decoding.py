"""Packed checkpoints as integers, a second time: written from the formats' descriptions for proving packages.

It shares nothing with the codecs that exports go through, so that a mistake there is not repeated here. Plain reads,
one weight at a time, a field at a time: W[n, k] = (code[n, k] - zero[n, g]) · scale[n, g], or code · scale + minimum,
g = k // group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from waybill.checkpoint import TensorHeader
from waybill.checkpoint.gguf import BLOCK_TYPES
from waybill.config.gguf import AS_FLOATS, METHOD
from waybill.config.quantization import FLOATS4, QuantizationConfig
from waybill.errors import ActOrder, DtypeMismatch, FileChanged, PackingMismatch
from waybill.onnx.verify.blocks import (
    CENTRE,
    FIELDS,
    VALUES,
    ZERO,
    block_codes,
    block_minimums,
    block_numbers,
    block_scales,
)
from waybill.weights.dtypes import NUMPY_DTYPES, Array

REPEATED_ONE = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}
"""GPTQ v1 subtracts this from a whole word of zero points."""
AWQ_SLOT = (0, 4, 1, 5, 2, 6, 3, 7)
"""Output 8c + j lies in slot AWQ_SLOT[j] of its word."""
SIDECARS = (
    "qweight",
    "scales",
    "qzeros",
    "g_idx",
    "weight_packed",
    "weight_scale",
    "weight_zero_point",
    "weight_shape",
    "scale_inv",
    "blocks",
)
SCALES_BESIDE = ("weight_scale", "scale_inv")
"""What lies beside codes that have the weight's own name."""


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """The tensors of a checkpoint, read at the offsets their headers state."""

    root: Path
    headers: Mapping[str, TensorHeader]

    def read(self, name: str, start: int, stop: int, axes: int = 1) -> Array:
        """Positions `start` to `stop` of the first axis, or of the first `axes` axes taken as one.

        Raises:
            DtypeMismatch: the tensor holds something no weight is stored in.
            FileChanged: the file cannot be read, or ends too early.
        """
        header = self.headers[name]
        dtype = NUMPY_DTYPES.get(header.dtype)
        if dtype is None:
            raise DtypeMismatch(
                "a tensor holds numbers that no package is made from",
                where=f"{name} ({header.file})",
                expected=" | ".join(NUMPY_DTYPES),
                found=str(header),
                fix="verify with the checkpoint the package was made from",
            )
        tail = header.shape[axes:]
        step = math.prod(tail) * dtype.itemsize
        octets = np.empty((stop - start) * step, np.uint8)
        _fill(self.root, header, start * step, octets)
        return octets.view(dtype).reshape(stop - start, *tail)

    def floats(self, name: str, start: int, stop: int, axes: int = 1) -> Array:
        """The same as numbers, also of GGUF blocks that may be read as such."""
        header = self.headers[name]
        if header.dtype not in AS_FLOATS:
            return self.read(name, start, stop, axes)
        return block_numbers(header.dtype, self.octets(name).read(name, start, stop, axes))

    def octets(self, name: str) -> StoredTensors:
        """A tensor of GGUF blocks as rows of bytes."""
        header = self.headers[name]
        elements, nbytes = BLOCK_TYPES[header.dtype]
        *rows, columns = header.shape
        plain = header._replace(dtype="U8", shape=(*rows, columns // elements * nbytes))
        return StoredTensors(self.root, {name: plain})

    def whole(self, name: str) -> Array:
        """All of a tensor."""
        shape = self.headers[name].shape
        return self.read(name, 0, shape[0] if shape else 1)

    def sidecars(self, weight: str) -> dict[str, str]:
        """Role to tensor of a packed weight: `q_proj.qweight`, `q_proj.weight_qweight`, or the weight itself where its
        scales lie beside it; empty for a float one."""
        stem = weight.removesuffix("weight") if weight.endswith(".weight") else f"{weight}."
        names = {role: [f"{weight}_{role}", f"{stem}{role}"] for role in SIDECARS}
        found = {role: name for role, pair in names.items() for name in pair if name in self.headers}
        own = weight in self.headers and any(role in found for role in SCALES_BESIDE)
        return found | ({"weight": weight} if own else {})


def read_at(path: Path, at: int, octets: Array) -> int:
    """Fill `octets` from a place in a file; returns how many there were, fewer than asked for where it ends."""
    done, view = 0, memoryview(octets)  # type: ignore[arg-type]
    with path.open("rb", buffering=0) as stream:
        stream.seek(at)
        while done < len(view) and (got := stream.readinto(view[done:])):
            done += got
    return done


def _fill(root: Path, header: TensorHeader, skip: int, octets: Array) -> None:
    """Read into `octets` from `skip` bytes after the tensor's beginning."""
    try:
        done = read_at(root / header.file, header.offset + skip, octets)
        found = f"the file ends {octets.nbytes - done:,} bytes too early"
    except OSError as error:
        done, found = -1, error.strerror or str(error)
    if done != octets.nbytes:
        raise FileChanged(
            "a weight file changed or failed while it was being read",
            where=header.file,
            expected=f"{header.name} {header}",
            found=found,
            fix="let the download finish, check the disk, and verify again",
        )


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """One stored weight [N, K]: zero points, scales and perhaps minimums as numbers [N, G]; codes are unpacked when
    asked for. With minimums, zero points are the centre of the codes, from which operators are to count.

    `form` is a method, or a type of GGUF blocks.
    """

    form: str
    bits: int
    group: int
    packed: Array
    zeros: Array
    scales: Array
    columns: int
    minimums: Array | None = None

    @property
    def rows(self) -> int:
        """N."""
        return len(self.scales)

    def codes(self, start: int, stop: int) -> Array:
        """Rows of codes as integers, U8 [stop - start, K]; both ends are multiples of 8."""
        if self.form in FIELDS:
            codes = block_codes(self.form, self.packed[start:stop])
            if self.form not in VALUES:
                return codes
            return (128 + np.asarray(VALUES[self.form])[codes]).astype(np.uint8)  # as a package holds them
        if self.form not in ("gptq", "awq"):
            return fields(self.packed[start:stop], self.bits)[:, : self.columns]
        out = np.empty((stop - start, self.columns), np.uint8)
        if self.form == "gptq":  # packed along K: row k // p, field k mod p
            words, per_word = self.packed[:, start:stop], 32 // self.bits
            for field in range(per_word):
                out[:, field::per_word] = _field(words, field, self.bits).T
        else:  # packed along N: column n // 8, slot of n mod 8
            words = self.packed[:, start // 8 : stop // 8]
            for output, slot in enumerate(AWQ_SLOT):
                out[output::8] = _field(words, slot, 4).T
        return out


def packed_matrix(
    stored: StoredTensors, weight: str, config: QuantizationConfig, expert: int | None = None
) -> PackedMatrix:
    """One packed weight, or one expert of a bank.

    Raises:
        PackingMismatch: shapes and metadata contradict each other.
        ActOrder: the groups are permuted.
    """
    if config.method == METHOD:
        return _blocks(stored, weight, config, expert)
    names = stored.sidecars(weight)
    if expert is None:
        arrays = {role: stored.whole(name) for role, name in names.items()}
    else:
        arrays = {role: stored.read(name, expert, expert + 1)[0] for role, name in names.items()}
    try:
        matrix = _DECODERS.get(config.method, _words)(arrays, config)
        groups = -(-matrix.columns // matrix.group) if matrix.group > 0 else 0
        if matrix.zeros.shape != matrix.scales.shape or matrix.scales.shape[1] != groups:
            raise ValueError(f"scales {matrix.scales.shape}, zero points {matrix.zeros.shape}, {groups} groups")
    except (KeyError, ValueError, IndexError) as error:
        raise PackingMismatch(
            "the parts of a packed weight do not fit together",
            where=weight,
            expected=str(config),
            found=f"{error}; {', '.join(f'{role} {list(array.shape)}' for role, array in arrays.items())}",
            fix="verify with the checkpoint the package was made from",
        ) from error
    if "g_idx" in arrays:
        _require_trivial(arrays["g_idx"], matrix, weight)
    return matrix


def _blocks(stored: StoredTensors, weight: str, config: QuantizationConfig, expert: int | None) -> PackedMatrix:
    """A tensor of GGUF blocks, which needs no sidecars."""
    header = stored.headers[weight]
    octets = stored.octets(weight)
    raw = octets.whole(weight) if expert is None else octets.read(weight, expert, expert + 1)[0]
    scales = block_scales(header.dtype, raw)
    zeros = np.full(scales.shape, (ZERO | CENTRE).get(header.dtype, 128), np.uint8)
    bits, minimums = 8 if header.dtype in VALUES else config.bits, block_minimums(header.dtype, raw)
    return PackedMatrix(header.dtype, bits, config.group_size, raw, zeros, scales, header.shape[-1], minimums)


def fields(octets: Array, bits: int) -> Array:
    """U8 [..., n] to its fields U8 [..., n·8/bits], the first in the low bits."""
    per_byte, mask = 8 // bits, (1 << bits) - 1
    out = np.empty((*octets.shape[:-1], octets.shape[-1] * per_byte), np.uint8)
    for field in range(per_byte):
        out[..., field::per_byte] = (octets >> (bits * field)) & mask
    return out


def _field(words: Array, at: int, bits: int) -> Array:
    """One field of every 32-bit word, counted from the low bits."""
    values: Array = ((words >> np.uint32(bits * at)) & np.uint32((1 << bits) - 1)).astype(np.uint8)
    return values


def _olive(arrays: Mapping[str, Array], config: QuantizationConfig) -> PackedMatrix:
    """Bytes along K for codes, along G for zero points; no zero points are all the midpoint."""
    packed, scales = arrays["qweight"], arrays["scales"]
    columns = packed.shape[1] * 8 // config.bits
    if "qzeros" in arrays:
        zeros = fields(arrays["qzeros"], config.bits)[:, : scales.shape[1]]
    else:
        zeros = np.full(scales.shape, 1 << (config.bits - 1), np.uint8)
    group = columns if config.group_size == -1 else config.group_size
    return PackedMatrix("olive", config.bits, group, packed, zeros, scales, columns)


def _compressed(arrays: Mapping[str, Array], config: QuantizationConfig) -> PackedMatrix:
    """Rows of fields, or of signed bytes; zero points along N in words, or signed; scales of rows, blocks or all."""
    if config.form == FLOATS4:
        octets = arrays["weight_packed"]
        return _floats({"blocks": octets.reshape(len(octets), -1, 16), "scales": arrays["weight_scale"]}, config)
    if config.form == "pack-quantized":
        packed = arrays["weight_packed"].view(np.uint8)
    else:
        packed = (arrays["weight"].astype(np.int16) + 128).astype(np.uint8)
    rows, columns = packed.shape[0], packed.shape[1] * 8 // config.bits
    if "weight_shape" in arrays and arrays["weight_shape"].tolist() != [rows, columns]:
        raise ValueError(f"weight_shape {arrays['weight_shape'].tolist()}")
    group = columns if config.group_size == -1 else config.group_size
    shared = rows if config.scale_rows == -1 else config.scale_rows
    blocks = (-(-rows // shared), -(-columns // group))
    row_of = np.arange(rows) // shared
    scales = arrays["weight_scale"].reshape(blocks)[row_of]
    stated = arrays.get("weight_zero_point")
    if stated is None:
        zeros = np.full(scales.shape, 1 << (config.bits - 1), np.uint8)
    elif stated.dtype == np.int8:
        zeros = (stated.reshape(blocks).astype(np.int16) + (1 << (config.bits - 1))).astype(np.uint8)[row_of]
    else:
        words, per_word = stated.view(np.uint32), 32 // config.bits
        zeros = np.empty((len(words) * per_word, words.shape[1]), np.uint8)
        for field in range(per_word):
            zeros[field::per_word] = _field(words, field, config.bits)
        zeros = zeros[:rows]
    return PackedMatrix(config.method, config.bits, group, packed, zeros, scales, columns)


def _words(arrays: Mapping[str, Array], config: QuantizationConfig) -> PackedMatrix:
    """GPTQ packs codes along K and zero points along N, AWQ both along N; scales lie [G, N] in both."""
    packed, scales = arrays["qweight"].view(np.uint32), arrays["scales"]
    words = arrays["qzeros"].view(np.uint32)
    zeros = np.empty((len(words), words.shape[1] * 32 // config.bits), np.uint8)
    if config.method == "gptq":
        columns, per_word = len(packed) * 32 // config.bits, 32 // config.bits
        true = words + np.uint32(config.zero_offset * REPEATED_ONE[config.bits])  # modulo 2**32, borrows included
        for field in range(per_word):
            zeros[:, field::per_word] = _field(true, field, config.bits)
    else:
        columns = len(packed)
        for output, slot in enumerate(AWQ_SLOT):
            zeros[:, output::8] = _field(words, slot, 4)
    group = columns if config.group_size == -1 else config.group_size
    return PackedMatrix(config.method, config.bits, group, packed, zeros.T, scales.T, columns)


def _floats(arrays: Mapping[str, Array], config: QuantizationConfig) -> PackedMatrix:
    """4-bit floats and powers of two, as a package holds them: twice each number as an integer around 128."""
    nibbles, exponents = fields(arrays["blocks"], 4), arrays["scales"].view(np.uint8)
    exponent, mantissa = nibbles >> 1 & 3, (nibbles & 1).astype(np.int16)
    doubled = np.where(exponent == 0, mantissa, (2 + mantissa) << (exponent.astype(np.int16) - 1).clip(0))
    codes = (128 + np.where(nibbles & 8, -doubled, doubled)).astype(np.uint8).reshape(len(nibbles), -1)
    scales = np.where(exponents == 255, np.nan, 2.0 ** (exponents.astype(np.int16) - 128.0))
    zeros = np.full(scales.shape, 128, np.uint8)
    return PackedMatrix(config.method, 8, nibbles.shape[-1], codes, zeros, scales, codes.shape[1])


_DECODERS = {"olive": _olive, "compressed-tensors": _compressed, "mxfp4": _floats}


def _require_trivial(g_idx: Array, matrix: PackedMatrix, weight: str) -> None:
    expected = np.arange(matrix.columns) // matrix.group
    if not np.array_equal(g_idx, expected):
        raise ActOrder(
            "the groups of a packed weight are permuted",
            where=weight,
            expected="g_idx[k] = k // group",
            found="another order",
            fix="a package cannot hold it; verify with the checkpoint the package was made from",
        )
