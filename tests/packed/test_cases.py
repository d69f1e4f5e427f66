"""Failures that users of other loaders met, cut, merged and selected weights: each loads right here, or is refused.

Ids and docstrings carry the code of the case. What must load is compared value by value with its float twin.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import waybill
from checkpoints import LAYERS, Recipe, lively, llama, qwen2, qwen3, qwen3_moe
from packed.meaning import assert_every_rank_holds, assert_exported, held
from packing import HEAD, TABLE, Scheme, Twins, pack
from ranks import streamed
from waybill.errors import ActOrder, WaybillError
from waybill.overview import describe

FORMS = ["gptq", "gptq_v2", "auto_round", "awq", "olive", "olive_dotted"]
LAYER = "model.layers.0"
Q, K, V, OUT = (f"{LAYER}.self_attn.{member}_proj" for member in "qkvo")
GATE, UP, DOWN = (f"{LAYER}.mlp.{member}_proj" for member in ("gate", "up", "down"))


def every(*modules: str, layers: int = LAYERS) -> list[str]:
    """The same modules of every layer."""
    return [module.replace(".0.", f".{layer}.") for module in modules for layer in range(layers)]


def small(make: Callable[..., Recipe] = llama, **config: Any) -> Recipe:
    return lively(make(np.float32, **config))


def problems(recipe: Recipe, folder: Path, **options: Any) -> list[WaybillError]:
    bill = waybill.plan(recipe.write(folder), **options)
    assert bill.problems
    assert not bill.bindings
    return list(bill.problems)


def problem(recipe: Recipe, folder: Path, **options: Any) -> WaybillError:
    (found,) = problems(recipe, folder, **options)
    return found


# Cuts


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("make", [qwen2, qwen3])
def test_packed_key_value_heads_fewer_than_ranks_are_replicated(
    form: str, make: Callable[..., Recipe], tmp_path: Path
) -> None:
    """B28: with their scales, zero points and biases."""
    heads = 4 if make is qwen2 else 8
    twins = pack(small(make, num_attention_heads=heads), Scheme(form), keep=every(DOWN))
    ranks = assert_every_rank_holds(twins, tmp_path, tp=4)
    size = 16 if make is qwen2 else 32
    for leaf in ("", ".bias") if make is qwen2 else ("",):
        kv = [rank[f"{LAYER}.self_attn.qkv_proj{leaf}"][-2 * size :] for rank in ranks]
        assert np.array_equal(kv[0], kv[1])
        assert np.array_equal(kv[2], kv[3])
        assert not np.array_equal(kv[1], kv[2])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("down", "legal"), [("float", "1, 2, 4, 8"), ("packed", "1, 2")])
def test_only_sizes_that_heads_and_groups_allow_are_offered(form: str, down: str, legal: str, tmp_path: Path) -> None:
    """B28, B32: three ranks divide no heads; more than two leave down_proj, K 96, less than 16 of a group of 32."""
    recipe = small(qwen3, num_attention_heads=8)
    packed = pack(recipe, Scheme(form), keep=every(DOWN) if down == "float" else []).packed
    found = problem(packed, tmp_path, tp=3)
    assert (found.code, found.expected) == ("illegal-tp", f"one of {legal}")
    report = describe(waybill.open(tmp_path))
    assert ("legal TP", legal) in list(report.rows(str))
    assert report.as_dict()["legal_tp"] == [int(size) for size in legal.split(", ")]
    for size in report.as_dict()["legal_tp"]:
        waybill.plan(tmp_path, tp=size).require_clean()


@pytest.mark.parametrize("tp", [2, 4])
def test_norms_of_heads_are_whole_on_every_rank(tp: int, tmp_path: Path) -> None:
    """B29."""
    twins = pack(small(qwen3), Scheme("gptq"), keep=every(DOWN))
    for rank in assert_every_rank_holds(twins, tmp_path, tp):
        for norm in ("q_norm", "k_norm"):
            name = f"{LAYER}.self_attn.{norm}"
            np.testing.assert_array_equal(rank[name], twins.packed.tensors[f"{name}.weight"])


@pytest.mark.parametrize("form", ["olive", "olive_dotted"])
@pytest.mark.parametrize("tp", [2, 4])
def test_packed_tables_of_130_rows_are_cut_and_padded_alike(form: str, tp: int, tmp_path: Path) -> None:
    """B30."""
    twins = pack(small(vocab_size=130), Scheme(form), keep=every(DOWN), table=True, head=True)
    ranks = assert_every_rank_holds(twins, tmp_path, tp)
    for name in (TABLE, HEAD):
        rows = np.concatenate([rank[name.removesuffix(".weight")] for rank in ranks])
        np.testing.assert_array_equal(rows[:130], twins.dense.tensors[name])
        assert len(rows) == -(-130 // tp) * tp
        assert not rows[130:].any()


@pytest.mark.parametrize("stated", [True, False])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("module", [Q, OUT], ids=["columns", "rows"])
def test_permuted_groups_are_refused_on_every_rank(stated: bool, tp: int, module: str, tmp_path: Path) -> None:
    """B33: from headers when the metadata says so, else from the first look at the group numbers."""
    recipe = pack(small(), Scheme("gptq")).packed
    order = np.random.default_rng(7).permutation(64)
    recipe.tensors[f"{module}.g_idx"] = recipe.tensors[f"{module}.g_idx"][order]
    recipe.config["quantization_config"]["desc_act"] = stated
    folder = recipe.write(tmp_path)
    for rank in range(tp):
        bill = waybill.plan(folder, tp=tp, rank=rank)
        if stated:
            assert {found.code for found in bill.problems} == {"act-order"}
            continue
        with pytest.raises(ActOrder) as refused:
            streamed(bill)
        assert module in refused.value.where


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_one_group_over_all_of_k_is_read_and_cut(form: str, tp: int, tmp_path: Path) -> None:
    """B34."""
    twins = pack(small(), Scheme(form, group=-1))
    groups = {tensor.size for name, tensor in twins.packed.tensors.items() if f"{K}." in name and "scales" in name}
    assert groups == {32}
    assert_every_rank_holds(twins, tmp_path, tp)


@pytest.mark.parametrize("form", FORMS)
def test_one_group_over_all_of_k_is_exported_in_blocks_that_mean_the_same(form: str, tmp_path: Path) -> None:
    """B34: K is 96 in down_proj, and blocks are powers of two."""
    assert_exported(pack(small(), Scheme(form, group=-1)), tmp_path)


# Merges

BITS, GROUP = "bits", "group"
UNEQUAL: dict[str, tuple[list[str], list[str], dict[str, dict[str, Any]]]] = {
    "v-float": (FORMS, [V], {}),
    "k-float-everywhere": (FORMS, every(K), {}),
    "gate-float": (FORMS, [GATE], {}),
    "up-8-bits": (["gptq", "auto_round", "olive"], [], {UP: {BITS: 8}}),
    "k-group-16": (["gptq", "gptq_v2", "auto_round", "olive", "olive_dotted"], [], {K: {GROUP: 16}}),
    "three-layouts": (["gptq", "auto_round", "olive"], [V], {K: {BITS: 8}}),
    "three-widths": (["gptq_v2", "olive_dotted"], [], {K: {BITS: 8}, V: {BITS: 2}}),
    "scales-of-two-dtypes": (["gptq", "olive"], [], {K: {"scales": np.float32}}),
}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("case", "form"), [(case, form) for case, (forms, *_) in UNEQUAL.items() for form in forms])
def test_members_packed_differently_keep_their_values(case: str, form: str, tp: int, tmp_path: Path) -> None:
    """B35."""
    _, keep, overrides = UNEQUAL[case]
    twins = unequal(form, keep, overrides)
    assert_every_rank_holds(twins, tmp_path, tp)
    (notice,) = (line for line in waybill.plan(tmp_path / "packed").notices if "apart" in line)
    assert all(module in notice for module in [*keep, *overrides][:1])
    if tp == 1:
        assert_exported(twins, tmp_path)


def unequal(form: str, keep: list[str], overrides: dict[str, dict[str, Any]]) -> Twins:
    twins = pack(small(), Scheme(form), keep=keep, overrides=overrides)
    stated = twins.packed.config["quantization_config"]
    for rules in ("dynamic", "overrides", "extra_config"):
        for change in (stated.get(rules) or {}).values():
            change.pop("scales", None)
    return twins


def test_act_order_of_one_member_is_refused_by_its_name(tmp_path: Path) -> None:
    """B35: by a rule of the metadata, and by group numbers that nothing announces."""
    recipe = pack(small(), Scheme("gptq")).packed
    recipe.config["quantization_config"]["dynamic"] = {r"+:.*\.0\..*q_proj": {"desc_act": True}}
    found = problem(recipe, tmp_path / "stated")
    assert (found.code, found.where) == ("act-order", f"{Q}.weight (model.safetensors)")
    recipe.config["quantization_config"]["dynamic"] = {}
    recipe.tensors[f"{Q}.g_idx"] = np.roll(recipe.tensors[f"{Q}.g_idx"], 1)
    with pytest.raises(ActOrder) as refused:
        waybill.load(recipe.write(tmp_path / "silent"))
    assert Q in refused.value.where


def by_role(name: str) -> int:
    """Parts of one weight in different shards, those of q in other shards than those of k and v."""
    return (sum(map(ord, name)) + ("q_proj" in name)) % 3


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("descending", [False, True])
def test_packed_members_scattered_over_shards_merge(form: str, descending: bool, tmp_path: Path) -> None:
    """B36."""
    twins = pack(small(qwen2), Scheme(form))
    bill = waybill.plan(twins.packed.write(tmp_path / "one"), dtype="float32")
    order = (lambda name: 2 - by_role(name)) if descending else by_role
    scattered = waybill.plan(twins.packed.write(tmp_path / "three", shard_of=order), dtype="float32")
    assert len(scattered.checkpoint.shards) == 3
    whole, parts = held(bill), held(scattered)
    assert whole.keys() == parts.keys()
    assert all(np.array_equal(whole[name], parts[name]) for name in whole)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lost", "qkv")
def test_a_packed_member_that_never_arrives_is_no_float_one(form: str, lost: str, tmp_path: Path) -> None:
    """B36: the layer, the member, and where the others are; no word of layouts."""
    recipe = pack(small(qwen2), Scheme(form)).packed
    module = f"{LAYER}.self_attn.{lost}_proj"
    recipe.tensors = {n: t for n, t in recipe.tensors.items() if not n.startswith(module) or n.endswith("bias")}
    bill = waybill.plan(recipe.write(tmp_path, shard_of=by_role))
    (found,) = bill.problems
    assert (found.code, found.where) == ("incomplete-merge", f"{module}.weight")
    assert found.found.count(f"{LAYER}.self_attn.") == found.found.count("of-00003.safetensors") == 2
    assert not [line for line in bill.notices if "apart" in line]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lost", [0, 3])
def test_a_packed_expert_that_never_arrives_is_the_only_problem(form: str, lost: int, tmp_path: Path) -> None:
    """B36: the first one too."""
    recipe = pack(small(qwen3_moe), Scheme(form)).packed
    recipe.tensors = {n: t for n, t in recipe.tensors.items() if f".1.mlp.experts.{lost}." not in n}
    found = problem(recipe, tmp_path)
    assert (found.code, found.where) == ("expert-mismatch", "model.layers.1.mlp.experts")
    assert found.found.startswith(f"no expert {lost}")
