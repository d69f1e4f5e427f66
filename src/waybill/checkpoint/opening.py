"""A checkpoint from whatever a user names: a folder, a GGUF file with the others it was split into, or an id."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from waybill.checkpoint.files import Files, Folder, is_kind
from waybill.checkpoint.folder import Checkpoint, Findings, describe, read_folder, read_shards
from waybill.checkpoint.gguf import MAGIC, read_gguf
from waybill.checkpoint.header import FileHeader, TensorHeader
from waybill.checkpoint.hub import open_hub
from waybill.checkpoint.hubid import HubId, hub_id
from waybill.checkpoint.metadata import FREQUENCIES, config_of, generation_of
from waybill.errors import MissingShard, some

MOST_FACTORS = 4096
"""Half the elements of a head, many times over."""
_PIECE = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf")


def read_checkpoint(path: str | Path, *, dequantize: bool = False) -> Checkpoint:
    """Describe the checkpoint at `path` without reading a weight; problems are collected, not raised.

    A path that is there is read. Another text, unless it is a Path, that has the form of a Hugging Face id is looked
    for on the hub, of which config files and headers are fetched, and no weights.

    `dequantize`: blocks of a GGUF file that have minimums, or a table of values, are read as the floats they mean.

    Raises:
        NotACheckpoint: `path` is neither a folder holding a config.json, nor a GGUF file, nor an id.
        HubError: the hub does not give what is needed.
    """
    file, named = Path(path), hub_id(path) if isinstance(path, str) else None
    if named is not None and not is_kind(Path.exists, file):
        found = _read_hub(named)
    else:
        found = _read_gguf(Folder(file.parent), file.name) if is_gguf(file) else read_folder(file)
        if named is not None:
            found = replace(found, notices=(*found.notices, f"{path} is read from this disk, not from the hub"))
    return replace(found, dequantize=dequantize)


def _read_hub(named: HubId) -> Checkpoint:
    files = open_hub(named)
    found = _read_gguf(files, Path(named.file).name) if named.file else describe(files)
    if isinstance(files, Folder):  # nobody was asked: what the cache holds is all there is
        return found
    return replace(found, remote=files, notices=(*found.notices, files.summary()))


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
    first = path.with_name(_pieces(path.name)[0])
    try:
        stat = first.stat()
    except OSError:
        return read_gguf(first, first.name).metadata  # which says what is wrong
    return _metadata_of(first, (stat.st_size, stat.st_mtime_ns, stat.st_ino))


@lru_cache(maxsize=1)
def _metadata_of(path: Path, _identity: tuple[int, int, int]) -> dict[str, Any]:
    """A vocabulary takes a while to parse, and the tokenizer and every prompt's template ask for it."""
    return read_gguf(path, path.name).metadata


def _pieces(file: str) -> list[str]:
    """The names of all files of a model, from the name of one."""
    split = _PIECE.fullmatch(file)
    if split is None or int(split[3]) == 0:
        return [file]
    return [f"{split[1]}-{number:05d}-of-{split[3]}.gguf" for number in range(1, int(split[3]) + 1)]


def _read_gguf(files: Files, file: str) -> Checkpoint:
    findings, names = Findings(), _pieces(file)
    present = [name for name in names if files.holds(name)]
    if len(present) < len(names):
        findings.problems.append(_incomplete(f"{files.place}/{file}", names, present))
    stated: dict[str, dict[str, Any]] = {}

    def header(name: str) -> FileHeader:
        found = files.gguf(name)
        stated[name] = found.metadata
        return found.file

    tensors, shards = read_shards(files, present, header, findings)
    metadata = next((stated[name] for name in present if stated.get(name)), {})  # the others repeat what splits them
    return Checkpoint(
        files.root,
        config_of(metadata, tensors, _factors(files, tensors)) if shards and len(present) == len(names) else {},
        generation_of(metadata),
        tensors,
        tuple(shards),
        problems=tuple(findings.problems),
        metadata=metadata,
    )


def _factors(files: Files, tensors: Mapping[str, TensorHeader]) -> tuple[float, ...] | None:
    """The factors of the rotary frequencies: a fact of the config that some files keep as a small tensor."""
    header = tensors.get(FREQUENCIES)
    if header is None:
        return None
    if header.dtype != "F32" or header.nbytes > MOST_FACTORS * 4:
        return ()
    try:
        octets = files.octets(header.file, header.offset, header.nbytes)
    except OSError:
        return ()
    return struct.unpack(f"<{len(octets) // 4}f", octets)


def _incomplete(where: str, names: list[str], present: list[str]) -> MissingShard:
    missing = sorted(set(names) - set(present))
    return MissingShard(
        f"{len(missing)} of the {len(names)} files this model was split into are not here: incomplete download?",
        where=where,
        expected=some(missing),
        found=f"{len(present)} of {len(names)} files",
        fix="download the missing files into the same folder",
    )
