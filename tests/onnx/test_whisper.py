"""Whisper's two graphs against transformers: what is heard, what is written, step by step, float and packed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from safetensors.numpy import load_file
from transformers import WhisperConfig, WhisperForConditionalGeneration

import waybill
from checkpoints import Array, Recipe
from packing import Scheme, dequantize, metadata, quantize, sidecars
from waybill.onnx.graph import every_node

TABLE, HEAD = "model.decoder.embed_tokens.weight", "proj_out.weight"
MEL, POSITIONS, HIDDEN, HEADS, VOCAB = 16, 10, 64, 2, 128
SCHEMES = {"encoder": Scheme("olive", 8, 32), "decoder": Scheme("olive", 4, 32)}
PACKED = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")


def saved(folder: Path, **config: Any) -> WhisperForConditionalGeneration:
    """A tiny model with random weights, of which everything matters, in `folder` as transformers writes it."""
    sizes = {
        "d_model": HIDDEN, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
        "decoder_attention_heads": HEADS, "encoder_ffn_dim": 96, "decoder_ffn_dim": 160, "vocab_size": VOCAB,
        "num_mel_bins": MEL, "max_source_positions": POSITIONS, "max_target_positions": 12, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3,
    }  # fmt: skip
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(WhisperConfig(**sizes | config)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm.weight" in name else 0.0, 0.2)
    model.save_pretrained(folder)
    return model


class Package:
    """A package of both graphs, in ONNX Runtime."""

    def __init__(self, checkpoint: Path, folder: Path, **options: Any) -> None:
        self.built = waybill.build(checkpoint, logits="all", exact=True, **options)
        self.built.save(folder)
        self.genai = json.loads((folder / "genai_config.json").read_text())["model"]
        settings = ort.SessionOptions()
        settings.intra_op_num_threads = 1
        self.sessions = {
            name: ort.InferenceSession(folder / f"{name}.onnx", settings, providers=["CPUExecutionProvider"])
            for name in ("encoder", "decoder")
        }

    def run(self, name: str, feeds: dict[str, Array]) -> dict[str, Array]:
        session = self.sessions[name]
        return dict(zip([out.name for out in session.get_outputs()], session.run(None, feeds), strict=True))

    def encode(self, features: Array) -> Array:
        return self.run("encoder", {"input_features": features})["encoder_hidden_states"]

    def decode(self, states: Array, ids: Array, prompt: int) -> Array:
        """Logits of every position: of the prompt at once, then of one token a step, with what the steps before made.

        Only the first step is given the encoder's states.
        """
        requests, length = ids.shape
        none = np.zeros((requests, HEADS, 0, HIDDEN // HEADS), np.float32)
        caches = {i.name: none for i in self.sessions["decoder"].get_inputs() if i.name.startswith("past")}
        logits, at = [], 0
        while at < length:
            end = max(prompt, at + 1)
            mask = np.ones((requests, end), np.int64)
            given = {"input_ids": ids[:, at:end], "attention_mask": mask, "encoder_hidden_states": states}
            made = self.run("decoder", given | caches)
            logits.append(made["logits"])
            cross = {name.replace("present", "past").replace("cross", "cross_values"): value
                     for name, value in made.items() if "cross" in name}  # fmt: skip
            caches |= cross if at == 0 else {}
            caches |= {name.replace("present.", "past_key_values."): value
                       for name, value in made.items() if name.startswith("present.")}  # fmt: skip
            states, at = states[:, :0], end
        return np.concatenate(logits, 1)


def heard(seed: int = 0, count: int = 2) -> Array:
    return np.random.default_rng(seed).standard_normal((count, MEL, 2 * POSITIONS)).astype(np.float32)


def peer(model: WhisperForConditionalGeneration, features: Array, ids: Array) -> tuple[Array, Array]:
    """transformers' states and logits."""
    with torch.no_grad():
        out = model(input_features=torch.tensor(features), decoder_input_ids=torch.tensor(ids))
    return out.encoder_last_hidden_state.numpy(), out.logits.numpy()


IDS = np.array([[3, 11, 12, 13, 14], [3, 21, 22, 23, 24]])


@pytest.mark.parametrize("prompt", [1, 3, 5])
def test_a_prompt_and_the_steps_after_it_equal_transformers(tmp_path: Path, prompt: int) -> None:
    model = saved(tmp_path / "model")
    package = Package(tmp_path / "model", tmp_path / "package")
    features = heard()
    states, logits = peer(model, features, IDS)
    np.testing.assert_allclose(package.encode(features), states, atol=1e-4)
    found = package.decode(package.encode(features), IDS, prompt)
    assert np.abs(logits).max() > 1
    np.testing.assert_allclose(found, logits, atol=1e-4)


def test_requests_of_unequal_length_stand_at_positions_of_their_own(tmp_path: Path) -> None:
    model = saved(tmp_path / "model")
    package = Package(tmp_path / "model", tmp_path / "package")
    features, ids = heard(), np.array([[3, 11, 12, 13], [3, 21, 0, 0]])
    none = np.zeros((2, HEADS, 0, HIDDEN // HEADS), np.float32)
    feeds = {i.name: none for i in package.sessions["decoder"].get_inputs() if i.name.startswith("past")}
    feeds |= {"input_ids": ids, "attention_mask": (ids > 0).astype(np.int64)}
    found = package.run("decoder", feeds | {"encoder_hidden_states": package.encode(features)})["logits"]
    _, first = peer(model, features[:1], ids[:1])
    _, second = peer(model, features[1:], ids[1:, :2])
    np.testing.assert_allclose(found[:1], first, atol=1e-4)
    np.testing.assert_allclose(found[1:, :2], second, atol=1e-4)


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu", "silu"])
def test_the_activation_is_the_layers_and_never_the_convolutions(tmp_path: Path, activation: str) -> None:
    model = saved(tmp_path / "model", activation_function=activation)
    package = Package(tmp_path / "model", tmp_path / "package")
    states, _ = peer(model, heard(), IDS)
    np.testing.assert_allclose(package.encode(heard()), states, atol=1e-4)


def test_scaled_embeddings_change_nothing_as_in_transformers(tmp_path: Path) -> None:
    model = saved(tmp_path / "model", scale_embedding=True)
    package = Package(tmp_path / "model", tmp_path / "package")
    states, logits = peer(model, heard(), IDS)
    np.testing.assert_allclose(package.encode(heard()), states, atol=1e-4)
    np.testing.assert_allclose(package.decode(states, IDS, 2), logits, atol=1e-4)


def restored(folder: Path, **tensors: Array) -> Recipe:
    """A saved checkpoint, to be written with other tensors."""
    stored = load_file(folder / "model.safetensors")
    return Recipe(json.loads((folder / "config.json").read_text()), stored | tensors)


def test_a_head_stored_again_is_the_table_and_is_written_once(tmp_path: Path) -> None:
    model = saved(tmp_path / "model")
    recipe = restored(tmp_path / "model")
    assert HEAD not in recipe.tensors
    recipe.tensors[HEAD] = recipe.tensors[TABLE]
    recipe.write(tmp_path / "again")
    absent = Package(tmp_path / "model", tmp_path / "absent")
    again = Package(tmp_path / "again", tmp_path / "package")
    assert HEAD not in again.built["decoder"].bindings
    assert again.built.nbytes == absent.built.nbytes
    states, logits = peer(model, heard(), IDS)
    np.testing.assert_allclose(again.decode(states, IDS, 2), logits, atol=1e-4)


def test_a_different_head_in_the_file_is_used_and_reported(tmp_path: Path) -> None:
    model = saved(tmp_path / "model")
    head = np.random.default_rng(1).standard_normal((VOCAB, HIDDEN)).astype(np.float32) * 0.2
    restored(tmp_path / "model", **{HEAD: head}).write(tmp_path / "other")
    package = Package(tmp_path / "other", tmp_path / "package")
    assert any("the file holds a different one" in line for line in package.built.notices)
    model.proj_out.weight = torch.nn.Parameter(torch.tensor(head))
    states, logits = peer(model, heard(), IDS)
    np.testing.assert_allclose(package.decode(states, IDS, 2), logits, atol=1e-4)


def test_an_untied_head_is_the_files(tmp_path: Path) -> None:
    model = saved(tmp_path / "model", tie_word_embeddings=False)
    package = Package(tmp_path / "model", tmp_path / "package")
    assert HEAD in package.built["decoder"].bindings
    states, logits = peer(model, heard(), IDS)
    np.testing.assert_allclose(package.decode(states, IDS, 2), logits, atol=1e-4)


def test_the_package_says_how_an_answer_begins(tmp_path: Path) -> None:
    saved(tmp_path / "model", forced_decoder_ids=[[1, 7], [2, 8]], suppress_tokens=[5], begin_suppress_tokens=[6, 999])
    (tmp_path / "model" / "generation_config.json").unlink()
    package = Package(tmp_path / "model", tmp_path / "package")
    facts = {"type": "whisper", "decoder_start_token_id": 3, "prompt_ids": [7, 8], "suppress_tokens": [5],
             "begin_suppress_tokens": [6], "context_length": 12}  # fmt: skip
    assert facts.items() <= package.genai.items()
    assert package.genai["encoder"]["filename"] == "encoder.onnx"


def pack_components(folder: Path) -> tuple[Recipe, Recipe]:
    """The checkpoint with each component's matrices packed as `SCHEMES` says, and the float one it must equal."""
    packed, dense = restored(folder), restored(folder)
    for name, tensor in restored(folder).tensors.items():
        component = name.split(".")[1]
        if not name.removesuffix(".weight").endswith(PACKED):
            continue
        scheme = SCHEMES[component]
        codes, zeros, scales = quantize(tensor, scheme)
        del packed.tensors[name]
        packed.tensors |= sidecars(name, codes, zeros, scales, scheme)
        dense.tensors[name] = dequantize(codes, zeros, scales, scheme.group)
    packed.config["component_quantization"] = {
        name: metadata(scheme, (), {}, table=False, head=False, moe=False, tie=False)
        for name, scheme in SCHEMES.items()
    }
    return packed, dense


def test_an_eight_bit_encoder_and_a_four_bit_decoder_equal_their_float_twins(tmp_path: Path) -> None:
    saved(tmp_path / "model")
    packed, dense = pack_components(tmp_path / "model")
    package = Package(packed.write(tmp_path / "packed"), tmp_path / "package")
    twin = WhisperForConditionalGeneration.from_pretrained(dense.write(tmp_path / "dense"))
    states, logits = peer(twin, heard(), IDS)
    np.testing.assert_allclose(package.encode(heard()), states, atol=1e-4)
    np.testing.assert_allclose(package.decode(states, IDS, 3), logits, atol=1e-4)


def test_every_packed_product_has_its_components_bits_and_group(tmp_path: Path) -> None:
    saved(tmp_path / "model")
    packed, _ = pack_components(tmp_path / "model")
    Package(packed.write(tmp_path / "packed"), tmp_path / "package")
    for name, products in (("encoder", 2 * 6), ("decoder", 3 * 10)):
        nodes = every_node(ir.load(tmp_path / "package" / f"{name}.onnx").graph)
        found = [node.attributes for node in nodes if node.op_type == "MatMulNBits"]
        scheme = SCHEMES[name]
        assert [(a["bits"].as_int(), a["block_size"].as_int()) for a in found] == [(scheme.bits, 32)] * products


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
