"""Ctrl-C and SIGTERM, whenever they come: 130 and 143, nothing left behind, and no traceback."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from signal import SIGINT, SIGTERM

import numpy as np
import pytest

import waybill
from checkpoints import BF16, lively, llama, write_tokenizer

SIGNALS = pytest.mark.parametrize("number", [SIGINT, SIGTERM], ids=["ctrl-c", "sigterm"])
READY = (
    "import os, signal, sys\n"
    "from waybill.__main__ import main\n"
    "for each in (signal.SIGINT, signal.SIGTERM): signal.signal(each, signal.SIG_DFL)\n"  # Python's own start is over
    "os.write(2, b'ready\\n')\n"
    "main()\n"
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_tokenizer(lively(llama(BF16, num_hidden_layers=1)).write(tmp_path / "checkpoint"))


@SIGNALS
@pytest.mark.parametrize("what", ["importing", "working"])
def test_an_export_can_be_stopped_at_every_import_and_every_step(
    what: str, number: signal.Signals, checkpoint: Path, tmp_path: Path
) -> None:
    out = tmp_path / "place" / "package"
    waybill.build(checkpoint, logits="all").save(out)
    files = sorted(path.name for path in out.iterdir())
    script = [sys.executable, Path(__file__).with_name("stopped.py"), what, str(int(number)), checkpoint, out]
    done = subprocess.run(script, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    *stopped, last = map(json.loads, done.stdout.splitlines())
    assert last["status"] == 0
    print(what, number, len(stopped))
    assert len(stopped) > 20
    for each in stopped:
        # The system ends it where there is nothing to clean up: before the command begins, and when it is over.
        assert each["status"] in ((128 + number) << 8, number)
        assert "Traceback" not in each["said"]
        assert "Exception ignored" not in each["said"]
        assert (each["beside"], each["whole"]) == (["package"], files)
    assert not waybill.verify(out, checkpoint).problems


@SIGNALS
def test_an_export_can_be_stopped_at_any_moment(number: signal.Signals, checkpoint: Path, tmp_path: Path) -> None:
    place, ends = tmp_path / "place", {-number: 0, 128 + number: 0, 0: 0}
    place.mkdir()
    moment = random.Random(number)
    longest = 0.5
    for _ in range(12):
        command = [sys.executable, "-c", READY, "export", str(checkpoint), str(place / "package"), "--overwrite"]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert child.stderr is not None
        assert child.stderr.readline() == b"ready\n"
        time.sleep(moment.uniform(0, longest))
        child.send_signal(number)
        _, err = child.communicate(timeout=60)
        ends[child.returncode] += 1
        assert b"Traceback" not in err
        assert b"Exception ignored" not in err
        assert [path.name for path in place.iterdir()] in ([], ["package"])
    print(number, ends)
    assert ends[0] < 12


def speaking(checkpoint: Path, number: signal.Signals, *options: str) -> subprocess.CompletedProcess[bytes]:
    """A `generate` that is sent the signal when it has begun to speak, and would go on for long."""
    command = [sys.executable, "-c", READY, "generate", str(checkpoint), "--prompt", "w5", "-n", "250", *options]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    first = child.stdout.read(1)
    os.kill(child.pid, number)
    out, err = child.communicate(timeout=60)
    return subprocess.CompletedProcess(command, child.returncode, first + out, err)


@SIGNALS
@pytest.mark.parametrize("target", ["checkpoint", "package"])
def test_an_answer_can_be_stopped(target: str, number: signal.Signals, tmp_path: Path) -> None:
    checkpoint = write_tokenizer(lively(llama(np.float32)).write(tmp_path / "checkpoint"))
    if target == "package":
        waybill.build(checkpoint).save(tmp_path / "package")
    ended = speaking(tmp_path / target, number)
    assert ended.returncode in (128 + number, 0, -number)  # it may have come to its end just before
    assert b"Traceback" not in ended.stderr
    assert ended.stdout


def test_what_is_not_to_be_disturbed_is_not(checkpoint: Path, tmp_path: Path) -> None:
    """A job that a shell put in the background ignores Ctrl-C, and so does every step of it."""
    code = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n{READY.replace('(signal.SIGINT, ', '(')}"
    code = code.replace("signal.SIGTERM): signal.signal(each", "signal.SIGTERM,): signal.signal(each")
    command = [sys.executable, "-c", code, "export", str(checkpoint), str(tmp_path / "package")]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stderr is not None
    assert child.stderr.readline() == b"ready\n"
    child.send_signal(SIGINT)
    time.sleep(0.2)
    child.send_signal(SIGINT)
    child.communicate(timeout=60)
    assert child.returncode == 0
    assert not waybill.verify(tmp_path / "package", checkpoint).problems
