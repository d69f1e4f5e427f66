"""Shards: the cuts of all ranks tile the axis, and what is planned is what one would cut by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import waybill
from checkpoints import Array, Recipe, llama, qwen2, qwen3, qwen3_moe
from waybill.checkpoint import RangeReader, read_checkpoint
from waybill.families.decoder import DECODER, decoder_parameters
from waybill.plan import Binding, ParameterSpec, Part, Plan, Shard, Target, make_plan
from waybill.plan.stream import stream
from waybill.rules import Move, RuleTable

RANKS = st.integers(1, 16)


def delivered(plan: Plan) -> dict[str, Array]:
    """Every parameter's bytes, streamed over memory that is not zero."""
    with RangeReader(plan.checkpoint) as reader:
        done = stream(plan.bindings, reader, lambda binding: np.full(binding.nbytes, 0xAB, np.uint8))
        return {binding.target: result for binding, result in done}


@given(st.integers(1, 200), RANKS)
def test_even_cuts_tile_the_axis(width: int, tp: int) -> None:
    cuts = [Shard(0).cut(width * tp, rank, tp) for rank in range(tp)]
    assert [i for cut in cuts for i in range(cut.start, cut.start + cut.length)] == list(range(width * tp))
    assert {(cut.length, cut.padded) for cut in cuts} == {(width, width)}


@given(st.integers(1, 500), RANKS)
def test_padded_cuts_tile_the_axis_and_pad_only_after_it(size: int, tp: int) -> None:
    cuts = [Shard(0, pad=True).cut(size, rank, tp) for rank in range(tp)]
    assert [i for cut in cuts for i in range(cut.start, cut.start + cut.length)] == list(range(size))
    assert {cut.padded for cut in cuts} == {-(-size // tp)}
    gathered = [
        i for cut in cuts for i in [*range(cut.start, cut.start + cut.length), *[-1] * (cut.padded - cut.length)]
    ]
    assert gathered[:size] == list(range(size))
    assert set(gathered[size:]) <= {-1}


@given(st.integers(1, 16), st.integers(1, 8), st.integers(1, 8))
def test_more_groups_than_ranks_are_cut_between_groups(per_rank: int, width: int, tp: int) -> None:
    shard = Shard(0, groups=per_rank * tp)
    for rank in range(tp):
        cut = shard.cut(per_rank * tp * width, rank, tp)
        assert (cut.start, cut.length) == (rank * per_rank * width, per_rank * width)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8))
def test_fewer_groups_than_ranks_are_replicated_side_by_side(groups: int, copies: int, width: int) -> None:
    tp = groups * copies
    cuts = [Shard(0, groups=groups).cut(groups * width, rank, tp) for rank in range(tp)]
    assert [cut.start // width for cut in cuts] == [group for group in range(groups) for _ in range(copies)]
    assert {(cut.start % width, cut.length, cut.padded) for cut in cuts} == {(0, width, width)}


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 4), (8, 2), (8, 1), (12, 3), (6, 2)])
def test_each_query_head_finds_its_key_value_head_on_its_own_rank(heads: int, kv_heads: int) -> None:
    for tp in (n for n in range(1, heads + 1) if heads % n == 0 and not (kv_heads % n and n % kv_heads)):
        for rank in range(tp):
            q = Shard(0, groups=heads).cut(heads, rank, tp)
            kv = Shard(0, groups=kv_heads).cut(kv_heads, rank, tp)
            needed = {head // (heads // kv_heads) for head in range(q.start, q.start + q.length)}
            assert needed == set(range(kv.start, kv.start + kv.length))


RECIPES = {
    "llama": lambda: llama(vocab_size=130),
    "llama-biased": lambda: biased(llama(attention_bias=True, mlp_bias=True)),
    "qwen2": lambda: qwen2(vocab_size=131),
    "qwen3": lambda: qwen3(num_key_value_heads=1),
    "qwen3-moe": qwen3_moe,
    "qwen3-moe-banks": lambda: qwen3_moe(banks=True, vocab_size=129),
    "qwen3-moe-one-dense-layer": lambda: one_dense_layer(qwen3_moe(mlp_only_layers=[0])),
}


def biased(recipe: Recipe) -> Recipe:
    """A bias beside every projection."""
    biases = {
        name.replace("weight", "bias"): np.arange(tensor.shape[0]).astype(tensor.dtype)
        for name, tensor in recipe.tensors.items()
        if "_proj." in name
    }
    recipe.tensors |= biases
    return recipe


def one_dense_layer(recipe: Recipe) -> Recipe:
    """Layer 0 without experts."""
    dense = qwen3().tensors
    kept = {name: tensor for name, tensor in recipe.tensors.items() if not name.startswith("model.layers.0.mlp.")}
    recipe.tensors = kept | {name: tensor for name, tensor in dense.items() if name.startswith("model.layers.0.mlp.")}
    return recipe


def by_hand(recipe: Recipe, target: str, rank: int, tp: int) -> Array:
    """A rank's parameter, sliced and joined with numpy by what each layer of the engine computes."""
    t, kv_heads = recipe.tensors, recipe.config["num_key_value_heads"]

    def rows(name: str, groups: int = tp) -> Array:
        return np.split(t[name], min(groups, tp))[rank * min(groups, tp) // tp]

    def columns(name: str) -> Array:
        return np.split(t[name], tp, axis=1)[rank]

    path, _, leaf = target.rpartition(".")
    parent = path.rpartition(".")[0]
    if target in ("model.embed_tokens.weight", "lm_head.weight"):
        table = t[target]
        return np.split(np.pad(table, [(0, -len(table) % tp), (0, 0)]), tp)[rank]
    if path.endswith("qkv_proj"):
        return np.concatenate(
            [rows(f"{parent}.q_proj.{leaf}"), *(rows(f"{parent}.{m}_proj.{leaf}", kv_heads) for m in "kv")]
        )
    if path.endswith("mlp.gate_up_proj"):
        return np.concatenate([rows(f"{parent}.{member}_proj.{leaf}") for member in ("gate", "up")])
    if path.endswith("experts"):
        return experts_by_hand(recipe, target, rank, tp)
    if leaf == "weight" and path.endswith(("o_proj", "down_proj")):
        return columns(target)
    return t[target]


def experts_by_hand(recipe: Recipe, target: str, rank: int, tp: int) -> Array:
    """A rank's bank of experts, from one tensor a projection or from whole banks."""
    t, path = recipe.tensors, target.rpartition(".")[0]
    experts = range(recipe.config["num_experts"])
    if target.endswith("down_proj"):
        bank = t[target] if target in t else np.stack([t[f"{path}.{e}.down_proj.weight"] for e in experts])
        return np.split(bank, tp, axis=2)[rank]
    if target in t:
        halves = np.split(t[target], 2, axis=1)
    else:
        halves = [np.stack([t[f"{path}.{e}.{member}_proj.weight"] for e in experts]) for member in ("gate", "up")]
    return np.concatenate([np.split(half, tp, axis=1)[rank] for half in halves], axis=1)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("kind", RECIPES)
def test_every_parameter_of_every_rank_is_the_cut_made_by_hand(kind: str, tp: int, tmp_path: Path) -> None:
    recipe = RECIPES[kind]()
    folder = recipe.write(tmp_path, shard_of=lambda name: len(name) % 3)
    for rank in range(tp):
        plan = waybill.plan(folder, tp=tp, rank=rank)
        plan.require_clean()
        shapes = {spec.name: spec.local_shape(rank, tp) for spec in decoder_parameters(plan.config)}
        bindings = {binding.target: binding for binding in plan.bindings}
        for target, result in delivered(plan).items():
            expected = by_hand(recipe, target, rank, tp)
            assert bindings[target].shape == bindings[target].value.shape == shapes[target] == expected.shape
            assert result.tobytes() == expected.tobytes(), target
        assert set(bindings) == {name for name in shapes if name != "lm_head.weight" or name in recipe.tensors}


@st.composite
def specs(draw: st.DrawFn) -> ParameterSpec:
    """Parts of two axes joined along either, stacked or not, each cut along either axis or not at all."""
    axis, stack = draw(st.sampled_from([0, 1])), draw(st.sampled_from([0, 1, 3]))
    cut_axis = draw(st.sampled_from([None, 0, 1]))
    pad = draw(st.booleans())
    parts = []
    other = 8 * draw(st.integers(1, 2))
    for _ in range(draw(st.integers(1, 3))):
        size = 8 * draw(st.integers(1, 3)) - (draw(st.integers(0, 7)) if pad and cut_axis == axis else 0)
        shape = (size, other) if axis == 0 else (other, size)
        groups = draw(st.sampled_from([None, 2, 4, 8])) if cut_axis == axis and not pad else None
        parts.append(Part(shape, None if cut_axis is None else Shard(cut_axis, groups, pad), "drawn"))
    return ParameterSpec(name="t", kind="linear", parts=tuple(parts), axis=axis, stack=stack)


def write_parts(spec: ParameterSpec, folder: Path) -> dict[str, Array]:
    """A tensor for every part of every position in the stack, counting up."""
    config = llama(num_attention_heads=8, num_key_value_heads=8, moe_intermediate_size=8, intermediate_size=8).config
    tensors: dict[str, Array] = {}
    for position in range(spec.stack or 1):
        for member, part in enumerate(spec.parts):
            first = sum(array.size for array in tensors.values())
            values = np.arange(first, first + np.prod(part.shape), dtype=np.float32)
            tensors[f"t.{position}.m{member}"] = values.reshape(part.shape)
    Recipe(config, tensors).write(folder)
    return tensors


def planned(spec: ParameterSpec, folder: Path, rank: int, tp: int) -> Plan:
    """Plan `spec` alone, as a target of its own."""
    members = "{" + "|".join(f"m{n}" for n in range(len(spec.parts))) + "}" if len(spec.parts) > 1 else "m0"
    source = f"t.{{e}}.{members}" if spec.stack else f"t.{{i}}.{members}"
    name = spec.name if spec.stack else "t.{i}"
    family = replace(
        DECODER,
        kind_of=lambda _: "linear",
        rules=lambda _: RuleTable(()),
        merges=RuleTable([Move(source, name, spec.axis)]),
        parameters=lambda _config, _packings, _merges: [spec],
    )
    plan = make_plan(
        read_checkpoint(folder),
        target=Target("test"),
        family=family,
        tp=tp,
        rank=rank,
        dtype="F32",
    )
    plan.require_clean()
    return plan


def cut_by_hand(values: Array, shard: Shard | None, rank: int, tp: int) -> Array:
    if shard is None:
        return values
    size = values.shape[shard.axis]
    ranks = min(shard.groups or tp, tp)
    if shard.pad:
        width = [(0, -size % tp if axis == shard.axis else 0) for axis in range(values.ndim)]
        values = np.pad(values, width)
    return np.split(values, ranks, axis=shard.axis)[rank * ranks // tp]


@given(specs(), st.sampled_from([1, 2, 4, 8]))
def test_shard_merge_stack_is_slicing_each_member_then_joining_then_stacking(
    tmp_path_factory: pytest.TempPathFactory, spec: ParameterSpec, tp: int
) -> None:
    folder = tmp_path_factory.mktemp("spec")
    spec = spec if spec.stack else ParameterSpec(name="t.0", kind="linear", parts=spec.parts, axis=spec.axis)
    tensors = write_parts(spec, folder)
    for rank in range(tp):
        plan = planned(spec, folder, rank, tp)
        (binding,) = plan.bindings
        expected = joined_by_hand(spec, tensors, rank, tp)
        assert binding.shape == spec.local_shape(rank, tp) == expected.shape
        assert delivered(plan)[spec.name].tobytes() == expected.tobytes()


def joined_by_hand(spec: ParameterSpec, tensors: dict[str, Array], rank: int, tp: int) -> Array:
    def merged(position: int) -> Array:
        parts = enumerate(spec.parts)
        cuts = [cut_by_hand(tensors[f"t.{position}.m{m}"], part.shard, rank, tp) for m, part in parts]
        return np.concatenate(cuts, spec.axis)

    return np.stack([merged(position) for position in range(spec.stack)]) if spec.stack else merged(0)


def test_the_ranks_together_read_every_byte_of_a_sharded_weight_once(tmp_path: Path) -> None:
    recipe = llama(vocab_size=127)
    folder = recipe.write(tmp_path)
    plans = [waybill.plan(folder, tp=4, rank=rank) for rank in range(4)]

    def read(of: Sequence[Plan], target: str) -> int:
        return sum(b.bytes_read for plan in of for b in plan.bindings if b.target == target)

    assert read(plans, "lm_head.weight") == recipe.tensors["lm_head.weight"].nbytes
    path = "model.layers.0.mlp"
    assert read(plans, f"{path}.gate_up_proj.weight") == 2 * recipe.tensors[f"{path}.up_proj.weight"].nbytes


def test_operations_name_the_cut_the_padding_and_the_merge(tmp_path: Path) -> None:
    plan = waybill.plan(llama(vocab_size=127).write(tmp_path), tp=4, rank=3)
    words: dict[str, Binding] = {binding.target: binding for binding in plan.bindings}
    assert words["lm_head.weight"].operations == ("narrow axis 0 96:127", "pad 1 zeros")
    assert words["model.norm.weight"].operations == ("replicate",)
    assert words["model.layers.0.self_attn.qkv_proj.weight"].operations == (
        "narrow axis 0 48:64", "narrow axis 0 16:32", "concat 3 on axis 0",
    )  # fmt: skip
