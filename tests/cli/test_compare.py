"""waybill compare: what people read, and how it ends: 0 the same, 3 they differ, 1 refused."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from checkpoints import Recipe, llama
from commands import Capture, Patch, run
from packing import HEAD, Scheme, pack


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(np.float32).write(tmp_path_factory.mktemp("one") / "a")


def test_the_same_is_said_in_a_line_and_ends_with_zero(folder: Path, monkeypatch: Patch, capsys: Capture) -> None:
    code, out, err = run(monkeypatch, capsys, "compare", folder, folder)
    assert (code, out) == (0, "21 tensors of the same name compared\nthe same\n")
    assert re.fullmatch(r"comparing 625 kB: [\d.]+ s, .*/s\n", err)


def test_layers_that_differ_alike_are_one_row_and_with_full_one_each(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    packed, dense = pack(llama(np.float32), Scheme("gptq", 4, 32))
    dense.tensors[HEAD] = dense.tensors[HEAD] + np.float32(0.25)
    pair = packed.write(tmp_path / "a"), dense.write(tmp_path / "b")
    code, out, _ = run(monkeypatch, capsys, "compare", *pair, "--values")
    lines = [re.sub(" +", " ", line).strip() for line in out.splitlines()]
    assert code == 3
    assert 'decoder.layout "gptq 4-bit, group 32, asymmetric" "float"' in lines
    assert "model.layers.{0–1}.self_attn.q_proj.weight gptq 4-bit, group 32, asymmetric –" in lines
    assert "lm_head.weight F32[128, 64] other bytes" in lines
    assert "lm_head.weight 0.25" in lines
    assert lines[-3:] == ["1 of 21 weights differ in value", "7 tensors of the same name compared", "they differ"]
    _, out, _ = run(monkeypatch, capsys, "compare", *pair, "--full")
    assert "model.layers.1.self_attn.q_proj.weight " in out
    assert re.search(r"lm_head\.weight +F32\[128, 64\] [0-9a-f]{12}… +F32\[128, 64\] [0-9a-f]{12}…", out)


def test_long_lists_are_cut_and_the_rest_counted(
    folder: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    recipe = llama(np.float32)
    other = Recipe(recipe.config | {f"field_{n}": "x" * 200 for n in range(30)}, recipe.tensors).write(tmp_path / "b")
    _, out, _ = run(monkeypatch, capsys, "compare", folder, other)
    assert "\nand 10 more; --full lists them\n" in out
    assert f'"{"x" * 58}…' in out
    assert "more" not in run(monkeypatch, capsys, "compare", folder, other, "--full")[1]


def test_what_a_stranger_wrote_is_escaped(folder: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    recipe = llama(np.float32, **{"\x1b[2J": "\x1b[31m"})
    _, out, _ = run(monkeypatch, capsys, "compare", folder, recipe.write(tmp_path / "b"))
    assert "\x1b" not in out
    assert r"\x1b[2J" in out


def test_a_refusal_ends_with_one_and_nothing_on_stdout(
    folder: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    code, out, err = run(monkeypatch, capsys, "compare", folder, tmp_path)
    assert (code, out) == (1, "")
    assert "not a checkpoint [not-a-checkpoint]" in err


def test_neither_torch_nor_onnxruntime_is_imported(folder: Path) -> None:
    program = (
        "import sys\nfrom waybill.cli.app import main\ntry:\n    main()\n"
        "finally:\n    print(sorted({'torch', 'transformers', 'onnxruntime'} & sys.modules.keys()), file=sys.stderr)"
    )
    command = [sys.executable, "-c", program, "compare", folder, folder, "--values", "--json"]
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stderr == "[]\n"
