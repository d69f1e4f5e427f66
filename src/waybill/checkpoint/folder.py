"""A checkpoint folder: config files, shards, and every stored tensor, known from headers alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from waybill.checkpoint.header import FileHeader, TensorHeader, read_header
from waybill.checkpoint.jsonfile import read_object
from waybill.errors import (
    BadIndex,
    CheckpointError,
    DuplicateTensor,
    MissingShard,
    MissingTensor,
    NoSafetensors,
    NotACheckpoint,
    PathEscape,
    WaybillError,
    some,
)

INDEX_NAME = "model.safetensors.index.json"
SIDE_FILES = ("quantize_config.json", "quant_config.json", "quantization_config.json")
"""Where older quantizers state their metadata, and some newer ones repeat it."""
FOREIGN = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".npz")
"""Weight files of other formats, named when there is nothing we can read."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One weight file: its name, and its size, modification time and inode when the header was read."""

    name: str
    size: int
    mtime_ns: int
    inode: int
    tensors: int

    @classmethod
    def of(cls, name: str, header: FileHeader) -> Shard:
        """The file a header was read from."""
        return cls(name, header.size, header.mtime_ns, header.inode, len(header.tensors))

    def is_file(self, stat: os.stat_result) -> bool:
        """Whether this still is the file whose header was read."""
        return (stat.st_size, stat.st_mtime_ns, stat.st_ino) == (self.size, self.mtime_ns, self.inode)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What headers and config files say. `problems` refuse it; `notices` are worth a line."""

    root: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    tensors: Mapping[str, TensorHeader]
    shards: tuple[Shard, ...]
    side_files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Quantization metadata that lies beside config.json."""
    problems: tuple[WaybillError, ...] = ()
    notices: tuple[str, ...] = ()
    metadata: Mapping[str, Any] | None = None
    """What a GGUF file says of itself; None for a folder, whose files say it."""
    dequantize: bool = False
    """Whether whoever reads it asked for floats where blocks have no exact packed form."""

    @property
    def name(self) -> str:
        """What the checkpoint is called: its folder, or its file."""
        return self.root.resolve().name if self.metadata is None or not self.shards else self.shards[0].name

    @property
    def nbytes(self) -> int:
        """Bytes of all stored tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(slots=True)
class Findings:
    """What is collected on the way, so that one look at a folder finds everything."""

    problems: list[WaybillError] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


def read_folder(path: str | Path) -> Checkpoint:
    """Describe the checkpoint at `path` without reading a weight; problems are collected, not raised.

    Raises:
        NotACheckpoint: `path` is not a folder holding a config.json.
    """
    root = Path(path)
    if not is_kind(Path.is_dir, root) or not is_kind(Path.exists, root / "config.json"):
        raise _not_a_checkpoint(root)
    findings = Findings()
    config = _json(root / "config.json", findings)
    generation = root / "generation_config.json"
    generation_config = _json(generation, findings) if generation.exists() else {}
    side_files = {name: _json(root / name, findings) for name in SIDE_FILES if (root / name).exists()}
    names, promised = _weight_files(root, findings)
    tensors, shards = _read_shards(root, names, findings)
    if promised is not None:
        _compare_with_index(promised, tensors, shards, findings)
    return Checkpoint(
        root,
        config,
        generation_config,
        tensors,
        tuple(shards),
        side_files,
        tuple(findings.problems),
        tuple(findings.notices),
    )


def is_kind(kind: Callable[[Path], bool], path: Path) -> bool:
    """`path.is_file()` and the like, false also for a name no file system takes."""
    try:
        return kind(path)
    except (OSError, ValueError):
        return False


def _not_a_checkpoint(root: Path) -> NotACheckpoint:
    if is_kind(Path.is_dir, root):
        found = "a folder without config.json"
        fix = "point at the folder that holds config.json and the .safetensors files"
        if files := sorted(path.name for path in root.glob("*.gguf")):
            found, fix = f"{found}, with {some(files)}", f"give the path of the file, {root / files[0]}"
    elif is_kind(Path.exists, root):
        found = "a file that is not GGUF"
        fix = f"point at its folder, {root.parent}"
    else:
        found = "nothing there"
        fix = "check the path; download the checkpoint first, for example with `hf download ORG/MODEL --local-dir DIR`"
    return NotACheckpoint(
        "not a checkpoint",
        where=str(root),
        expected="a folder with config.json, or a .gguf file",
        found=found,
        fix=fix,
    )


def _json(path: Path, findings: Findings) -> dict[str, Any]:
    try:
        return read_object(path)
    except CheckpointError as error:
        findings.problems.append(error)
        return {}


def _weight_files(root: Path, findings: Findings) -> tuple[list[str], dict[str, str] | None]:
    """File names to read, and the index's map from tensor to file when there is an index."""
    present = sorted(p.name for p in root.glob("*.safetensors"))
    adapters = [name for name in present if name.startswith("adapter_")]
    for name in adapters:
        findings.notices.append(f"{name}: adapter ignored, its weights are not applied")
    present = [name for name in present if name not in adapters]
    index = root / INDEX_NAME
    if not index.exists():
        others = sorted(root.glob("*.safetensors.index.json"))
        if len(others) == 1:
            index = others[0]
    if index.exists():
        promised = _read_index(index, findings)
        if promised is None:
            return [], None
        names = sorted(set(promised.values()))
        extra = [name for name in present if name not in set(names)]
        if extra:
            findings.notices.append(f"ignored, not in {index.name}: {', '.join(extra)}")
        return _on_disk(root, names, index.name, findings), promised
    if not present:
        findings.problems.append(_no_safetensors(root))
    return present, None


def _read_index(path: Path, findings: Findings) -> dict[str, str] | None:
    try:
        weight_map = read_object(path).get("weight_map")
    except CheckpointError as error:
        findings.problems.append(error)
        return None
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        wrong = (
            next((f"{k!r}: {v!r}" for k, v in weight_map.items() if not isinstance(v, str)), "nothing in it")
            if isinstance(weight_map, dict)
            else ""
        )
        findings.problems.append(
            BadIndex(
                "the index has no usable weight_map",
                where=path.name,
                expected='"weight_map": {tensor name: file name, …}',
                found=f"weight_map with {wrong}"[:160] if wrong else f"weight_map of type {type(weight_map).__name__}",
                fix=f"download {path.name} again, or delete it if all shards are here",
            )
        )
        return None
    return weight_map


def _on_disk(root: Path, names: list[str], index: str, findings: Findings) -> list[str]:
    """Keep the listed names that exist inside the folder; report the rest all at once."""
    good, missing = [], []
    for name in names:
        parts = Path(name).parts
        if not name or Path(name).is_absolute() or ".." in parts or "\\" in name or "\0" in name:
            findings.problems.append(_escape(name, index, "a path that leaves the folder"))
        elif not is_kind(Path.is_file, root / name):
            missing.append(name)
        else:
            good.append(name)
    if missing:
        findings.problems.append(
            MissingShard(
                f"{len(missing)} of {len(names)} shards named by the index are not on disk: incomplete download?",
                where=index,
                expected=", ".join(missing),
                found=f"{len(good)} of {len(names)} shards",
                fix="download the missing files; `hf download` resumes where it stopped",
            )
        )
    return good


def _escape(name: str, where: str, found: str) -> PathEscape:
    return PathEscape(
        "a weight file lies outside the checkpoint folder",
        where=f"{where}: {name}",
        expected="a file inside the folder",
        found=found,
        fix="copy the file into the folder, or name its real folder",
    )


def _no_safetensors(root: Path) -> NoSafetensors:
    foreign = sorted(p.name for p in root.iterdir() if p.suffix in FOREIGN and p.is_file())
    fix = "download the weights of this model"
    if (root / "waybill.json").is_file():
        fix = "this is a package that was exported: give it to `waybill verify` or `waybill generate`"
    elif foreign:
        fix = "this tool reads safetensors only and never unpickles; convert with transformers' save_pretrained"
    return NoSafetensors(
        "no safetensors weights here",
        where=str(root),
        expected="model.safetensors, or shards with model.safetensors.index.json",
        found=some(foreign) or "no weight files",
        fix=fix,
    )


def _allowed_roots(root: Path) -> list[Path]:
    """Where a weight file may really lie: the folder, or the blob store when it is a Hugging Face cache snapshot."""
    real = root.resolve()
    roots = [real]
    if real.parent.name == "snapshots":
        roots.append(real.parent.parent / "blobs")
    return roots


def _read_shards(root: Path, names: list[str], findings: Findings) -> tuple[dict[str, TensorHeader], list[Shard]]:
    allowed = _allowed_roots(root)
    tensors: dict[str, TensorHeader] = {}
    shards: list[Shard] = []
    for name in names:
        try:
            real = (root / name).resolve()
        except (OSError, RuntimeError):  # a link that leads to itself
            findings.problems.append(_broken_link(name, root))
            continue
        if not any(real.is_relative_to(place) for place in allowed):
            findings.problems.append(_escape(name, "folder", f"a link to {real}"))
            continue
        if not real.exists():
            findings.problems.append(_broken_link(name, root))
            continue
        try:
            header = read_header(real, name)
        except CheckpointError as error:
            findings.problems.append(error)
            continue
        shards.append(Shard.of(name, header))
        for tensor in header.tensors:
            if tensor.name in tensors:
                findings.problems.append(duplicate(tensors[tensor.name], tensor))
            else:
                tensors[tensor.name] = tensor
    return tensors, shards


def _broken_link(name: str, root: Path) -> MissingShard:
    return MissingShard(
        "a weight file is a link that leads nowhere: incomplete download?",
        where=name,
        expected="a file",
        found=f"a link to {(root / name).readlink()}" if (root / name).is_symlink() else "nothing",
        fix="download the file again; `hf download` resumes where it stopped",
    )


def duplicate(first: TensorHeader, second: TensorHeader) -> DuplicateTensor:
    """One name in two files."""
    return DuplicateTensor(
        "a tensor is stored in two files",
        where=first.name,
        expected="one file",
        found=f"{first} in {first.file} and {second} in {second.file}",
        fix="remove the file that does not belong to this checkpoint",
    )


def _compare_with_index(
    promised: dict[str, str], tensors: dict[str, TensorHeader], shards: list[Shard], findings: Findings
) -> None:
    read = {shard.name for shard in shards}
    lost = [name for name, file in promised.items() if name not in tensors and file in read]
    if lost:
        files = sorted({promised[name] for name in lost})
        findings.problems.append(
            MissingTensor(
                f"the index promises tensors that no file holds: {len(lost)}",
                where=", ".join(files),
                expected=some(lost, most=5),
                found="no such tensor in any header",
                fix="the index belongs to another version of these files; download both again",
            )
        )
    moved = [n for n, file in promised.items() if n in tensors and tensors[n].file != file]
    if moved:
        findings.notices.append(
            f"the index points {len(moved)} tensors at the wrong shard, the headers are followed: {moved[0]} is in "
            f"{tensors[moved[0]].file}"
        )
    unlisted = sum(name not in promised for name in tensors)
    if unlisted:
        findings.notices.append(f"{unlisted} tensors lie in the shards and are not listed in the index")
