"""What does not add up between headers and config is refused before a weight byte is read, named and counted."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import waybill
from checkpoints import BF16, Array, Recipe, llama, qwen2, qwen3, qwen3_moe
from waybill.checkpoint import RangeReader
from waybill.errors import NonFiniteWeight, WaybillError
from waybill.plan import Plan
from waybill.plan.stream import stream
from waybill.weights.dtypes import NUMPY_DTYPES

LAYER = "model.layers."
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
FILE = "model.safetensors"


def zeros(*shape: int, dtype: Any = BF16) -> Array:
    return np.zeros(shape, dtype)


def sealed_plan(folder: Path, **options: Any) -> Plan:
    """A plan made while every read of a weight range fails."""

    def unread(*_: object) -> int:
        raise AssertionError("a weight was read")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", unread)
        return waybill.plan(folder, **options)


def problems(recipe: Recipe, folder: Path, *, scatter: bool = False, **options: Any) -> list[WaybillError]:
    recipe.write(folder, shard_of=(lambda name: sum(map(ord, name)) % 3) if scatter else None)
    bill = sealed_plan(folder, **options)
    assert bill.problems
    assert not bill.bindings
    assert bill.bytes_read == 0
    assert all(problem.fix for problem in bill.problems)
    return list(bill.problems)


def problem(recipe: Recipe, folder: Path, **options: Any) -> WaybillError:
    (found,) = problems(recipe, folder, **options)
    return found


def clean(recipe: Recipe, folder: Path, **options: Any) -> Plan:
    (bill := sealed_plan(recipe.write(folder), **options)).require_clean()
    return bill


def weights(bill: Plan, **options: Any) -> dict[str, Array]:
    with RangeReader(bill.checkpoint) as reader:
        made = stream(bill.bindings, reader, lambda binding: np.empty(binding.nbytes, np.uint8), **options)
        return {b.target: array.view(NUMPY_DTYPES[b.dtype]).reshape(b.shape) for b, array in made}


def with_tensors(recipe: Recipe, **tensors: Array) -> Recipe:
    recipe.tensors |= tensors
    return recipe


def without(recipe: Recipe, *parts: str) -> Recipe:
    """The recipe without the tensors whose name holds one of the parts."""
    recipe.tensors = {name: t for name, t in recipe.tensors.items() if not any(part in name for part in parts)}
    return recipe


# Heads


def test_a_tied_checkpoint_may_store_its_head_again(tmp_path: Path) -> None:
    recipe = qwen3()
    alone = clean(recipe, tmp_path / "tied")
    recipe.tensors[HEAD] = recipe.tensors[EMBEDDING]
    stored = clean(recipe, tmp_path / "stored")
    assert stored.result_bytes == alone.result_bytes
    assert [b.tied_to for b in stored.bindings if b.target == HEAD] == [EMBEDDING]
    assert HEAD not in [b.target for b in alone.bindings]


def test_an_untied_checkpoint_without_a_head_is_refused_with_the_hint(tmp_path: Path) -> None:
    found = problem(without(llama(), HEAD), tmp_path)
    assert (found.code, found.where) == ("missing-head", HEAD)
    assert found.what == "the config says untied, and the file has no output head"
    assert "[128, 64]" in found.expected
    assert "tie_word_embeddings" in found.fix


def test_a_missing_head_is_not_said_to_lie_beside_a_missing_embedding(tmp_path: Path) -> None:
    found = problems(without(llama(), HEAD, EMBEDDING), tmp_path)
    assert sorted(p.code for p in found) == ["missing-head", "missing-weight"]
    assert not any("an input embedding and no head" in p.found for p in found)


@pytest.mark.parametrize(("tp", "rows"), [(2, 65), (4, 33)])
def test_a_tied_head_and_its_embedding_are_cut_and_padded_alike(tmp_path: Path, tp: int, rows: int) -> None:
    recipe = qwen3(vocab_size=130)
    recipe.tensors[HEAD] = recipe.tensors[EMBEDDING]
    last = clean(recipe, tmp_path, tp=tp, rank=tp - 1)
    cuts = {b.target: (b.shape, b.value.tiles[0].start, b.value.tiles[0].shape) for b in last.bindings
            if b.target in (HEAD, EMBEDDING)}  # fmt: skip
    assert cuts[HEAD] == cuts[EMBEDDING] == ((rows, 64), ((tp - 1) * rows, 0), (130 - (tp - 1) * rows, 64))


@pytest.mark.parametrize(("name", "rows"), [(EMBEDDING, 129), (HEAD, 127)])
def test_other_vocabulary_rows_than_the_config_are_refused_with_both(tmp_path: Path, name: str, rows: int) -> None:
    found = problem(with_tensors(llama(), **{name: zeros(rows, 64)}), tmp_path)
    assert (found.code, found.where) == ("vocab-mismatch", f"{name} ({FILE})")
    assert found.expected == "[128, 64] (vocab_size 128, hidden_size 64)"
    assert found.found == f"[{rows}, 64]: {rows} rows, vocab_size says 128"
    assert "tokenizer" in found.fix


# Surplus and drift


def test_recomputed_tensors_are_dropped_with_a_reason(tmp_path: Path) -> None:
    extra = {f"{LAYER}0.self_attn.rotary_emb.inv_freq": zeros(8, dtype=np.float32),
             f"{LAYER}1.self_attn.masked_bias": zeros(1), "mtp.fc.weight": zeros(2, 2)}  # fmt: skip
    bill = clean(with_tensors(llama(), **extra), tmp_path)
    assert bill.ignored.keys() == extra.keys()
    assert all(bill.ignored.values())
    assert bill.consumed == 21
    assert "3 dropped by rule, 0 unbound" in bill.summary()


def test_prediction_layers_after_the_last_are_dropped_only_when_the_config_counts_them(tmp_path: Path) -> None:
    name = f"{LAYER}2.mlp.up_proj.weight"
    assert problem(with_tensors(llama(), **{name: zeros(96, 64)}), tmp_path / "a").code == "unclaimed-weight"
    bill = clean(with_tensors(llama(num_nextn_predict_layers=1), **{name: zeros(96, 64)}), tmp_path / "b")
    assert "multi-token" in bill.ignored[name]


def test_a_surplus_layer_is_refused_with_both_numbers_and_the_nearest_names(tmp_path: Path) -> None:
    found = problem(with_tensors(llama(), **{f"{LAYER}5.mlp.up_proj.weight": zeros(96, 64)}), tmp_path)
    assert found.code == "unclaimed-weight"
    assert found.where.startswith(f"{LAYER}5.mlp.up_proj.weight")
    assert found.found == "layer 5; num_hidden_layers is 2"
    assert found.expected.count(LAYER) == 5


def test_a_missing_layer_is_one_problem_with_both_numbers(tmp_path: Path) -> None:
    recipe = llama()
    recipe.config["num_hidden_layers"] = 3
    found = problem(recipe, tmp_path)
    assert (found.code, found.where) == ("missing-weight", f"{LAYER}2")
    assert found.expected == "layers 0 to 2: num_hidden_layers is 3"


@pytest.mark.parametrize("recipe", [llama, qwen2, qwen3])
def test_a_bias_without_a_slot_is_refused(tmp_path: Path, recipe: Callable[[], Recipe]) -> None:
    name = f"{LAYER}0.self_attn.{'q' if recipe is llama else 'o'}_proj.bias"
    found = problem(with_tensors(recipe(), **{name: zeros(64)}), tmp_path)
    assert found.code == "unclaimed-weight"
    assert name in found.where
    assert "a bias this model has no slot for" in found.found


@pytest.mark.parametrize(
    "tensor", ["x" * 10_000, "é\ud800", "\x1b[2J", "", ".", LAYER + "9" * 5000 + ".w", LAYER + "٣"]
)
def test_no_name_is_strange_enough_for_a_traceback(tmp_path: Path, tensor: str) -> None:
    found = problem(with_tensors(llama(), **{tensor: zeros(1)}), tmp_path)
    assert found.code == ("bad-header" if "\ud800" in tensor else "unclaimed-weight")
    assert "\x1b" not in str(found)
    assert str(found).encode()


@pytest.mark.parametrize(
    ("rename", "found", "expected"),
    [
        (lambda n: "language_model." + n, "starts with 'language_model.'", EMBEDDING),
        (lambda n: n.removeprefix("model."), "lacks 'model.'", EMBEDDING),
        (lambda n: n.replace("model.", "model.language_model.", 1), "model.language_model.", EMBEDDING),
    ],
)
def test_a_prefix_on_every_name_is_one_problem(
    tmp_path: Path, rename: Callable[[str], str], found: str, expected: str
) -> None:
    recipe = llama()
    recipe.tensors = {rename(name): tensor for name, tensor in recipe.tensors.items()}
    drift = problem(recipe, tmp_path)
    assert (drift.code, drift.where, drift.expected) == ("prefix-drift", rename(EMBEDDING), expected)
    assert found in drift.found


# Shapes and dtypes


@pytest.mark.parametrize("shape", [(64, 96), (96,), (), (96, 64, 1), (0, 64), (97, 64)])
def test_another_shape_than_the_config_implies_is_refused_with_both(tmp_path: Path, shape: tuple[int, ...]) -> None:
    name = f"{LAYER}0.mlp.up_proj.weight"
    found = problem(with_tensors(llama(), **{name: zeros(*shape)}), tmp_path)
    assert (found.code, found.where) == ("shape-mismatch", f"{name} ({FILE})")
    assert found.expected == "[96, 64] (intermediate_size 96, hidden_size 64)"
    assert found.found == str(list(shape))


def test_a_head_dim_the_shapes_contradict_is_refused_with_both_numbers(tmp_path: Path) -> None:
    recipe = qwen3()
    del recipe.config["head_dim"]
    found = problems(recipe, tmp_path)
    assert {p.code for p in found} == {"shape-mismatch"}
    query = next(p for p in found if "q_proj" in p.where)
    assert query.expected == "[512, 64] (num_attention_heads 4 × head_dim 128, hidden_size 64)"
    assert query.found == "[128, 64]"


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.int64])
def test_integers_are_never_read_as_float_weights(tmp_path: Path, dtype: type) -> None:
    found = problem(with_tensors(llama(), **{"model.norm.weight": zeros(64, dtype=dtype)}), tmp_path)
    assert (found.code, found.where) == ("dtype-mismatch", f"model.norm.weight ({FILE})")
    assert found.expected == "F32 | F16 | BF16 | F64"
    assert found.found.endswith("[64]")


PACKED = {
    "a whole group": ["qweight", "qzeros", "scales", "g_idx"],
    "no qweight": ["qzeros", "scales"],
    "an orphan": ["scales"],
    "compressed-tensors": ["weight_packed", "weight_scale", "weight_shape"],
    "fp8": ["weight_scale_inv"],
    "olive": ["weight_qweight"],
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_weights_without_a_config_for_them_are_refused(tmp_path: Path, name: str) -> None:
    path = f"{LAYER}1.mlp.down_proj"
    sidecars = {f"{path}.{suffix}": zeros(8, 8, dtype=np.int32) for suffix in PACKED[name]}
    recipe = with_tensors(llama() if len(sidecars) == 1 else without(llama(), f"{path}.weight"), **sidecars)
    found = problem(recipe, tmp_path)
    assert found.code == "unsupported-quantization"
    assert all(sidecar in found.where for sidecar in sidecars)
    assert found.found.startswith(str(len(sidecars)))


@pytest.mark.parametrize("lost", ["q", "k", "v"])
@pytest.mark.parametrize("leaf", ["weight", "bias"])
def test_an_incomplete_qkv_names_the_layer_the_member_and_the_files_of_the_others(
    tmp_path: Path, lost: str, leaf: str
) -> None:
    found = problem(without(qwen2(), f"1.self_attn.{lost}_proj.{leaf}"), tmp_path, scatter=True)
    assert (found.code, found.where) == ("incomplete-merge", f"{LAYER}1.self_attn.{lost}_proj.{leaf}")
    for member in {"q", "k", "v"} - {lost}:
        name = f"{LAYER}1.self_attn.{member}_proj.{leaf}"
        assert f"{name} in model-{sum(map(ord, name)) % 3 + 1:05d}-of-00003.safetensors" in found.found


def test_a_merge_nothing_of_which_is_stored_is_a_missing_weight(tmp_path: Path) -> None:
    found = problem(without(qwen2(), ".bias"), tmp_path)
    assert found.code == "missing-weight"
    assert "[64] + [32] + [32]" in found.expected


def test_members_scattered_over_shards_in_any_order_merge(tmp_path: Path) -> None:
    recipe = llama()
    recipe.write(tmp_path, shard_of=lambda name: 2 if "q_proj" in name else 0 if "v_proj" in name else 1)
    merged = weights(sealed_plan(tmp_path))[f"{LAYER}1.self_attn.qkv_proj.weight"]
    members = [recipe.tensors[f"{LAYER}1.self_attn.{m}_proj.weight"] for m in "qkv"]
    np.testing.assert_array_equal(merged, np.concatenate(members))


# Experts


@pytest.mark.parametrize("parts", [("experts.3.",), ("experts.3.down_proj",)])
def test_missing_experts_are_listed_by_layer_with_the_file_of_the_others(tmp_path: Path, parts: tuple[str]) -> None:
    found = problem(without(qwen3_moe(), *(f"{LAYER}1.mlp.{part}" for part in parts)), tmp_path)
    assert (found.code, found.where) == ("expert-mismatch", f"{LAYER}1.mlp.experts")
    assert found.expected == "experts 0 to 3: num_experts is 4"
    assert found.found == f"no expert 3; the others are in {FILE}"


def test_a_surplus_expert_is_refused(tmp_path: Path) -> None:
    shapes = {"gate": (32, 64), "up": (32, 64), "down": (64, 32)}
    extra = {f"{LAYER}1.mlp.experts.4.{p}_proj.weight": zeros(*shape) for p, shape in shapes.items()}
    found = problem(with_tensors(qwen3_moe(), **extra), tmp_path)
    assert (found.code, found.where) == ("expert-mismatch", f"{LAYER}1.mlp.experts")
    assert found.found.startswith("also expert 4")


@pytest.mark.parametrize("banks", [False, True])
@pytest.mark.parametrize(("stated", "words"), [(3, "also expert 3"), (6, "no expert 4–5")])
def test_another_number_of_experts_is_refused_by_layer(tmp_path: Path, stated: int, words: str, banks: bool) -> None:
    recipe = qwen3_moe(banks=banks)
    recipe.config["num_experts"] = stated
    found = problems(recipe, tmp_path)
    layers = [p for p in found if p.code == "expert-mismatch"]
    assert [p.where for p in layers] == [f"{LAYER}{n}.mlp.experts" for n in range(2)]
    assert all(words in p.found for p in layers)
    assert all(f"num_experts {stated}" in p.expected for p in found if p.code == "shape-mismatch")


def test_a_layer_without_any_expert_lists_them_all(tmp_path: Path) -> None:
    found = problems(without(qwen3_moe(), "1.mlp.experts."), tmp_path)
    assert any("0–3" in p.found or "experts.3." in p.where for p in found)


def test_banks_and_single_experts_give_one_plan_and_the_same_weights(tmp_path: Path) -> None:
    """moe_intermediate_size 32 and hidden_size 64: a bank [E, 2I, H] is square, so only names can tell its layout."""
    single = qwen3_moe()
    banked = without(Recipe(single.config, dict(single.tensors)), ".experts.")
    for layer in range(2):
        experts = [f"{LAYER}{layer}.mlp.experts.{e}" for e in range(4)]
        part = {p: [single.tensors[f"{e}.{p}_proj.weight"] for e in experts] for p in ("gate", "up", "down")}
        bank = f"{LAYER}{layer}.mlp.experts."
        banked.tensors[bank + "down_proj"] = np.stack(part["down"])
        banked.tensors[bank + "gate_up_proj"] = np.stack(
            [np.concatenate(pair) for pair in zip(part["gate"], part["up"], strict=True)]
        )
        assert banked.tensors[bank + "gate_up_proj"].shape == (4, 64, 64)
    one, other = clean(single, tmp_path / "single"), clean(banked, tmp_path / "banked")
    assert {(b.target, b.shape, b.dtype) for b in one.bindings} == {
        (b.target, b.shape, b.dtype) for b in other.bindings
    }
    ours, theirs = weights(one), weights(other)
    for target, array in ours.items():
        np.testing.assert_array_equal(array, theirs[target])
    np.testing.assert_array_equal(
        ours[f"{LAYER}1.mlp.experts.gate_up_proj"], banked.tensors[f"{LAYER}1.mlp.experts.gate_up_proj"]
    )


@pytest.mark.parametrize("shape", [(64, 64), (4, 63, 64), (4, 64), (64,), (), (0, 64, 64), (4, 64, 32), (4, 0, 64)])
def test_a_bank_of_another_shape_is_refused_by_name(tmp_path: Path, shape: tuple[int, ...]) -> None:
    name = f"{LAYER}0.mlp.experts.gate_up_proj"
    found = problems(with_tensors(qwen3_moe(banks=True), **{name: zeros(*shape)}), tmp_path)
    assert any(p.code == "shape-mismatch" and name in p.where for p in found)


# Tensor parallelism


@pytest.mark.parametrize(("heads", "kv", "tp", "legal"), [(8, 2, 3, "1, 2, 4, 8"), (12, 3, 2, "1, 3, 6, 12")])
def test_an_illegal_number_of_ranks_is_refused_with_the_legal_ones(
    tmp_path: Path, heads: int, kv: int, tp: int, legal: str
) -> None:
    found = problem(qwen3(num_attention_heads=heads, num_key_value_heads=kv), tmp_path, tp=tp)
    assert found.code == "illegal-tp"
    assert found.what == f"the model cannot be cut into {tp} ranks"
    assert found.expected == f"one of {legal}"
    assert f"num_key_value_heads {kv} neither divides {tp} nor is divided by it" in found.found


def test_an_illegal_number_of_ranks_hides_no_other_problem(tmp_path: Path) -> None:
    found = problems(without(llama(), "model.norm.weight"), tmp_path, tp=3)
    assert sorted(p.code for p in found) == ["illegal-tp", "missing-weight"]


def test_key_value_heads_fewer_than_ranks_are_replicated_biases_too(tmp_path: Path) -> None:
    recipe = qwen2()
    recipe.write(tmp_path)
    ranks = [weights(sealed_plan(tmp_path, tp=4, rank=rank)) for rank in range(4)]
    for leaf in ("weight", "bias"):
        q, k, v = (recipe.tensors[f"{LAYER}0.self_attn.{m}_proj.{leaf}"] for m in "qkv")
        for rank, local in enumerate(ranks):
            own, shared = slice(16 * rank, 16 * rank + 16), slice(16 * (rank // 2), 16 * (rank // 2) + 16)
            expected = np.concatenate([q[own], k[shared], v[shared]])
            np.testing.assert_array_equal(local[f"{LAYER}0.self_attn.qkv_proj.{leaf}"], expected)


STORED: dict[str, tuple[Callable[[], Recipe], str, Array]] = {
    "unclaimed-weight": (llama, "model.stray.weight", zeros(1)),
    "unsupported-quantization": (llama, f"{LAYER}0.mlp.up_proj.scales", zeros(1)),
    "claimed-twice": (qwen3_moe, f"{LAYER}0.mlp.experts.down_proj", zeros(4, 64, 32)),
    "shape-mismatch": (qwen3_moe, f"{LAYER}0.mlp.experts.gate_up_proj", zeros(4, 63, 64)),
    "expert-mismatch": (qwen3_moe, f"{LAYER}0.mlp.experts.4.down_proj.weight", zeros(64, 32)),
}


@pytest.mark.parametrize("code", STORED)
def test_a_refusal_of_a_stored_tensor_names_its_file(tmp_path: Path, code: str) -> None:
    recipe, name, tensor = STORED[code]
    found = [p for p in problems(with_tensors(recipe(), **{name: tensor}), tmp_path) if p.code == code]
    assert [FILE in str(p) for p in found] == [True] * max(len(found), 1)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_refused_on_request(tmp_path: Path, value: float) -> None:
    recipe = llama()
    name = f"{LAYER}1.self_attn.k_proj.weight"
    recipe.tensors[name][3, 5] = value
    bill = clean(recipe, tmp_path)
    assert not np.isfinite(weights(bill)[f"{LAYER}1.self_attn.qkv_proj.weight"].astype(np.float32)).all()
    with pytest.raises(NonFiniteWeight) as refused:
        weights(bill, check_finite=True)
    assert refused.value.code == "non-finite-weight"
    assert name in refused.value.where
    assert FILE in str(refused.value)
