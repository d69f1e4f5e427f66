"""The engine against transformers, live: the same random weights, the same logits, the same tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import waybill
from checkpoints import Recipe
from parity.tolerances import LOGITS_FLOAT32
from waybill.config import ModelConfig
from waybill.engine.context import Batch, get_global_ctx
from waybill.engine.generate import generate
from waybill.engine.kvcache import KVCache
from waybill.engine.models.decoder import CausalLM

NEW_TOKENS = 32
LENGTHS = (23, 1, 64)
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 130,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MOE = {"head_dim": 16, "moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}

SHARED = {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 80, "num_experts": 4,
          "num_experts_per_tok": 2, "norm_topk_prob": False}  # fmt: skip


def rope(kind: str, **numbers: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **numbers}}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-attention-bias": ("llama", {"attention_bias": True}),
    "llama-mlp-bias": ("llama", {"mlp_bias": True}),
    "llama-all-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 24}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-as-many-kv-heads": ("llama", {"num_key_value_heads": 4}),
    "llama-eps": ("llama", {"rms_norm_eps": 0.5}),
    "llama-theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}),
    "llama-linear": ("llama", rope("linear", factor=4.0)),
    "llama-llama3": (
        "llama",
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    "llama-yarn": ("llama", rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    "llama-yarn-plain-length": ("llama", rope("yarn", factor=2.0)),
    "llama-yarn-attention-factor": (
        "llama",
        rope("yarn", factor=4.0, original_max_position_embeddings=32, attention_factor=1.5),
    ),
    "llama-yarn-betas": (
        "llama",
        rope("yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=8.0, beta_slow=0.5, truncate=False),
    ),
    "llama-yarn-mscale": (
        "llama",
        rope("yarn", factor=4.0, original_max_position_embeddings=32, mscale=0.7, mscale_all_dim=1.3),
    ),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn": ("qwen2", rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-tied": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-attention-bias": ("qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen3-one-kv-head": ("qwen3", {"head_dim": 16, "num_key_value_heads": 1}),
    "qwen3-odd-heads": ("qwen3", {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 10}),
    "qwen3-linear": ("qwen3", {"head_dim": 16} | rope("linear", factor=2.0)),
    "qwen2_moe": ("qwen2_moe", SHARED),
    "qwen2_moe-renormalized": ("qwen2_moe", SHARED | {"norm_topk_prob": True}),
    "qwen2_moe-tied": ("qwen2_moe", SHARED | {"tie_word_embeddings": True}),
    "qwen2_moe-no-biases": ("qwen2_moe", SHARED | {"qkv_bias": False}),
    "qwen2_moe-every-second-layer": ("qwen2_moe", SHARED | {"decoder_sparse_step": 2, "num_hidden_layers": 4}),
    "qwen2_moe-one-dense-layer": ("qwen2_moe", SHARED | {"mlp_only_layers": [1], "num_hidden_layers": 3}),
    "qwen2_moe-square-banks": ("qwen2_moe", SHARED | {"moe_intermediate_size": 32}),
    "qwen3_moe": ("qwen3_moe", MOE),
    "qwen3_moe-plain-weights": ("qwen3_moe", MOE | {"norm_topk_prob": False}),
    "qwen3_moe-tied": ("qwen3_moe", MOE | {"tie_word_embeddings": True}),
    "qwen3_moe-attention-bias": ("qwen3_moe", MOE | {"attention_bias": True}),
    "qwen3_moe-one-of-many": ("qwen3_moe", MOE | {"num_experts": 16, "num_experts_per_tok": 1}),
    "qwen3_moe-all-experts": ("qwen3_moe", MOE | {"num_experts_per_tok": 4}),
    "qwen3_moe-every-second-layer": ("qwen3_moe", MOE | {"decoder_sparse_step": 2, "num_hidden_layers": 4}),
    "qwen3_moe-one-dense-layer": ("qwen3_moe", MOE | {"mlp_only_layers": [1], "num_hidden_layers": 3}),
    "qwen3_moe-square-banks": ("qwen3_moe", MOE | {"moe_intermediate_size": 32}),  # 2I == H: no shape tells them apart
}

YARN = rope("yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=32.0, beta_slow=1.0, truncate=False)
SINKS = YARN | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
                "num_hidden_layers": 4}  # fmt: skip
CASES |= {
    "gpt_oss": ("gpt_oss", SINKS),
    "gpt_oss-one-kv-head": ("gpt_oss", SINKS | {"num_key_value_heads": 1}),
    "gpt_oss-a-window-of-two": ("gpt_oss", SINKS | {"sliding_window": 2}),
    "gpt_oss-full-before-sliding": (
        "gpt_oss",
        SINKS | {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "gpt_oss-no-windows": ("gpt_oss", SINKS | {"layer_types": ["full_attention"] * 4}),
    "gpt_oss-no-attention-biases": ("gpt_oss", SINKS | {"attention_bias": False}),
    "gpt_oss-tied": ("gpt_oss", SINKS | {"tie_word_embeddings": True, "num_local_experts": 6}),
    "gpt_oss-narrow-clamp": ("gpt_oss", SINKS | {"swiglu_limit": 0.25, "swiglu_alpha": 0.7}),
    "gpt_oss-square-banks": ("gpt_oss", SINKS | {"intermediate_size": 32}),  # 2I == H: nothing shows they lie turned
    "gpt_oss-square-down": ("gpt_oss", SINKS | {"intermediate_size": 64}),
}
BANKED = [name for name, (kind, _) in CASES.items() if kind.endswith("_moe")]


@dataclass(frozen=True)
class Reference:
    """What transformers computes for one case."""

    model: PreTrainedModel
    prompts: list[list[int]]
    logits: list[torch.Tensor]
    tokens: list[list[int]]


@cache
def reference(case: str) -> Reference:
    kind, overrides = CASES[case]
    config = AutoConfig.for_model(kind, **SIZES | overrides)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    random = torch.Generator().manual_seed(sum(case.encode()) + 6)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(random_weight(name, parameter.shape, random))
    prompts = [torch.randint(130, (n,), generator=random).tolist() for n in LENGTHS]
    found = Reference(model, prompts, [their_logits(model, p)[-1] for p in prompts], [])
    found.tokens.extend(their_tokens(model, prompt) for prompt in prompts)
    return found


def random_weight(name: str, shape: torch.Size, random: torch.Generator) -> torch.Tensor:
    """At a scale that keeps activations near one and lets every layer change the outcome."""
    noise = torch.randn(shape, generator=random)
    if "norm" in name:
        return 1 + 0.2 * noise
    if name.endswith("bias"):
        return 0.2 * noise
    if name.endswith("sinks"):
        return 1.5 * noise
    if "embed_tokens" in name:
        return 0.3 * noise
    return noise * 1.5 / shape[-1] ** 0.5


@torch.no_grad()
def their_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def their_tokens(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def saved(case: str, folder: Path) -> Path:
    """As transformers saves it."""
    reference(case).model.save_pretrained(folder)
    return folder


def hub(case: str, folder: Path, *, banks: bool = False) -> Path:
    """As the hub's originals are: configs in the spelling of transformers 4, a tensor for every expert's projection."""
    model = reference(case).model
    config = model.config.to_dict()
    parameters = config.pop("rope_parameters")
    config["rope_theta"] = parameters.pop("rope_theta")
    config["rope_scaling"] = None if parameters["rope_type"] == "default" else parameters
    config["torch_dtype"] = str(config.pop("dtype")).removeprefix("torch.")
    if config["model_type"] == "gpt_oss":
        banks = True  # its experts have no other form
    elif "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")
    recipe = Recipe(config)
    for name, tensor in model.state_dict().items():
        if not (name == "lm_head.weight" and config["tie_word_embeddings"]):
            recipe.tensors |= {name: tensor.numpy()} if banks else one_by_one(name, tensor)
    return recipe.write(folder)


def one_by_one(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    path, _, leaf = name.rpartition(".")
    if not path.endswith("experts"):
        return {name: tensor.numpy()}
    members = ["gate_proj", "up_proj"] if leaf == "gate_up_proj" else [leaf]
    return {
        f"{path}.{expert}.{member}.weight": part.numpy()
        for expert, bank in enumerate(tensor)
        for member, part in zip(members, bank.chunk(len(members)), strict=True)
    }


@torch.inference_mode()
def our_logits(model: CausalLM, batch: Batch, kv_cache: KVCache | None = None) -> torch.Tensor:
    with get_global_ctx().forward_batch(batch, kv_cache):
        return model.forward()


def cache_for(model: CausalLM, requests: int, length: int) -> KVCache:
    return KVCache(
        model.config, requests=requests, length=length, tp_size=1, dtype=torch.float32, device=torch.device("cpu")
    )


def flat(prompts: list[list[int]]) -> list[int]:
    return [token for prompt in prompts for token in prompt]


def assert_same_logits(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=LOGITS_FLOAT32, rtol=0)


def assert_same_model(ours: CausalLM, theirs: Reference) -> None:
    """Logits and tokens; each prompt alone, and all of them as one batch."""
    for prompt, logits in zip(theirs.prompts, theirs.logits, strict=True):
        assert_same_logits(our_logits(ours, Batch(torch.tensor(prompt), (len(prompt),)))[0], logits)
    together = Batch(torch.tensor(flat(theirs.prompts)), LENGTHS)
    assert_same_logits(our_logits(ours, together), torch.stack(theirs.logits))
    alone = [generate(ours, [p], max_new_tokens=NEW_TOKENS).token_ids[0] for p in theirs.prompts]
    assert alone == theirs.tokens
    assert generate(ours, theirs.prompts, max_new_tokens=NEW_TOKENS).token_ids == theirs.tokens


@pytest.mark.parametrize("case", CASES)
def test_the_reference_says_more_than_one_word(case: str) -> None:
    assert all(len(set(tokens)) > 3 for tokens in reference(case).tokens)


@pytest.mark.parametrize("case", CASES)
def test_a_model_saved_by_transformers_speaks_as_it_does_there(case: str, tmp_path: Path) -> None:
    assert_same_model(waybill.load(saved(case, tmp_path)), reference(case))


@pytest.mark.parametrize("case", CASES)
def test_a_model_in_the_hubs_original_layout_speaks_as_it_does_in_transformers(case: str, tmp_path: Path) -> None:
    assert_same_model(waybill.load(hub(case, tmp_path)), reference(case))


@pytest.mark.parametrize("case", BANKED)
def test_experts_stored_as_banks_are_the_same_experts(case: str, tmp_path: Path) -> None:
    assert_same_model(waybill.load(hub(case, tmp_path, banks=True)), reference(case))


@pytest.mark.parametrize("case", ["llama-yarn", "qwen2", "qwen3-tied", "qwen2_moe", "qwen3_moe", "gpt_oss"])
def test_prefill_in_pieces_and_decode_give_the_logits_of_every_position(case: str, tmp_path: Path) -> None:
    model, tokens = waybill.load(hub(case, tmp_path)), reference(case).prompts[0]
    theirs, kv_cache, done = their_logits(reference(case).model, tokens), cache_for(model, 1, len(tokens)), 0
    for length in (7, 1, 5, *[1] * 10):
        piece = torch.tensor(tokens[done : done + length])
        logits = our_logits(model, Batch(piece, (length,), (done,)), kv_cache)
        done += length
        assert_same_logits(logits[0], theirs[done - 1])
    assert done == len(tokens)


def test_requests_of_a_batch_may_prefill_and_decode_at_once(tmp_path: Path) -> None:
    case = "qwen3"
    model, (first, _, second) = waybill.load(hub(case, tmp_path)), reference(case).prompts
    kv_cache = cache_for(model, 2, len(second))
    our_logits(model, Batch(torch.tensor(first[:-1] + second[:5]), (len(first) - 1, 5)), kv_cache)
    mixed = Batch(torch.tensor(first[-1:] + second[5:]), (1, len(second) - 5), (len(first) - 1, 5))
    expected = torch.stack([reference(case).logits[0], reference(case).logits[2]])
    assert_same_logits(our_logits(model, mixed, kv_cache), expected)


@pytest.mark.parametrize("case", ["llama-tied", "qwen3_moe-tied"])
def test_a_tied_model_that_stores_its_head_again_shares_the_one_table(case: str, tmp_path: Path) -> None:
    model = waybill.load(with_head(case, tmp_path, reference(case).model.get_input_embeddings().weight))
    assert model.lm_head.is_tied
    assert "lm_head.weight" not in model.state_dict()
    assert_same_model(model, reference(case))


@pytest.mark.parametrize("case", ["llama-tied", "qwen3_moe-tied"])
@pytest.mark.parametrize("where", ["everywhere", "in its last number"])
def test_a_tied_model_that_stores_another_head_uses_it_and_says_so(case: str, where: str, tmp_path: Path) -> None:
    head = reference(case).model.get_input_embeddings().weight.detach().clone()
    if where == "everywhere":
        head = head.flip(0)
    else:
        head[-1, -1] += 30
    with pytest.warns(UserWarning, match="the file's head is used"):
        ours = waybill.load(with_head(case, tmp_path, head))
    kind, overrides = CASES[case]
    config = AutoConfig.for_model(kind, **SIZES | overrides | {"tie_word_embeddings": False})
    untied = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    untied.load_state_dict(reference(case).model.state_dict() | {"lm_head.weight": head})
    prompts = reference(case).prompts
    logits = our_logits(ours, Batch(torch.tensor(flat(prompts)), LENGTHS))
    assert_same_logits(logits, torch.stack([their_logits(untied, prompt)[-1] for prompt in prompts]))
    assert (logits - torch.stack(reference(case).logits)).abs().max() > 1  # it matters which head is used
    tokens = generate(ours, prompts, max_new_tokens=NEW_TOKENS).token_ids
    assert tokens == [their_tokens(untied, prompt) for prompt in prompts]


def with_head(case: str, folder: Path, head: torch.Tensor) -> Path:
    from safetensors.torch import load_file, save_file

    hub(case, folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": head.detach().clone()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("case", CASES)
def test_a_transformers_config_and_its_file_mean_the_same(case: str, tmp_path: Path) -> None:
    live = ModelConfig.from_hf(reference(case).model.config)
    for folder in (saved(case, tmp_path / "new"), hub(case, tmp_path / "old")):
        assert waybill.plan(folder).config == live
