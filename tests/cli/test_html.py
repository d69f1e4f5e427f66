"""--html: a report beside the usual answer; whole or not at all, and never over anything else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoints import llama
from commands import Capture, Patch, run, run_unread
from reports import read
from waybill.report import write
from waybill.report.write import MARKER


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return llama().write(tmp_path / "checkpoint")


@pytest.mark.parametrize("command", [["inspect"], ["plan"], ["plan", "--target", "onnx"], ["inspect", "--json"]])
def test_a_report_is_written_beside_the_usual_answer(
    command: list[str], checkpoint: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    report = tmp_path / "report.html"
    code, plain, _ = run(monkeypatch, capsys, *command, checkpoint)
    again, out, err = run_unread(monkeypatch, capsys, *command, checkpoint, "--html", report)
    assert (code, again, out) == (0, 0, plain)
    assert err.splitlines()[:1] == [f"report: {report}"] * ("--json" not in command)
    assert report.read_text("utf-8").startswith(MARKER)
    assert next(read(report).all("h1")).text == "checkpoint"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "report.html"]
    if "--json" in command:
        assert json.loads(out)["tensors"] == 21


@pytest.mark.parametrize("command", ["inspect", "plan"])
def test_what_is_refused_has_a_report_of_its_problems_and_their_fixes(
    command: str, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    recipe = llama()
    del recipe.tensors["model.layers.1.self_attn.v_proj.weight"]
    folder, report = recipe.write(tmp_path / "broken"), tmp_path / "report.html"
    code, _, _ = run(monkeypatch, capsys, command, folder, "--html", report)
    assert code == 1
    text = read(report).one("problems").text
    assert "incomplete-merge" in text and "fix download the shard that holds the missing weight" in text
    assert "✕ refused: 1 problem" in read(report).text


def test_a_package_says_which_providers_can_run_it(
    checkpoint: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    report = tmp_path / "report.html"
    run(monkeypatch, capsys, "plan", checkpoint, "--target", "onnx", "--html", report)
    text = read(report).one("memory").text
    assert "CPUExecutionProvider can run it" in text and "free disk" in text


def test_a_report_is_replaced_only_when_asked_for(
    checkpoint: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    report = tmp_path / "report.html"
    run(monkeypatch, capsys, "inspect", checkpoint, "--html", report)
    before = report.read_bytes()
    code, out, err = run(monkeypatch, capsys, "plan", checkpoint, "--html", report)
    assert (code, out, report.read_bytes()) == (1, "", before)
    assert err == (
        "the target is taken [target-exists]\n"
        f"  where    {report}\n"
        "  expected nothing, or a report with --overwrite\n"
        "  found    something of that name\n"
        "  fix      choose another name, or give --overwrite to replace a report\n"
    )
    code, _, _ = run(monkeypatch, capsys, "plan", checkpoint, "--html", report, "--overwrite")
    assert code == 0 and report.read_bytes() != before


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "", "pipe", "dangling"])
def test_nothing_but_a_report_is_ever_replaced(
    name: str, checkpoint: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    os.mkfifo(checkpoint / "pipe")
    (checkpoint / "dangling").symlink_to("nowhere")
    before = {path: path.read_bytes() for path in checkpoint.iterdir() if path.is_file()}
    code, _, err = run(monkeypatch, capsys, "inspect", checkpoint, "--html", checkpoint / name, "--overwrite")
    assert code == 1
    assert "the target is taken [target-exists]" in err and "something that is no report" in err
    assert {path: path.read_bytes() for path in checkpoint.iterdir() if path.is_file()} == before


def test_a_folder_that_is_not_there_is_refused_before_anything_is_computed(
    checkpoint: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    code, out, err = run(monkeypatch, capsys, "inspect", checkpoint, "--html", tmp_path / "no" / "report.html")
    assert (code, out) == (1, "")
    assert err == (
        "the report cannot be written [cannot-write]\n"
        f"  where    {tmp_path / 'no'}\n"
        "  expected a place in a folder that can be written, with enough space\n"
        "  found    no such folder\n"
        "  fix      make the folder first, or choose another\n"
    )


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failing_disk_leaves_what_was_there_and_nothing_else(
    step: str, checkpoint: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    report = tmp_path / "report.html"
    run(monkeypatch, capsys, "inspect", checkpoint, "--html", report)
    before = report.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*((write.os, "fsync") if step == "fsync" else (Path, "replace")), full)
    code, _, err = run(monkeypatch, capsys, "inspect", checkpoint, "--html", report, "--overwrite")
    assert code == 1 and "No space left on device" in err and "[cannot-write]" in err
    assert report.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "report.html"]


def test_what_a_killed_process_left_is_removed_by_the_next_report(
    checkpoint: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    for name in (".report.html.0badcafe.partial", ".other.html.0badcafe.partial"):
        (tmp_path / name).write_text(MARKER)
    assert run(monkeypatch, capsys, "inspect", checkpoint, "--html", tmp_path / "report.html")[0] == 0
    found = sorted(path.name for path in tmp_path.iterdir())
    assert found == [".other.html.0badcafe.partial", "checkpoint", "report.html"]


def test_without_a_report_no_template_is_loaded(checkpoint: Path) -> None:
    script = (
        "import sys\nfrom waybill.cli.app import main\ntry: main()\nexcept SystemExit: pass\n"
        "print(*({'jinja2', 'waybill.report.page', 'waybill.report.write'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "inspect", checkpoint], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == ""
