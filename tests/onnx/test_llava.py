"""A LLaVA package, run graph by graph: its logits are those of transformers, whatever the tower and the spelling."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from safetensors.numpy import load_file
from transformers import LlavaForConditionalGeneration

import waybill
from checkpoints import Array, Recipe
from composites import pack_components
from llavas import HIDDEN, IMAGE, PATCH, SIDE, TEXT_LAYERS, TOWER_LAYERS, make_llava, spell_as_hub, spell_as_memory
from packing import Scheme
from waybill.families.llava import LLAVA

TOLERANCE = 1e-4
CASES: dict[str, dict[str, Any]] = {
    "clip, llama": {},
    "clip, tied llama, last layer": {"tied": True, "vision_feature_layer": -1},
    "clip, qwen2, all positions": {"text": "qwen2", "vision_feature_select_strategy": "full"},
    "clip, llama, several layers": {"vision_feature_layer": [-1, 0, 2]},
    "siglip, tied qwen2": {"tower": "siglip", "text": "qwen2", "tied": True, "vision_feature_select_strategy": "full"},
    "siglip, qwen2, last layer, less the first patch": {"tower": "siglip", "text": "qwen2", "vision_feature_layer": -1},
    "siglip, qwen3, several layers": {
        "tower": "siglip",
        "text": "qwen3",
        "vision_feature_layer": [-2, -3],
        "vision_feature_select_strategy": "full",
    },
    "clip without layers, another projector": {
        "vision_feature_layer": [0],
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu_pytorch_tanh",
    },
}


class Sessions:
    """The three graphs, and what a runtime does with them."""

    def __init__(self, checkpoint: Path, folder: Path) -> None:
        self.built = waybill.build(checkpoint, logits="all", exact=True)
        self.built.save(folder)
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        self.vision, self.embedding, self.decoder = (
            ort.InferenceSession(folder / f"{name}.onnx", options, providers=["CPUExecutionProvider"])
            for name in ("vision_encoder", "embedding", "decoder")
        )

    def features(self, pixels: Array) -> Array:
        made: Array = self.vision.run(["image_features"], {"pixel_values": pixels})[0]
        return made

    def step(self, ids: Array, features: Array, mask: Array, cache: Mapping[str, Array]) -> dict[str, Array]:
        (embeds,) = self.embedding.run(["inputs_embeds"], {"input_ids": ids, "image_features": features})
        names = [made.name for made in self.decoder.get_outputs()]
        made = self.decoder.run(names, {"inputs_embeds": embeds, "attention_mask": mask, **cache})
        return dict(zip(names, made, strict=True))

    def logits(self, ids: Array, pixels: Array, steps: int = 2) -> Array:
        """Of all positions: the last `steps` are decoded one by one, without features, the others are prefilled."""
        requests, total = ids.shape
        cache = {
            given.name: np.zeros((requests, given.shape[1], 0, given.shape[3]), np.float32)
            for given in self.decoder.get_inputs()
            if given.name.startswith("past")
        }
        features, start, parts = self.features(pixels), 0, []
        for end in range(total - steps, total + 1):
            made = self.step(ids[:, start:end], features, np.ones((requests, end), np.int64), cache)
            parts.append(made.pop("logits"))
            cache = {name.replace("present.", "past_key_values."): values for name, values in made.items()}
            features, start = np.zeros((0, HIDDEN), np.float32), end
        return np.concatenate(parts, 1)

    def initializers(self) -> dict[str, dict[str, bytes]]:
        """The bytes of every graph's weights, as the checkpoint gives them."""
        return {
            name: {key: value.const_value.tobytes() for key, value in graph.initializers.items() if value.const_value}
            for name, component in self.built.items()
            for graph in [component.model().graph]
        }


def saved(model: LlavaForConditionalGeneration, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def prompts(model: LlavaForConditionalGeneration, requests: int = 1) -> tuple[Array, Array]:
    """Tokens with one picture in each request, at different places, and the pictures."""
    config = model.config
    places = (SIDE // PATCH) ** 2 + (config.vision_config.model_type == "clip_vision_model")
    places -= config.vision_feature_select_strategy == "default"
    generator = np.random.default_rng(1)
    ids = generator.integers(3, IMAGE, (requests, places + 6))
    for row in range(requests):
        ids[row, row + 1 : row + 1 + places] = IMAGE
    return ids, generator.normal(size=(requests, 3, SIDE, SIDE)).astype(np.float32)


def logits_of(model: LlavaForConditionalGeneration, ids: Array, pixels: Array) -> Array:
    """What transformers says."""
    with torch.no_grad():
        made: Array = model(input_ids=torch.tensor(ids), pixel_values=torch.tensor(pixels)).logits.numpy()
    return made


def assert_every_tensor_is_accounted_for(folder: Path) -> None:
    """Each is a binding's source or dropped by a rule, and only one of the two."""
    plan = waybill.plan(folder, "onnx")
    used = {source for binding in plan.bindings for source in binding.sources}
    assert plan.problems == ()
    assert used | plan.ignored.keys() == load_file(folder / "model.safetensors").keys()
    assert not used & plan.ignored.keys()


@pytest.mark.parametrize("case", CASES)
def test_logits_with_a_picture_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    checkpoint = saved(model := make_llava(**CASES[case]), tmp_path / "checkpoint")
    ids, pixels = prompts(model)
    expected = logits_of(model, ids, pixels)
    assert np.abs(expected).max() > 1
    assert np.abs(Sessions(checkpoint, tmp_path / "package").logits(ids, pixels) - expected).max() < TOLERANCE
    assert_every_tensor_is_accounted_for(checkpoint)


@pytest.mark.parametrize("tower", ["clip", "siglip"])
def test_features_are_those_of_transformers_picture_after_picture(tower: str, tmp_path: Path) -> None:
    model = make_llava(tower)
    _, pixels = prompts(model, requests=3)
    with torch.no_grad():
        expected = torch.cat(model.get_image_features(torch.tensor(pixels)).pooler_output).numpy()
    made = Sessions(saved(model, tmp_path / "checkpoint"), tmp_path / "package").features(pixels)
    assert made.shape == expected.shape
    assert np.abs(made - expected).max() < TOLERANCE


def test_another_picture_makes_other_logits(tmp_path: Path) -> None:
    sessions = Sessions(saved(model := make_llava(), tmp_path / "checkpoint"), tmp_path / "package")
    ids, pixels = prompts(model)
    assert np.abs(sessions.logits(ids, pixels) - sessions.logits(ids, -pixels)).max() > 0.1


def test_two_requests_with_a_picture_each_are_as_each_alone(tmp_path: Path) -> None:
    sessions = Sessions(saved(model := make_llava(text="qwen2"), tmp_path / "checkpoint"), tmp_path / "package")
    ids, pixels = prompts(model, requests=2)
    made = sessions.logits(ids, pixels)
    assert np.abs(made - logits_of(model, ids, pixels)).max() < TOLERANCE
    for row in (slice(0, 1), slice(1, 2)):
        assert np.abs(made[row] - sessions.logits(ids[row], pixels[row])).max() < TOLERANCE


@pytest.mark.parametrize("case", ["clip, llama", "siglip, tied qwen2"])
@pytest.mark.parametrize("respell", [spell_as_hub, spell_as_memory])
def test_another_spelling_makes_the_same_package(
    respell: Callable[[Path, Path], Path], case: str, tmp_path: Path
) -> None:
    checkpoint = saved(model := make_llava(**CASES[case]), tmp_path / "checkpoint")
    other = respell(checkpoint, tmp_path / "other")
    first, second = (Sessions(folder, tmp_path / f"{folder.name} package") for folder in (checkpoint, other))
    assert first.initializers() == second.initializers()
    np.testing.assert_array_equal(first.logits(*prompts(model)), second.logits(*prompts(model)))
    assert_every_tensor_is_accounted_for(other)


def test_the_package_says_which_token_stands_for_pictures_and_how_often(tmp_path: Path) -> None:
    Sessions(saved(make_llava(), tmp_path / "checkpoint"), tmp_path / "package")
    said = json.loads((tmp_path / "package" / "genai_config.json").read_text())["model"]
    assert (said["image_token_id"], said["image_tokens"]) == (IMAGE, 4)
    assert said["vision"]["filename"] == "vision_encoder.onnx"


# Components in layouts of their own.


def test_targets_and_exclusions_of_a_whole_model_are_followed_in_each_component(tmp_path: Path) -> None:
    folder = saved(make_llava(), tmp_path / "float")
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    packed, _ = pack_components(tensors, {"decoder": Scheme("ct", 4, 32)}, LLAVA.naming(config).component)
    block = packed.config["component_quantization"]["decoder"]
    block["ignore"] = ["re:.*lm_head", r"re:.*vision_tower\.", "re:.*multi_modal_projector"]
    checkpoint = Recipe(config | {"quantization_config": block}, packed.tensors).write(tmp_path / "packed")
    Sessions(checkpoint, tmp_path / "package")
    for component, count in PRODUCTS.items():
        wanted = [(4, 32)] * count if component == "decoder" else []
        assert packed_products(tmp_path / "package" / f"{component}.onnx") == wanted
    assert_every_tensor_is_accounted_for(checkpoint)
    block["ignore"] = ["re:.*"]
    Recipe(config | {"quantization_config": block}, packed.tensors).write(tmp_path / "ignored")
    problems = waybill.plan(tmp_path / "ignored", "onnx").problems
    assert {problem.code for problem in problems} == {"packing-mismatch"}
    assert all("the exclusion 're:.*'" in problem.expected for problem in problems)


LAYOUTS = [
    {"decoder": Scheme("olive", 4, 32), "vision_encoder": Scheme("olive", 8, 16)},
    {"decoder": Scheme("olive", 4, 16, symmetric=True), "vision_encoder": Scheme("olive", 8, 32)},
    {"decoder": Scheme("olive", 4, 32)},
    {"vision_encoder": Scheme("olive", 8, 32)},
    {"decoder": Scheme("ct", 4, 32), "vision_encoder": Scheme("ct_int", 8, 16)},
]
PRODUCTS = {"vision_encoder": 6 * (TOWER_LAYERS - 1) + 2, "embedding": 0, "decoder": 5 * TEXT_LAYERS}
"""How many a graph has whose weights are packed, when its component is: q, k and v of the decoder are one."""


@pytest.mark.parametrize(("tower", "text"), [("clip", "llama"), ("siglip", "qwen2")])
@pytest.mark.parametrize("layouts", LAYOUTS, ids=lambda layouts: ", ".join(f"{k} {v}" for k, v in layouts.items()))
def test_each_component_keeps_its_own_layout(layouts: dict[str, Scheme], tower: str, text: str, tmp_path: Path) -> None:
    folder = saved(model := make_llava(tower, text), tmp_path / "float")
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    packed, dense = pack_components(tensors, layouts, LLAVA.naming(config).component)
    checkpoint = Recipe(config | packed.config, packed.tensors).write(tmp_path / "packed")
    twin = LlavaForConditionalGeneration.from_pretrained(Recipe(config, dense.tensors).write(tmp_path / "dense")).eval()
    ids, pixels = prompts(model)
    expected = logits_of(twin, ids, pixels)
    assert np.abs(Sessions(checkpoint, tmp_path / "package").logits(ids, pixels) - expected).max() < TOLERANCE
    assert np.abs(expected - logits_of(model, ids, pixels)).max() > 0.01  # packing did change the model
    for component, count in PRODUCTS.items():
        scheme = layouts.get(component)
        wanted = [] if scheme is None else [(scheme.bits, scheme.group)] * count
        assert packed_products(tmp_path / "package" / f"{component}.onnx") == wanted
    assert_every_tensor_is_accounted_for(checkpoint)


def packed_products(file: Path) -> list[tuple[int, int]]:
    """Bits and block of every packed product of a graph."""
    graph = ir.load(file).graph
    nodes = [node for node in graph if node.op_type == "MatMulNBits"]
    return [(node.attributes["bits"].as_int(), node.attributes["block_size"].as_int()) for node in nodes]
