"""What people see: 80 columns, colour on terminals only, progress, --quiet, help with examples, and what was meant."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import typer

import waybill
from checkpoints import lively, llama, write_tokenizer
from commands import Capture, Patch, run
from waybill.cli.app import app
from waybill.cli.progress import Progress

if TYPE_CHECKING:
    from references import Both, Make

COMMANDS = {str(command.name): command for command in typer.main.get_command(app).commands.values()}  # type: ignore[attr-defined]
CLIP = "LLaVA: CLIP, Llama"
every_command = pytest.mark.parametrize("command", COMMANDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(lively(llama(np.float32)).write(tmp_path_factory.mktemp("one") / "checkpoint"))


@pytest.fixture(scope="module")
def package(folder: Path) -> Path:
    waybill.build(folder).save(folder.parent / "package")
    return folder.parent / "package"


# Eighty columns


@pytest.fixture
def several(make: Make) -> Both:
    from references import PACKED

    return make(CLIP, PACKED)


@pytest.mark.parametrize(
    "arguments",
    [
        "inspect {a}", "plan {a} --target onnx", "plan {a} --target onnx --full", "export {a} {out}", "verify {p}",
        "verify {p} --checkpoint {a}", "compare {a} {b} --full --values", "compare {a} {b}", "compare {p} {a}",
    ],
)  # fmt: skip
def test_what_commands_print_fits_eighty_columns(
    arguments: str, several: Both, tmp_path: Path, make: Make, monkeypatch: Patch, capsys: Capture
) -> None:
    from references import FLOAT

    other = make(CLIP, FLOAT).checkpoint
    paths = {"a": several.checkpoint, "b": other, "p": several.package, "out": tmp_path / "out"}
    capsys.readouterr()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    code, out, _ = run(monkeypatch, capsys, *arguments.format(**paths).split())
    assert code in (0, 3)
    assert len(out.splitlines()) > 1
    assert [line for line in out.splitlines() if len(line) > 80 and " " in line.strip()] == []


@every_command
def test_help_fits_too_and_shows_an_example(command: str, monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = run(monkeypatch, capsys, command, "--help")
    assert (code, err) == (0, "")
    assert re.search(rf"Example:\s+waybill {command} \./", out)
    assert max(map(len, out.splitlines())) <= 80


# Colour


def on_a_terminal(*arguments: object, **environment: str) -> str:
    """What a command writes to a terminal, escapes and all."""
    ours, theirs = pty.openpty()
    given = {**os.environ, "COLUMNS": "80", "TERM": "xterm-256color"} | environment
    command = [sys.executable, "-m", "waybill", *map(str, arguments)]
    done = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=given)
    os.close(theirs)
    written = b"".join(iter(lambda: _read(ours), b""))
    os.close(ours)
    assert done.wait() == 0
    return written.decode()


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # the other side has gone
        return b""


def test_escapes_are_for_terminals_and_for_those_who_want_them(folder: Path) -> None:
    assert "\x1b[" in on_a_terminal("plan", folder)
    assert "\x1b" not in on_a_terminal("plan", folder, NO_COLOR="1")
    assert "\x1b" not in on_a_terminal("plan", folder, TERM="dumb")
    piped = subprocess.run(
        [sys.executable, "-m", "waybill", "plan", folder], capture_output=True, check=True,
        env={**os.environ, "TERM": "xterm-256color", "FORCE_COLOR": "1"},
    )  # fmt: skip
    assert b"\x1b" not in piped.stdout + piped.stderr


def test_a_terminal_shows_a_bar_and_then_nothing_of_it(package: Path) -> None:
    written = on_a_terminal("verify", package, NO_COLOR="1")
    assert "verifying" in written
    assert "in place, every digest right" in written
    assert "verifying" not in on_a_terminal("verify", package, "--quiet", NO_COLOR="1")
    assert re.search(r"verifying [\d.]+ kB: [\d.]+ s, ", on_a_terminal("verify", package, TERM="dumb"))


# Progress and quiet


class Terminal(io.StringIO):
    """A stream that says it is one."""

    def isatty(self) -> bool:
        return True


def test_a_bar_has_bytes_their_rate_and_what_remains(monkeypatch: Patch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    with Progress("reading", 2_000_000) as advance:
        advance(500_000)
        advance(500_000)
    assert re.search(r"reading .*1\.0/2\.0 MB.* [\d.?]+( [kMGT]?B/s)?.* (-|\d+):(--|\d+):(--|\d+)", shown.getvalue())


def test_elsewhere_progress_is_one_line(monkeypatch: Patch) -> None:
    monkeypatch.setattr(sys, "stderr", shown := io.StringIO())
    with Progress("reading", 2_000_000) as advance:
        advance(1_000_000)
    assert re.fullmatch(r"reading 2 MB: [\d.]+ s, [\d.]+ [kMGT]?B/s\n", shown.getvalue())
    with pytest.raises(ValueError, match="broken"), Progress("reading", 10):
        raise ValueError("broken")
    assert shown.getvalue().endswith("reading 10 B: stopped\n")


COMMON = {
    "inspect": "inspect {a}", "plan": "plan {a} --dtype float16", "export": "export {a} {out} --link",
    "verify": "verify {p} --checkpoint {a}", "compare": "compare {a} {p}", "generate": "generate {a} -p w5 -n 2",
    "generate a package": "generate {p} -p w5 -n 2",
}  # fmt: skip


@pytest.mark.parametrize("arguments", COMMON.values(), ids=COMMON)
def test_quiet_leaves_stderr_to_refusals(
    arguments: str, folder: Path, package: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    noted = write_tokenizer(lively(llama(np.float32)).write(tmp_path / "a"))
    (noted / "adapter_model.safetensors").touch()
    words = arguments.format(a=noted, p=package, out=tmp_path / "out").split()
    code, loud, said = run(monkeypatch, capsys, *words)
    assert (code, bool(said)) == (0, True)
    if words[0] == "export":
        words.append("--overwrite")
    code, out, err = run(monkeypatch, capsys, *words, "--quiet")
    assert (code, err) == (0, "")
    assert out == loud


def test_the_quiet_option_is_there_for_every_command_and_so_is_json() -> None:
    for command in COMMANDS.values():
        assert {"--quiet", "--json"} <= {name for parameter in command.params for name in parameter.opts}


def test_quiet_does_not_silence_a_refusal(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    recipe = llama()
    del recipe.tensors["model.norm.weight"]
    lacking = recipe.write(tmp_path / "a")
    for command in (["inspect", lacking], ["plan", lacking], ["export", lacking, tmp_path / "out"]):
        code, _, err = run(monkeypatch, capsys, *command, "--quiet")
        assert code == 1
        assert "[missing-weight]" in err


# What was meant


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("inspct .", "inspect"), ("exprot a b", "export"), ("plan . --ful", "--full"), ("verify . --jsn", "--json"),
        ("compare a b --value", "--values"), ("generate . --promt x", "--prompt"),
    ],
)  # fmt: skip
def test_a_misspelt_command_or_option_suggests_the_right_one(
    typed: str, meant: str, monkeypatch: Patch, capsys: Capture
) -> None:
    code, out, err = run(monkeypatch, capsys, *typed.split())
    assert (code, out) == (2, "")
    assert re.search(rf"(Did you mean|Possible options:) .*{meant}", err)


def test_the_version_is_that_of_the_package(monkeypatch: Patch, capsys: Capture) -> None:
    assert run(monkeypatch, capsys, "--version") == (0, f"waybill {version('waybill')}\n", "")


def completed(words: str) -> Iterator[str]:
    """What bash is offered after these words."""
    given = {"_WAYBILL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    program = "import sys; sys.argv[0] = 'waybill'; from waybill.cli.app import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **given}, capture_output=True, text=True, check=True
    )
    return iter(done.stdout.split())


def test_a_shell_completes_commands_and_options() -> None:
    assert set(completed("waybill ")) == set(COMMANDS)
    assert list(completed("waybill ins")) == ["inspect"]
    assert "--values" in set(completed("waybill compare --"))
    assert list(completed("waybill plan --ful")) == ["--full"]


def test_the_completion_script_is_for_this_command(monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    code, out, _ = run(monkeypatch, capsys, "--show-completion", "bash")
    assert code == 0
    assert "_WAYBILL_COMPLETE=complete_bash" in out
