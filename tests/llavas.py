"""Tiny LLaVA models of transformers, made on the spot: every tower with every language model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2Config,
    Qwen3Config,
    SiglipVisionConfig,
)

IMAGE, HIDDEN, TOWER_LAYERS, TEXT_LAYERS = 100, 64, 3, 2
SIDE, PATCH = 30, 14  # the last pixels belong to no patch
TEXT: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": TEXT_LAYERS,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": TOWER_LAYERS,
    "intermediate_size": 64,
    "image_size": SIDE,
    "patch_size": PATCH,
}
TEXTS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
TOWERS = {"clip": CLIPVisionConfig, "siglip": SiglipVisionConfig}


def make_llava(
    tower: str = "clip", text: str = "llama", *, tied: bool = False, **settings: Any
) -> LlavaForConditionalGeneration:
    """A model whose every weight matters: no bias is zero, and no norm is the identity."""
    config = LlavaConfig(
        vision_config=TOWERS[tower](**VISION),
        text_config=TEXTS[text](**TEXT, **({"head_dim": 16} if text == "qwen3" else {}), tie_word_embeddings=tied),
        image_token_index=IMAGE,
        **settings,
    )
    model = LlavaForConditionalGeneration(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            matrix = parameter.ndim == 2 and "embed" not in name
            scale = 1.5 / parameter.shape[-1] ** 0.5 if matrix else 0.3
            parameter.copy_(noise * scale + ("norm" in name and name.endswith("weight")))
    return model


def spell_as_hub(folder: Path, to: Path) -> Path:
    """The same weights under the names that files of the hub have, with the buffer that old ones store."""
    renamed = {
        name.replace("vision_tower.", "vision_tower.vision_model.", 1) if name.startswith("vision_tower.") else name: t
        for name, t in load_file(folder / "model.safetensors").items()
    }
    embeddings = "vision_tower.vision_model.embeddings"
    positions = len(renamed[f"{embeddings}.position_embedding.weight"])
    return _write(folder, to, renamed | {f"{embeddings}.position_ids": np.arange(positions)[None]})


def spell_as_memory(folder: Path, to: Path) -> Path:
    """The same weights under the names that the modules have, or had before the tower lost a level."""
    renamed = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        inner = name.replace("language_model.model.", "language_model.")
        renamed["lm_head.weight" if inner.endswith("lm_head.weight") else f"model.{inner}"] = tensor
    deeper = {name.replace("vision_tower.", "vision_tower.vision_model."): t for name, t in renamed.items()}
    return _write(folder, to, deeper)


def _write(folder: Path, to: Path, tensors: dict[str, Any]) -> Path:
    to.mkdir()
    save_file(tensors, to / "model.safetensors")
    (to / "config.json").write_text((folder / "config.json").read_text())
    return to
