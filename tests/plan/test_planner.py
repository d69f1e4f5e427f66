"""Planning: every stored tensor has one place or one reason, whatever its name; no weight byte is touched."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import waybill
from checkpoints import BF16, Array, Recipe, llama, qwen2, qwen3, qwen3_moe
from waybill.checkpoint import RangeReader, read_checkpoint
from waybill.engine.target import TORCH
from waybill.families.decoder import DECODER
from waybill.plan import Plan, make_plan
from waybill.plan.bill import CHUNK, THREADS
from waybill.plan.stream import stream
from waybill.rules import RuleTable

RECIPES: dict[str, Callable[[], Recipe]] = {
    "llama": llama,
    "llama-tied-and-stored": lambda: extra("lm_head.weight", np.ones((128, 64), BF16), llama(tie_word_embeddings=True)),
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3-moe": qwen3_moe,
    "qwen3-moe-banks": lambda: qwen3_moe(banks=True),
}
LAYER = "model.layers.0"


def clean(folder: Path, **options: Any) -> Plan:
    plan = waybill.plan(folder, **options)
    plan.require_clean()
    return plan


def codes(plan: Plan) -> set[str]:
    return {problem.code for problem in plan.problems}


def extra(name: str, tensor: Array | None = None, recipe: Recipe | None = None) -> Recipe:
    """A good checkpoint with one tensor more."""
    recipe = recipe or llama()
    recipe.tensors[name] = np.zeros(4, np.float32) if tensor is None else tensor
    return recipe


@pytest.mark.parametrize("kind", RECIPES)
def test_every_stored_tensor_is_consumed_exactly_once(kind: str, tmp_path: Path) -> None:
    recipe = RECIPES[kind]()
    recipe.tensors[f"{LAYER}.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    recipe.tensors["mtp.layers.0.weight"] = np.ones(8, np.float32)
    plan = clean(recipe.write(tmp_path))
    uses = Counter(source for binding in plan.bindings for source in binding.sources)
    assert set(plan.ignored) == {f"{LAYER}.self_attn.rotary_emb.inv_freq", "mtp.layers.0.weight"}
    assert uses == Counter(recipe.tensors.keys() - plan.ignored.keys())
    elements = Counter[str]()
    for binding in plan.bindings:
        for tile in binding.value.tiles:
            elements[tile.source.name] += int(np.prod(tile.shape))
    assert elements == Counter({name: recipe.tensors[name].size for name in uses})
    assert plan.consumed == len(uses)
    assert plan.summary().endswith("2 dropped by rule, 0 unbound")


@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.parametrize("tp", [1, 2])
def test_bindings_follow_the_files(kind: str, tp: int, tmp_path: Path) -> None:
    plan = clean(RECIPES[kind]().write(tmp_path, shard_of=lambda name: sum(name.encode()) % 3), tp=tp)
    files = [shard.name for shard in plan.checkpoint.shards]
    stored = plan.checkpoint.tensors
    places = [max((files.index(stored[s].file), stored[s].offset) for s in b.sources) for b in plan.bindings]
    assert len(places) > 10
    assert places == sorted(places)


def test_planning_touches_no_weight(tmp_path: Path) -> None:
    recipe = qwen3_moe()
    checkpoint = read_checkpoint(recipe.write(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    assert waybill.plan(checkpoint, tp=2, rank=1).problems == ()


def test_a_bank_beside_its_own_experts_is_claimed_twice(tmp_path: Path) -> None:
    recipe = qwen3_moe()
    recipe.tensors |= qwen3_moe(banks=True).tensors
    plan = waybill.plan(recipe.write(tmp_path))
    assert codes(plan) == {"claimed-twice"}
    assert plan.bindings == ()
    problem = next(p for p in plan.problems if p.where == f"{LAYER}.mlp.experts.0.down_proj.weight")
    assert f"{LAYER}.mlp.experts.0.down_proj.weight (model.safetensors)" in problem.found
    assert f"{LAYER}.mlp.experts.down_proj (model.safetensors)" in problem.found


def test_a_bank_that_is_stored_twice_over_is_one_problem_a_bank(tmp_path: Path) -> None:
    recipe = qwen3_moe()
    recipe.tensors |= qwen3_moe(banks=True).tensors
    assert len(waybill.plan(recipe.write(tmp_path)).problems) <= 2 * recipe.config["num_hidden_layers"]


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("self_attn.q_proj.weight", "self_attn.qkv_proj.weight"),
        ("mlp.gate_proj.weight", "mlp.gate_up_proj.weight"),
    ],
)
def test_a_tensor_under_a_name_of_the_target_is_no_weight_of_the_architecture(
    stored: str, name: str, tmp_path: Path
) -> None:
    recipe = llama()
    recipe.tensors[f"{LAYER}.{name}"] = recipe.tensors.pop(f"{LAYER}.{stored}")
    plan = waybill.plan(recipe.write(tmp_path))
    assert plan.problems != ()
    assert any(f"{LAYER}.{name}" in problem.where for problem in plan.problems)


ODD = ("#", "01", "-1", "²", "١", "", "9" * 9, "9" * 10, "9" * 5000, "0\n", "{i}")


@pytest.mark.parametrize("segment", ODD, ids=lambda s: repr(s)[:12])
@pytest.mark.parametrize(
    "rest", ["self_attn.q_proj.weight", "mlp.experts.0.up_proj.weight", "mlp.experts.gate_up_proj", "x"]
)
def test_a_layer_that_is_no_layer_has_no_place(segment: str, rest: str, tmp_path: Path) -> None:
    plan = waybill.plan(extra(f"model.layers.{segment}.{rest}", np.zeros((2, 2, 2), np.float32)).write(tmp_path))
    assert codes(plan) == {"unclaimed-weight"}


@pytest.mark.parametrize("segment", [segment for segment in ODD if segment != "9" * 9], ids=lambda s: repr(s)[:12])
def test_a_layer_that_is_no_layer_is_not_dropped_either(segment: str, tmp_path: Path) -> None:
    plan = waybill.plan(extra(f"model.layers.{segment}.self_attn.rotary_emb.inv_freq").write(tmp_path))
    assert codes(plan) == {"unclaimed-weight"}
    assert plan.ignored == {}


# Every character, and more often those that mean something to some reader of names.
NAME = st.text(st.sampled_from(".#0123456789²١{}|e_model layers\n\x00") | st.characters(), max_size=30)


@settings(max_examples=150)
@given(name=NAME)
def test_no_name_crashes_the_planner_or_slips_through(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    plan = waybill.plan(extra(name, recipe=llama(num_hidden_layers=1)).write(tmp_path_factory.mktemp("named")))
    assert plan.problems != () or name in plan.ignored
    assert json.loads(json.dumps(plan.as_dict()))["problems"] == [problem.as_dict() for problem in plan.problems]


@pytest.mark.parametrize("shape", [(100_000, 2, 0), (0, 2, 4), (3, 0, 4), (3, 3, 4), (4,), ()])
def test_a_bank_that_cannot_be_taken_apart_is_one_problem(shape: tuple[int, ...], tmp_path: Path) -> None:
    plan = waybill.plan(extra(f"{LAYER}.mlp.experts.gate_up_proj", np.zeros(shape, np.float32)).write(tmp_path))
    assert [problem.what for problem in plan.problems] == ["a bank cannot be taken apart"]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", RECIPES)
def test_a_plan_is_json(kind: str, rank: int, tmp_path: Path) -> None:
    plan = clean(RECIPES[kind]().write(tmp_path), tp=2, rank=rank)
    document = plan.as_dict()
    assert json.loads(json.dumps(document)) == document
    assert sum(row["bytes_read"] for row in document["bindings"]) == document["totals"]["bytes_read"] == plan.bytes_read
    assert document["totals"]["tensors"] == document["totals"]["consumed"] == len(plan.checkpoint.tensors)


def test_a_plan_with_problems_is_json_too(tmp_path: Path) -> None:
    recipe = extra("stranger.weight")
    del recipe.tensors["model.norm.weight"]
    plan = waybill.plan(recipe.write(tmp_path))
    with pytest.raises(waybill.Refused) as refused:
        plan.require_clean()
    assert refused.value.problems == plan.problems
    document = plan.as_dict()
    assert json.loads(json.dumps(document)) == document
    assert [problem["code"] for problem in document["problems"]] == ["missing-weight", "unclaimed-weight"]
    assert document["bindings"] == []


def test_the_plan_keeps_the_number_of_ranks_that_was_asked_for(tmp_path: Path) -> None:
    plan = waybill.plan(llama().write(tmp_path), tp=3, rank=2)
    assert codes(plan) == {"illegal-tp"}
    assert (plan.tp, plan.rank) == (3, 2)


@pytest.mark.parametrize(
    ("config", "stored", "asked", "expected"),
    [
        ({"torch_dtype": "float16"}, np.float32, None, "F16"),
        ({"dtype": "bfloat16"}, np.float32, None, "BF16"),
        ({"torch_dtype": "torch.bfloat16"}, np.float16, None, "BF16"),
        ({"torch_dtype": "float64"}, BF16, None, "BF16"),
        ({"torch_dtype": "auto"}, np.float32, None, "F32"),
        ({}, np.float16, None, "F16"),
        ({}, np.float64, None, "F32"),
        ({"torch_dtype": "float16"}, np.float32, "bfloat16", "BF16"),
    ],
)
def test_the_dtype_is_what_was_asked_for_else_the_configs_else_the_commonest(
    config: dict[str, Any], stored: Any, asked: str | None, expected: str, tmp_path: Path
) -> None:
    recipe = llama(stored)
    del recipe.config["torch_dtype"]
    recipe.config |= config
    plan = clean(recipe.write(tmp_path), dtype=asked)
    assert plan.dtype == expected
    assert {binding.dtype for binding in plan.bindings} == {expected}


def test_the_commonest_dtype_is_the_one_with_most_bytes(tmp_path: Path) -> None:
    recipe = llama(torch_dtype=None)
    norms = [name for name in recipe.tensors if "norm" in name]
    recipe.tensors |= {name: recipe.tensors[name].astype(np.float32) for name in norms}
    assert clean(recipe.write(tmp_path)).dtype == "BF16"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_members_of_different_dtypes_are_merged_right(dtype: str, tmp_path: Path) -> None:
    recipe = llama()
    names = [f"{LAYER}.self_attn.{member}_proj.weight" for member in "qkv"]
    stored = (np.dtype(np.float32), np.dtype(np.float16), BF16)
    recipe.tensors |= {name: recipe.tensors[name].astype(d) for name, d in zip(names, stored, strict=True)}
    plan = clean(recipe.write(tmp_path), dtype=dtype)
    (merged,) = [b for b in plan.bindings if b.target == f"{LAYER}.self_attn.qkv_proj.weight"]
    with RangeReader(plan.checkpoint) as reader:
        ((_, result),) = stream((merged,), reader, lambda b: np.full(b.nbytes, 0xAB, np.uint8))
    target = BF16 if dtype == "bfloat16" else np.dtype(dtype)
    assert result.tobytes() == b"".join(recipe.tensors[name].astype(target).tobytes() for name in names)
    tag = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}[dtype]
    assert merged.operations[-1] == f"cast {', '.join(sorted({'F32', 'F16', 'BF16'} - {tag}))} to {tag}"


@pytest.mark.parametrize(("tp", "scratch"), [(1, False), (2, True)])
def test_the_peak_counts_scratch_whenever_bytes_are_staged(tp: int, scratch: bool, tmp_path: Path) -> None:
    # Columns of down_proj are cut at 96 bytes a row: too short to be read one by one, so rows are staged.
    plan = clean(llama().write(tmp_path), tp=tp)
    assert plan.peak_bytes == plan.result_bytes + (2 * THREADS * CHUNK if scratch else 0)


def test_a_tied_head_that_is_stored_again_is_compared_and_counted_in_the_peak(tmp_path: Path) -> None:
    plan = clean(RECIPES["llama-tied-and-stored"]().write(tmp_path))
    (head,) = [b for b in plan.bindings if b.target == "lm_head.weight"]
    assert head.tied_to == "model.embed_tokens.weight"
    assert head.operations == ("compare with model.embed_tokens.weight, shared when equal",)
    assert plan.result_bytes == plan.checkpoint.nbytes - head.nbytes
    assert plan.peak_bytes == plan.checkpoint.nbytes + 2 * THREADS * CHUNK


def test_a_name_that_a_source_rule_does_not_know_is_refused_by_any_target(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(extra("stranger.weight").write(tmp_path))
    nothing = replace(DECODER, merges=RuleTable(()), parameters=lambda _config, _packings, _merges: [])
    plan = make_plan(checkpoint, target=TORCH, family=nothing)
    assert codes(plan) == {"unclaimed-weight"}
    assert sum(p.where.count("stranger.weight") for p in plan.problems) == 1
