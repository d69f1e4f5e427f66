"""The engine's public names, used as the chapter on models and weight loading uses them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from checkpoints import BF16, Recipe, lively, llama, qwen2, qwen3, qwen3_moe
from waybill import Refused
from waybill.engine import (
    Batch,
    ModelConfig,
    RotaryConfig,
    cached_load_hf_config,
    create_model,
    download_hf_weight,
    get_global_ctx,
    get_tp_info,
    load_weight,
    set_rope_device,
    set_tp_info,
    torch_dtype,
)
from waybill.engine.models.decoder import CausalLM
from waybill.errors import (
    DtypeMismatch,
    MissingWeight,
    ShapeMismatch,
    UnclaimedWeight,
    UnsupportedArchitecture,
    WaybillError,
)

CPU = torch.device("cpu")
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "hidden_act": "silu",
    "max_position_embeddings": 40960, "tie_word_embeddings": True, "attention_bias": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """As the chapter starts, and as other tests need to find it."""
    set_tp_info(0, 1)
    set_rope_device(CPU)
    yield
    set_tp_info(0, 1)
    set_rope_device(CPU)


def with_stored_head(recipe: Recipe) -> Recipe:
    """Sorted by name, as published files are: the head comes first."""
    recipe.tensors["lm_head.weight"] = recipe.tensors["model.embed_tokens.weight"]
    return Recipe(recipe.config, dict(sorted(recipe.tensors.items())))


def empty(config: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> CausalLM:
    with torch.device("meta"), torch_dtype(dtype):
        return create_model(config)


def test_every_public_name_is_there() -> None:
    engine = import_module("waybill.engine")
    assert all(getattr(engine, name) is not None for name in engine.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = engine.no_such_name


def test_the_chapters_example_runs(tmp_path: Path) -> None:
    path = str(with_stored_head(qwen3()).write(tmp_path))
    config = ModelConfig.from_hf(cached_load_hf_config(path))
    assert (config.num_layers, config.num_qo_heads, config.num_kv_heads) == (2, 4, 2)
    assert (config.head_dim, config.hidden_size, config.vocab_size) == (32, 64, 128)
    assert (config.rotary_config.base, config.tie_word_embeddings) == (10000.0, True)
    assert config.architectures[0] == "Qwen3ForCausalLM"
    with torch.device("meta"), torch_dtype(torch.bfloat16):
        model = create_model(config)
    weights = {}
    for name, tensor in load_weight(path, torch.device("cpu")):
        weights[name] = tensor
    model.load_state_dict(weights)
    w = model.model.layers.op_list[0].self_attn.qkv_proj.weight
    assert (tuple(w.shape), w.dtype, w.device) == (((4 + 2 * 2) * 32, 64), torch.bfloat16, CPU)


def test_the_loader_streams_in_file_order_and_yields_a_merge_after_its_last_part(tmp_path: Path) -> None:
    names = [name for name, _ in load_weight(with_stored_head(qwen3()).write(tmp_path), CPU)]
    layer = "model.layers.0"
    assert names[:6] == [
        "lm_head.weight",
        "model.embed_tokens.weight",
        f"{layer}.input_layernorm.weight",
        f"{layer}.mlp.down_proj.weight",
        f"{layer}.mlp.gate_up_proj.weight",
        f"{layer}.post_attention_layernorm.weight",
    ]


def test_the_loader_is_an_iterator_that_refuses_before_it_yields(tmp_path: Path) -> None:
    recipe = qwen3()
    del recipe.tensors["model.layers.1.self_attn.k_proj.weight"]
    weights = load_weight(recipe.write(tmp_path), CPU)
    assert iter(weights) is weights
    with pytest.raises(Refused, match="incomplete-merge"):
        next(weights)


@pytest.mark.parametrize("recipe", [llama, qwen2, qwen3, qwen3_moe])
@pytest.mark.parametrize("rank, size", [(0, 1), (0, 2), (1, 2), (3, 4)])
def test_the_loader_yields_exactly_the_models_keys(recipe: Any, rank: int, size: int, tmp_path: Path) -> None:
    path = with_stored_head(recipe()).write(tmp_path)
    set_tp_info(rank, size)
    model = empty(ModelConfig.from_hf(cached_load_hf_config(path)))
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    loaded = {name: tuple(tensor.shape) for name, tensor in load_weight(path, CPU)}
    head = loaded.pop("lm_head.weight")
    assert head == expected.pop("lm_head.weight", (128 // size, 64))
    assert loaded == expected


def test_an_expert_bank_stacks_gate_over_up(tmp_path: Path) -> None:
    recipe = qwen3_moe(np.float32)
    bank = dict(load_weight(recipe.write(tmp_path), CPU))["model.layers.1.mlp.experts.gate_up_proj"]
    assert bank.shape == (4, 64, 64)
    for expert in range(4):
        gate, up = (recipe.tensors[f"model.layers.1.mlp.experts.{expert}.{p}_proj.weight"] for p in ("gate", "up"))
        np.testing.assert_array_equal(bank[expert].numpy(), np.concatenate([gate, up]))


def test_the_smallest_qwen3_has_226_weights_and_takes_no_memory_to_describe() -> None:
    model = empty(ModelConfig.from_hf(QWEN3_06B))
    weights = model.state_dict()
    assert len(weights) == 226
    assert all((w.device.type, w.dtype) == ("meta", torch.bfloat16) for w in weights.values())
    assert weights["model.layers.0.self_attn.qkv_proj.weight"].shape == ((16 + 2 * 8) * 128, 1024)
    assert sum(map(torch.Tensor.numel, weights.values())) == 596_049_920
    assert ModelConfig.from_hf(QWEN3_06B).kv_cache_bytes_per_token(2) == 114_688


@pytest.mark.parametrize("given", [QWEN3_06B, AutoConfig.for_model(**QWEN3_06B)], ids=["dict", "transformers"])
def test_a_config_is_read_from_a_dict_and_from_a_transformers_object(given: Any) -> None:
    config = ModelConfig.from_hf(given)
    assert config.rotary_config == RotaryConfig(128, 128, 40960, 1000000.0)
    assert (config.num_layers, config.head_dim, config.qk_norm, config.attention_bias) == (28, 128, True, False)
    assert not config.is_moe


def test_a_moe_config_says_that_it_is_one() -> None:
    assert ModelConfig.from_hf(qwen3_moe().config).is_moe


def test_an_architecture_without_a_class_is_refused_by_name() -> None:
    config = ModelConfig.from_hf(qwen3().config)
    config.architectures[:] = ["MambaForCausalLM"]
    with pytest.raises(UnsupportedArchitecture, match="MambaForCausalLM"):
        create_model(config)


def test_a_config_is_read_again_only_when_its_file_changes(tmp_path: Path) -> None:
    qwen3().write(tmp_path)
    before = cached_load_hf_config(tmp_path)
    assert cached_load_hf_config(tmp_path) is before
    qwen3(vocab_size=64).write(tmp_path)
    os.utime(tmp_path / "config.json", ns=(0, 0))  # clocks of file systems are too coarse to wait for
    assert cached_load_hf_config(tmp_path)["vocab_size"] == 64


def test_a_local_folder_needs_no_download(tmp_path: Path) -> None:
    assert download_hf_weight(str(qwen3().write(tmp_path))) == tmp_path


def test_the_default_dtype_changes_inside_and_returns_even_after_an_error() -> None:
    before = torch.get_default_dtype()
    with pytest.raises(KeyError), torch_dtype(torch.float16):
        assert torch.empty(1).dtype == torch.float16
        raise KeyError
    assert torch.get_default_dtype() == before


def test_a_rank_outside_the_group_is_refused_and_changes_nothing() -> None:
    set_tp_info(1, 2)
    assert (get_tp_info().rank, get_tp_info().size, get_tp_info().is_primary()) == (1, 2, False)
    for rank, size in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match="is not one of"):
            set_tp_info(rank, size)
    assert get_tp_info() == (1, 2)


def loaded(tmp_path: Path) -> tuple[CausalLM, dict[str, torch.Tensor]]:
    path = lively(qwen3(np.float32)).write(tmp_path)
    model = empty(ModelConfig.from_hf(cached_load_hf_config(path)), torch.float32)
    state = dict(load_weight(path, CPU))
    model.load_state_dict(state)
    return model, state


def test_a_state_dict_that_does_not_fit_is_refused_with_every_reason_and_changes_nothing(tmp_path: Path) -> None:
    model, state = loaded(tmp_path)
    wrong = {name: tensor + 1 for name, tensor in state.items()}
    del wrong["model.norm.weight"]
    wrong["model.layers.0.mlp.down_proj.weight"] = wrong["model.layers.0.mlp.down_proj.weight"].T.contiguous()
    wrong["model.layers.1.self_attn.q_norm.weight"] = wrong["model.layers.1.self_attn.q_norm.weight"].bfloat16()
    wrong["model.layers.2.mlp.down_proj.weight"] = torch.zeros(2)
    with pytest.raises(Refused) as refused:
        model.load_state_dict(wrong)
    found: dict[type[WaybillError], str] = {type(problem): problem.where for problem in refused.value.problems}
    assert found == {
        MissingWeight: "model.norm.weight",
        ShapeMismatch: "model.layers.0.mlp.down_proj.weight",
        DtypeMismatch: "model.layers.1.self_attn.q_norm.weight",
        UnclaimedWeight: "model.layers.2.mlp.down_proj.weight",
    }
    assert len(refused.value.problems) == 4
    after = model.state_dict()
    assert after.keys() == state.keys()
    assert all(after[name] is state[name] for name in state)


def test_a_different_head_in_a_state_dict_that_does_not_fit_leaves_the_model_tied(tmp_path: Path) -> None:
    model, state = loaded(tmp_path)
    state["lm_head.weight"] = state["model.embed_tokens.weight"] * 2
    del state["model.norm.weight"]
    with pytest.warns(UserWarning, match="file's head is used"), pytest.raises(Refused, match="missing-weight"):
        model.load_state_dict(state)
    assert model.lm_head.is_tied


def test_a_state_dict_with_another_head_unties_the_model(tmp_path: Path) -> None:
    model, state = loaded(tmp_path)
    state["lm_head.weight"] = state["model.embed_tokens.weight"] * 2
    with pytest.warns(UserWarning, match="file's head is used"):
        model.load_state_dict(state)
    assert model.state_dict()["lm_head.weight"] is state["lm_head.weight"]


def test_forward_takes_no_arguments_and_returns_one_row_of_logits_a_request(tmp_path: Path) -> None:
    model, _ = loaded(tmp_path)
    batch = Batch(torch.tensor([1, 2, 3, 4, 5]), (2, 3))
    with torch.inference_mode(), get_global_ctx().forward_batch(batch):
        assert get_global_ctx().batch is batch
        logits = model.forward()
    assert logits.shape == (2, 128)
    assert all(map(math.isfinite, logits.flatten().tolist()))


def test_a_forward_pass_without_a_batch_says_how_to_set_one(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="forward_batch"):
        loaded(tmp_path)[0].forward()


def test_a_batch_is_gone_after_its_forward_pass_even_after_an_error() -> None:
    with pytest.raises(KeyError), get_global_ctx().forward_batch(Batch(torch.tensor([1]), (1,))):
        raise KeyError
    with pytest.raises(RuntimeError):
        _ = get_global_ctx().batch


def test_weights_are_delivered_in_the_dtype_of_the_config(tmp_path: Path) -> None:
    assert {w.dtype for _, w in load_weight(qwen2(BF16).write(tmp_path / "a"), CPU)} == {torch.bfloat16}
    assert {w.dtype for _, w in load_weight(qwen2(np.float32).write(tmp_path / "b"), CPU)} == {torch.float32}
