"""Run by test_publish.py: `killed.py CHECKPOINT OUT overwrite|new link|copy`.

Exports in forked children, the n-th of which is killed at its n-th call of the file system, until one lives. After
each, prints a JSON line: how the child ended, what lies beside the package's name, and the digests of what lies there.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import waybill

CALLS = {"open", "os.mkdir", "os.rename", "os.truncate", "os.link", "os.remove", "os.rmdir", "ctypes.dlsym"}


def die_at(number: int) -> None:
    """Audit hooks cannot be removed, so this is for a process that ends soon."""
    calls = 0

    def hook(event: str, _: object) -> None:
        nonlocal calls
        if event not in CALLS:
            return
        calls += 1
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


os.fsync = lambda _: None  # a killed process does not take the kernel's memory along


def main(checkpoint: Path, out: Path, overwrite: bool, link: bool) -> None:
    package = waybill.build(checkpoint, link=link)
    out.parent.mkdir()
    if overwrite:
        waybill.build(checkpoint, logits="all").save(out)
    number, status = 0, -1
    while status != 0:
        number += 1
        child = os.fork()
        if child == 0:
            die_at(number)
            package.save(out, overwrite=overwrite, link=link)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        digests = {
            str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in out.rglob("*")
            if path.is_file()
        }
        print(json.dumps({"status": status, "beside": sorted(p.name for p in out.parent.iterdir()), "out": digests}))
        if status != 0 and not overwrite:
            shutil.rmtree(out, ignore_errors=True)


main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "overwrite", sys.argv[4] == "link")
