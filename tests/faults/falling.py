"""Run by test_ranks.py: `falling.py CHECKPOINT` plays every scene, and prints a JSON line for each.

A scene is a number of ranks that generate together, forked as `torchrun` starts them, and what befalls one of them. The
store they meet at outlives them, as `torchrun`'s does; unlike `torchrun` it does not end the others, so that what they
say is all theirs.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from children import forked

import waybill.engine.load  # noqa: F401 - with all that is behind it, once for all
from waybill.__main__ import main

LIMIT = 60
"""Seconds after which ranks that have not ended hang."""


def at(number: int, module: Any, name: str, act: Callable[[], object]) -> None:
    """Do something before the n-th call of a function."""
    real, calls = getattr(module, name), iter(range(1, 1 << 30))

    def told(*arguments: Any, **options: Any) -> Any:
        if next(calls) == number:
            act()
        return real(*arguments, **options)

    setattr(module, name, told)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def exhausted() -> None:
    raise MemoryError


def cut(checkpoint: Path) -> None:
    shard = checkpoint / "model.safetensors"
    os.truncate(shard, shard.stat().st_size // 2)


class Scene(NamedTuple):
    size: int
    victim: int
    befall: Callable[[Path], object]
    """Before the victim runs; its checkpoint is a copy of its own."""


SCENES = {
    "killed while loading": Scene(4, 2, lambda _: at(3, os, "preadv", killed)),
    "the first is killed while loading": Scene(2, 0, lambda _: at(3, os, "preadv", killed)),
    "killed while generating": Scene(4, 1, lambda _: at(5, dist, "broadcast", killed)),
    "the first is killed while generating": Scene(2, 0, lambda _: at(5, dist, "broadcast", killed)),
    "a file is short": Scene(2, 1, cut),
    "a file becomes short": Scene(2, 1, lambda checkpoint: at(3, os, "preadv", lambda: cut(checkpoint))),
    "no memory while loading": Scene(2, 1, lambda _: at(3, os, "preadv", exhausted)),
    "no memory while generating": Scene(2, 1, lambda _: at(5, dist, "broadcast", exhausted)),
    "a file of the first is short": Scene(2, 0, cut),
}


def rank(number: int, scene: Scene, port: int, checkpoint: Path, folder: Path) -> None:
    with (folder / str(number)).open("wb") as said:
        for stream in (1, 2):
            os.dup2(said.fileno(), stream)
    os.environ |= {
        "RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(scene.size), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip
    if number == scene.victim:
        checkpoint = Path(shutil.copytree(checkpoint, folder / "checkpoint"))
        scene.befall(checkpoint)
    generate(checkpoint)


def generate(checkpoint: Path) -> None:
    # quiet: progress comes and goes with time
    sys.argv = ["waybill", "generate", str(checkpoint), "--prompt", "w5", "-n", "20", "--quiet"]
    main()


def play(title: str, scene: Scene, checkpoint: Path) -> None:
    """In a process of its own: the store has threads, and what is forked should have none."""
    with tempfile.TemporaryDirectory() as name:
        meeting = socket.create_server(("127.0.0.1", 0))
        port = meeting.getsockname()[1]
        ranks = [forked(partial(rank, number, scene, port, checkpoint, Path(name))) for number in range(scene.size)]
        store = dist.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=meeting.detach(),
            timeout=timedelta(seconds=LIMIT),
        )  # fmt: skip
        ends: dict[int, int] = {}
        last = time.monotonic() + LIMIT
        while len(ends) < scene.size and time.monotonic() < last:
            for number, process in enumerate(ranks):
                if number not in ends and (found := os.waitpid(process, os.WNOHANG))[0]:
                    ends[number] = os.waitstatus_to_exitcode(found[1])
            time.sleep(0.02)
        for number, process in enumerate(ranks):
            if number not in ends:
                os.kill(process, signal.SIGKILL)
        told = [(Path(name) / str(number)).read_text() for number in range(scene.size)]
        del store
    print(json.dumps({"title": title, "ends": [ends.get(number) for number in range(scene.size)], "told": told}))
    sys.stdout.flush()
    sys.exit(0)


def torchrun(checkpoint: Path) -> None:
    """One rank of those that the real `torchrun` starts; the second is killed."""
    if os.environ["RANK"] == "1":
        at(5, dist, "broadcast", killed)
    generate(checkpoint)


if "RANK" in os.environ:
    torchrun(Path(sys.argv[1]))
else:
    for title, scene in SCENES.items():
        os.waitpid(forked(partial(play, title, scene, Path(sys.argv[1]))), 0)
