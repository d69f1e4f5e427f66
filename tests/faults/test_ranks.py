"""One of the ranks that share a model ends: so do the others, and say which it was."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import lively, qwen3, write_tokenizer
from ranks import torchrun

SCRIPT = Path(__file__).with_name("falling.py")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(lively(qwen3(np.float32)).write(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def scenes(checkpoint: Path) -> dict[str, Any]:
    """By title: exit codes of all ranks, None of one that hung, and what each of them wrote."""
    done = subprocess.run(
        [sys.executable, SCRIPT, checkpoint], capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    played = {scene["title"]: scene for scene in map(json.loads, done.stdout.splitlines())}
    for scene in played.values():
        assert None not in scene["ends"]
        assert not any("Traceback" in told for told in scene["told"])
    return played


@pytest.mark.parametrize(
    ("title", "victim"),
    [
        ("killed while loading", 2),
        ("the first is killed while loading", 0),
        ("killed while generating", 1),
        ("the first is killed while generating", 0),
    ],
)
def test_when_a_rank_is_killed_all_others_end_and_name_it(title: str, victim: int, scenes: dict[str, Any]) -> None:
    scene = scenes[title]
    assert scene["ends"] == [-9 if rank == victim else 1 for rank in range(len(scene["ends"]))]
    for rank, told in enumerate(scene["told"]):
        if rank == victim:
            assert "[other-rank-failed]" not in told
            continue
        speaker = f"rank {rank}: " if rank else ""
        text = told[told.index(f"{speaker}rank {victim} ended") :].splitlines()
        assert text[0] == f"{speaker}rank {victim} ended, and the others cannot go on [other-rank-failed]"
        assert text[1] == f"  expected {len(scene['ends'])} ranks"
        assert re.match(r"  found    (Connection closed by peer|Read error) \[127", text[2])
        end = f"  fix      see what rank {victim} printed, and whether a signal or a lack of memory ended it"
        assert text[3:] == [end]


@pytest.mark.parametrize("stage", ["loading", "generating"])
def test_a_rank_without_memory_says_so_and_the_others_name_it(stage: str, scenes: dict[str, Any]) -> None:
    scene = scenes[f"no memory while {stage}"]
    assert scene["ends"] == [1, 1]
    assert scene["told"][1] == "rank 1: stopped: there is not enough memory\n"
    assert "rank 1 ended, and the others cannot go on [other-rank-failed]" in scene["told"][0]


@pytest.mark.parametrize(
    ("title", "code"), [("a file is short", "wrong-length"), ("a file becomes short", "file-changed")]
)
def test_what_one_rank_refuses_alone_it_says_and_the_others_name_it(
    title: str, code: str, scenes: dict[str, Any]
) -> None:
    first, second = scenes[title]["told"]
    assert scenes[title]["ends"] == [1, 1]
    assert first == (
        "rank 1 refused to load [other-rank-failed]\n  expected 2 ranks\n  fix      see what rank 1 printed\n"
    )
    assert second.startswith("rank 1: ")
    assert f"[{code}]" in second


def test_what_the_first_rank_refuses_alone_ends_the_others_too(scenes: dict[str, Any]) -> None:
    first, second = scenes["a file of the first is short"]["told"]
    assert "[wrong-length]" in first
    assert second.startswith("rank 1: rank 0 refused to load [other-rank-failed]")


def test_torchrun_ends_the_others_and_names_the_rank_that_was_killed(checkpoint: Path) -> None:
    done = torchrun(2, str(SCRIPT), str(checkpoint))
    assert done.returncode == 1
    assert re.search(r"rank +: 1 \(local_rank: 1\)\n +exitcode +: -9", done.stderr)
    assert "waybill/" not in done.stderr  # torchrun ends with a traceback of its own; ours is none
