"""Plans of packed checkpoints: what is bound, what a rank reads, and cuts that groups allow or do not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import waybill
from checkpoints import Recipe, lively, llama, qwen2, qwen3, qwen3_moe
from packing import Scheme, pack
from ranks import bytes_streamed, streamed
from waybill.errors import IllegalParallelism
from waybill.plan import Binding, Plan
from waybill.plan import stream as stream_module

LAYER = "model.layers.0"
SCHEMES = [
    Scheme("gptq"),
    Scheme("gptq_v2", bits=8),
    Scheme("gptq", bits=2),
    Scheme("auto_round", symmetric=True),
    Scheme("awq"),
    Scheme("olive"),
    Scheme("olive", bits=2, symmetric=True),
    Scheme("olive_dotted", bits=8),
]
MODELS: dict[str, Callable[[], Recipe]] = {
    "llama": lambda: lively(llama(np.float32)),
    "qwen2": lambda: lively(qwen2(np.float32)),
    "qwen3": lambda: lively(qwen3(np.float32)),
    "qwen3-moe": lambda: lively(qwen3_moe(np.float32)),
    "qwen3-moe-banks": lambda: lively(qwen3_moe(np.float32, banks=True)),
}

CASES = [
    pytest.param(kind, scheme, id=f"{kind}-{scheme}")
    for kind in MODELS
    for scheme in SCHEMES
    if scheme.form == "olive" or kind != "qwen3-moe-banks"  # only later Olive packs banks
]


def clean(folder: Path, **options: Any) -> Plan:
    bill = waybill.plan(folder, **options)
    bill.require_clean()
    return bill


def bound(bill: Plan, target: str) -> dict[str, Binding]:
    """A packed parameter's bindings by role."""
    return {b.role: b for b in bill.bindings if b.target.rpartition(".")[0] == target}


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_packed_parameter_is_codes_scales_and_zero_points(scheme: Scheme, tmp_path: Path) -> None:
    bill = clean(pack(MODELS["llama"](), scheme).packed.write(tmp_path))
    parts = bound(bill, f"{LAYER}.self_attn.qkv_proj")
    zeros = {} if scheme.is_olive and scheme.symmetric else {"zero_points": ("U8", (128, 2))}
    codes = ("U8", (128, 2, 32 * scheme.bits // 8))
    forms = {role: (b.dtype, b.shape) for role, b in parts.items()}
    assert forms == {"codes": codes, "scales": ("F16", (128, 2)), **zeros}
    assert all(b.target == f"{LAYER}.self_attn.qkv_proj.{role}" for role, b in parts.items())
    layout = bill.packings[f"{LAYER}.self_attn.q_proj.weight"]
    assert (layout.bits, layout.group, layout.zero_points) == (scheme.bits, 32, bool(zeros))


@pytest.mark.parametrize(("kind", "scheme"), CASES)
def test_every_sidecar_is_a_source_of_every_part_and_nothing_is_unbound(
    kind: str, scheme: Scheme, tmp_path: Path
) -> None:
    packed = pack(MODELS[kind](), scheme).packed
    bill = clean(packed.write(tmp_path, shard_of=lambda name: sum(name.encode()) % 3))
    assert {source for b in bill.bindings for source in b.sources} == packed.tensors.keys()
    assert bill.summary().endswith("0 unbound")
    qkv = bound(bill, f"{LAYER}.self_attn.qkv_proj")
    members = tuple(f"{LAYER}.self_attn.{member}_proj." for member in "qkv")
    sidecars = {name for name in packed.tensors if name.startswith(members) and not name.endswith("bias")}
    assert all(set(b.sources) == sidecars for role, b in qkv.items() if role != "weight")
    assert len(sidecars) in (6, 9, 12)


@pytest.mark.parametrize(("kind", "scheme"), CASES)
@pytest.mark.parametrize("tp", [1, 2])
def test_each_rank_reads_the_bytes_its_plan_says(kind: str, scheme: Scheme, tp: int, tmp_path: Path) -> None:
    folder = pack(MODELS[kind](), scheme).packed.write(tmp_path)
    for rank in range(tp):
        bill = clean(folder, tp=tp, rank=rank)
        assert bytes_streamed(bill) == bill.bytes_read


@pytest.mark.parametrize("form", ["gptq", "awq", "olive"])
@pytest.mark.parametrize("group", [16, -1])
def test_small_blocks_make_the_same_bytes_and_read_none_twice(
    form: str, group: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bill = clean(pack(MODELS["llama"](), Scheme(form, group=group)).packed.write(tmp_path))
    whole = streamed(bill)[0]
    monkeypatch.setattr(stream_module, "DECODED", 1 << 10)
    monkeypatch.setattr(stream_module, "CHUNK", 1 << 10)
    blocks, read = streamed(bill)
    assert blocks.keys() == whole.keys()
    assert all(np.array_equal(blocks[name], whole[name]) for name in whole)
    assert group == -1 or read == bill.bytes_read  # one group leaves only outputs to cut along


@pytest.mark.parametrize("form", ["gptq", "awq", "olive", "olive_dotted", "auto_round"])
def test_a_rank_of_two_reads_half_of_long_matrices(form: str, tmp_path: Path) -> None:
    hidden, long = 128, 4096  # half a row of AWQ's words, and of Olive's bytes, is then worth a read of its own
    recipe = llama(np.float32, hidden_size=hidden, intermediate_size=long, num_attention_heads=16,
                   num_key_value_heads=16, head_dim=256, num_hidden_layers=1)  # fmt: skip
    tall, flat = (long, hidden), (hidden, long)
    for name, tensor in recipe.tensors.items():
        shape = flat if "o_proj" in name or "down_proj" in name else tall if "_proj" in name else (128, hidden)
        recipe.tensors[name] = np.empty(shape if tensor.ndim == 2 else (hidden,), np.float32)
    folder = pack(lively(recipe), Scheme(form, group=128)).packed.write(tmp_path)
    size = (folder / "model.safetensors").stat().st_size
    for rank in range(2):
        bill = clean(folder, tp=2, rank=rank)
        assert bytes_streamed(bill) == bill.bytes_read <= 0.55 * size


@pytest.mark.parametrize("form", ["gptq", "awq", "olive"])
@pytest.mark.parametrize(("group", "local"), [(16, 16), (32, 16), (-1, 48)])
def test_a_row_cut_that_splits_a_group_makes_the_groups_smaller(
    form: str, group: int, local: int, tmp_path: Path
) -> None:
    folder = pack(MODELS["llama"](), Scheme(form, group=group)).packed.write(tmp_path)
    for rank in range(2):
        parts = bound(clean(folder, tp=2, rank=rank), f"{LAYER}.mlp.down_proj")  # K 96, 48 a rank
        assert parts["codes"].shape == (64, 48 // local, local // 2)
        assert parts["scales"].shape == parts["zero_points"].shape == (64, 48 // local)
        columns = bound(clean(folder, tp=2, rank=rank), f"{LAYER}.mlp.gate_up_proj")
        whole = 64 if group == -1 else group
        assert columns["codes"].shape == (96, 64 // whole, whole // 2)


@pytest.mark.parametrize("form", ["gptq", "awq", "olive"])
def test_a_row_cut_that_leaves_groups_below_16_is_refused_with_the_numbers(form: str, tmp_path: Path) -> None:
    folder = pack(MODELS["llama"](), Scheme(form)).packed.write(tmp_path)
    bill = waybill.plan(folder, tp=4)
    (problem,) = bill.problems
    assert isinstance(problem, IllegalParallelism)
    assert f"{LAYER}.mlp.down_proj" in problem.where
    assert problem.found == "K 96, group 32, 4 ranks"
    assert "at most 2 ranks" in problem.expected  # 3 would leave whole groups, and cannot cut 4 heads
    assert problem.fix == "use --tp 2"
    assert not bill.bindings
    clean(folder, tp=2)


def test_the_largest_legal_size_holds_for_every_weight(tmp_path: Path) -> None:
    recipe = lively(llama(np.float32, num_key_value_heads=4))
    recipe.config |= {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8}
    folder = pack(recipe, Scheme("olive")).packed.write(tmp_path)
    (problem,) = waybill.plan(folder, tp=8).problems  # o_proj alone, K 64, could be cut into 4; down_proj, K 96, not
    assert problem.fix == "use --tp 2"
    clean(folder, tp=2)


def test_the_same_cut_of_a_float_weight_is_no_matter(tmp_path: Path) -> None:
    keep = [f"model.layers.{layer}.mlp.down_proj" for layer in range(2)]
    clean(pack(MODELS["llama"](), Scheme("gptq"), keep=keep).packed.write(tmp_path), tp=4)


@pytest.mark.parametrize("form", ["awq", "olive"])
def test_experts_whose_groups_a_cut_would_split_are_refused_too(form: str, tmp_path: Path) -> None:
    folder = pack(MODELS["qwen3-moe"](), Scheme(form, group=16)).packed.write(tmp_path)
    clean(folder, tp=2)
    (problem,) = waybill.plan(folder, tp=4).problems  # K 32, 8 a rank
    assert isinstance(problem, IllegalParallelism)
    assert f"{LAYER}.mlp.experts.down_proj" in problem.where
    assert "K 32, group 16, 4 ranks" in problem.found
    assert "at most 2 ranks" in problem.expected


@pytest.mark.parametrize("form", ["gptq", "olive"])
@pytest.mark.parametrize("group", [16, 32])
def test_a_short_last_group_is_no_cut(form: str, group: int, tmp_path: Path) -> None:
    recipe = lively(qwen3_moe(np.float32, moe_intermediate_size=40))
    folder = pack(recipe, Scheme(form, group=group)).packed.write(tmp_path)
    shapes = {binding.target: binding.shape for binding in waybill.plan(folder).bindings}
    assert shapes["model.layers.0.mlp.experts.down_proj.scales"] == (4, 64, -(-40 // group))
    (problem,) = waybill.plan(folder, tp=2).problems
    assert (problem.code, problem.fix) == ("illegal-tp", "use --tp 1")
