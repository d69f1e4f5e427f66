"""GPT-OSS as it is published: banks of 4-bit floats, against transformers' model of the numbers they mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import waybill
from checkpoints import Recipe, gpt_oss, lively
from floating import Blocks, pack_fp8, pack_mxfp4
from packing import Scheme, Twins, pack
from parity.tolerances import LOGITS_FLOAT32
from ranks import bytes_streamed
from waybill.config.composite import read_text
from waybill.engine.context import Batch, get_global_ctx
from waybill.engine.generate import generate
from waybill.engine.models.decoder import CausalLM

PROMPTS = [[3, 17, 99, 4, 56, 23, 8, 61, 90, 12, 77], [5], [120, 7, 7, 31, 64]]
NEW = 16
LAYER = "model.layers.0"
BANK = f"{LAYER}.mlp.experts.gate_up_proj"
PUBLISHED = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip
"""What config.json of the published models says."""


def lively_twins(**config: Any) -> Twins:
    twins = pack_mxfp4(lively(gpt_oss(np.float32, **config)))
    twins.packed.config["quantization_config"] = PUBLISHED
    return twins


@dataclass(frozen=True)
class Both:
    ours: CausalLM
    theirs: PreTrainedModel


@pytest.fixture(scope="module", params=[{}, {"intermediate_size": 32}, {"sliding_window": 1}], ids=str)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    """The second has banks whose shape does not show which way they lie: 2I is H."""
    root, twins = tmp_path_factory.mktemp("gpt"), lively_twins(**request.param)
    theirs = AutoModelForCausalLM.from_pretrained(twins.dense.write(root / "dense"), dtype=torch.float32).eval()
    return Both(waybill.load(twins.packed.write(root / "packed"), dtype="float32"), theirs)


@torch.inference_mode()
def logits(model: CausalLM, prompts: list[list[int]]) -> torch.Tensor:
    tokens = torch.tensor([token for prompt in prompts for token in prompt])
    with get_global_ctx().forward_batch(Batch(tokens, tuple(map(len, prompts)))):
        return model.forward()


@torch.no_grad()
def said(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """Greedy tokens, every step from the beginning."""
    tokens = list(prompt)
    for _ in range(NEW):
        tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_logits_and_tokens_are_those_of_the_float_twin_in_transformers(both: Both) -> None:
    with torch.no_grad():
        expected = torch.cat([both.theirs(torch.tensor([prompt])).logits[:, -1] for prompt in PROMPTS])
    torch.testing.assert_close(logits(both.ours, PROMPTS), expected, atol=LOGITS_FLOAT32, rtol=0)
    tokens = [said(both.theirs, prompt) for prompt in PROMPTS]
    assert generate(both.ours, PROMPTS, max_new_tokens=NEW).token_ids == tokens
    assert len({token for row in tokens for token in row}) > 5


def test_experts_stay_packed_and_their_biases_float(both: Both) -> None:
    state = both.ours.state_dict()
    assert {name.removeprefix(f"{BANK}."): tensor.dtype for name, tensor in state.items() if BANK in name} == {
        "codes": torch.uint8, "scales": torch.uint8, "bias": torch.float32,
    }  # fmt: skip


def test_windows_and_sinks_change_what_is_said(tmp_path: Path) -> None:
    recipe = lively(gpt_oss(np.float32))
    said = [logits(waybill.load(recipe.write(tmp_path / "windows")), PROMPTS)]
    recipe.config["sliding_window"] = 64
    said.append(logits(waybill.load(recipe.write(tmp_path / "none")), PROMPTS))
    for layer in range(2):
        recipe.tensors[f"model.layers.{layer}.self_attn.sinks"][:] = -1e4
    said.append(logits(waybill.load(recipe.write(tmp_path / "no-sinks")), PROMPTS))
    assert [float((a - b).abs().max()) > 0.1 for a, b in pairwise(said)] == [True, True]


def test_prompts_are_attended_to_in_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = waybill.load(lively(gpt_oss(np.float32)).write(tmp_path))
    whole = logits(model, PROMPTS)
    monkeypatch.setattr("waybill.engine.layers.sinks.SCORES", 100)
    torch.testing.assert_close(logits(model, PROMPTS), whole, atol=LOGITS_FLOAT32, rtol=0)


@pytest.mark.parametrize("tp", [1, 2])
def test_each_rank_reads_the_bytes_its_plan_says(tp: int, tmp_path: Path) -> None:
    for folder in (lively_twins().packed.write(tmp_path / "packed"), lively_twins().dense.write(tmp_path / "dense")):
        for rank in range(tp):
            bill = waybill.plan(folder, tp=tp, rank=rank)
            assert bytes_streamed(bill) == bill.bytes_read


def test_a_cut_through_a_block_of_experts_is_refused(tmp_path: Path) -> None:
    folder = lively_twins(intermediate_size=96).packed.write(tmp_path)
    (problem,) = waybill.plan(folder, tp=2).problems  # 48 columns of down_proj a rank
    assert (problem.code, problem.where) == ("illegal-tp", f"{LAYER}.mlp.experts.down_proj.weight")


def problems(recipe: Recipe, folder: Path) -> list[waybill.errors.WaybillError]:
    return list(waybill.plan(recipe.write(folder)).problems)


Change = Callable[[Recipe], Any]
SPOILED: dict[str, tuple[Change, str, str]] = {
    "scales lost": (lambda r: r.tensors.pop(f"{BANK}_scales"), "incomplete-weight", BANK),
    "a bias lost": (lambda r: r.tensors.pop(f"{BANK}_bias"), "missing-weight", f"{BANK}.bias"),
    "a bank lost": (
        lambda r: [r.tensors.pop(f"{BANK}_{part}") for part in ("blocks", "scales")],
        "missing-weight", f"{BANK}.weight",
    ),
    "sinks lost": (lambda r: r.tensors.pop(f"{LAYER}.self_attn.sinks"), "missing-weight", f"{LAYER}.self_attn.sinks"),
    "the router's bias lost": (
        lambda r: r.tensors.pop(f"{LAYER}.mlp.router.bias"), "missing-weight", f"{LAYER}.mlp.router.bias",
    ),
    "an expert too few": (
        lambda r: r.tensors.update({f"{BANK}_{p}": r.tensors[f"{BANK}_{p}"][:3] for p in ("blocks", "scales")}),
        "shape-mismatch", "num_local_experts 4",
    ),
    "other sinks": (
        lambda r: r.tensors.update({f"{LAYER}.self_attn.sinks": np.zeros(3, np.float32)}),
        "shape-mismatch", "num_attention_heads 4",
    ),
    "no metadata": (
        lambda r: r.config.pop("quantization_config"), "unsupported-quantization", "no quantization metadata",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SPOILED)
def test_what_does_not_add_up_is_named(case: str, tmp_path: Path) -> None:
    change, code, words = SPOILED[case]
    twins = lively_twins()
    change(twins.packed)
    (problem,) = problems(twins.packed, tmp_path)
    assert problem.code == code
    assert words in str(problem)


def test_float_banks_that_lie_as_other_models_do_are_refused(tmp_path: Path) -> None:
    recipe = lively(gpt_oss(np.float32, intermediate_size=96))
    recipe.tensors[BANK] = np.ascontiguousarray(recipe.tensors[BANK].swapaxes(1, 2))
    (problem,) = problems(recipe, tmp_path)
    assert problem.code == "shape-mismatch"
    assert "[4, 192, 64]" in problem.expected


@pytest.mark.parametrize("form", ["olive", "fp8"])
def test_banks_packed_by_who_does_not_say_along_which_axis_are_refused(form: str, tmp_path: Path) -> None:
    """2I is H, so that no shape would tell."""
    recipe = lively(gpt_oss(np.float32, intermediate_size=32))
    banks = {f"{LAYER[:-1]}{n}.mlp.experts.{name}" for n in range(2) for name in ("gate_up_proj", "down_proj")}
    others = {name.removesuffix(".weight") for name in recipe.tensors} - banks
    if form == "olive":
        packed = pack(recipe, Scheme("olive"), keep=sorted(others)).packed
    else:
        packed = pack_fp8(recipe, Blocks(), keep=sorted(others)).packed
    found = problems(packed, tmp_path)
    assert found
    assert {problem.code for problem in found} <= {"packing-mismatch", "dtype-mismatch", "unclaimed-weight"}
    assert "experts" in found[0].where


def test_a_decoder_with_sinks_inside_a_larger_model_is_refused() -> None:
    text = gpt_oss(np.float32).config
    found: list[waybill.errors.WaybillError] = []
    read_text({"text_config": text}, found, [])
    assert [problem.code for problem in found] == ["unsupported-feature"]
    assert "attention sinks" in found[0].what
