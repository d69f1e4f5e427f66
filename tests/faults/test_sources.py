"""A checkpoint that changes while it is read is refused: no package and no model of two halves."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import waybill
from checkpoints import BF16, lively, llama, write_tokenizer
from commands import Patch
from waybill.errors import FileChanged

SHARD = "model.safetensors"


def truncated(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1000)


def emptied(file: Path) -> None:
    os.truncate(file, 0)


def grown(file: Path) -> None:
    with file.open("ab") as stream:
        stream.write(b"more")


def written_to(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.seek(-8, os.SEEK_END)
        stream.write(bytes(8))


def replaced(file: Path) -> None:
    """By one of the same size and time: only that it is another file tells."""
    stat, other = file.stat(), file.with_name("other")
    other.write_bytes(bytes(reversed(file.read_bytes())))
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.replace(file)


def removed(file: Path) -> None:
    file.unlink()


CHANGES = (truncated, emptied, grown, written_to, replaced, removed)
Export = Callable[[Path, Path], object]
READERS: dict[str, tuple[Any, Export]] = {
    "copied": (np.float32, lambda source, out: waybill.build(source).save(out)),
    "read": (BF16, lambda source, out: waybill.build(source).save(out)),
    "linked": (np.float32, lambda source, out: waybill.build(source, link=True).save(out, link=True)),
    "loaded": (BF16, lambda source, _: waybill.load(source)),
}


def watched(monkeypatch: Patch, at: int, change: Callable[[], object]) -> list[str]:
    """Does something before the n-th read of a weight; the list grows by one with every read."""
    seen: list[str] = []
    for call in ("preadv", "copy_file_range"):
        real = getattr(os, call)

        def told(descriptor: int, *rest: Any, _real: Any = real) -> Any:
            if Path(f"/proc/self/fd/{descriptor}").readlink().name.startswith(SHARD):
                seen.append("read")
                if len(seen) == at:
                    change()
            return _real(descriptor, *rest)

        monkeypatch.setattr(os, call, told)
    return seen


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("moment", ["first", "last"])
@pytest.mark.parametrize("reader", READERS)
def test_a_file_that_changes_at_the_first_or_the_last_read_of_it_is_refused(
    reader: str, moment: str, change: Callable[[Path], object], tmp_path: Path, monkeypatch: Patch
) -> None:
    dtype, act = READERS[reader]
    checkpoint = lively(llama(dtype, num_hidden_layers=1)).write(tmp_path / "checkpoint")
    place = tmp_path / "place"
    with monkeypatch.context() as patch:
        seen = watched(patch, 0, lambda: None)
        act(checkpoint, place / "once" / "package")
        reads = len(seen)
    assert reads > 1
    watched(monkeypatch, 1 if moment == "first" else reads, lambda: change(checkpoint / SHARD))
    with pytest.raises(FileChanged) as refused:
        act(checkpoint, place / "package")
    assert refused.value.what == "a file changed or failed while it was being read"
    assert refused.value.where == SHARD
    assert [path.name for path in place.glob("*")] == ["once"] * (reader != "loaded")


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("link", [False, True])
def test_a_file_that_changes_between_planning_and_writing_is_refused(
    link: bool, change: Callable[[Path], object], tmp_path: Path
) -> None:
    checkpoint = lively(llama(np.float32, num_hidden_layers=1)).write(tmp_path / "checkpoint")
    package = waybill.build(checkpoint, link=link)
    change(checkpoint / SHARD)
    with pytest.raises(waybill.WaybillError) as refused:
        package.save(tmp_path / "package", link=link)
    assert refused.value.code in ("file-changed", "cannot-link")
    assert not (tmp_path / "package").exists()


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_tokenizer_that_changes_while_it_is_copied_is_refused(
    change: Callable[[Path], object], tmp_path: Path, monkeypatch: Patch
) -> None:
    checkpoint = write_tokenizer(lively(llama(BF16, num_hidden_layers=1)).write(tmp_path / "checkpoint"))
    package, real = waybill.build(checkpoint), os.fstat

    def told(descriptor: int) -> os.stat_result:
        stat = real(descriptor)
        if Path(f"/proc/self/fd/{descriptor}").readlink() == checkpoint / "tokenizer.json":
            change(checkpoint / "tokenizer.json")
        return stat

    monkeypatch.setattr(os, "fstat", told)
    with pytest.raises(FileChanged) as refused:
        package.save(tmp_path / "package")
    assert refused.value.where == str(checkpoint / "tokenizer.json")
    assert refused.value.expected == "the file as it was when it was opened"
    assert not (tmp_path / "package").exists()


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("change", ["replaced", "removed", "added"])
def test_what_was_planned_from_is_what_is_packed(name: str, change: str, tmp_path: Path) -> None:
    checkpoint = lively(llama(BF16, num_hidden_layers=1)).write(tmp_path / "checkpoint")
    if change != "added":
        (checkpoint / "generation_config.json").write_text('{"eos_token_id": 2}')
    package = waybill.build(checkpoint)
    if change == "removed":
        (checkpoint / name).unlink()
    else:
        (checkpoint / name).write_text('{"eos_token_id": 3}')
    with pytest.raises(FileChanged, match="a file is not what was planned from") as refused:
        package.save(tmp_path / "package")
    assert refused.value.where == str(checkpoint / name)
    assert not (tmp_path / "package").exists()
