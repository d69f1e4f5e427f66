"""What becomes of a folder that comes from a stranger: commands over it, watched, in a process of their own.

That process is a fork with a bound on its memory. It notes what it opens outside the folder, what it writes and which
programs it starts: a promise of docs/security.md that does not hold fails whichever test asked.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import resource
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

import waybill
from waybill.checkpoint import RangeReader
from waybill.cli.app import main
from waybill.errors import Refused, WaybillError
from waybill.plan.stream import stream

Commands = Sequence[Sequence[str]]
FACTS: Commands = (["inspect", "--json"], ["inspect"], ["plan"], ["plan", "--target", "onnx", "--json"])
GENERATE: Commands = (["generate", "-p", "w3 w5", "-n", "2"],)
PACKAGE: Commands = (["verify"], *GENERATE, ["compare"])
MEMORY = 1 << 30
"""Bytes a folder may make a process map beyond what it had, stacks and pools of threads included."""
SECONDS = 120
"""Of processor time, after which a process is ended: whoever runs the tests should not have to."""
CODE = re.compile(r"\[([a-z][a-z-]+[0-9]?)\]$|\"code\": \"([a-z0-9-]+)\"", re.MULTILINE)
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "socket.connect", "pty.spawn")
CHANGES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod")
MACHINE = ("/proc", "/sys", "/dev", "/usr", "/etc", "/lib", "/run")
"""What Python and its libraries ask of the machine."""


@dataclass(frozen=True)
class Outcome:
    """How a command ended: its exit code, the codes of its refusals, and what it said."""

    command: str
    exit: int
    codes: list[str]
    said: str


def judged(folder: Path | Sequence[Path], commands: Commands = FACTS, *, also: Path | None = None) -> list[Outcome]:
    """Every promise is checked but one: whether the folder should have been refused. `also` may be read too."""
    _import()
    folders = [folder] if isinstance(folder, Path) else list(folder)
    report = _in_a_fork(lambda: _watched(folders, commands, also))
    assert not report["broken"], report["broken"]
    outcomes = [Outcome(**outcome) for outcome in report["outcomes"]]
    for outcome in outcomes:
        assert outcome.exit in (0, 1), outcome
        assert "Traceback" not in outcome.said, outcome.said
        assert not CONTROL.search(outcome.said), repr(outcome.said)
        assert (outcome.exit == 1) == bool(outcome.codes), outcome
    return outcomes


def refused(folder: Path | Sequence[Path], commands: Commands = FACTS) -> set[str]:
    """The codes with which the commands refuse the folder; all do."""
    outcomes = judged(folder, commands)
    assert all(outcome.exit == 1 for outcome in outcomes), outcomes
    return {code for outcome in outcomes for code in outcome.codes}


def read_or_refused(intended: str, *folders: Path) -> list[bool]:
    """Of each folder whether the weights are read, and then exactly those intended."""
    loaded = [o for o in judged(folders, [["inspect", "--json"], FACTS[-1], ["load"]]) if o.command == "load"]
    for outcome in loaded:
        assert outcome.exit == 1 or outcome.said == intended, f"other weights: {outcome}"
    return [outcome.exit == 0 for outcome in loaded]


def in_bounds(task: Callable[[], object], folder: Path) -> str:
    """The code with which a call refuses what lies in a folder, or nothing; watched and bounded as commands are."""

    def call() -> dict[str, Any]:
        broken = _watch([folder])
        code = ""
        try:
            task()
        except WaybillError as refusal:
            code = refusal.code
        return {"code": code, "broken": list(broken)}

    report = _in_a_fork(call)
    assert not report["broken"], report["broken"]
    return str(report["code"])


def digest_of(folder: Path, dtype: str | None = None) -> str:
    """Of every parameter's name, shape and bytes, as a model is given them."""
    bill = waybill.plan(folder, dtype=dtype)
    bill.require_clean()
    total = hashlib.sha256()
    with RangeReader(bill.checkpoint) as reader:
        for binding, values in stream(bill.bindings, reader, lambda binding: np.empty(binding.nbytes, np.uint8)):
            total.update(f"{binding.target} {binding.dtype} {binding.shape}".encode())
            total.update(values.data)
    return total.hexdigest()


def _in_a_fork(task: Callable[[], dict[str, Any]]) -> Any:
    """What `task` returns, as JSON, in a child that has MEMORY more than it was born with."""
    ours, theirs = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of other tests, which are idle
        child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(ours)
            mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            with os.fdopen(theirs, "w") as pipe:
                json.dump(task(), pipe)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(theirs)
    with os.fdopen(ours) as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the process ended with {os.waitstatus_to_exitcode(status)}"
    return json.loads(told)


@cache
def _import() -> None:
    """What commands import as they run: once, and not in every fork."""
    for command in (*FACTS, *PACKAGE):
        _run(Path("nothing there"), command)


def _watched(folders: Sequence[Path], commands: Commands, also: Path | None) -> dict[str, Any]:
    broken = _watch([*folders, *([also] if also else [])])
    outcomes = [asdict(_run(folder, command)) for folder in folders for command in commands]
    return {"outcomes": outcomes, "broken": list(broken)}


def _watch(folders: Sequence[Path]) -> list[str]:
    """From now on, whatever this process does besides reading in the folders. It cannot be undone."""
    sys.dont_write_bytecode = True
    python = {sys.prefix, sys.base_prefix, *filter(None, sys.path)}
    places = tuple(os.path.realpath(place) for place in (*folders, *python, *MACHINE))
    broken: list[str] = []

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if (event in STARTS and "waybill.text.sandbox" not in str(arguments)) or event in CHANGES:
            broken.append(f"{event} {arguments}"[:300])
        if event == "open" and isinstance(arguments[0], (str, bytes)):
            path, mode, flags = os.path.realpath(os.fsdecode(arguments[0])), arguments[1] or "", arguments[2] or 0
            writes = set(mode) & set("wax+") or (isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR))
            if not any(path == place or path.startswith(f"{place}/") for place in places):
                broken.append(f"opened {path}")
            elif writes and not path.startswith("/dev/"):
                broken.append(f"wrote {path}")

    sys.addaudithook(watch)
    return broken


def _run(folder: Path, command: Sequence[str]) -> Outcome:
    name, *options = command
    if name == "load":
        return _load(folder)
    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    argv = patch.object(sys, "argv", ["waybill", name, *[str(folder)] * (2 if name == "compare" else 1), *options])
    with argv, redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
        except BaseException:
            traceback.print_exc()
            code = -1
    if options[-1:] == ["--json"] and out.getvalue():
        json.loads(out.getvalue(), parse_constant=lambda constant: 1 / 0)  # JSON that others can read
    said = out.getvalue() + err.getvalue()
    codes = sorted({one or other for one, other in CODE.findall(said)})
    return Outcome(" ".join(command), code, codes, said)


def _load(folder: Path) -> Outcome:
    """The digest of what is loaded, or a refusal."""
    try:
        return Outcome("load", 0, [], digest_of(folder))
    except WaybillError as error:
        problems = error.problems if isinstance(error, Refused) else [error]
        return Outcome("load", 1, sorted({problem.code for problem in problems}), str(error))
