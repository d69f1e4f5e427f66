"""A short fuzz of every target with a fixed seed; `make fuzz` takes ten minutes for each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TARGETS = sorted(path.stem for path in (ROOT / "fuzz" / "targets").glob("[a-z]*.py"))
RUNS = {"header": 1000, "index": 500, "config": 75, "quantization": 150}
"""As many as take a few seconds: some plan several checkpoints for each input."""


@pytest.mark.parametrize("target", TARGETS)
def test_mutated_inputs_are_refused_or_read_soundly(target: str, tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason="pip install 'waybill[fuzz]'")
    # By a shell: a process begins with its parent's peak of memory, and libFuzzer compares that with the bound.
    shell = ["sh", "-c", '"$@"; exit $?', "sh"]
    command = [*shell, sys.executable, "-m", "fuzz", target, f"-runs={RUNS.get(target, 250)}", "-seed=1"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, sys.path)])}
    environment["WAYBILL_FUZZ"] = str(tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
