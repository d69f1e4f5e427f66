"""Exported packages in ONNX Runtime against the engine and transformers: the same logits, the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import waybill
from checkpoints import Array, Recipe, lively, llama, qwen2, qwen2_moe, qwen3, qwen3_moe
from packing import HEAD, TABLE, Scheme, Twins, pack
from parity.tolerances import (
    LOGITS_FLOAT16_ONNX,
    LOGITS_FLOAT32,
    ROUNDING_INT8_ACTIVATIONS,
)
from sessions import Package
from waybill.engine.context import Batch, get_global_ctx
from waybill.engine.generate import generate
from waybill.engine.models.decoder import CausalLM

NEW_TOKENS = 32
PROMPTS = [[3, 17, 99, 4, 56], [8], [120, 7, 7, 31, 64, 2, 90, 11, 45]]
FLAT = [token for prompt in PROMPTS for token in prompt]

MODELS: dict[str, Callable[[], Recipe]] = {
    "llama": lambda: lively(llama(np.float32)),
    "llama-biases": lambda: biased(lively(llama(np.float32, attention_bias=True, mlp_bias=True), 5)),
    "qwen2": lambda: lively(qwen2(np.float32), 1),
    "qwen2-tied": lambda: lively(qwen2(np.float32, tie_word_embeddings=True), 6),
    "qwen3": lambda: lively(qwen3(np.float32), 2),
    "qwen2-moe": lambda: lively(qwen2_moe(np.float32, shared_expert_intermediate_size=64), 8),
    "qwen2-moe-all-experts": lambda: lively(
        qwen2_moe(np.float32, shared_expert_intermediate_size=64, num_experts_per_tok=4), 8
    ),
    "qwen2-moe-banks-one-dense-layer": lambda: lively(qwen2_moe(np.float32, banks=True, mlp_only_layers=[0]), 8),
    "qwen2-moe-renormalized": lambda: lively(qwen2_moe(np.float32, norm_topk_prob=True), 8),
    "qwen3-moe": lambda: lively(qwen3_moe(np.float32), 3),
    "qwen3-moe-plain-weights": lambda: lively(qwen3_moe(np.float32, norm_topk_prob=False), 7),
    "qwen3-moe-all-experts": lambda: lively(qwen3_moe(np.float32, num_experts_per_tok=4), 3),
    "qwen3-moe-banks": lambda: lively(qwen3_moe(np.float32, banks=True), 4),
}
KINDS = ("llama", "qwen2", "qwen3", "qwen2-moe", "qwen3-moe")
SCHEMES = [
    Scheme("gptq"),
    Scheme("gptq", bits=2, group=32),
    Scheme("gptq", group=64),  # K is 96 in down_proj
    Scheme("gptq", bits=8, group=-1),
    Scheme("gptq_v2", bits=2, group=16),
    Scheme("gptq_v2", group=-1, symmetric=True),
    Scheme("gptq_v2", bits=8, group=32, scales=np.float32),
    Scheme("auto_round", symmetric=True),
    Scheme("awq"),
    Scheme("awq", group=16, symmetric=True),
    Scheme("olive"),
    Scheme("olive", group=128),  # more than a row holds
    Scheme("olive", bits=2, group=16),
    Scheme("olive_dotted", bits=8, symmetric=True),
    Scheme("ct"),
    Scheme("ct_old", bits=2, group=64),  # K is 96 in down_proj
    Scheme("ct_int", bits=8, group=-1, symmetric=True),
]


def biased(recipe: Recipe) -> Recipe:
    generator = np.random.default_rng(9)
    for name, tensor in list(recipe.tensors.items()):
        if name.endswith("_proj.weight"):
            bias = (generator.standard_normal(tensor.shape[0]) * 0.2).astype(tensor.dtype)
            recipe.tensors[name.replace("weight", "bias")] = bias
    return recipe


def pack_mixed(scheme: Scheme, **options: Any) -> Callable[[Recipe], Twins]:
    return lambda recipe: pack(recipe, scheme, **options)


def every_expert(kind: str) -> str:
    """Where activations are rounded, every token goes to every expert: no rounding changes where it goes."""
    return kind.replace("moe", "moe-all-experts")


@torch.inference_mode()
def logits_of(model: CausalLM, positions: str = "all") -> Array:
    batch = Batch(torch.tensor(FLAT), tuple(map(len, PROMPTS)))
    if positions == "all":
        batch.ends = torch.arange(len(FLAT))
    with get_global_ctx().forward_batch(batch):
        return model.forward().float().numpy()


def tokens_of(model: CausalLM) -> list[list[int]]:
    return generate(model, PROMPTS, max_new_tokens=NEW_TOKENS).token_ids


def export(checkpoint: Path, folder: Path, **options: object) -> Package:
    waybill.build(checkpoint, **options).save(folder)  # type: ignore[arg-type]
    return Package(folder)


def every_position(package: Package) -> Array:
    """Logits of all prompts' positions, [tokens, vocabulary], from one batch."""
    logits, _ = package.prefill(PROMPTS)
    return np.concatenate([row[: len(prompt)] for row, prompt in zip(logits, PROMPTS, strict=True)]).astype(np.float32)


def assert_close(ours: Array, theirs: Array, atol: float = LOGITS_FLOAT32) -> None:
    np.testing.assert_allclose(ours, theirs, atol=atol, rtol=0)


def assert_speaks_alike(checkpoint: Path, folder: Path) -> Package:
    """In float32: every position's logits, the last positions', and 32 greedy tokens are the engine's."""
    model = waybill.load(checkpoint, dtype="float32")
    assert_close(every_position(export(checkpoint, folder / "all", exact=True, logits="all")), logits_of(model))
    package = export(checkpoint, folder / "last", exact=True)
    last, _ = package.prefill(PROMPTS)
    assert last.shape[1] == 1
    assert_close(last[:, 0], logits_of(model, "last"))
    made = tokens_of(model)
    assert [package.greedy(prompt, NEW_TOKENS) for prompt in PROMPTS] == made
    assert len({token for each in made for token in each}) > 5
    return package


# Float.


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@torch.inference_mode()
def test_a_float_package_speaks_as_the_engine_and_transformers_do(kind: str, tmp_path: Path) -> None:
    checkpoint = MODELS[kind]().write(tmp_path / "checkpoint")
    assert_speaks_alike(checkpoint, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    whole = [theirs(torch.tensor([prompt])).logits[0].numpy() for prompt in PROMPTS]
    assert_close(every_position(Package(tmp_path / "all")), np.concatenate(whole))


@pytest.mark.parametrize("stored", [np.float16, "bfloat16"])
@pytest.mark.parametrize("kind", [llama, qwen3])
def test_stored_half_floats_are_widened_exactly(kind: Callable[..., Recipe], stored: object, tmp_path: Path) -> None:
    recipe = lively(kind() if stored == "bfloat16" else kind(stored))
    assert_speaks_alike(recipe.write(tmp_path / "checkpoint"), tmp_path)


@pytest.mark.parametrize("kind", MODELS)
def test_a_float16_package_rounds_as_much_as_the_engine_does(kind: str, tmp_path: Path) -> None:
    checkpoint = MODELS[kind]().write(tmp_path / "checkpoint")
    package = export(checkpoint, tmp_path / "package", dtype="float16", logits="all")
    assert package.dtype == np.float16
    exact = logits_of(waybill.load(checkpoint, dtype="float32"))
    assert_close(every_position(package), exact, LOGITS_FLOAT16_ONNX)


ROPES = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}  # fmt: skip


@pytest.mark.parametrize("rope", ROPES)
def test_positions_turn_as_they_do_in_the_engine(rope: str, tmp_path: Path) -> None:
    recipe = lively(llama(np.float32, rope_scaling=ROPES[rope]))
    assert_speaks_alike(recipe.write(tmp_path / "checkpoint"), tmp_path)


@pytest.mark.parametrize("scheme", [None, Scheme("gptq")], ids=str)
def test_layers_with_experts_and_without_may_follow_each_other(scheme: Scheme | None, tmp_path: Path) -> None:
    recipe = lively(qwen3_moe(np.float32, mlp_only_layers=[1]))
    kept = {name: tensor for name, tensor in recipe.tensors.items() if "1.mlp" not in name}
    dense = {name: tensor for name, tensor in lively(qwen3(np.float32)).tensors.items() if "1.mlp" in name}
    recipe.tensors = kept | dense
    if scheme is not None:
        recipe = pack(recipe, scheme).packed
    package = assert_speaks_alike(recipe.write(tmp_path / "checkpoint"), tmp_path)
    assert package.operators.count("QMoE" if scheme else "MoE") == 1


# Packed, exactly.


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_package_speaks_as_the_engine_does(kind: str, scheme: Scheme, tmp_path: Path) -> None:
    if "moe" in kind and scheme.bits == 8:
        checkpoint = pack(MODELS[every_expert(kind)](), scheme).packed.write(tmp_path / "checkpoint")
        assert_rounds_to_8_bits(checkpoint, tmp_path / "package", exact=True)  # as its operator always does
        return
    assert_speaks_alike(pack(MODELS[kind](), scheme).packed.write(tmp_path / "checkpoint"), tmp_path)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("symmetric", [True, False])
def test_packed_banks_speak_as_they_do_in_the_engine(bits: int, symmetric: bool, tmp_path: Path) -> None:
    recipe = lively(qwen3_moe(np.float32, banks=True, norm_topk_prob=symmetric))
    twins = pack(recipe, Scheme("olive", bits=bits, group=16, symmetric=symmetric))
    assert_speaks_alike(twins.packed.write(tmp_path / "checkpoint"), tmp_path)


LAYER = "model.layers.0"
MIXED = {
    "gptq-float-v": pack_mixed(Scheme("gptq"), keep=[f"{LAYER}.self_attn.v_proj"]),
    "awq-float-v": pack_mixed(Scheme("awq"), keep=[f"{LAYER}.self_attn.v_proj"]),
    "compressed-tensors-8-bit-up": pack_mixed(
        Scheme("ct"), overrides={f"{LAYER}.mlp.up_proj": {"bits": 8, "form": "ct_int"}}
    ),
    "auto-round-2-bit-gate": pack_mixed(
        Scheme("auto_round", symmetric=True), overrides={f"{LAYER}.mlp.gate_proj": {"bits": 2}}
    ),
    "olive-8-bit-up": pack_mixed(Scheme("olive_dotted"), overrides={f"{LAYER}.mlp.up_proj": {"bits": 8}}),
    "gptq-other-group-k": pack_mixed(Scheme("gptq_v2"), overrides={f"{LAYER}.self_attn.k_proj": {"group": 16}}),
    "olive-symmetric-k": pack_mixed(Scheme("olive"), overrides={f"{LAYER}.self_attn.k_proj": {"symmetric": True}}),
}


@pytest.mark.parametrize("case", MIXED)
@pytest.mark.parametrize("kind", ["llama-biases", "qwen2"])
def test_modules_may_be_packed_differently(kind: str, case: str, tmp_path: Path) -> None:
    recipe = MODELS[kind]()
    assert_speaks_alike(MIXED[case](recipe).packed.write(tmp_path / "checkpoint"), tmp_path)


# Tables.


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("table", "head"), [(True, False), (False, True), (True, True)])
def test_tables_are_packed_one_by_one(bits: int, table: bool, head: bool, tmp_path: Path) -> None:
    twins = pack(MODELS["llama"](), Scheme("olive", bits=bits, group=16), table=table, head=head)
    package = assert_speaks_alike(twins.packed.write(tmp_path / "checkpoint"), tmp_path)
    assert ("GatherBlockQuantized" in package.operators) == table
    assert (package.operators[-1] == "MatMulNBits") == head


def test_a_symmetric_packed_table_is_looked_up_as_it_is_multiplied_by(tmp_path: Path) -> None:
    twins = pack(MODELS["llama"](), Scheme("olive", symmetric=True), table=True, head=True)
    assert_speaks_alike(twins.packed.write(tmp_path / "checkpoint"), tmp_path)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_tied_packed_table_is_stored_once_and_used_twice(bits: int, tmp_path: Path) -> None:
    recipe = lively(qwen3(np.float32, tie_word_embeddings=False))
    twins = pack(recipe, Scheme("olive_dotted", bits=bits, group=16), table=True, head=True, tie=True)
    package = assert_speaks_alike(twins.packed.write(tmp_path / "checkpoint"), tmp_path)
    rows, blocks = (package.place(f"model.embed_tokens.codes{suffix}") for suffix in (".rows", ""))
    assert rows == blocks
    assert not [name for name in package.graph.initializers if name.startswith("lm_head")]


@pytest.mark.parametrize("kind", ["float", "packed"])
def test_a_tied_head_that_is_stored_again_is_left_out(kind: str, tmp_path: Path) -> None:
    recipe = MODELS["qwen3"]()
    if kind == "packed":
        recipe = pack(recipe, Scheme("olive"), table=True).packed
        recipe.config["quantization_config"]["lm_head"] = True
    for name in [name for name in recipe.tensors if name.startswith(TABLE)]:
        recipe.tensors[name.replace(TABLE, HEAD)] = recipe.tensors[name]
    package = assert_speaks_alike(recipe.write(tmp_path / "checkpoint"), tmp_path)
    assert not [name for name in package.graph.initializers if name.startswith("lm_head")]


@pytest.mark.parametrize("kind", ["float", "packed"])
@pytest.mark.filterwarnings("ignore:config.json ties the head")
def test_another_head_beside_a_tied_table_is_honoured(kind: str, tmp_path: Path) -> None:
    recipe = MODELS["qwen3"]()
    recipe.tensors[HEAD] = -2 * recipe.tensors[TABLE]
    if kind == "packed":
        recipe = pack(recipe, Scheme("olive"), table=True, head=True).packed
    package = assert_speaks_alike(recipe.write(tmp_path / "checkpoint"), tmp_path)
    assert [name for name in package.graph.initializers if name.startswith("lm_head")]


# Packed, with activations rounded to 8 bits: the default on a CPU.


def assert_rounds_to_8_bits(checkpoint: Path, folder: Path, **options: object) -> None:
    exact = logits_of(waybill.load(checkpoint, dtype="float32"))
    error = every_position(export(checkpoint, folder, logits="all", **options)) - exact
    assert 0 < np.square(error).mean() ** 0.5 < ROUNDING_INT8_ACTIVATIONS * np.square(exact).mean() ** 0.5


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if (s.bits, s.group) != (2, 16)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_fast_kernels_round_activations_and_nothing_else(kind: str, scheme: Scheme, tmp_path: Path) -> None:
    checkpoint = pack(MODELS[every_expert(kind)](), scheme).packed.write(tmp_path / "checkpoint")
    assert_rounds_to_8_bits(checkpoint, tmp_path / "package")


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_float16_package_rounds_as_a_float_one_does(kind: str, tmp_path: Path) -> None:
    checkpoint = pack(MODELS[kind](), Scheme("gptq")).packed.write(tmp_path / "checkpoint")
    package = export(checkpoint, tmp_path / "package", dtype="float16", exact=True, logits="all")
    assert package.dtype == np.float16
    assert_close(every_position(package), logits_of(waybill.load(checkpoint, dtype="float32")), LOGITS_FLOAT16_ONNX)


# Prefill, decode, and the cache.

SERVED = {
    "llama": MODELS["llama"],
    "qwen2-tied": MODELS["qwen2-tied"],
    "qwen3-moe": MODELS["qwen3-moe"],
    "qwen3-olive-4": lambda: pack(MODELS["qwen3"](), Scheme("olive", group=16), table=True).packed,
}


@pytest.mark.parametrize("kind", SERVED)
def test_prefill_and_decode_give_the_logits_of_every_position(kind: str, tmp_path: Path) -> None:
    checkpoint = SERVED[kind]().write(tmp_path / "checkpoint")
    whole = logits_of(waybill.load(checkpoint, dtype="float32"))[-len(PROMPTS[-1]) :]
    package, prompt = export(checkpoint, tmp_path / "package", exact=True), PROMPTS[-1]
    logits, cache = package.prefill([prompt[:4]])
    assert_close(logits[0, 0], whole[3])
    for at in range(4, len(prompt)):
        logits, cache = package.step(np.array([[prompt[at]]]), np.ones((1, at + 1), np.int64), cache)
        assert_close(logits[0, 0], whole[at])
        assert {values.shape[2] for values in cache} == {at + 1}


@pytest.mark.parametrize("kind", SERVED)
def test_one_buffer_may_be_past_and_present_and_longer_than_both(kind: str, tmp_path: Path) -> None:
    checkpoint = SERVED[kind]().write(tmp_path / "checkpoint")
    package = export(checkpoint, tmp_path / "package", exact=True)
    made = tokens_of(waybill.load(checkpoint, dtype="float32"))
    assert [package.greedy_in_place(prompt, NEW_TOKENS, room=100) for prompt in PROMPTS] == made


@pytest.mark.parametrize("kind", SERVED)
def test_requests_of_unequal_length_decode_together(kind: str, tmp_path: Path) -> None:
    """Each request's cache is as long as its own prompt; what follows in the buffer is not looked at."""
    checkpoint = SERVED[kind]().write(tmp_path / "checkpoint")
    package = export(checkpoint, tmp_path / "package", exact=True)
    logits, cache = package.prefill(PROMPTS)
    alone = [package.prefill([prompt])[0][0, 0] for prompt in PROMPTS]
    assert_close(logits[:, 0], np.stack(alone))
    made = [[int(row[0].argmax())] for row in logits]
    lengths, longest = [len(prompt) for prompt in PROMPTS], max(map(len, PROMPTS))
    room = longest + NEW_TOKENS
    grown = package.no_cache(len(PROMPTS), room)
    for values, begun in zip(grown, cache, strict=True):
        values[:, :, :longest] = begun
    while len(made[0]) < 8:
        mask = np.zeros((len(PROMPTS), longest + len(made[0])), np.int64)
        for row, length in enumerate(lengths):
            mask[row, : length + len(made[0])] = 1
        cache = [values[:, :, : mask.shape[1] - 1] for values in grown]
        logits, cache = package.step(np.array([each[-1:] for each in made]), mask, cache)
        for values, longer in zip(grown, cache, strict=True):
            values[:, :, : longer.shape[2]] = longer
        for each, row in zip(made, logits, strict=True):
            each.append(int(row[0].argmax()))
    assert made == [tokens[:8] for tokens in tokens_of(waybill.load(checkpoint, dtype="float32"))]
