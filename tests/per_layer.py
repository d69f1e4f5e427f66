"""Decoders whose layers have inputs of their own, in torch: transformers' own layers, and the block written here.

The formulas are those of transformers' Gemma 4 text model; a test holds the block against that model.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from checkpoints import Recipe

GATE, PROJECTION = "per_layer_input_gate", "per_layer_projection"
MODEL_PROJECTION = "model.per_layer_model_projection"


class Inputs:
    """Per-layer inputs in torch, by a checkpoint's tensors under their own names."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
        self.tensors, self.eps = tensors, config["rms_norm_eps"]
        self.layers, self.size = config["num_hidden_layers"], config["hidden_size_per_layer_input"]

    def linear(self, path: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self.tensors[f"{path}.weight"].T

    def norm(self, path: str, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.tensors[f"{path}.weight"]

    def make(self, ids: torch.Tensor) -> torch.Tensor:
        """What layers are given, [B, S, L, P]."""
        embedded = self.tensors["model.embed_tokens.weight"][ids]
        shape = (*ids.shape, self.layers, self.size)
        projected = self.linear(MODEL_PROJECTION, embedded) * embedded.shape[-1] ** -0.5
        normed = self.norm("model.per_layer_projection_norm", projected.reshape(shape))
        looked_up = self.tensors["model.embed_tokens_per_layer.weight"][ids] * self.size**0.5
        return (normed + looked_up.reshape(shape)) * 2**-0.5

    def added(self, layer: int, h: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """What a layer adds to its states, [B, S, H], for its own input, [B, S, P]."""
        path = f"model.layers.{layer}"
        gate = torch.nn.functional.silu(self.linear(f"{path}.{GATE}", h))
        return self.norm(f"{path}.post_per_layer_input_norm", self.linear(f"{path}.{PROJECTION}", gate * own))


class Model:
    """transformers' model of a recipe, with the block in its layers."""

    def __init__(self, recipe: Recipe) -> None:
        self.model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**recipe.config), dtype=torch.float32).eval()
        tensors = {name: torch.from_numpy(tensor) for name, tensor in recipe.tensors.items()}
        plain = {name: tensor for name, tensor in tensors.items() if "per_layer" not in name}
        lacking, surplus = self.model.load_state_dict(plain, strict=False)
        assert (set(lacking) <= {"lm_head.weight"}, surplus) == (True, [])
        self.inputs = Inputs(tensors, recipe.config)

    def __call__(self, input_ids: torch.Tensor) -> Any:
        own = self.inputs.make(input_ids)

        def block(layer: int, _module: Any, _args: Any, h: torch.Tensor) -> torch.Tensor:
            return h + self.inputs.added(layer, h, own[:, :, layer])

        layers = enumerate(self.model.model.layers)
        hooks = [layer.register_forward_hook(partial(block, number)) for number, layer in layers]
        out = self.model(input_ids)
        for hook in hooks:
            hook.remove()
        return out
