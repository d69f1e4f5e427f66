"""Checkpoint folders: shards, index files, links and strays, judged from headers alone."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import waybill
from checkpoints import llama, safetensors_bytes
from waybill.checkpoint import Checkpoint, read_checkpoint
from waybill.errors import NotACheckpoint, Refused, WaybillError

INDEX = "model.safetensors.index.json"
NORM = "model.norm.weight"


def fifth(name: str) -> int:
    """Scatter tensors over five shards."""
    return sum(map(ord, name)) % 5


def shard(number: int) -> str:
    return f"model-{number:05d}-of-00005.safetensors"


def sharded(folder: Path) -> Path:
    return llama().write(folder, shard_of=fifth)


def edit_index(folder: Path, change: Callable[[dict[str, str]], Any]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def only_problem(folder: Path) -> WaybillError:
    """The one problem of a folder; nothing of it may be bound, and opening it is refused."""
    checkpoint = read_checkpoint(folder)
    (problem,) = checkpoint.problems
    with pytest.raises(Refused) as refused:
        waybill.open(folder)
    assert [p.as_dict() for p in refused.value.problems] == [problem.as_dict()]
    assert str(refused.value).startswith("refused: 1 problem\n" + problem.what)
    bill = waybill.plan(checkpoint)
    assert not bill.bindings
    assert bill.problems == (problem,)
    assert problem.fix
    return problem


def clean(folder: Path) -> Checkpoint:
    """The folder's checkpoint, which plans without a problem."""
    checkpoint = waybill.open(folder)
    waybill.plan(checkpoint).require_clean()
    return checkpoint


def test_a_sharded_checkpoint_is_read_whole(tmp_path: Path) -> None:
    checkpoint = clean(sharded(tmp_path))
    assert [s.name for s in checkpoint.shards] == [shard(n) for n in range(1, 6)]
    assert len(checkpoint.tensors) == 21
    assert not checkpoint.notices


def test_shards_without_an_index_are_read_together(tmp_path: Path) -> None:
    assert len(clean(llama().write(tmp_path, shard_of=fifth, index=False)).tensors) == 21


def test_an_index_of_another_name_is_found_and_shards_may_lie_in_a_subfolder(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "part").mkdir()
    (tmp_path / shard(1)).rename(tmp_path / "part" / shard(1))
    edit_index(tmp_path, lambda m: m.update({k: f"part/{v}" for k, v in m.items() if v == shard(1)}))
    (tmp_path / INDEX).rename(tmp_path / "model.bf16.safetensors.index.json")
    assert f"part/{shard(1)}" in [s.name for s in clean(tmp_path).shards]


def test_all_missing_shards_are_listed_at_once(tmp_path: Path) -> None:
    sharded(tmp_path)
    for number in (2, 4):
        (tmp_path / shard(number)).unlink()
    problem = only_problem(tmp_path)
    assert problem.code == "missing-shard"
    assert "2 of 5 shards" in problem.what
    assert "incomplete download?" in problem.what
    assert problem.where == INDEX
    assert problem.expected == f"{shard(2)}, {shard(4)}"
    assert problem.found == "3 of 5 shards"


def test_every_broken_file_is_reported_in_one_look(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / shard(1)).unlink()
    (tmp_path / shard(2)).write_bytes(b"")
    os.truncate(tmp_path / shard(3), (tmp_path / shard(3)).stat().st_size - 8)
    (tmp_path / "generation_config.json").write_text("[")
    codes = sorted(p.code for p in read_checkpoint(tmp_path).problems)
    assert codes == ["bad-json", "missing-shard", "not-safetensors", "wrong-length"]


@pytest.mark.parametrize("entry", ["/etc/passwd", "../model.safetensors", "a/../../b.safetensors", "a\\b", "a\0b"])
def test_an_index_entry_that_leaves_the_folder_is_refused(tmp_path: Path, entry: str) -> None:
    sharded(tmp_path)
    edit_index(tmp_path, lambda m: m.update({NORM: entry}))
    problem = only_problem(tmp_path)
    assert problem.code == "path-escape"
    assert problem.where == f"{INDEX}: {entry}"
    assert problem.found == "a path that leaves the folder"


@pytest.mark.parametrize("entry", ["x" * 300 + ".safetensors", "nested/" * 900, "\ud800.safetensors", ".", "part"])
def test_an_index_entry_that_can_be_no_file_is_a_missing_shard(tmp_path: Path, entry: str) -> None:
    sharded(tmp_path)
    (tmp_path / "part").mkdir()
    edit_index(tmp_path, lambda m: m.update({NORM: entry}))
    problem = only_problem(tmp_path)
    assert problem.code == "missing-shard"
    assert problem.expected == entry


@pytest.mark.parametrize("weight_map", [None, [], "x", {NORM: 1}, {NORM: None}, {NORM: [shard(1)]}, {}])
def test_an_index_without_a_usable_weight_map_is_refused(tmp_path: Path, weight_map: Any) -> None:
    sharded(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    problem = only_problem(tmp_path)
    assert problem.code == "bad-index"
    assert problem.where == INDEX
    assert "weight_map" in problem.found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "Expecting value"),
        ("[]", "a JSON list"),
        ('{"weight_map": {"a": "b", "a": "c"}}', "'a' occurs twice"),
        ('{"weight_map": ' + "[" * 100_000, "nested too deeply"),
        ('{"weight_map": {}}' + " " * (33 << 20), "more than 33,554,432 bytes"),
    ],
)
def test_an_index_that_is_no_json_object_is_refused(tmp_path: Path, text: str, found: str) -> None:
    sharded(tmp_path)
    (tmp_path / INDEX).write_text(text)
    problem = only_problem(tmp_path)
    assert problem.code == "bad-json"
    assert problem.where == str(tmp_path / INDEX)
    assert found in problem.found


def test_an_entry_at_the_wrong_shard_is_resolved_by_the_headers_and_said(tmp_path: Path) -> None:
    home = sharded(tmp_path) / shard(fifth(NORM) + 1)
    edit_index(tmp_path, lambda m: m.update({NORM: shard(1 + (fifth(NORM) + 1) % 5)}))
    checkpoint = clean(tmp_path)
    assert checkpoint.tensors[NORM].file == home.name
    (notice,) = checkpoint.notices
    assert NORM in notice
    assert home.name in notice


def test_a_tensor_only_the_index_knows_is_refused_with_its_file(tmp_path: Path) -> None:
    sharded(tmp_path)
    edit_index(tmp_path, lambda m: m.update({"model.ghost.weight": shard(3)}))
    problem = only_problem(tmp_path)
    assert problem.code == "missing-tensor"
    assert problem.where == shard(3)
    assert problem.expected == "model.ghost.weight"
    assert "no such tensor" in problem.found


def test_a_tensor_the_index_does_not_list_is_said(tmp_path: Path) -> None:
    sharded(tmp_path)
    edit_index(tmp_path, lambda m: m.pop(NORM))
    (notice,) = clean(tmp_path).notices
    assert notice.startswith("1 tensor")
    assert "not listed in the index" in notice


@pytest.mark.parametrize("name", ["consolidated.safetensors", "model.safetensors", "model-00001-of-00009.safetensors"])
def test_files_beside_the_indexed_set_are_ignored_in_one_line(tmp_path: Path, name: str) -> None:
    sharded(tmp_path)
    strays = {"layers.0.attention.wq.weight": np.zeros((2, 2), np.float32), NORM: np.ones(64, np.float32)}
    (tmp_path / name).write_bytes(safetensors_bytes(strays))
    (tmp_path / "other.safetensors").write_bytes(b"not even safetensors")
    checkpoint = clean(tmp_path)
    assert checkpoint.notices == (f"ignored, not in {INDEX}: {name}, other.safetensors",)
    assert checkpoint.tensors[NORM].dtype == "BF16"


def test_an_adapter_is_ignored_in_one_line(tmp_path: Path) -> None:
    llama().write(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"not read")
    (notice,) = clean(tmp_path).notices
    assert notice.startswith("adapter_model.safetensors: adapter ignored")


def test_a_tensor_in_two_files_is_refused_with_both_names(tmp_path: Path) -> None:
    llama().write(tmp_path)
    (tmp_path / "old.safetensors").write_bytes(safetensors_bytes({NORM: np.ones((8, 8), np.float32)}))
    problem = only_problem(tmp_path)
    assert problem.code == "duplicate-tensor"
    assert problem.where == NORM
    assert problem.found == "BF16[64] in model.safetensors and F32[8, 8] in old.safetensors"


def test_a_tensor_in_two_indexed_shards_is_refused(tmp_path: Path) -> None:
    recipe = llama()
    recipe.write(tmp_path, shard_of=fifth)
    held = {n: t for n, t in recipe.tensors.items() if fifth(n) == 0} | {NORM: recipe.tensors[NORM]}
    assert fifth(NORM) != 0
    (tmp_path / shard(1)).write_bytes(safetensors_bytes(held))
    problem = only_problem(tmp_path)
    assert (problem.code, problem.where) == ("duplicate-tensor", NORM)
    assert shard(1) in problem.found
    assert shard(fifth(NORM) + 1) in problem.found


def test_only_pickled_weights_are_refused_by_name_and_never_opened(tmp_path: Path) -> None:
    (llama().write(tmp_path) / "model.safetensors").unlink()
    for name in ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"):
        (tmp_path / name).write_bytes(b"\x80\x02cos\nsystem\n.")
    (tmp_path / "safetensors_notes.json").write_text("{}")
    problem = only_problem(tmp_path)
    assert problem.code == "no-safetensors"
    assert problem.found == "pytorch_model-00001-of-00002.bin, pytorch_model-00002-of-00002.bin"
    assert "never unpickles" in problem.fix


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (llama().write(tmp_path) / "model.safetensors").unlink()
    problem = only_problem(tmp_path)
    assert (problem.code, problem.found) == ("no-safetensors", "no weight files")


@pytest.mark.parametrize(
    ("name", "found"),
    [("nowhere", "nothing there"), ("file", "a file that is not GGUF"), ("folder", "a folder without config.json")],
)
def test_a_path_that_is_no_checkpoint_is_refused(tmp_path: Path, name: str, found: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(NotACheckpoint) as refused:
        waybill.open(tmp_path / name)
    assert refused.value.where == str(tmp_path / name)
    assert refused.value.found == found


@pytest.mark.parametrize("path", ["x" * 5000, "a\0b", ""])
def test_a_path_that_cannot_exist_is_refused(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotACheckpoint):
        waybill.open(path)


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = llama().write(tmp_path / "model")
    (folder / "model.safetensors").rename(tmp_path / "elsewhere")
    (folder / "model.safetensors").symlink_to("../elsewhere")
    problem = only_problem(folder)
    assert problem.code == "path-escape"
    assert "model.safetensors" in problem.where
    assert problem.found == f"a link to {(tmp_path / 'elsewhere').resolve()}"


def test_an_indexed_shard_linked_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "model")
    (folder / shard(2)).rename(tmp_path / "elsewhere")
    (folder / shard(2)).symlink_to("../elsewhere")
    codes = [p.code for p in read_checkpoint(folder).problems]
    assert codes == ["path-escape"]


def test_a_link_inside_the_folder_is_followed(tmp_path: Path) -> None:
    llama().write(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "data")
    (tmp_path / "model.safetensors").symlink_to("data")
    assert len(clean(tmp_path).tensors) == 21


def test_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    (llama().write(tmp_path) / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to("model.safetensors")
    assert "model.safetensors" in only_problem(tmp_path).where


def test_a_link_to_nothing_is_called_a_link(tmp_path: Path) -> None:
    (llama().write(tmp_path) / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to("blob-that-was-never-downloaded")
    problem = only_problem(tmp_path)
    assert "blob-that-was-never-downloaded" in problem.found
    assert "pipe" not in problem.found


def hub_cache(root: Path, store: str = "blobs") -> Path:
    """A snapshot as the hub's cache keeps it: every file a link into the blob store."""
    snapshot = root / "models--org--name" / "snapshots" / "0123abcd"
    target = root / "models--org--name" / store
    target.mkdir(parents=True)
    for file in sharded(snapshot).iterdir():
        file.rename(target / f"sha-{file.name}")
        file.symlink_to(f"../../{store}/sha-{file.name}")
    return snapshot


def test_a_snapshot_of_the_hub_cache_works(tmp_path: Path) -> None:
    assert len(clean(hub_cache(tmp_path)).tensors) == 21


def test_a_link_to_a_snapshot_works(tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(hub_cache(tmp_path), target_is_directory=True)
    assert len(clean(tmp_path / "latest").tensors) == 21


def test_a_snapshot_may_reach_its_blobs_and_nothing_else(tmp_path: Path) -> None:
    problems = read_checkpoint(hub_cache(tmp_path, store="secrets")).problems
    assert [(p.code, Path(p.where).name) for p in problems] == [("path-escape", "config.json"), ("path-escape", INDEX)]


CONFIGS = {
    "empty file": ("", "Expecting value"),
    "text": ("Entry not found", "Expecting value"),
    "list": ("[]", "a JSON list, not an object"),
    "null": ("null", "not an object"),
    "nan": ('{"rms_norm_eps": NaN}', "NaN is not JSON"),
    "infinity": ('{"rope_theta": Infinity}', "Infinity is not JSON"),
    "twice": ('{"head_dim": 1, "head_dim": 2}', "'head_dim' occurs twice"),
    "deep": ('{"a":' + "[" * 100_000, "nested too deeply"),
    "digits": ('{"head_dim": ' + "9" * 5000 + "}", "5000 digits"),
    "latin-1": (b'{"a": "\xe9"}', "not UTF-8"),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_a_config_that_is_no_strict_json_object_is_refused(tmp_path: Path, file: str, name: str) -> None:
    content, found = CONFIGS[name]
    (llama().write(tmp_path) / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    problem = only_problem(tmp_path)
    assert problem.code == "bad-json"
    assert problem.where == str(tmp_path / file)
    assert found in problem.found


def test_a_config_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    (llama().write(tmp_path) / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    assert only_problem(tmp_path).code == "bad-json"


def test_an_endless_config_is_refused(tmp_path: Path) -> None:
    (llama().write(tmp_path) / "config.json").unlink()
    (tmp_path / "config.json").symlink_to("/dev/zero")
    assert only_problem(tmp_path).code == "path-escape"
