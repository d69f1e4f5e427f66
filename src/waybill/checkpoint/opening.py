"""A checkpoint from whatever a path names: a folder, or a GGUF file with the others it was split into."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from waybill.checkpoint.folder import Checkpoint, Findings, Shard, duplicate, is_kind, read_folder
from waybill.checkpoint.gguf import MAGIC, read_gguf
from waybill.checkpoint.header import TensorHeader
from waybill.checkpoint.metadata import FREQUENCIES, config_of, generation_of
from waybill.errors import CheckpointError, MissingShard, some

MOST_FACTORS = 4096
"""Half the elements of a head, many times over."""
_PIECE = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf")


def read_checkpoint(path: str | Path, *, dequantize: bool = False) -> Checkpoint:
    """Describe the checkpoint at `path` without reading a weight; problems are collected, not raised.

    `dequantize`: blocks of a GGUF file that have no exact packed form may be read as the floats they mean.

    Raises:
        NotACheckpoint: `path` is neither a folder holding a config.json nor a GGUF file.
    """
    file = Path(path)
    return replace(_read_gguf(file) if is_gguf(file) else read_folder(file), dequantize=dequantize)


def is_gguf(path: Path) -> bool:
    """Whether a path names a GGUF file, by its ending or by its first letters."""
    if not is_kind(Path.is_file, path):
        return False
    if path.suffix.lower() == ".gguf":
        return True
    try:
        with path.open("rb") as stream:
            return stream.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_metadata(path: Path) -> dict[str, Any]:
    """The metadata of a GGUF file, or of the first of those it was split into.

    Raises:
        CheckpointError: the file is no whole GGUF file.
    """
    first = path.with_name(_pieces(path)[0])
    return read_gguf(first, first.name).metadata


def _pieces(path: Path) -> list[str]:
    """The names of all files of a model, from the name of one."""
    split = _PIECE.fullmatch(path.name)
    if split is None or int(split[3]) == 0:
        return [path.name]
    return [f"{split[1]}-{number:05d}-of-{split[3]}.gguf" for number in range(1, int(split[3]) + 1)]


def _read_gguf(path: Path) -> Checkpoint:
    findings, root = Findings(), path.parent
    names = _pieces(path)
    present = [name for name in names if is_kind(Path.is_file, root / name)]
    if len(present) < len(names):
        findings.problems.append(_incomplete(path, names, present))
    metadata: dict[str, Any] = {}
    tensors: dict[str, TensorHeader] = {}
    shards: list[Shard] = []
    for name in present:
        try:
            header = read_gguf(root / name, name)
        except CheckpointError as error:
            findings.problems.append(error)
            continue
        metadata = metadata or header.metadata  # the others repeat only what splits them
        shards.append(Shard.of(name, header.file))
        for tensor in header.file.tensors:
            if tensor.name in tensors:
                findings.problems.append(duplicate(tensors[tensor.name], tensor))
            tensors.setdefault(tensor.name, tensor)
    return Checkpoint(
        root,
        config_of(metadata, tensors, _factors(root, tensors)) if shards and len(present) == len(names) else {},
        generation_of(metadata),
        tensors,
        tuple(shards),
        problems=tuple(findings.problems),
        metadata=metadata,
    )


def _factors(root: Path, tensors: Mapping[str, TensorHeader]) -> tuple[float, ...] | None:
    """The factors of the rotary frequencies: a fact of the config that some files keep as a small tensor."""
    header = tensors.get(FREQUENCIES)
    if header is None:
        return None
    if header.dtype != "F32" or header.nbytes > MOST_FACTORS * 4:
        return ()
    try:
        with (root / header.file).open("rb") as stream:
            stream.seek(header.offset)
            octets = stream.read(header.nbytes)
    except OSError:
        return ()
    return struct.unpack(f"<{len(octets) // 4}f", octets)


def _incomplete(path: Path, names: list[str], present: list[str]) -> MissingShard:
    missing = sorted(set(names) - set(present))
    return MissingShard(
        f"{len(missing)} of the {len(names)} files this model was split into are not here: incomplete download?",
        where=str(path),
        expected=some(missing),
        found=f"{len(present)} of {len(names)} files",
        fix="download the missing files into the same folder",
    )
