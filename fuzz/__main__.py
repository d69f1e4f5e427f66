"""Feed one target mutated inputs: anything but a typed refusal or a sound success ends the run and keeps the input.

libFuzzer's options follow the target's name: `-max_total_time=600`, `-runs=2000 -seed=1`, or a file to repeat. An input
may take a minute and the process a gigabyte, or that is a finding too. What is learned is kept in .fuzz/TARGET,
or in the folder that WAYBILL_FUZZ names.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from importlib import import_module
from pathlib import Path

import atheris

ROOT = Path(__file__).parent.parent
BOUNDS = ("-rss_limit_mb=1024", "-timeout=60", "-max_len=65536", "-print_final_stats=1")


def main(name: str, *options: str) -> None:
    """Fuzz one target."""
    sys.path[:0] = [str(ROOT / "tests")]
    with atheris.instrument_imports(include=["waybill"]):
        target = import_module(f"fuzz.targets.{name}")
        from waybill.errors import Refused, WaybillError

    def one(octets: bytes) -> None:
        try:
            target.check(octets)
        except WaybillError as refusal:
            for problem in refusal.problems if isinstance(refusal, Refused) else [refusal]:
                assert problem.code != "error" and problem.what and problem.where and problem.fix, problem
            assert str(refusal).replace("\n", "").isprintable(), refusal
            json.dumps(refusal.as_dict())

    files = [option for option in options if not option.startswith("-")]
    flags = [option for option in options if option.startswith("-")]
    corpus = Path(os.environ.get("WAYBILL_FUZZ", ROOT / ".fuzz")) / name
    corpus.mkdir(parents=True, exist_ok=True)
    (corpus.parent / "found").mkdir(exist_ok=True)
    for seed in target.SEEDS:
        (corpus / hashlib.sha1(seed, usedforsecurity=False).hexdigest()).write_bytes(seed)
    kept = f"-artifact_prefix={corpus.parent}/found/{name}-"
    mutator = {"custom_mutator": target.mutate} if hasattr(target, "mutate") else {}
    atheris.Setup([sys.argv[0], *BOUNDS, kept, *flags, *(files or [str(corpus)])], one, **mutator)
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
