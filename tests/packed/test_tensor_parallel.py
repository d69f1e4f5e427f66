"""Packed models cut into two ranks against the same models whole: one launch of `torchrun`, over gloo."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ggufs
from checkpoints import BF16, LAYERS, Recipe, gpt_oss, lively, llama, qwen2, qwen2_moe, qwen3, qwen3_moe
from floating import Blocks, pack_fp8, pack_mxfp4
from packed.tp_worker import play
from packing import Scheme, Twins, pack
from parity.tolerances import LOGITS_FLOAT32_RANKS
from ranks import played_by

WORKER = Path(__file__).with_name("tp_worker.py")
K, V = (f"model.layers.0.self_attn.{member}_proj" for member in "kv")
OUT = [f"model.layers.{layer}.self_attn.o_proj" for layer in range(LAYERS)]


def narrow_heads() -> Recipe:
    """Two key-value heads of 4 rows: a rank's begin in the middle of a word."""
    recipe = lively(llama(np.float32, head_dim=4))
    for name, tensor in recipe.tensors.items():
        if "self_attn" in name:
            rows = {"q_proj": np.s_[:16], "o_proj": np.s_[:, :16]}.get(name.split(".")[-2], np.s_[:8])
            recipe.tensors[name] = tensor[rows] * 2
    return recipe


CASES: dict[str, Callable[[], Twins]] = {
    # down_proj has K 96: 48 a rank, so that groups of 32 become groups of 16
    "gptq": lambda: pack(lively(llama(np.float32)), Scheme("gptq")),
    "gptq-8-bit-one-group": lambda: pack(lively(qwen2(np.float32)), Scheme("gptq_v2", bits=8, group=-1)),
    "gptq-2-bit-last-group-short": lambda: pack(lively(llama(np.float32)), Scheme("gptq", bits=2, group=64)),
    "gptq-one-kv-head": lambda: pack(lively(qwen3(np.float32, num_key_value_heads=1)), Scheme("gptq")),
    "gptq-experts": lambda: pack(lively(qwen3_moe(np.float32)), Scheme("gptq", group=16)),
    "gptq-shared-expert": lambda: pack(
        lively(qwen2_moe(np.float32, shared_expert_intermediate_size=64)), Scheme("gptq", group=16)
    ),
    "olive-shared-expert-float": lambda: pack(
        lively(qwen2_moe(np.float32, banks=True, shared_expert_intermediate_size=64)), Scheme("olive", bits=8),
        keep=[f"model.layers.{n}.mlp.shared_expert.{p}_proj" for n in range(2) for p in ("gate", "up", "down")],
    ),
    "mxfp4-experts-with-biases": lambda: pack_mxfp4(lively(gpt_oss(np.float32))),
    "gptq-half-a-word": lambda: pack(narrow_heads(), Scheme("gptq"), keep=OUT),
    "awq-half-a-word": lambda: pack(narrow_heads(), Scheme("awq"), keep=OUT),
    "auto-round": lambda: pack(lively(qwen2(np.float32)), Scheme("auto_round", symmetric=True)),
    "awq": lambda: pack(lively(qwen2(np.float32)), Scheme("awq")),
    "awq-experts": lambda: pack(lively(qwen3_moe(np.float32)), Scheme("awq", group=32)),
    "compressed-tensors": lambda: pack(lively(llama(np.float32)), Scheme("ct")),
    "compressed-tensors-bytes": lambda: pack(lively(qwen2(np.float32)), Scheme("ct_int", bits=8, group=-1)),
    "compressed-tensors-signed-zeros": lambda: pack(lively(llama(np.float32)), Scheme("ct_old", bits=2, group=64)),
    "compressed-tensors-half-a-word": lambda: pack(narrow_heads(), Scheme("ct"), keep=OUT),
    "compressed-tensors-experts": lambda: pack(lively(qwen3_moe(np.float32)), Scheme("ct", group=16)),
    "olive-tied-table": lambda: pack(
        lively(qwen3(np.float32, vocab_size=130, tie_word_embeddings=False)),
        Scheme("olive_dotted"), table=True, head=True, tie=True,
    ),
    "olive-tables-of-131-rows": lambda: pack(
        lively(llama(np.float32, vocab_size=131)), Scheme("olive", bits=8), table=True, head=True
    ),
    "olive-head-of-one-row": lambda: pack(lively(llama(np.float32, vocab_size=1)), Scheme("olive"), head=True),
    "olive-banks": lambda: pack(lively(qwen3_moe(np.float32, banks=True)), Scheme("olive")),
    "fp8": lambda: pack_fp8(lively(qwen3(np.float32)), Blocks(16, 16)),
    "fp8-one-scale": lambda: pack_fp8(lively(llama(np.float32)), Blocks(-1, -1, BF16)),
    "fp8-a-scale-a-row-divided": lambda: pack_fp8(lively(qwen2(np.float32)), Blocks(1, -1, gptqmodel=True)),
    "fp8-experts": lambda: pack_fp8(lively(qwen3_moe(np.float32)), Blocks(16, 16)),
    "olive-mixed": lambda: pack(
        lively(qwen2(np.float32)), Scheme("olive"), keep=[V], overrides={K: {"bits": 8, "group": 16}}
    ),
}  # fmt: skip


GGUF = {
    "minimums.gguf": lambda: ggufs.model("llama", "Q4_1", blk__0__ffn_down__weight="Q2_K", tied=True),
    "minimums-experts.gguf": lambda: ggufs.model("qwen3moe", "Q4_K"),
    "tables.gguf": lambda: ggufs.model("qwen2", "MXFP4", blk__1__ffn_down__weight="IQ4_XS"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("packed-tp")
    for file, make in GGUF.items():
        make().write(root / file)
    return {file: root / file for file in GGUF} | {
        case: make().packed.write(root / case) for case, make in CASES.items()
    }


@pytest.fixture(scope="module")
def ranks(folders: dict[str, Path]) -> dict[str, Any]:
    return played_by(2, WORKER, folders)


@pytest.mark.parametrize("case", [*CASES, *GGUF])
def test_two_ranks_compute_what_the_whole_packed_model_does(
    case: str, ranks: dict[str, Any], folders: dict[str, Path]
) -> None:
    whole = play(folders[case])
    assert whole["packed"] > 0
    assert len({token for tokens in whole["tokens"] for token in tokens}) > (5 if "one-row" not in case else 0)
    assert len(ranks[case]) == 2
    for said in ranks[case]:
        torch.testing.assert_close(
            torch.tensor(said["logits"]), torch.tensor(whole["logits"]), atol=LOGITS_FLOAT32_RANKS, rtol=0
        )
        assert said["tokens"] == whole["tokens"]
        assert said["packed"] == whole["packed"]
        assert said["bytes"] < whole["bytes"]
