"""Run by test_signals.py: `stopped.py importing|working SIGNAL CHECKPOINT OUT`.

Exports with `--overwrite`, as the command does, in forked children. The n-th sends itself the signal when it imports
for the 31·n-th time, or takes its n-th step in the file system, until one does less. Prints a JSON line for each: how
it ended, what it wrote to its terminal, and what lies beside the package.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from children import forked

from waybill.__main__ import main

STRIDE = {"importing": 31, "working": 1}
"""There are a thousand imports, and a hundred steps."""


def child(before: Callable[[], None], arguments: list[str]) -> tuple[int, str]:
    """Exit status of the command, and all it wrote."""
    reading, writing = os.pipe()

    def act() -> None:
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        sys.argv = ["waybill", *arguments]
        before()
        main()

    number = forked(act)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    return os.waitpid(number, 0)[1], said


def importing(at: int, send: Callable[[], None]) -> None:
    """Audit hooks cannot be removed, so this is for a process that ends soon."""
    numbers = itertools.count(1)
    sys.addaudithook(lambda event, _: send() if event == "import" and next(numbers) == at else None)


def working(at: int, send: Callable[[], None]) -> None:
    import steps

    def tell(number: int, _kind: str, _path: str) -> None:
        if number == at:
            send()

    steps.watch(steps.Counter(steps.CHANGES | steps.READS, at, tell))


def play(what: str, number: int, checkpoint: str, out: Path) -> None:
    if what == "working":
        import waybill.cli.app
        import waybill.onnx.package  # noqa: F401 - imported once, for all children
    act, sent = importing if what == "importing" else working, f"\0{number}"

    def send() -> None:
        os.write(2, sent.encode())
        os.kill(os.getpid(), number)

    for at in itertools.count(1, STRIDE[what]):
        status, said = child(partial(act, at, send), ["export", checkpoint, str(out), "--overwrite"])
        beside = sorted(path.name for path in out.parent.iterdir())
        whole = sorted(path.name for path in out.iterdir()) if out.exists() else []
        print(json.dumps({"status": status, "said": said.replace(sent, ""), "beside": beside, "whole": whole}))
        if sent not in said:
            return


play(sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
