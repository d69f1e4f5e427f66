"""Every step of an export is its last, or fails: the old package is intact or the new one whole; the next tidies up.

The counts that docs/faults.md gives are counted here.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import BF16, lively, llama, write_tokenizer

SCRIPT = Path(__file__).with_name("forked.py")


def command(tmp_path: Path, dtype: Any, *words: str) -> list[Any]:
    folder = tmp_path / "checkpoint"
    write_tokenizer(lively(llama(dtype, num_hidden_layers=1)).write(folder))
    return [sys.executable, SCRIPT, folder, tmp_path / "place" / "package", *words]


def play(tmp_path: Path, dtype: Any, fault: str, words: str) -> list[dict[str, Any]]:
    """What came of every export; its `out` is "old" or "new", or "none" where there is no package."""
    arguments = command(tmp_path, dtype, fault, *words.split())
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    *runs, last = map(json.loads, done.stdout.splitlines())
    assert last["sound"]
    names = {json.dumps(last["old"]): "old", json.dumps(runs[-1]["next"]["out"]): "new", "{}": "none"}
    assert len(names) == 3
    for run in (*runs, *(run["next"] for run in runs)):
        run["out"] = names[json.dumps(run["out"])]  # anything else is half a package
    for run in runs:
        assert run["next"] == {"status": 0, "beside": ["package"], "out": "new"}
    *faulty, clean = runs
    assert (clean["status"], clean["beside"], clean["out"]) == (0, ["package"], "new")
    print(fault, words, len(faulty), dict(kinds(faulty)))
    return faulty


def kinds(runs: list[dict[str, Any]]) -> Counter[str]:
    return Counter(run["step"][0] for run in runs)


def lost(runs: list[dict[str, Any]], words: str) -> list[dict[str, Any]]:
    """Exports after which there is neither the package that was there nor the new one."""
    return [run for run in runs if run["out"] not in ("old" if "overwrite" in words else "none", "new")]


@pytest.mark.parametrize(
    ("dtype", "words"),
    [(np.float32, "overwrite"), (BF16, "new"), (np.float32, "overwrite link"), (np.float32, "overwrite unexchanged")],
    ids=["replaced", "new", "linked", "unexchanged"],
)
def test_killed_at_any_step_an_export_leaves_the_old_package_or_the_new_one(
    dtype: Any, words: str, tmp_path: Path
) -> None:
    runs = play(tmp_path, dtype, "kill", words)
    assert {run["status"] for run in runs} == {signal.SIGKILL}
    assert set(kinds(runs)) >= {"mkdir", "create", "write", "truncate", "fsync", "flock", "unlink", "rmdir"}
    # Between two renames there is no package of that name; the next export puts the old one back.
    assert kinds(lost(runs, words)) == ({"rename": 1} if "unexchanged" in words else {})
    for run in runs:  # one folder: the killed one's, or the one that was left before
        assert len(set(run["beside"]) - {"package"}) <= 1 + (run in lost(runs, words))


@pytest.mark.parametrize(
    ("dtype", "words"),
    [(np.float32, "overwrite"), (BF16, "new"), (BF16, "overwrite unexchanged")],
    ids=["replaced", "new", "unexchanged"],
)
def test_a_disk_that_is_full_from_any_step_on_is_told_and_loses_nothing(dtype: Any, words: str, tmp_path: Path) -> None:
    runs = play(tmp_path, dtype, "ENOSPC", words)
    assert set(kinds(runs)) >= {"mkdir", "create", "write", "truncate", "fsync"}
    assert {(run["status"], run["refused"][0]) for run in runs} == {(0, "cannot-write")}
    assert kinds(lost(runs, words)) == ({"rename": 1} if "unexchanged" in words else {})
    for run in runs:
        assert len(set(run["beside"]) - {"package"}) == (run in lost(runs, words))


@pytest.mark.parametrize(
    ("dtype", "words"),
    [(np.float32, "overwrite"), (BF16, "new"), (BF16, "overwrite unexchanged")],
    ids=["replaced", "new", "unexchanged"],
)
def test_a_disk_that_fails_at_any_step_is_told_and_loses_nothing(dtype: Any, words: str, tmp_path: Path) -> None:
    runs = play(tmp_path, dtype, "EIO", words)
    assert {run["status"] for run in runs} == {0}
    assert lost(runs, words) == []
    for run in runs:
        kind = run["step"][0]
        if "refused" in run:
            assert run["refused"][0] == "cannot-write"
        else:  # done in another way, without a lock, or left for the next export
            assert kind in ("copy", "exchange", "flock", "unlink", "rmdir", "mkdir")
        assert len(set(run["beside"]) - {"package"}) <= (kind in ("flock", "unlink", "rmdir"))


@pytest.mark.parametrize("words", ["overwrite", "overwrite link", "new"])
def test_a_file_that_cannot_be_read_at_any_step_is_told_and_loses_nothing(words: str, tmp_path: Path) -> None:
    runs = play(tmp_path, np.float32 if "link" in words else BF16, "unreadable", words)
    assert {run["status"] for run in runs} == {0}
    assert lost(runs, words) == []
    shards = [run["refused"][0] for run in runs if run["step"][1].endswith("checkpoint/model.safetensors")]
    assert Counter(shards).keys() == {"bad-header", "file-changed"}  # while planning, and while bytes move
    for run in runs:
        assert "refused" in run or run["step"][0] == "open"  # of a folder that is to be removed


@pytest.mark.parametrize("words", ["overwrite", "new"])
def test_files_then_their_folder_reach_the_disk_before_the_rename_and_the_parents_after_it(
    words: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        command(tmp_path, np.float32, "order", words), capture_output=True, text=True, timeout=120, check=True
    )
    place = tmp_path / "place"
    steps = [(kind, Path(path)) for kind, path in map(json.loads, done.stdout.splitlines())]
    [renamed] = [number for number, (kind, _) in enumerate(steps) if kind in ("rename", "exchange")]
    flushed = [path for kind, path in steps if kind == "fsync"]
    *files, folder = [path for kind, path in steps[:renamed] if kind == "fsync"]
    assert {path.parent for path in files} == {folder}
    assert sorted(path.name for path in files) == sorted(path.name for path in (place / "package").iterdir())
    written = [number for number, (kind, _) in enumerate(steps) if kind in ("create", "write", "copy", "truncate")]
    assert max(written) < steps.index(("fsync", files[0]))
    made = [] if words == "overwrite" else [tmp_path]  # `place` itself is new, and so an entry of its own parent
    assert [path for path in flushed if path not in (*files, folder)] == [place, *made]
    after = [kind for kind, _ in steps[renamed + 1 :]]
    assert after[: 1 + len(made)] == ["fsync"] * (1 + len(made))  # before the old package is removed
