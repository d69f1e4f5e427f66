"""Models cut into ranks against the same models whole: one launch of `torchrun` a size, over gloo."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import waybill
from checkpoints import (
    BF16,
    HEADS,
    HIDDEN,
    INNER,
    LAYERS,
    Recipe,
    gpt_oss,
    lively,
    llama,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    write_tokenizer,
)
from parity.tolerances import LOGITS_FLOAT32_RANKS
from parity.tp_worker import play
from ranks import bytes_streamed, played_by, torchrun

WORKER = Path(__file__).with_name("tp_worker.py")
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"

fine = partial(qwen3_moe, np.float32, num_experts=6, moe_intermediate_size=48)


def biased() -> Recipe:
    recipe = llama(np.float32, attention_bias=True, mlp_bias=True)
    for layer in range(LAYERS):
        path = f"model.layers.{layer}"
        lengths = {"self_attn.q_proj": 64, "self_attn.k_proj": 32, "self_attn.v_proj": 32, "self_attn.o_proj": HIDDEN,
                   "mlp.gate_proj": INNER, "mlp.up_proj": INNER, "mlp.down_proj": HIDDEN}  # fmt: skip
        recipe.tensors |= {f"{path}.{name}.bias": np.empty(n, np.float32) for name, n in lengths.items()}
    return recipe


def one_dense_layer() -> Recipe:
    recipe = qwen3_moe(np.float32, mlp_only_layers=[0])
    dense = {name: t for name, t in llama(np.float32).tensors.items() if name.startswith("model.layers.0.mlp")}
    kept = {name: t for name, t in recipe.tensors.items() if not name.startswith("model.layers.0.mlp")}
    return Recipe(recipe.config, kept | dense)


def below_zero(recipe: Recipe) -> Recipe:
    """Every logit is negative, so that a padding row's zero would win."""
    for name, tensor in recipe.tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[0] = 0  # no layer touches the first channel: it is positive from the table to the head
    recipe.tensors[TABLE][:, 0] = 2
    recipe.tensors[HEAD][:, 0] = -12
    return recipe


def stored_head(recipe: Recipe, change: Callable[[Any], None] = lambda _: None) -> Recipe:
    recipe.tensors[HEAD] = recipe.tensors[TABLE].copy()
    change(recipe.tensors[HEAD])
    return recipe


def negate(rows: slice, head: Any) -> None:
    head[rows] *= -2


CASES: dict[str, Callable[[], Recipe]] = {
    "llama": lambda: lively(llama(np.float32)),
    "bfloat16-file": lambda: lively(llama(BF16)),
    "one-kv-head": lambda: lively(llama(np.float32, num_key_value_heads=1)),
    "four-kv-heads": lambda: lively(llama(np.float32, num_key_value_heads=HEADS)),
    "vocab-of-130": lambda: lively(llama(np.float32, vocab_size=130)),
    "vocab-of-130-below-zero": lambda: below_zero(lively(llama(np.float32, vocab_size=130))),
    "vocab-of-5-leaves-a-rank-without-rows": lambda: below_zero(lively(llama(np.float32, vocab_size=5))),
    "all-biases": lambda: lively(biased()),
    "qwen2": lambda: lively(qwen2(np.float32)),
    "qwen2-one-kv-head": lambda: lively(qwen2(np.float32, num_key_value_heads=1)),
    "tied": lambda: lively(qwen3(np.float32)),
    "tied-vocab-of-130": lambda: lively(qwen3(np.float32, vocab_size=130)),
    "tied-vocab-of-5-stored-equal": lambda: stored_head(lively(qwen3(np.float32, vocab_size=5))),
    "tied-stored-equal": lambda: stored_head(lively(qwen3(np.float32))),
    "tied-stored-different": lambda: stored_head(lively(qwen3(np.float32)), partial(negate, slice(None))),
    "tied-stored-different-on-the-first-rank": lambda: stored_head(
        lively(qwen3(np.float32)), partial(negate, slice(0, 3))
    ),
    "tied-stored-different-on-the-last-rank": lambda: stored_head(
        lively(qwen3(np.float32, vocab_size=130)), partial(negate, slice(129, 130))
    ),
    "moe": lambda: lively(fine()),
    "moe-banks": lambda: lively(fine(banks=True)),
    "moe-square-banks": lambda: lively(qwen3_moe(np.float32, banks=True)),
    "moe-shared-expert": lambda: lively(qwen2_moe(np.float32)),
    "moe-shared-expert-banks-one-dense-layer": lambda: lively(qwen2_moe(np.float32, banks=True, mlp_only_layers=[0])),
    "moe-one-dense-layer": lambda: lively(one_dense_layer()),
    "sinks-windows-biased-experts": lambda: lively(gpt_oss(np.float32)),
    "sinks-one-kv-head": lambda: lively(gpt_oss(np.float32, num_key_value_heads=1)),
}
SIZES = (2, 4)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tp")
    return {case: make().write(root / case) for case, make in CASES.items()}


@pytest.fixture(scope="session")
def whole(folders: dict[str, Path]) -> dict[str, Any]:
    return {case: play(folder) for case, folder in folders.items()}


@pytest.fixture(scope="session", params=SIZES)
def ranks(request: pytest.FixtureRequest, folders: dict[str, Path]) -> dict[str, Any]:
    return played_by(request.param, WORKER, folders)


@pytest.mark.parametrize("case", CASES)
def test_every_rank_has_the_logits_and_tokens_of_the_whole_model(
    case: str, ranks: dict[str, Any], whole: dict[str, Any]
) -> None:
    expected = whole[case]
    for said in ranks[case]:
        for way in ("logits", "by hand"):
            torch.testing.assert_close(
                torch.tensor(said[way]), torch.tensor(expected["logits"]), atol=LOGITS_FLOAT32_RANKS, rtol=0
            )
        assert said["greedy"] == expected["greedy"]
        assert said["seeded"] == expected["seeded"]
        assert said["unseeded"] == ranks[case][0]["unseeded"]
        assert (said["tied"], said["warnings"]) == (expected["tied"], expected["warnings"])


def test_the_cases_are_what_their_names_say(whole: dict[str, Any]) -> None:
    for case, said in whole.items():
        assert len({token for tokens in said["greedy"] for token in tokens}) > (5 if "vocab-of-5" not in case else 1)
        assert said["seeded"] != said["greedy"]
        assert (max(map(max, said["logits"])) < 0) == ("below-zero" in case or "without-rows" in case)
        assert bool(said["warnings"]) == ("stored-different" in case)
        assert said["tied"] == ("tied" in case and "different" not in case)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tp", (1, *SIZES))
def test_each_rank_reads_the_bytes_its_plan_says(case: str, tp: int, folders: dict[str, Path]) -> None:
    for rank in range(tp):
        bill = waybill.plan(folders[case], tp=tp, rank=rank)
        assert bytes_streamed(bill) == bill.bytes_read
        assert tp == 1 or bill.bytes_read < bill.checkpoint.nbytes


def test_a_rank_of_two_reads_half_of_a_model_made_of_matrices(tmp_path: Path) -> None:
    hidden, inner, kv = 512, 1024, 256
    recipe = llama(np.float32, hidden_size=hidden, intermediate_size=inner, head_dim=128, vocab_size=128)
    shapes = {"q_proj": (hidden, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, hidden),
              "gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner),
              "embed_tokens": (128, hidden), "lm_head": (128, hidden)}  # fmt: skip
    for name in recipe.tensors:
        recipe.tensors[name] = np.zeros(shapes.get(name.split(".")[-2], (hidden,)), np.float32)
    folder = recipe.write(tmp_path)
    size = (folder / "model.safetensors").stat().st_size
    for rank in range(2):
        bill = waybill.plan(folder, tp=2, rank=rank)
        assert bytes_streamed(bill) == bill.bytes_read <= 0.55 * size


@pytest.fixture(scope="module")
def with_words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = lively(qwen3(np.float32)).write(tmp_path_factory.mktemp("words"))
    return write_tokenizer(folder)


def test_under_torchrun_one_rank_prints_what_a_single_process_prints(with_words: Path) -> None:
    command = ["-m", "waybill", "generate", str(with_words), "--prompt", "w5 w17 w9", "-n", "8"]
    alone = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=120, check=True)
    together = torchrun(2, *command)
    assert together.returncode == 0, together.stderr
    assert together.stdout == alone.stdout
    assert len(alone.stdout.split()) == 8
    assert together.stderr.count("consumed ") == 1


def test_ranks_the_model_cannot_be_cut_into_are_refused_once_with_the_sizes_it_can(with_words: Path) -> None:
    done = torchrun(3, "-m", "waybill", "generate", str(with_words), "--prompt", "w5")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("[illegal-tp]") == 1
    assert "expected one of 1, 2, 4" in " ".join(done.stderr.split())
    assert "waybill/cli" not in done.stderr  # torchrun ends with a traceback of its own; ours is none


def test_a_weight_only_one_rank_finds_broken_is_reported(tmp_path: Path) -> None:
    recipe = lively(qwen3(np.float32))
    recipe.tensors[TABLE][-1, 0] = np.nan  # the last rank's row
    folder = write_tokenizer(recipe.write(tmp_path))
    done = torchrun(2, "-m", "waybill", "generate", str(folder), "--prompt", "w5", "--check-finite")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("[non-finite-weight]") == 1
    assert done.stderr.count("[other-rank-failed]") == 1
    assert TABLE in done.stderr
    assert "waybill/cli" not in done.stderr  # the other rank leaves quietly too
