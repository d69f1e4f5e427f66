"""Loading into the engine: numbers, dtypes, file layouts, and files that change underneath."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import waybill
from checkpoints import BF16, LAYERS, Recipe, lively, llama, qwen2, qwen3, qwen3_moe
from waybill.engine.load import load_model
from waybill.errors import BadOption, CastOverflow, DeviceUnavailable, FileChanged, NonFiniteWeight, Refused

NORM = "model.norm.weight"
TABLE = "model.embed_tokens.weight"
QKV = [f"model.layers.1.self_attn.{member}_proj" for member in "qkv"]


def tensor(array: Any) -> torch.Tensor:
    """The same numbers in torch, bit for bit."""
    if array.dtype == BF16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def recipe_with(values: Any, dtype: Any) -> Recipe:
    """These numbers in a norm, which loads as it is, and in a key projection, which is merged."""
    recipe = lively(llama(dtype))
    recipe.tensors[NORM] = values[:64].astype(dtype)
    recipe.tensors[f"{QKV[1]}.weight"] = np.resize(values, (32, 64)).astype(dtype)
    return recipe


def edge_cases() -> Any:
    """Float32 numbers around every kind of rounding to bfloat16: ties, carries, subnormals, zeros, infinities."""
    bits = np.array([0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x3FFFFFFF, 0x7F7F7FFF, 0x00000001,
                     0x00008000, 0x00018000, 0x80000000, 0x7F800000, 0xFF800000], np.uint32)  # fmt: skip
    random = np.random.default_rng(0).integers(0, 0x7F000000, 2048 - len(bits), np.uint32)
    return np.concatenate([bits, random]).view(np.float32)


@pytest.mark.parametrize("stored", [BF16, np.float16, np.float32, np.float64], ids=["bf16", "f16", "f32", "f64"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_number_is_converted_as_torch_converts_it(stored: Any, dtype: str, tmp_path: Path) -> None:
    with np.errstate(over="ignore"):
        recipe = recipe_with(edge_cases(), stored)
    weights = waybill.load(recipe.write(tmp_path), dtype=dtype).state_dict()
    target = getattr(torch, dtype)
    whole = torch.cat([tensor(recipe.tensors[f"{name}.weight"]) for name in QKV])
    for ours, theirs in (
        (weights[NORM], tensor(recipe.tensors[NORM])),
        (weights[f"{QKV[0][:-6]}qkv_proj.weight"], whole),
    ):
        assert ours.dtype == target
        assert torch.equal(bits_of(ours), bits_of(theirs.to(target)))


def bits_of(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int16 if values.itemsize == 2 else torch.int32)


@pytest.mark.parametrize("stored", [BF16, np.float32], ids=["bf16", "f32"])
def test_numbers_within_the_range_of_half_precision_are_rounded_as_torch_rounds_them(
    stored: Any, tmp_path: Path
) -> None:
    values = np.random.default_rng(1).standard_normal(2048) * np.logspace(-9, 4.5, 2048)
    recipe = recipe_with(values.astype(np.float32), stored)
    weights = waybill.load(recipe.write(tmp_path), dtype="float16").state_dict()
    assert torch.equal(weights[NORM], tensor(recipe.tensors[NORM]).half())


@pytest.mark.parametrize("name", [NORM, f"{QKV[2]}.weight", "lm_head.weight"])
@pytest.mark.parametrize(
    "stored, number, dtype, tag",
    [
        (BF16, 70000.0, "float16", "F16"),
        (np.float32, 65520.0, "float16", "F16"),
        (np.float32, -70000.0, "float16", "F16"),
        (np.float64, 1e300, "float16", "F16"),
        (np.float64, 1e300, "float32", "F32"),
        (np.float64, 1e300, "bfloat16", "BF16"),
        (np.float32, 3.4e38, "bfloat16", "BF16"),
    ],
)
def test_a_number_too_large_for_the_dtype_is_refused_by_name(
    name: str, stored: Any, number: float, dtype: str, tag: str, tmp_path: Path
) -> None:
    recipe = lively(llama(stored))
    recipe.tensors[name].flat[-1] = number
    with pytest.raises(CastOverflow, match=f"does not fit {tag}") as refused:
        waybill.load(recipe.write(tmp_path), dtype=dtype)
    assert refused.value.where == f"{name} (model.safetensors)"


def test_an_infinity_stays_one_and_is_no_overflow(tmp_path: Path) -> None:
    recipe = lively(llama())
    recipe.tensors[NORM][3] = np.inf
    assert waybill.load(recipe.write(tmp_path), dtype="float16").state_dict()[NORM][3] == torch.inf


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", [NORM, f"{QKV[1]}.weight", TABLE])
@pytest.mark.parametrize("stored", [BF16, np.float32], ids=["bf16", "f32"])
def test_a_number_that_is_none_is_refused_by_name_when_asked(
    number: float, name: str, stored: Any, tmp_path: Path
) -> None:
    recipe = lively(llama(stored))
    recipe.tensors[name].flat[7] = number
    folder = recipe.write(tmp_path)
    with pytest.raises(NonFiniteWeight) as refused:
        waybill.load(folder, check_finite=True)
    assert name in refused.value.where
    waybill.load(folder)


@pytest.mark.filterwarnings("ignore:config.json ties the head")
def test_the_other_head_of_a_tied_model_is_checked_too(tmp_path: Path) -> None:
    recipe = lively(qwen3())
    recipe.tensors["lm_head.weight"] = recipe.tensors[TABLE].copy()
    recipe.tensors["lm_head.weight"][3, 3] = np.nan
    with pytest.raises(NonFiniteWeight) as refused:
        waybill.load(recipe.write(tmp_path), check_finite=True)
    assert "lm_head.weight" in refused.value.where


@pytest.mark.parametrize("make", [llama, qwen2, qwen3, qwen3_moe])
def test_finite_weights_pass_the_check(make: Callable[[], Recipe], tmp_path: Path) -> None:
    assert waybill.load(make().write(tmp_path), check_finite=True).state_dict()


def by_member(name: str) -> int:
    """q, k and v in three shards, gate and up in two."""
    return next((shard for shard, word in enumerate(("q_proj", "k_proj", "v_proj", "up_proj")) if word in name), 1)


LAYOUTS: dict[str, Callable[[str], int] | None] = {
    "one file": None,
    "a shard for each member": by_member,
    "members against file order": lambda name: 3 - by_member(name),
    "a shard for each letter count": lambda name: len(name) % 5,
}


@pytest.mark.parametrize("make", [qwen2, qwen3_moe])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("order", ["as is", "reversed", "shuffled"])
def test_any_division_into_files_in_any_order_is_the_same_model(
    make: Callable[..., Recipe], layout: str, order: str, tmp_path: Path
) -> None:
    recipe = lively(make(np.float32))
    names = list(recipe.tensors)
    if order == "reversed":
        names.reverse()
    elif order == "shuffled":
        np.random.default_rng(0).shuffle(names)
    shuffled = Recipe(recipe.config, {name: recipe.tensors[name] for name in names})
    plain = waybill.load(recipe.write(tmp_path / "plain")).state_dict()
    loaded = waybill.load(shuffled.write(tmp_path / "other", shard_of=LAYOUTS[layout]))
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, plain[name]), name
    whole = np.concatenate([recipe.tensors[f"{member}.weight"] for member in QKV])
    assert torch.equal(plain["model.layers.1.self_attn.qkv_proj.weight"], torch.from_numpy(whole))


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 4)


def grow(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"more")


def rewrite(file: Path) -> None:
    """As long as before, and with other numbers."""
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(0, 0))  # clocks of file systems are too coarse to wait for


@pytest.mark.parametrize("change", [truncate, grow, rewrite, Path.unlink])
def test_a_file_that_changes_between_plan_and_load_is_refused_by_name(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = lively(llama()).write(tmp_path, shard_of=lambda name: int("layers.1" in name))
    bill = waybill.plan(folder)
    checkpoint = waybill.open(folder)
    change(folder / "model-00002-of-00002.safetensors")
    for start in (lambda: load_model(folder, bill=bill), lambda: waybill.load(checkpoint)):
        with pytest.raises(FileChanged) as refused:
            start()
        assert refused.value.where == "model-00002-of-00002.safetensors"


def test_an_opened_checkpoint_loads_like_its_path(tmp_path: Path) -> None:
    folder = lively(qwen3()).write(tmp_path)
    by_path, opened = waybill.load(folder).state_dict(), waybill.load(waybill.open(folder)).state_dict()
    assert all(torch.equal(opened[name], weight) for name, weight in by_path.items())


def test_a_plan_with_problems_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    recipe = llama()
    del recipe.tensors[f"{QKV[0]}.weight"], recipe.tensors[NORM]
    with pytest.raises(Refused) as refused:
        waybill.load(recipe.write(tmp_path))
    assert {problem.code for problem in refused.value.problems} == {"incomplete-merge", "missing-weight"}


def test_progress_adds_up_to_what_was_loaded(tmp_path: Path) -> None:
    folder = lively(llama()).write(tmp_path)
    heard: list[int] = []
    load_model(folder, dtype="float32", progress=heard.append)
    assert len(heard) > LAYERS
    assert sum(heard) == waybill.plan(folder, dtype="float32").result_bytes


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:7"])
def test_a_gpu_that_is_not_there_is_refused(device: str, tmp_path: Path) -> None:
    with pytest.raises(DeviceUnavailable, match="device-unavailable") as refused:
        waybill.load(llama().write(tmp_path), device=device)
    assert refused.value.found == device


@pytest.mark.parametrize("device", ["banana", "", "cuda:x", "meta"])
def test_a_device_that_is_none_is_refused(device: str, tmp_path: Path) -> None:
    with pytest.raises((DeviceUnavailable, BadOption)):
        waybill.load(llama().write(tmp_path), device=device)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", ""])
def test_a_dtype_no_model_runs_in_is_refused(dtype: str, tmp_path: Path) -> None:
    with pytest.raises(BadOption, match=r"float32 \| float16 \| bfloat16"):
        waybill.load(llama().write(tmp_path), dtype=dtype)


def test_loading_leaves_torchs_defaults_alone(tmp_path: Path) -> None:
    waybill.load(lively(llama()).write(tmp_path))
    assert torch.get_default_dtype() == torch.float32
    assert torch.empty(1).device.type == "cpu"
