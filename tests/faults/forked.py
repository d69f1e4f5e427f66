"""Run by the tests beside it: `forked.py CHECKPOINT OUT FAULT [overwrite] [link] [unexchanged]`.

Exports in forked children; the n-th step of the n-th child is where the fault happens, until a child takes fewer steps.
After each child prints a JSON line: what the step was, how the child ended, what lies beside the package's name, and
the digests of what lies there; then exports once more without a fault, and tells what that left. The fault `order` is
none: one child is run, and each of its steps printed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import steps

import waybill

Tell = Callable[[Any], object]

os.fsync = lambda _: None  # a killed process does not take the kernel's memory along

LEFT = ".package.1-00.partial"
"""What an earlier export left behind."""
ERRORS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "unreadable": errno.EIO}
KINDS = {"ENOSPC": steps.ROOM, "unreadable": steps.READS}
"""Where a fault may be; anywhere unless told."""


def child(act: Callable[[Tell], None]) -> tuple[int, list[Any]]:
    """Exit status of a forked process, and what it told."""
    reading, writing = os.pipe()
    number = os.fork()
    if number == 0:
        act(lambda said: os.write(writing, (json.dumps(said) + "\n").encode()))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        told = [json.loads(line) for line in pipe]
    return os.waitpid(number, 0)[1], told


def state(out: Path) -> dict[str, Any]:
    digests = {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(out.rglob("*"))
        if path.is_file()
    }
    return {"beside": sorted(path.name for path in out.parent.iterdir()), "out": digests}


def main(checkpoint: Path, out: Path, fault: str, *words: str) -> None:
    link, overwrite = "link" in words, "overwrite" in words
    package = waybill.build(checkpoint, link=link)
    old = out.parent.with_name("old")
    waybill.build(checkpoint, logits="all").save(old)

    def export(at: int, tell: Tell) -> None:
        def step(number: int, kind: str, path: str) -> None:
            if fault == "order":
                tell([kind, path])
                return
            if number == at:
                tell({"step": [kind, path]})
            if number == at and fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if number == at or (fault == "ENOSPC" and number > at):  # a disk that is full stays so
                raise OSError(ERRORS[fault], os.strerror(ERRORS[fault]), path)

        steps.watch(steps.Counter(KINDS.get(fault, steps.CHANGES), at, step), exchange="unexchanged" not in words)
        try:
            made = waybill.build(checkpoint, link=link) if fault == "unreadable" else package
            made.save(out, overwrite=overwrite, link=link)
        except waybill.WaybillError as error:
            first = getattr(error, "problems", [error])[0]
            tell({"refused": [first.code, first.where]})

    if fault == "order":
        if overwrite:
            shutil.copytree(old, out)
        print(*map(json.dumps, child(partial(export, 0))[1]), sep="\n")
        return
    number, reached = 0, True
    while reached:
        number += 1
        shutil.rmtree(out.parent, ignore_errors=True)
        (out.parent / LEFT).mkdir(parents=True)
        (out.parent / LEFT / "model.onnx").write_text("of an export that was killed")
        if overwrite:
            shutil.copytree(old, out)
        status, told = child(partial(export, number))
        said = {key: value for each in told for key, value in each.items()}
        reached = "step" in said
        after = state(out)
        ended, _ = child(lambda _: package.save(out, overwrite=True, link=link) and None)
        print(json.dumps({"status": status, **said, **after, "next": {"status": ended, **state(out)}}))
    shutil.rmtree(out.parent)
    shutil.copytree(old, out)
    print(json.dumps({"old": state(out)["out"], "sound": not waybill.verify(out).problems}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
