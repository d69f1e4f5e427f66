"""A checkpoint folder: config files, shards, and every stored tensor, known from headers alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from waybill.checkpoint.files import Files, Folder, Progress, Remote, escape, is_kind, leaves
from waybill.checkpoint.header import FileHeader, TensorHeader
from waybill.checkpoint.jsonfile import MAX_INDEX_BYTES, read_object
from waybill.errors import (
    BadIndex,
    CheckpointError,
    DuplicateTensor,
    FileChanged,
    MissingShard,
    MissingTensor,
    NoSafetensors,
    NotACheckpoint,
    WaybillError,
    some,
)

INDEX_ENDING = ".safetensors.index.json"
INDEX_NAME = f"model{INDEX_ENDING}"
SIDE_FILES = ("quantize_config.json", "quant_config.json", "quantization_config.json")
"""Where older quantizers state their metadata, and some newer ones repeat it."""
FOREIGN = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".npz")
"""Weight files of other formats, named when there is nothing we can read."""

MOST_SHARDS = 4096
"""Files of one model; the largest have a few hundred."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One weight file: its name, and its size, modification time and inode when the header was read.

    Time and inode are 0 of a file that lies on a hub.
    """

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
    """Whether whoever reads it asked for floats where blocks have minimums, or a table of values."""

    remote: Remote | None = field(default=None, repr=False, compare=False)
    """The hub that weight files can be brought from."""

    @property
    def location(self) -> Path:
        """What to open to read it again: its folder, or its GGUF file."""
        return self.root if self.metadata is None or not self.shards else self.root / self.shards[0].name

    @property
    def place(self) -> str:
        """Its folder's name; the id and the commit of what lies in a Hugging Face cache."""
        real = self.root.resolve()
        kind, *parts = real.parent.parent.name.split("--")
        return f"{'/'.join(parts)}@{real.name}" if kind == "models" and real.parent.name == "snapshots" else real.name

    @property
    def name(self) -> str:
        """What the checkpoint is called: its place, or its file."""
        return self.place if self.location == self.root else self.location.name

    @property
    def files(self) -> set[str]:
        """The names of its weight files."""
        return {shard.name for shard in self.shards}

    @property
    def nbytes(self) -> int:
        """Bytes of all stored tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def pending(self, files: Collection[str]) -> int:
        """Bytes that `fetched` would bring."""
        return 0 if self.remote is None else self.remote.pending(files)

    def fetched(self, files: Collection[str], progress: Progress = lambda _: None) -> Checkpoint:
        """The checkpoint with these weight files, and the small ones that go with any, on this disk.

        Raises:
            HubError: they cannot be brought.
            FileChanged: one of them is not what its header was read from.
        """
        if self.remote is None:
            return self
        self.remote.fetch(files, progress)
        return replace(self, shards=tuple(self._arrived(s) if s.name in files else s for s in self.shards))

    def _arrived(self, shard: Shard) -> Shard:
        folder = Folder(self.root)
        header = folder.header(shard.name) if self.metadata is None else folder.gguf(shard.name).file
        same = len(header.tensors) == shard.tensors and all(self.tensors.get(t.name) == t for t in header.tensors)
        if header.size != shard.size or not same:
            raise FileChanged(
                "a weight file is not the one whose header was read",
                where=shard.name,
                expected=f"{shard.tensors} tensors in {shard.size:,} bytes, as the hub's header said",
                found=f"{len(header.tensors)} tensors in {header.size:,} bytes"
                + ("" if same else ", and not the same tensors"),
                fix=f"remove {self.root.parent.parent} from the cache, and run again",
            )
        return Shard.of(shard.name, header)


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
    return describe(Folder(root))


def describe(files: Files) -> Checkpoint:
    """Describe the checkpoint that files with a config.json make."""
    root, findings = files.root, Findings()
    config = _json(root / "config.json", findings)
    generation = root / "generation_config.json"
    generation_config = _json(generation, findings) if generation.exists() else {}
    side_files = {name: _json(root / name, findings) for name in SIDE_FILES if (root / name).exists()}
    names, promised = _weight_files(files, findings)
    tensors, shards = read_shards(files, names, files.header, findings)
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
        fix = "check the path; a checkpoint on Hugging Face is ORG/NAME, ORG/NAME@REVISION or ORG/NAME/FILE.gguf"
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


def _weight_files(files: Files, findings: Findings) -> tuple[list[str], dict[str, str] | None]:
    """File names to read, and the index's map from tensor to file when there is an index."""
    present = sorted(name for name in files.names() if name.endswith(".safetensors"))
    adapters = [name for name in present if name.startswith("adapter_")]
    for name in adapters:
        findings.notices.append(f"{name}: adapter ignored, its weights are not applied")
    present = [name for name in present if name not in adapters]
    index = files.root / INDEX_NAME
    if not index.exists():
        others = sorted(files.root.glob(f"*{INDEX_ENDING}"))
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
        return _held(files, names, index.name, findings), promised
    if not present:
        findings.problems.append(_no_safetensors(files))
    return present, None


def _read_index(path: Path, findings: Findings) -> dict[str, str] | None:
    try:
        weight_map: Any = read_object(path, MAX_INDEX_BYTES).get("weight_map")
    except CheckpointError as error:
        findings.problems.append(error)
        return None
    if wrong := _unusable(weight_map):
        findings.problems.append(
            BadIndex(
                "the index has no usable weight_map",
                where=path.name,
                expected='"weight_map": {tensor name: file name, …}',
                found=f"weight_map {wrong}"[:160],
                fix=f"download {path.name} again, or delete it if all shards are here",
            )
        )
        return None
    return dict(weight_map)


def _unusable(weight_map: Any) -> str:
    """What is wrong with a map from tensors to files, if something is."""
    if not isinstance(weight_map, dict):
        return f"of type {type(weight_map).__name__}"
    for name, file in weight_map.items():
        if not isinstance(file, str):
            return f"with {name!r}: {file!r}"
    files = len(set(weight_map.values()))
    return f"with {files:,} files" if files > MOST_SHARDS else "" if files else "with nothing in it"


def _held(files: Files, names: list[str], index: str, findings: Findings) -> list[str]:
    """Keep the listed names that exist inside the folder; report the rest all at once."""
    good, missing, outside = [], [], []
    for name in names:
        if leaves(name):
            outside.append(name)
        elif not files.holds(name):
            missing.append(name)
        else:
            good.append(name)
    if outside:
        others = f", as {len(outside) - 1:,} others do" if len(outside) > 1 else ""
        findings.problems.append(escape(outside[0], index, f"a path that leaves the folder{others}"))
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


def _no_safetensors(files: Files) -> NoSafetensors:
    foreign = sorted(name for name in files.names() if Path(name).suffix in FOREIGN and files.holds(name))
    fix = "download the weights of this model"
    if files.holds("waybill.json"):
        fix = "this is a package that was exported: give it to `waybill verify` or `waybill generate`"
    elif foreign:
        fix = "this tool reads safetensors only and never unpickles; convert with transformers' save_pretrained"
    return NoSafetensors(
        "no safetensors weights here",
        where=files.place,
        expected="model.safetensors, or shards with model.safetensors.index.json",
        found=some(foreign) or "no weight files",
        fix=fix,
    )


def read_shards(
    files: Files, names: list[str], header_of: Callable[[str], FileHeader], findings: Findings
) -> tuple[dict[str, TensorHeader], list[Shard]]:
    """The tensors of all files by name, and the files; what is wrong with one is a problem, and the others are read."""

    def read(name: str) -> FileHeader | CheckpointError:
        try:
            return header_of(name)
        except CheckpointError as error:
            return error

    tensors: dict[str, TensorHeader] = {}
    shards: list[Shard] = []
    for name, header in zip(names, files.each(read, names), strict=True):
        if isinstance(header, CheckpointError):
            findings.problems.append(header)
            continue
        shards.append(Shard.of(name, header))
        for tensor in header.tensors:
            if (first := tensors.setdefault(tensor.name, tensor)) is not tensor:
                findings.problems.append(_duplicate(first, tensor))
    return tensors, shards


def _duplicate(first: TensorHeader, second: TensorHeader) -> DuplicateTensor:
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
    absent = promised.keys() - tensors.keys()
    lost = [name for name, file in promised.items() if name in absent and file in read] if absent else []
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
    moved = [t.name for t in tensors.values() if promised.get(t.name, t.file) != t.file]
    if moved:
        findings.notices.append(
            f"the index points {len(moved)} tensors at the wrong shard, the headers are followed: {moved[0]} is in "
            f"{tensors[moved[0]].file}"
        )
    unlisted = len(tensors.keys() - promised.keys())
    if unlisted:
        findings.notices.append(f"{unlisted} tensors lie in the shards and are not listed in the index")
