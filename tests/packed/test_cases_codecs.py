"""Failures that users of other loaders met, what packed integers mean: the producer's numbers exactly, or a refusal.

Docstrings carry the code of the case. What must load is compared value by value with its float twin.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import waybill
from checkpoints import BF16, LAYERS, Array, Recipe, lively, llama, qwen3_moe
from packed.meaning import assert_every_rank_holds, assert_exported, exported, held
from packing import Scheme, Twins, pack, quantize
from waybill.errors import ActOrder, CastOverflow, InexactScales, WaybillError, ZeroPointMismatch

LAYER = "model.layers.0"
Q, OUT, DOWN = f"{LAYER}.self_attn.q_proj", f"{LAYER}.self_attn.o_proj", f"{LAYER}.mlp.down_proj"
OUTS = [f"model.layers.{layer}.self_attn.o_proj" for layer in range(LAYERS)]


def small(dtype: Any = np.float32) -> Recipe:
    return lively(llama(dtype))


def stating(recipe: Recipe, **changes: Any) -> Recipe:
    """The same weights under other metadata; … takes a key away."""
    stated = recipe.config["quantization_config"] | changes
    recipe.config["quantization_config"] = {key: value for key, value in stated.items() if value is not ...}
    return recipe


def values(recipe: Recipe, folder: Path) -> dict[str, Array]:
    return held(waybill.plan(recipe.write(folder), dtype="float32"))


def problems(recipe: Recipe, folder: Path) -> list[WaybillError]:
    bill = waybill.plan(recipe.write(folder))
    assert not bill.bindings
    return list(bill.problems)


# Zero points of GPTQ


@pytest.mark.parametrize(
    ("stated", "word"),
    [("gptq", 0x77777777), ("gptq_v2", 0x88888888), (None, 0x77777777), (..., 0x77777777)],
)
def test_both_versions_of_a_zero_point_mean_the_same(stated: Any, word: int, tmp_path: Path) -> None:
    """B45: no version stated is the first one."""
    twins = pack(small(), Scheme("gptq", symmetric=True))
    zeros = [name for name in twins.packed.tensors if name.endswith("qzeros")]
    assert zeros
    for name in zeros:
        twins.packed.tensors[name] = np.full_like(twins.packed.tensors[name].view(np.uint32), word).view(np.int32)
    stating(twins.packed, checkpoint_format=stated)
    assert_every_rank_holds(twins, tmp_path)
    assert_exported(twins, tmp_path)


@pytest.mark.parametrize(("stated", "word"), [("gptq_v2", 0x77777777), ("gptq", 0x88888888), (..., 0x88888888)])
def test_a_zero_point_of_the_other_version_is_refused(stated: Any, word: int, tmp_path: Path) -> None:
    """B45: every weight would be off by one scale."""
    recipe = stating(pack(small(), Scheme("gptq", symmetric=True)).packed, checkpoint_format=stated)
    for name in [name for name in recipe.tensors if name.endswith("qzeros")]:
        recipe.tensors[name] = np.full_like(recipe.tensors[name].view(np.uint32), word).view(np.int32)
    folder = recipe.write(tmp_path / "checkpoint")
    for attempt in (waybill.load, lambda path: waybill.build(path).save(tmp_path / "package")):
        with pytest.raises(ZeroPointMismatch, match="checkpoint_format"):
            attempt(folder)
    assert not (tmp_path / "package").exists()


# The order of AWQ's nibbles

WORD = 0x75316420
"""Outputs 0 to 7 with the values 0 to 7, in AWQ's order 0 2 4 6 1 3 5 7, the first in the low bits."""


def test_the_nibbles_of_a_word_are_outputs_in_their_order(tmp_path: Path) -> None:
    """B48: of codes and of zero points."""
    twins = pack(small(), Scheme("awq"))
    words, zeros, scales = (f"{OUT}.{role}" for role in ("qweight", "qzeros", "scales"))
    tensors = twins.packed.tensors
    tensors[words] = np.full_like(tensors[words], WORD)
    tensors[zeros] = np.zeros_like(tensors[zeros])
    tensors[scales] = np.ones_like(tensors[scales])
    column = np.tile(np.arange(8, dtype=np.float32), 8)[:, None]
    np.testing.assert_array_equal(values(twins.packed, tmp_path / "codes")[OUT], np.broadcast_to(column, (64, 64)))
    tensors[words], tensors[zeros] = np.zeros_like(tensors[words]), np.full_like(tensors[zeros], WORD)
    np.testing.assert_array_equal(values(twins.packed, tmp_path / "zeros")[OUT], np.broadcast_to(-column, (64, 64)))


METADATA: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "sym": False, "desc_act": False},
    "awq": {"quant_method": "awq", "version": "gemm", "zero_point": True},
    "olive": {"quant_method": "olive", "symmetric": False},
}


MISTAKEN = [
    ("gptq", "awq"), ("gptq", "olive"), ("auto_round", "awq"), ("auto_round", "olive"), ("awq", "gptq"),
    ("awq", "olive"), ("olive", "gptq"), ("olive", "awq"), ("olive_dotted", "gptq"), ("olive_dotted", "awq"),
]  # fmt: skip


@pytest.mark.parametrize(("wrote", "says"), MISTAKEN)
@pytest.mark.parametrize("moe", [False, True])
def test_a_layout_is_never_read_as_another(wrote: str, says: str, moe: bool, tmp_path: Path) -> None:
    """B48: not for experts either; headers are enough to see it."""
    recipe = pack(lively(qwen3_moe(np.float32)) if moe else small(), Scheme(wrote)).packed
    recipe.config["quantization_config"] = {"bits": 4, "group_size": 32} | METADATA[says]
    assert {found.code for found in problems(recipe, tmp_path)} == {"packing-mismatch"}


@pytest.mark.parametrize("version", ["gemv", "gemv_fast", "GEMV"])
def test_other_versions_of_awq_are_refused_by_name(version: str, tmp_path: Path) -> None:
    """B48."""
    (found,) = problems(stating(pack(small(), Scheme("awq")).packed, version=version), tmp_path)
    assert (found.code, found.found) == ("unsupported-quantization", version.lower())


# Group numbers of GPTQ

PERMUTATIONS: dict[str, Callable[[Array], Array]] = {
    "balanced": lambda g: g[np.random.default_rng(3).permutation(len(g))],
    "reversed": lambda g: g[::-1],
    "two-rows-swapped": lambda g: np.concatenate([g[-1:], g[1:-1], g[:1]]),
    "renumbered": lambda g: g.max() - g,
    "one-group": lambda g: g * 0,
    "shifted-by-one-row": lambda g: np.roll(g, 1),
    "beyond-the-last": lambda g: g + 1,
}


@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
def test_group_numbers_in_order_may_be_left_out(form: str, tmp_path: Path) -> None:
    """B49: missing and trivial mean the same, and neither is kept."""
    twins = pack(small(), Scheme(form))
    (there,) = assert_every_rank_holds(twins, tmp_path / "there")
    for name in [name for name in twins.packed.tensors if name.endswith("g_idx")]:
        del twins.packed.tensors[name]
    (derived,) = assert_every_rank_holds(twins, tmp_path / "derived")
    assert there.keys() == derived.keys()
    assert all(np.array_equal(there[name], derived[name]) for name in there)


@pytest.mark.parametrize("kind", PERMUTATIONS)
def test_group_numbers_in_another_order_are_never_ignored(kind: str, tmp_path: Path) -> None:
    """B49: one layer of many, and metadata that knows nothing of it."""
    recipe = pack(small(), Scheme("gptq")).packed
    recipe.tensors[f"{DOWN}.g_idx"] = np.ascontiguousarray(PERMUTATIONS[kind](recipe.tensors[f"{DOWN}.g_idx"]))
    folder = recipe.write(tmp_path / "checkpoint")
    for attempt in (waybill.load, lambda path: waybill.build(path).save(tmp_path / "package")):
        with pytest.raises(ActOrder) as refused:
            attempt(folder)
        assert DOWN in refused.value.where
        assert refused.value.found.startswith("g_idx[")
    assert not (tmp_path / "package").exists()


# Names of Olive


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("form", ["olive", "olive_dotted"])
def test_both_spellings_of_olives_parts_are_read(form: str, symmetric: bool, tmp_path: Path) -> None:
    """B50: symmetric weights have no zero points."""
    twins = pack(small(), Scheme(form, group=16, symmetric=symmetric))
    assert any(name.endswith("qzeros") for name in twins.packed.tensors) != symmetric
    assert_every_rank_holds(twins, tmp_path)


@pytest.mark.parametrize("spelling", ["{}.weight.{}", "{}.weight_q_{}", "{}-{}"])
def test_parts_under_names_nothing_knows_are_refused(spelling: str, tmp_path: Path) -> None:
    """B50: no match at all is no float model."""
    recipe = pack(small(), Scheme("olive")).packed
    parts = {name: name.rpartition(".weight_") for name in recipe.tensors if ".weight_" in name}
    recipe.tensors = {spelling.format(parts[n][0], parts[n][2]) if n in parts else n: t
                      for n, t in recipe.tensors.items()}  # fmt: skip
    found = problems(recipe, tmp_path)
    assert {"missing-weight", "unclaimed-weight"} <= {each.code for each in found}
    assert any("down_proj" in each.where and "model.safetensors" in each.where for each in found)


@pytest.mark.parametrize("form", ["gptq", "awq", "olive", "auto_round"])
def test_metadata_of_packed_weights_over_a_float_checkpoint_is_refused(form: str, tmp_path: Path) -> None:
    """B50."""
    twins = pack(small(), Scheme(form))
    twins.dense.config["quantization_config"] = twins.packed.config["quantization_config"]
    (found,) = problems(twins.dense, tmp_path)
    assert (found.code, found.found) == ("packing-mismatch", f"{7 * LAYERS} float weights")


@pytest.mark.parametrize("form", ["gptq", "awq", "olive", "olive_dotted"])
def test_a_packed_layer_too_many_is_refused_with_both_numbers(form: str, tmp_path: Path) -> None:
    """B25, B50: by the names of weights, in the file that holds them."""
    recipe = pack(small(), Scheme(form)).packed
    surplus = {n.replace(".1.", ".5."): t for n, t in recipe.tensors.items() if n.startswith("model.layers.1.mlp.up")}
    recipe.tensors |= surplus
    (found,) = problems(recipe, tmp_path)
    assert (found.code, found.found) == ("unclaimed-weight", "layer 5; num_hidden_layers is 2")
    assert found.where == "model.layers.5.mlp.up_proj.weight (model.safetensors)"


def test_a_stray_packed_weight_is_no_prefix_on_every_name(tmp_path: Path) -> None:
    """B25, B26: what is missing beside it is said too."""
    recipe = pack(small(), Scheme("gptq")).packed
    stray = {f"extra.{name}": tensor for name, tensor in recipe.tensors.items() if name.startswith(DOWN)}
    del recipe.tensors["model.norm.weight"]
    recipe.tensors |= stray
    found = {each.code: each for each in problems(recipe, tmp_path / "stray")}
    assert found.keys() == {"missing-weight", "unclaimed-weight"}
    assert f"extra.{DOWN}.weight" in found["unclaimed-weight"].where
    recipe.tensors = {f"extra.{name}": tensor for name, tensor in recipe.tensors.items() if name not in stray}
    (drift,) = problems(recipe, tmp_path / "drift")
    assert (drift.code, drift.found) == ("prefix-drift", "every name starts with 'extra.'")


# Dtypes


@pytest.mark.parametrize("form", ["gptq", "awq", "olive"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", None])
@pytest.mark.parametrize("scales", [np.float16, BF16, np.float32], ids=["F16", "BF16", "F32"])
def test_no_dtype_of_the_model_touches_what_is_packed(form: str, dtype: str, scales: Any, tmp_path: Path) -> None:
    """B51: integers are never cast, and scales stay as stored; without a stated dtype too."""
    scheme = Scheme(form, bits=4, scales=scales)
    recipe = small(BF16)
    codes, _, stored = quantize(recipe.tensors[f"{DOWN}.weight"].astype(np.float32), scheme)
    packed = pack(recipe, scheme).packed
    del packed.config["torch_dtype"]
    bill = waybill.plan(packed.write(tmp_path), dtype=dtype)
    assert bill.dtype == {"float32": "F32", "float16": "F16"}.get(str(dtype), "BF16")
    parts = {b.role: b.dtype for b in bill.bindings if b.target.startswith(DOWN)}
    assert parts == {"codes": "U8", "scales": {np.float16: "F16", np.float32: "F32"}.get(scales, "BF16"),
                     "zero_points": "U8"}  # fmt: skip
    pairs = codes.reshape(64, 3, 16, 2)
    state = waybill.load(tmp_path, dtype=dtype).state_dict()
    if f"{DOWN}.codes" in state:  # a kernel may have arranged them anew
        assert state[f"{DOWN}.codes"].numpy().tolist() == (pairs[..., 0] | pairs[..., 1] << 4).tolist()
        assert state[f"{DOWN}.scales"].float().numpy().tolist() == stored.astype(np.float32).tolist()
    floats = {name: tensor.dtype for name, tensor in state.items() if name.endswith("weight")}
    assert set(floats.values()) == {getattr(torch, dtype or "bfloat16")}


def test_a_scale_too_large_for_float16_is_refused_everywhere(tmp_path: Path) -> None:
    """B51."""
    recipe = pack(small(), Scheme("gptq", scales=BF16)).packed
    recipe.tensors[f"{DOWN}.scales"][0, 0] = 7e4
    folder = recipe.write(tmp_path / "checkpoint")
    with pytest.raises(CastOverflow) as refused:
        waybill.load(folder, dtype="float16")
    assert f"{DOWN}.scales" in refused.value.where
    assert "70144" in refused.value.found
    with pytest.raises(CastOverflow) as refused:
        waybill.build(folder, dtype="float16").save(tmp_path / "package")
    assert f"{DOWN}.scales" in refused.value.where
    assert values(recipe, tmp_path / "float32")[DOWN].max() > 65504


def test_scales_are_not_rounded_on_the_way_into_a_package(tmp_path: Path) -> None:
    """B51: float32 scales that float16 cannot hold."""
    folder = pack(small(), Scheme("olive", scales=np.float32)).packed.write(tmp_path / "checkpoint")
    with pytest.raises(InexactScales) as refused:
        waybill.build(folder, dtype="float16").save(tmp_path / "package")
    assert refused.value.code == "inexact-scales"
    assert "float32" in refused.value.fix


# Zero points that are not there

SYMMETRIC, ASYMMETRIC = {"symmetric": True}, {"symmetric": False}


@pytest.mark.parametrize("form", ["olive", "olive_dotted", "gptq", "auto_round"])
@pytest.mark.parametrize("override", [SYMMETRIC, ASYMMETRIC], ids=["o-symmetric", "o-asymmetric"])
@pytest.mark.parametrize("tp", [1, 2])
def test_one_projection_may_be_symmetric_alone_or_alone_not_be(
    form: str, override: dict[str, bool], tp: int, tmp_path: Path
) -> None:
    """B52."""
    scheme = Scheme(form, symmetric=not override["symmetric"])
    twins = pack(small(), scheme, overrides=dict.fromkeys(OUTS, override))
    if scheme.is_olive:
        assert any(OUT in name and "qzeros" in name for name in twins.packed.tensors) != override["symmetric"]
    assert_every_rank_holds(twins, tmp_path, tp)
    if tp == 1:
        assert_exported(twins, tmp_path)


@pytest.mark.parametrize("form", ["olive", "olive_dotted"])
def test_an_asymmetric_projection_without_zero_points_is_refused_among_symmetric_ones(
    form: str, tmp_path: Path
) -> None:
    """B52: and all of them when the whole model is asymmetric."""
    recipe = pack(small(), Scheme(form, symmetric=True)).packed
    stating(recipe, overrides={OUT: ASYMMETRIC})
    (found,) = problems(recipe, tmp_path / "one")
    assert (found.code, found.what) == ("incomplete-weight", "a packed weight has no qzeros")
    assert OUT in found.where
    found_everywhere = problems(stating(recipe, overrides=None, symmetric=False), tmp_path / "all")
    assert {each.what for each in found_everywhere} == {"a packed weight has no qzeros"}
    assert len(found_everywhere) == 7


# Nothing is packed anew


def mixed(form: str) -> Twins:
    overrides: dict[str, dict[str, Any]] = {DOWN: {"bits": 8}, Q: {"bits": 2, "group": 16}}
    return pack(small(), Scheme(form), keep=[OUT], overrides={} if form == "awq" else overrides)


@pytest.mark.parametrize("form", ["gptq", "gptq_v2", "auto_round", "awq", "olive", "olive_dotted"])
def test_a_mixed_checkpoint_keeps_every_width_in_the_engine_and_in_a_package(form: str, tmp_path: Path) -> None:
    """B53."""
    twins = mixed(form)
    assert_every_rank_holds(twins, tmp_path)
    assert_exported(twins, tmp_path)
    bits = {name.removesuffix(".weight"): p.bits for name, p in waybill.plan(tmp_path / "packed").packings.items()}
    assert OUT not in bits
    assert (bits[DOWN], bits[Q]) == ((4, 4) if form == "awq" else (8, 2))


def test_nothing_packed_is_written_as_floats(tmp_path: Path) -> None:
    """B53: the package's data is no larger than what was stored, alignment apart."""
    twins = mixed("olive")
    exported(twins.packed.write(tmp_path / "checkpoint"), tmp_path / "package")
    stored = sum(tensor.nbytes for tensor in twins.packed.tensors.values())
    floats = sum(tensor.nbytes for tensor in twins.dense.tensors.values())
    written = (tmp_path / "package" / "model.onnx.data").stat().st_size
    assert written < (stored + floats) / 2
