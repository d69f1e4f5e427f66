"""Tiny random models of several networks, each with what a test must know of it, stated independently of the library.

Names are those that transformers writes to disk. Weights are larger than at birth, so that logits differ.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file
from transformers import (
    PreTrainedModel,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from checkpoints import Array, Recipe, lively, llama, per_layer
from llavas import IMAGE, SIDE, make_llava
from packing import Scheme, dequantize, metadata, quantize, sidecars
from per_layer import Model
from waybill.onnx.runtime.model import Inputs

STEPS = 6
Tensors = Mapping[str, torch.Tensor]


def loaded(recipe: Recipe, folder: Path) -> Callable[..., Any]:
    """transformers' model of a checkpoint."""
    kind = getattr(transformers, recipe.config["architectures"][0])
    return kind.from_pretrained(recipe.write(folder)).eval()  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """One model: how it is made, which component owns a stored tensor, which are packable, and what it is asked."""

    title: str
    make: Callable[[bool, Path], Recipe]
    """A checkpoint, from whether the head is tied; the folder is for whoever needs one to make it."""
    owner: Callable[[str], str]
    linear: re.Pattern[str]
    """Modules that are packed where their component is."""
    first: str
    """The component that is not a language model."""
    module: str
    """A packable module of the decoder's second layer."""
    module_pattern: str
    """An expression for it, and for that module of every layer."""
    inputs: Mapping[str, torch.Tensor]
    grows: str = "input_ids"
    """What answers are appended to."""
    never: int | None = None
    """A token that stands for something else, and is not answered."""
    ties: tuple[bool, ...] = (True, False)
    runtime: Callable[[str], str] = lambda name: name
    """A stored module as a package names it."""
    load: Callable[[Recipe, Path], Callable[..., Any]] = loaded
    """The reference of a float checkpoint."""


def saved(model: PreTrainedModel, folder: Path) -> Recipe:
    """What transformers writes of a model, with the name of its class."""
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    return Recipe(config, load_file(folder / "model.safetensors"))


def request(tiny: Tiny) -> Inputs:
    """What the library's runtime is asked, where a reference is asked `tiny.inputs`."""
    given = {name: values.numpy() for name, values in tiny.inputs.items()}
    media = [
        {name: given[name][row : row + 1] for name in given if name not in ("input_ids", "attention_mask", tiny.grows)}
        for row in range(2)
    ]
    if tiny.grows == "decoder_input_ids" and "input_ids" in given:
        rows = zip(given["input_ids"], given["attention_mask"], strict=True)
        return Inputs([row[mask == 1].tolist() for row, mask in rows])
    if tiny.grows == "decoder_input_ids":
        return Inputs(given[tiny.grows][:, 1:].tolist(), media)
    prompts = [[token for token, _ in groupby_place(row.tolist(), tiny.never)] for row in given["input_ids"]]
    return Inputs(prompts, media if tiny.never is not None else [])


def groupby_place(tokens: list[int], place: int | None) -> Iterator[tuple[int, int]]:
    """Tokens and how often each stands, where one place stands for a whole run of them."""
    for token, run in groupby(tokens):
        count = len(list(run))
        yield from [(token, count)] if token == place else [(token, 1)] * count


def tiny(model: PreTrainedModel) -> PreTrainedModel:
    """Ready to compute, and not nearly constant."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5 / parameter.shape[-1] ** 0.5)
            elif "norm" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.eval()


def t5(form: str, tied: bool) -> PreTrainedModel:
    config = T5Config(
        d_model=64, d_kv=16, d_ff=96, num_heads=4, num_layers=2, num_decoder_layers=3, vocab_size=128,
        decoder_start_token_id=0, feed_forward_proj=form, tie_word_embeddings=tied,
    )  # fmt: skip
    model = tiny(T5ForConditionalGeneration(config))
    if not tied:
        head = torch.randn(128, 64, generator=torch.Generator().manual_seed(3)) / 8
        model.lm_head.weight = torch.nn.Parameter(head)
        model.config.tie_word_embeddings = False
    return model


PROMPTS = torch.tensor([[5, 6, 7, 8, 9], [3, 4, 5, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
_T5 = Tiny(
    title="T5, gated",
    make=lambda tied, folder: saved(t5("gated-gelu", tied), folder),
    owner=lambda name: {"shared": "encoder", "lm_head": "decoder"}.get(name.split(".")[0], name.split(".")[0]),
    linear=re.compile(r".*(Attention\.[qkvo]|DenseReluDense\.w\w+)"),
    first="encoder",
    module="decoder.block.1.layer.2.DenseReluDense.wo",
    module_pattern=r"decoder\.block\.\d+\.layer\.2\.DenseReluDense\.wo",
    inputs={"input_ids": PROMPTS, "attention_mask": MASK, "decoder_input_ids": torch.zeros(2, 1, dtype=torch.long)},
    grows="decoder_input_ids",
)


def whisper(tied: bool) -> PreTrainedModel:
    config = WhisperConfig(
        d_model=64, encoder_layers=2, decoder_layers=3, encoder_attention_heads=4, decoder_attention_heads=2,
        encoder_ffn_dim=96, decoder_ffn_dim=160, vocab_size=128, num_mel_bins=16, max_source_positions=10,
        max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
        suppress_tokens=None, begin_suppress_tokens=None, tie_word_embeddings=tied,
    )  # fmt: skip
    return tiny(WhisperForConditionalGeneration(config))


_WHISPER = Tiny(
    title="Whisper",
    make=lambda tied, folder: saved(whisper(tied), folder),
    owner=lambda name: "encoder" if name.startswith("model.encoder.") else "decoder",
    linear=re.compile(r".*\.(\w*attn\.(q|k|v|out)_proj|fc[12])"),
    first="encoder",
    module="model.decoder.layers.1.fc2",
    module_pattern=r"model\.decoder\.layers\.\d+\.fc2",
    inputs={
        "input_features": torch.randn(2, 16, 20, generator=torch.Generator().manual_seed(1)),
        "decoder_input_ids": torch.tensor([[3, 9], [3, 4]]),
    },
    grows="decoder_input_ids",
)


def spoken(name: str) -> str:
    """A name on transformers' disk as its running model has it."""
    for disk, memory in (("language_model.model.", "model.language_model."), ("language_model.lm_head", "lm_head")):
        if name.startswith(disk):
            return memory + name.removeprefix(disk)
    return f"model.{name}"


def owner_among(*roots: tuple[str, str]) -> Callable[[str], str]:
    """The component of the first root that begins a name."""
    return lambda name: next(component for root, component in roots if name.startswith(root))


PIXELS = torch.randn(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(2))
_LLAVA = Tiny(
    title="LLaVA: CLIP, Llama",
    make=lambda tied, folder: saved(make_llava("clip", "llama", tied=tied), folder),
    owner=owner_among(
        ("vision_tower", "vision_encoder"),
        ("multi_modal_projector", "vision_encoder"),
        ("language_model.model.embed_tokens", "embedding"),
        ("model.language_model.embed_tokens", "embedding"),
        ("", "decoder"),
    ),
    linear=re.compile(
        r"(language_model\.model|vision_tower\.encoder)\.layers\.[01]\..*(_proj|fc[12])|multi.*linear_[12]"
    ),
    first="vision_encoder",
    module="language_model.model.layers.1.mlp.down_proj",
    module_pattern=r"language_model\.model\.layers\.\d+\.mlp\.down_proj",
    runtime=spoken,
    never=IMAGE,
    inputs={
        "input_ids": torch.tensor([[5, *[IMAGE] * 4, 7, 9], [3, 8, *[IMAGE] * 4, 6]]),
        "attention_mask": torch.ones(2, 7, dtype=torch.long),
        "pixel_values": PIXELS,
    },
)
HUB_HEAD, HUB_TABLE = "language_model.lm_head.weight", "language_model.model.embed_tokens.weight"


def qwen2_audio(tied: bool, folder: Path) -> Recipe:
    """transformers never ties this head: a tied checkpoint is one that states it and leaves the head out."""
    audio = {
        "model_type": "qwen2_audio_encoder", "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4,
        "encoder_ffn_dim": 96, "num_mel_bins": 16, "max_source_positions": 11,
    }  # fmt: skip
    text = {
        "model_type": "qwen2", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 128, "max_position_embeddings": 64,
    }  # fmt: skip
    config = Qwen2AudioConfig(audio_config=audio, text_config=text, audio_token_index=IMAGE)
    recipe = saved(tiny(Qwen2AudioForConditionalGeneration(config)), folder)
    if tied:
        del recipe.tensors[HUB_HEAD]
        recipe.config["text_config"]["tie_word_embeddings"] = True
    return recipe


def with_head(recipe: Recipe, folder: Path) -> Callable[..., Any]:
    """transformers' model of a checkpoint whose head may be left out."""
    table = recipe.tensors[HUB_TABLE]
    return loaded(Recipe(recipe.config, {HUB_HEAD: table, **recipe.tensors}), folder)


FRAMES = 18
_QWEN2_AUDIO = Tiny(
    title="Qwen2-Audio",
    make=qwen2_audio,
    load=with_head,
    owner=owner_among(
        ("audio_tower", "audio_encoder"),
        ("multi_modal_projector", "audio_encoder"),
        ("language_model.model.embed_tokens", "embedding"),
        ("", "decoder"),
    ),
    linear=re.compile(r"(language_model\.model|audio_tower)\.layers\..*(_proj|fc[12])|multi.*\.linear"),
    first="audio_encoder",
    module="language_model.model.layers.1.mlp.down_proj",
    module_pattern=r"language_model\.model\.layers\.\d+\.mlp\.down_proj",
    runtime=spoken,
    never=IMAGE,
    inputs={
        "input_ids": torch.tensor([[5, *[IMAGE] * 4, 7, 9], [3, 8, *[IMAGE] * 4, 6]]),
        "attention_mask": torch.ones(2, 7, dtype=torch.long),
        "input_features": torch.randn(2, 16, 22, generator=torch.Generator().manual_seed(4)),
        "feature_attention_mask": (torch.arange(22) < FRAMES).long().expand(2, -1),
    },
)
LAYERED = Tiny(
    title="Llama with per-layer inputs",
    make=lambda tied, _: lively(per_layer(llama(np.float32, tie_word_embeddings=tied))),
    load=lambda recipe, _: Model(recipe),
    owner=lambda name: "decoder",
    linear=re.compile(r"model\.(layers\..*(_proj|_gate|_projection)|per_layer_model_projection)"),
    first="none",
    module="model.layers.1.per_layer_input_gate",
    module_pattern=r"model\.layers\.\d+\.per_layer_(input_gate|projection)",
    inputs={"input_ids": torch.tensor([[3, 17, 99, 4, 56], [120, 7, 7, 31, 64]])},
)
ZOO = (
    _T5,
    replace(_T5, title="T5, plain", make=lambda tied, folder: saved(t5("relu", tied), folder)),
    _LLAVA,
    replace(
        _LLAVA,
        title="LLaVA: SigLIP, Qwen2",
        make=lambda tied, folder: saved(
            make_llava("siglip", "qwen2", tied=tied, vision_feature_select_strategy="full"), folder
        ),
    ),
    _WHISPER,
    _QWEN2_AUDIO,
    LAYERED,
)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How components are packed: a scheme for each, what stays float in the decoder, and what is overridden there."""

    title: str
    schemes: Mapping[str, Scheme] = field(default_factory=dict)
    """By `first` and `decoder`."""
    keep: str = ""
    """`exact` or `re`."""
    override: Mapping[str, Any] = field(default_factory=dict)


OLIVE4, OLIVE8 = Scheme("olive", 4, 16), Scheme("olive", 8, 32)
LAYOUTS = (
    Layout(title="float"),
    Layout(title="decoder 4 bits", schemes={"decoder": OLIVE4}),
    Layout(title="decoder 4, the other 8 bits", schemes={"first": OLIVE8, "decoder": OLIVE4}),
    Layout(title="an exact exclusion", schemes={"decoder": OLIVE4}, keep="exact"),
    Layout(title="a `re:` exclusion", schemes={"decoder": OLIVE4}, keep="re"),
    Layout(title="an override", schemes={"first": OLIVE8, "decoder": OLIVE4}, override={"bits": 8, "group": 32}),
    Layout(title="GPTQ", schemes={"first": replace(OLIVE8, form="gptq"), "decoder": replace(OLIVE4, form="gptq")}),
    Layout(title="AWQ and GPTQ", schemes={"first": replace(OLIVE8, form="gptq"), "decoder": Scheme("awq", 4, 32)}),
)


def pack(model: Tiny, recipe: Recipe, layout: Layout) -> tuple[Recipe, Recipe, dict[str, tuple[int, int]]]:
    """A packed checkpoint, the float one it must equal, and bits and group of each packed module."""
    packed, dense = Recipe(dict(recipe.config)), Recipe(dict(recipe.config))
    owners = {model.owner(name) for name in recipe.tensors}
    named = {model.first if name == "first" else name: scheme for name, scheme in layout.schemes.items()}
    schemes = {name: scheme for name, scheme in named.items() if name in owners}
    forms: dict[str, tuple[int, int]] = {}
    for name, tensor in recipe.tensors.items():
        module, scheme = name.removesuffix(".weight"), schemes.get(model.owner(name))
        kept = layout.keep and re.fullmatch(
            model.module_pattern if layout.keep == "re" else re.escape(model.module), module
        )
        if scheme is None or not model.linear.fullmatch(module) or kept:
            packed.tensors[name] = dense.tensors[name] = tensor
            continue
        if layout.override and module == model.module:
            scheme = replace(scheme, **layout.override)
        codes, zeros, scales = quantize(tensor.astype(np.float32), scheme)
        dense.tensors[name] = dequantize(codes, zeros, scales, scheme.group)
        packed.tensors |= sidecars(name, codes, zeros, scales, scheme)
        forms[module] = (scheme.bits, scheme.group)
    if schemes:
        keep = {"exact": [model.module], "re": [f"re:{model.module_pattern}"], "": []}[layout.keep]
        packed.config["component_quantization"] = {
            name: _entry(scheme, keep if name == "decoder" else [], model, layout if name == "decoder" else None)
            for name, scheme in schemes.items()
        }
    return packed, dense, forms


def _entry(scheme: Scheme, keep: list[str], model: Tiny, layout: Layout | None) -> dict[str, Any]:
    overrides = {model.module: layout.override} if layout is not None and layout.override else {}
    block = metadata(scheme, [], overrides, table=False, head=False, moe=False, tie=False)
    block.pop("tie_word_embeddings", None)
    return block | ({"modules_to_not_convert": keep} if keep else {})


def reference(model: Callable[..., Any], tiny: Tiny) -> tuple[Array, Array]:
    """Logits [STEPS, B, V] of every step, and the likeliest tokens [B, STEPS], with everything computed anew."""
    inputs = dict(tiny.inputs)
    logits = []
    for _ in range(STEPS):
        with torch.no_grad():
            last = model(**inputs).logits[:, -1]
        if tiny.never is not None:
            last[:, tiny.never] = -1e9
        logits.append(last)
        token = last.argmax(-1, keepdim=True)
        inputs[tiny.grows] = torch.cat([inputs[tiny.grows], token], 1)
        if tiny.grows == "input_ids" and "attention_mask" in inputs:
            inputs["attention_mask"] = torch.cat([inputs["attention_mask"], torch.ones_like(token)], 1)
    return torch.stack(logits).numpy(), inputs[tiny.grows][:, -STEPS:].numpy()
