"""Indexes and links that lead out of the folder, in circles or to millions of files.

What is allowed is written down in docs/security.md: links within the folder, and from a snapshot of the hub's cache to
its own blobs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import waybill
from checkpoints import Recipe, llama, write_tokenizer
from strangers import GENERATE, digest_of, judged, read_or_refused, refused
from waybill.errors import PathEscape

INDEX = "model.safetensors.index.json"
NORM = "model.norm.weight"
SECRET = "a secret that no command may read, show or copy"


def sharded(folder: Path) -> Path:
    return llama(num_hidden_layers=1).write(folder, shard_of=lambda name: len(name) % 2)


def names_file(name: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"][NORM] = name
        (folder / INDEX).write_text(json.dumps(index))

    return edit


ENTRIES = {
    "an absolute path": "/etc/passwd",
    "a parent folder": "../secret",
    "a parent folder, by a way around": "a/../../secret",
    "a parent folder, as Windows writes it": "..\\secret",
    "a name with a zero byte": "model\0.safetensors",
    "nothing": "",
    "the folder itself": ".",
    "a name longer than any file's": "x" * 5000,
    "half a character": "\ud800",
    "a device": "/dev/zero",
    "a terminal's commands": "\x1b[2J",
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_index_that_names_what_is_no_file_of_the_folder_is_refused(tmp_path: Path, entry: str) -> None:
    folder = sharded(tmp_path / "stranger")
    (tmp_path / "secret").write_text(SECRET)
    names_file(ENTRIES[entry])(folder)
    assert refused(folder) <= {"path-escape", "missing-shard"}


@pytest.mark.parametrize("name", ["../s{}", "s{}"], ids=["that lead out", "that are not there"])
def test_an_index_of_hundreds_of_thousands_of_files_is_refused(tmp_path: Path, name: str) -> None:
    folder = sharded(tmp_path)
    (folder / INDEX).write_text(json.dumps({"weight_map": {f"a{i}": name.format(i) for i in range(300_000)}}))
    assert refused(folder, (["inspect", "--json"],)) == {"bad-index"}


@pytest.mark.parametrize(("tensors", "code"), [(600_000, "missing-tensor"), (1_000_000, "bad-json")])
def test_an_index_of_tensors_without_end_is_refused(tensors: int, code: str, tmp_path: Path) -> None:
    folder, shard = sharded(tmp_path), "model-00001-of-00002.safetensors"
    (folder / INDEX).write_text(json.dumps({"weight_map": {f"a{i}": shard for i in range(tensors)}}))
    assert refused(folder, (["inspect", "--json"],)) == {code}


READ = (
    "config.json", "generation_config.json", INDEX, "quantize_config.json", "model-00001-of-00002.safetensors",
)  # fmt: skip


@pytest.mark.parametrize("file", READ)
def test_a_link_out_of_the_folder_is_refused_whatever_file_it_stands_for(tmp_path: Path, file: str) -> None:
    folder = sharded(tmp_path / "stranger")
    (folder / "generation_config.json").write_text("{}")
    secret = tmp_path / "secret"
    if (folder / file).exists():
        (folder / file).rename(secret)
    else:
        secret.write_text(SECRET)
    (folder / file).symlink_to("../secret")
    assert refused(folder) == {"path-escape"}


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_link_out_of_the_folder_is_refused_when_text_is_made(tmp_path: Path, file: str) -> None:
    folder = write_tokenizer(llama(num_hidden_layers=1).write(tmp_path / "stranger"), chat_template="w3")
    (tmp_path / "secret").write_text(SECRET)
    (folder / file).unlink(missing_ok=True)
    (folder / file).symlink_to("../secret")
    assert refused(folder, [[*GENERATE[0], "--chat"]]) == {"path-escape"}


@pytest.mark.parametrize(
    "file", ["tokenizer.json", "tokenizer.model", "special_tokens_map.json", "processor_config.json"]
)
def test_no_package_carries_a_file_from_elsewhere(tmp_path: Path, file: str) -> None:
    folder = llama(num_hidden_layers=1).write(tmp_path / "stranger")
    (tmp_path / "secret").write_text(SECRET)
    (folder / file).symlink_to("../secret")
    with pytest.raises(PathEscape, match="a file lies outside the folder that names it") as told:
        waybill.build(folder).save(tmp_path / "package")
    assert told.value.where == str(folder / file)
    assert told.value.found == f"a link to {(tmp_path / 'secret').resolve()}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret", "stranger"]


def in_a_circle(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(f"{name}.2")
    (folder / f"{name}.2").symlink_to(name)


@pytest.mark.parametrize("file", [*READ[:-1], "model.safetensors"])
def test_links_in_a_circle_are_refused(tmp_path: Path, file: str) -> None:
    llama(num_hidden_layers=1).write(tmp_path)
    in_a_circle(tmp_path, file)
    outcomes = judged(tmp_path)
    # A file that need not be there is as good as absent.
    assert {o.exit for o in outcomes} == (
        {0} if file in ("generation_config.json", INDEX, "quantize_config.json") else {1}
    )


def test_a_folder_that_contains_itself_is_not_walked(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    intended = digest_of(folder)
    (folder / "again").symlink_to(".", target_is_directory=True)
    assert read_or_refused(intended, folder) == [True]


@pytest.mark.parametrize("file", READ[:-1])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path, file: str) -> None:
    folder = sharded(tmp_path)
    (folder / file).unlink(missing_ok=True)
    os.mkfifo(folder / file)
    assert refused(folder) == {"bad-json"}


def cached(root: Path, recipe: Recipe, store: str = "blobs") -> Path:
    """A snapshot as the hub's cache keeps it: every file a link into the store of blobs."""
    snapshot, blobs = root / "models--a--b" / "snapshots" / "0123", root / "models--a--b" / store
    blobs.mkdir(parents=True)
    for file in write_tokenizer(recipe.write(snapshot)).iterdir():
        file.rename(blobs / f"sha-{file.name}")
        file.symlink_to(f"../../{store}/sha-{file.name}")
    return snapshot


def test_a_snapshot_of_the_hubs_cache_is_read_and_answers(tmp_path: Path) -> None:
    snapshot = cached(tmp_path, llama(num_hidden_layers=1))
    also = snapshot.parents[1]
    outcomes = judged(snapshot, [["inspect"], ["plan"], ["load"], *GENERATE], also=also)
    assert [outcome.exit for outcome in outcomes] == [0] * 4
    assert outcomes[2].said == digest_of(snapshot)


def test_a_snapshot_reaches_its_own_blobs_and_no_others(tmp_path: Path) -> None:
    assert refused(cached(tmp_path, llama(num_hidden_layers=1), store="secrets")) == {"path-escape"}
