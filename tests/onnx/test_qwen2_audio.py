"""Qwen2-Audio's three graphs against transformers: recordings of unequal length in prompts, float and packed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from safetensors.numpy import load_file
from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

import waybill
from checkpoints import Array, Recipe
from packing import Scheme, dequantize, metadata, quantize, sidecars
from waybill.families.qwen2_audio import audio_tokens
from waybill.onnx.folder import read_package
from waybill.onnx.graph import every_node
from waybill.onnx.runtime.model import Inputs, open_model

MEL, POSITIONS, HIDDEN, KV, VOCAB, AUDIO = 16, 11, 64, 2, 128, 100
SCHEMES = {"audio_encoder": Scheme("olive", 8, 32), "decoder": Scheme("olive", 4, 32)}
PACKED = ("_proj", "fc1", "fc2", "multi_modal_projector.linear")


def saved(folder: Path) -> Qwen2AudioForConditionalGeneration:
    """A tiny model with random weights, of which everything matters, in `folder` as transformers writes it."""
    audio = {
        "model_type": "qwen2_audio_encoder", "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4,
        "encoder_ffn_dim": 96, "num_mel_bins": MEL, "max_source_positions": POSITIONS,
    }  # fmt: skip
    sizes = {
        "model_type": "qwen2", "hidden_size": HIDDEN, "num_attention_heads": 4, "num_key_value_heads": KV,
        "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": VOCAB, "max_position_embeddings": 64,
    }  # fmt: skip
    torch.manual_seed(0)
    config = Qwen2AudioConfig(audio_config=audio, text_config=sizes, audio_token_index=AUDIO)
    model = Qwen2AudioForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm.weight" in name else 0.0, 0.2)
    model.save_pretrained(folder)
    return model


class Package:
    """A package of the three graphs, in ONNX Runtime."""

    def __init__(self, checkpoint: Path, folder: Path) -> None:
        self.built = waybill.build(checkpoint, logits="all", exact=True)
        self.built.save(folder)
        self.genai = json.loads((folder / "genai_config.json").read_text())["model"]
        settings = ort.SessionOptions()
        settings.intra_op_num_threads = 1
        self.sessions = {
            name: ort.InferenceSession(folder / f"{name}.onnx", settings, providers=["CPUExecutionProvider"])
            for name in ("audio_encoder", "embedding", "decoder")
        }

    def run(self, name: str, feeds: dict[str, Array]) -> dict[str, Array]:
        session = self.sessions[name]
        return dict(zip([out.name for out in session.get_outputs()], session.run(None, feeds), strict=True))

    def hear(self, features: Array, mask: Array) -> Array:
        given = {"input_features": features, "feature_attention_mask": mask}
        return self.run("audio_encoder", given)["audio_features"]

    def answer(self, features: Array, ids: Array, mask: Array, prompt: int) -> Array:
        """Logits of every position: of the prompt at once, then of one token a step."""
        requests, length = ids.shape
        none = np.zeros((requests, KV, 0, HIDDEN // 4), np.float32)
        caches = {i.name: none for i in self.sessions["decoder"].get_inputs() if i.name.startswith("past")}
        logits, at = [], 0
        while at < length:
            end = max(prompt, at + 1)
            given = {"input_ids": ids[:, at:end], "audio_features": features[: None if at == 0 else 0]}
            embeds = self.run("embedding", given)["inputs_embeds"]
            made = self.run("decoder", {"inputs_embeds": embeds, "attention_mask": mask[:, :end], **caches})
            logits.append(made.pop("logits"))
            caches = {name.replace("present.", "past_key_values."): value for name, value in made.items()}
            at = end
        return np.concatenate(logits, 1)


def heard(*frames: int) -> tuple[Array, Array]:
    """Recordings of so many frames, padded with noise that must not matter where nothing looks, and their mask."""
    features = np.random.default_rng(0).standard_normal((len(frames), MEL, 2 * POSITIONS)).astype(np.float32)
    mask = (np.arange(2 * POSITIONS) < np.array(frames)[:, None]).astype(np.int64)
    return features, mask


def asked(*frames: int) -> Array:
    """A request with a recording of so many frames each, and tokens before and after."""
    rows = [[7, 8] + [AUDIO] * audio_tokens(count) + [11, 12, 13] for count in frames]
    longest = max(map(len, rows))
    return np.array([[*row, *range(20, 20 + longest - len(row))] for row in rows])


def peer(model: Qwen2AudioForConditionalGeneration, features: Array, heard_mask: Array, ids: Array) -> Array:
    """transformers' logits."""
    with torch.no_grad():
        out = model(
            input_ids=torch.tensor(ids),
            attention_mask=torch.ones(ids.shape, dtype=torch.long),
            input_features=torch.tensor(features),
            feature_attention_mask=torch.tensor(heard_mask),
        )
    logits: Array = out.logits.numpy()
    return logits


def in_memory(recipe: Recipe) -> Recipe:
    """The same weights under the names that transformers 5 has for them at run time."""
    names = {"language_model.lm_head": "lm_head", "language_model.model": "model.language_model",
             "audio_tower": "model.audio_tower", "multi_modal_projector": "model.multi_modal_projector"}  # fmt: skip

    def renamed(name: str) -> str:
        stored = next(stored for stored in names if name.startswith(f"{stored}."))
        return names[stored] + name.removeprefix(stored)

    return Recipe(recipe.config, {renamed(name): tensor for name, tensor in recipe.tensors.items()})


def restored(folder: Path) -> Recipe:
    return Recipe(json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors"))


def assert_equal(package: Package, model: Qwen2AudioForConditionalGeneration, prompt: int | None = None) -> None:
    frames = (22, 13)
    features, mask = heard(*frames)
    ids = asked(*frames)
    prompt = prompt or ids.shape[1] - 2
    wanted = peer(model, features, mask, ids)
    assert np.abs(wanted).max() > 1
    found = package.answer(package.hear(features, mask), ids, np.ones_like(ids), prompt)
    np.testing.assert_allclose(found, wanted, atol=1e-4)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_two_recordings_of_unequal_length_equal_transformers(tmp_path: Path, steps: int) -> None:
    model = saved(tmp_path / "model")
    assert_equal(Package(tmp_path / "model", tmp_path / "package"), model, asked(22, 13).shape[1] - steps)


def test_two_recordings_in_one_request_equal_transformers(tmp_path: Path) -> None:
    model = saved(tmp_path / "model")
    package = Package(tmp_path / "model", tmp_path / "package")
    features, mask = heard(9, 20)
    ids = np.array([[5, *[AUDIO] * audio_tokens(9), 6, 7, *[AUDIO] * audio_tokens(20), 8]])
    found = package.answer(package.hear(features, mask), ids, np.ones_like(ids), ids.shape[1])
    np.testing.assert_allclose(found, peer(model, features, mask, ids), atol=1e-4)


def test_as_many_features_come_back_as_tokens_stand_for_the_recording(tmp_path: Path) -> None:
    saved(tmp_path / "model")
    package = Package(tmp_path / "model", tmp_path / "package")
    for frames in range(2 * POSITIONS + 1):
        found = package.hear(*heard(frames, 2 * POSITIONS))
        assert found.shape == (audio_tokens(frames) + audio_tokens(2 * POSITIONS), HIDDEN)
        assert np.isfinite(found).all()


def test_what_lies_far_in_the_padding_does_not_matter(tmp_path: Path) -> None:
    saved(tmp_path / "model")
    package = Package(tmp_path / "model", tmp_path / "package")
    features, mask = heard(10)
    other = features.copy()
    other[:, :, 14:] += 100  # the convolutions reach three frames beyond the last
    np.testing.assert_array_equal(package.hear(features, mask), package.hear(other, mask))


def test_a_prompt_of_text_alone_needs_no_features(tmp_path: Path) -> None:
    model = saved(tmp_path / "model")
    package = Package(tmp_path / "model", tmp_path / "package")
    ids = np.array([[5, 6, 7, 8]])
    none = np.zeros((0, HIDDEN), np.float32)
    with torch.no_grad():
        wanted = model(input_ids=torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(package.answer(none, ids, np.ones_like(ids), 3), wanted, atol=1e-4)


def test_the_same_weights_as_they_are_named_in_memory_are_the_same_package(tmp_path: Path) -> None:
    model = saved(tmp_path / "model")
    recipe = restored(tmp_path / "model")
    assert {name.split(".")[0] for name in recipe.tensors} == {"language_model", "audio_tower", "multi_modal_projector"}
    runtime = in_memory(recipe)
    assert runtime.tensors.keys() == model.state_dict().keys()
    assert_equal(Package(runtime.write(tmp_path / "runtime"), tmp_path / "package"), model)


def test_a_head_that_is_tied_and_absent_is_the_embeddings_table(tmp_path: Path) -> None:
    """transformers' class never ties it; files of one that does have no head."""
    model = saved(tmp_path / "model")
    recipe = restored(tmp_path / "model")
    del recipe.tensors["language_model.lm_head.weight"]
    recipe.config["text_config"]["tie_word_embeddings"] = True
    package = Package(recipe.write(tmp_path / "tied"), tmp_path / "package")
    assert package.built.shared_bytes == VOCAB * HIDDEN * 4  # two components use it, and it is stored once
    model.lm_head.weight = model.model.language_model.embed_tokens.weight
    assert_equal(package, model)


def test_the_package_says_which_token_stands_for_sound(tmp_path: Path) -> None:
    saved(tmp_path / "model")
    package = Package(tmp_path / "model", tmp_path / "package")
    facts = {"type": "qwen2_audio", "audio_token_id": AUDIO, "vocab_size": VOCAB, "context_length": 64}
    assert facts.items() <= package.genai.items()
    assert package.genai["speech"]["filename"] == "audio_encoder.onnx"
    assert package.genai["embedding"]["filename"] == "embedding.onnx"


def pack_components(folder: Path) -> tuple[Recipe, Recipe]:
    """The checkpoint with each component's matrices packed as `SCHEMES` says, and the float one it must equal."""
    packed, dense = restored(folder), restored(folder)
    for name, tensor in restored(folder).tensors.items():
        if not name.removesuffix(".weight").endswith(PACKED):
            continue
        scheme = SCHEMES["decoder" if name.startswith("language_model") else "audio_encoder"]
        codes, zeros, scales = quantize(tensor, scheme)
        del packed.tensors[name]
        packed.tensors |= sidecars(name, codes, zeros, scales, scheme)
        dense.tensors[name] = dequantize(codes, zeros, scales, scheme.group)
    packed.config["component_quantization"] = {
        name: metadata(scheme, (), {}, table=False, head=False, moe=False, tie=False)
        for name, scheme in SCHEMES.items()
    }
    return packed, dense


@pytest.mark.parametrize("is_renamed", [False, True])
def test_an_eight_bit_encoder_and_a_four_bit_decoder_equal_their_float_twins(tmp_path: Path, is_renamed: bool) -> None:
    saved(tmp_path / "model")
    packed, dense = pack_components(tmp_path / "model")
    packed = in_memory(packed) if is_renamed else packed
    package = Package(packed.write(tmp_path / "packed"), tmp_path / "package")
    twin = Qwen2AudioForConditionalGeneration.from_pretrained(dense.write(tmp_path / "dense"))
    assert_equal(package, twin)


def test_every_packed_product_has_its_components_bits_and_group(tmp_path: Path) -> None:
    saved(tmp_path / "model")
    packed, _ = pack_components(tmp_path / "model")
    Package(packed.write(tmp_path / "packed"), tmp_path / "package")
    # q, k and v of the decoder are one product; the encoder's projector is one more.
    for name, products in (("audio_encoder", 2 * 6 + 1), ("decoder", 2 * 5), ("embedding", 0)):
        nodes = every_node(ir.load(tmp_path / "package" / f"{name}.onnx").graph)
        found = [node.attributes for node in nodes if node.op_type == "MatMulNBits"]
        bits = SCHEMES[name].bits if name in SCHEMES else 0
        assert [(a["bits"].as_int(), a["block_size"].as_int()) for a in found] == [(bits, 32)] * products


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_package_is_verified_against_its_checkpoint(tmp_path: Path, is_packed: bool) -> None:
    saved(tmp_path / "model")
    checkpoint = tmp_path / "model"
    if is_packed:
        checkpoint = pack_components(tmp_path / "model")[0].write(tmp_path / "packed")
    Package(checkpoint, tmp_path / "package")
    report = waybill.verify(tmp_path / "package", checkpoint)
    assert report.problems == []
    assert report.sources == len(waybill.open(checkpoint).tensors)


def test_the_runtime_answers_as_transformers_does(tmp_path: Path) -> None:
    model = saved(tmp_path / "model")
    Package(tmp_path / "model", tmp_path / "package")
    features, mask = heard(22, 13)
    recordings = [
        {"input_features": features[at : at + 1], "feature_attention_mask": mask[at : at + 1]} for at in range(2)
    ]
    prompts = [[7, 8, AUDIO, 11, 12], [9, AUDIO, 13]]
    made = open_model(read_package(tmp_path / "package")).generate(Inputs(prompts, recordings), max_new_tokens=6)
    for at, (prompt, frames) in enumerate(zip(prompts, (22, 13), strict=True)):
        ids = [each for token in prompt for each in [token] * (audio_tokens(frames) if token == AUDIO else 1)]
        answer: list[int] = []
        while len(answer) < 6:
            logits = peer(model, features[at : at + 1], mask[at : at + 1], np.array([ids + answer]))
            answer.append(int(logits[0, -1].argmax()))
        assert made.token_ids[at] == answer
