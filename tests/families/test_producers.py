"""Layers that producers packed, as components of larger models: packages equal transformers on what the bytes mean.

`golden/parts` was written by auto-round's own packing modules from the integers that `integers` makes, and
`golden/layers` by Olive, GPTQModel and AutoAWQ.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file

from checkpoints import Array, Recipe
from composites import assert_equal_to_transformers
from packing import dequantize
from zoo import ZOO, Tiny

GOLDEN = Path(__file__).parents[1] / "golden"
GROUP = 32
NUMBERS = {"bits": 4, "group_size": GROUP}


class Part(NamedTuple):
    """A component that was packed whole: of which model, which modules, and what its producer says of it."""

    title: str
    under: str
    entry: dict[str, Any]


PARTS = {
    "auto_round_gptq": Part("T5, gated", "decoder.", {
        "quant_method": "gptq", "sym": False, "desc_act": False, "lm_head": False, "provider": "auto-round",
    } | NUMBERS),
    "auto_round_awq": Part("LLaVA: CLIP, Llama", "language_model.model.", {
        "quant_method": "awq", "version": "gemm", "zero_point": True, "provider": "auto-round",
    } | NUMBERS),
}  # fmt: skip
TINIES = {tiny.title: tiny for tiny in ZOO}


def integers(rows: int, columns: int, at: int) -> tuple[Array, Array, Array]:
    """Codes [N, K], zero points and scales [N, G] of the module number `at`; GPTQ has no words for a zero point 0."""
    n, k, g = np.arange(rows)[:, None], np.arange(columns), np.arange(columns // GROUP)
    codes = (n * 31 + k * 17 + n * k % 13 + at) % 16
    zeros = (n * 5 + g * 3 + at) % 15 + 1
    scales = ((n * 3 + g * 7 + at) % 8 + 4) / 512
    return codes.astype(np.uint8), zeros.astype(np.uint8), scales.astype(np.float16)


def modules(tiny: Tiny, recipe: Recipe, under: str) -> list[str]:
    """The linear modules below a path, in the order of the checkpoint."""
    names = [name.removesuffix(".weight") for name in recipe.tensors if name.startswith(under)]
    return sorted(name for name in names if tiny.linear.fullmatch(name))


def replaced(recipe: Recipe, module: str, weight: Array, sidecars: dict[str, Array]) -> tuple[Recipe, Recipe]:
    """The checkpoint with a packed module, and the one with what it means."""
    kept = {name: tensor for name, tensor in recipe.tensors.items() if name != f"{module}.weight"}
    dense = Recipe(recipe.config, kept | {f"{module}.weight": weight})
    return Recipe(recipe.config, kept | {f"{module}.{role}": tensor for role, tensor in sidecars.items()}), dense


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", PARTS)
def test_a_component_that_auto_round_packed_is_what_its_integers_mean(name: str, tied: bool, tmp_path: Path) -> None:
    part, tiny = PARTS[name], TINIES[PARTS[name].title]
    whole = tiny.make(tied, tmp_path / "whole")
    stored = load_file(GOLDEN / "parts" / f"{name}.safetensors")
    packed, dense = Recipe(dict(whole.config), dict(whole.tensors)), Recipe(whole.config, dict(whole.tensors))
    found = modules(tiny, whole, part.under)
    for at, module in enumerate(found):
        del packed.tensors[f"{module}.weight"]
        shape = whole.tensors[f"{module}.weight"].shape
        dense.tensors[f"{module}.weight"] = dequantize(*integers(*shape, at), GROUP)
    assert {tensor.rpartition(".")[0] for tensor in stored} == set(found)
    packed.tensors |= stored
    packed.config["component_quantization"] = {"decoder": part.entry}
    driver = assert_equal_to_transformers(tiny, packed, dense, tmp_path)
    assert driver.packed()["decoder"] == {tiny.runtime(module): (4, GROUP) for module in found}


@pytest.mark.parametrize("name", PARTS)
def test_auto_round_packs_these_integers_into_these_bytes(name: str, tmp_path: Path) -> None:
    """Where the producer is installed."""
    pytest.importorskip("auto_round_extension")
    part = PARTS[name]
    tiny = TINIES[part.title]
    whole = tiny.make(True, tmp_path)
    shapes = {module: whole.tensors[f"{module}.weight"].shape for module in modules(tiny, whole, part.under)}
    made = packed_by_auto_round(part.entry["quant_method"], shapes)
    stored = load_file(GOLDEN / "parts" / f"{name}.safetensors")
    assert made.keys() == stored.keys()
    assert all(np.array_equal(made[tensor], stored[tensor]) for tensor in stored)


def packed_by_auto_round(method: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, Array]:
    """The tensors that the producer's packing modules hold when they were given these integers as weights."""
    import torch
    from auto_round.export.export_to_awq.utils import WQLinear_GEMM  # type: ignore[import-not-found]
    from auto_round.export.utils import get_autogptq_packing_qlinear  # type: ignore[import-not-found]

    out: dict[str, Array] = {}
    for at, (module, (rows, columns)) in enumerate(shapes.items()):
        codes, zeros, scales = integers(rows, columns, at)
        linear = torch.nn.Linear(columns, rows, bias=False)
        linear.weight.data = torch.from_numpy(dequantize(codes, zeros, scales, GROUP))
        z, s = torch.from_numpy(zeros.astype(np.int32)), torch.from_numpy(scales.astype(np.float32))
        if method == "awq":
            layer = WQLinear_GEMM.from_linear(linear, 4, GROUP, scales=s.t(), zeros=z.t(), device="cpu")
        else:
            layer = get_autogptq_packing_qlinear("gptq", 4, GROUP, False)(4, GROUP, columns, rows, False)
            layer.pack(linear, s, z, None, device="cpu")
        out |= {f"{module}.{role}": tensor.numpy() for role, tensor in layer.state_dict().items()}
    return out


INDEX = {entry["file"].removesuffix(".safetensors"): entry["config"]
         for entry in json.loads((GOLDEN / "layers" / "INDEX.json").read_text())}  # fmt: skip
LANGUAGE, VISION = "language_model.model.", "vision_tower."
PLACES = {  # module: [32, 64], the shape of the layers
    "decoder": [f"{LANGUAGE}layers.{n}.self_attn.{letter}_proj" for n in (0, 1) for letter in "kv"],
    "vision_encoder": [f"{VISION}encoder.layers.{n}.mlp.fc2" for n in (0, 1)],
}
PAIRS = [
    ("olive_main_w4_g32_asym", "olive_main_w8_g16_sym"),
    ("olive_v013_w4_g16_asym", "olive_v013_w8_g32_asym"),
    ("gptqmodel_v1_w4_g32_asym", "olive_main_w8_g-1_asym"),
    ("gptqmodel_v2_w8_g16_asym", "autoawq_gemm_w4_g32"),
    ("autoawq_gemm_w4_g-1", "gptqmodel_v1_w4_g32_asym_zp0_borrow"),
    ("autoround_raw_w4_g32_asym", "olive_v013_w2_g16_sym"),
]


@pytest.mark.parametrize("language_vision", PAIRS, ids=" and ".join)
def test_layers_of_two_producers_in_two_components(language_vision: tuple[str, str], tmp_path: Path) -> None:
    tiny = TINIES["LLaVA: CLIP, Llama"]
    packed = dense = tiny.make(False, tmp_path / "whole")
    entries: dict[str, Any] = {}
    for component, layer, under in zip(("decoder", "vision_encoder"), language_vision, (LANGUAGE, ""), strict=True):
        linear = [module for module in modules(tiny, dense, under) if tiny.owner(module) == component]
        floats = [module for module in linear if module not in PLACES[component]]
        entries[component] = INDEX[layer] | _floats(INDEX[layer]["quant_method"], floats)
        stored = load_file(GOLDEN / "layers" / f"{layer}.safetensors")
        weight = stored.pop("expected_dequant")
        sidecars = {role: tensor for role, tensor in stored.items() if not role.startswith(("ref.", "bias"))}
        for module in PLACES[component]:
            packed, _ = replaced(packed, module, weight, sidecars)
            _, dense = replaced(dense, module, weight, sidecars)
    packed = Recipe(packed.config | {"component_quantization": entries}, packed.tensors)
    driver = assert_equal_to_transformers(tiny, packed, dense, tmp_path)
    found = {component: set(held) for component, held in driver.packed().items() if held}
    assert found == {component: set(map(tiny.runtime, places)) for component, places in PLACES.items()}


def _floats(method: str, names: list[str]) -> dict[str, Any]:
    """How a producer says that modules are float."""
    if method == "auto-round":
        return {"extra_config": {name: {"bits": 16} for name in names}}
    return {"modules_to_not_convert": names}
