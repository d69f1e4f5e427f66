"""Vision transformers that turn a picture into hidden states: CLIP's (arXiv 2103.00020) and SigLIP's (2303.15343).

A convolution cuts the picture into patches, a table says where each lies, and layers attend everywhere. CLIP puts a
class embedding before the patches, and a norm before the first layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from waybill.config.architectures import PART_DEFAULTS
from waybill.config.composite import choice, divides
from waybill.config.fields import LARGEST_COUNT, Fields
from waybill.errors import BadConfig, WaybillError
from waybill.families.stack import LayerNames, Stack, convolution, norm_parameters, stack_parameters, table, vector
from waybill.plan.parameter import Packing, ParameterSpec
from waybill.rules import Drop, DropUnder

ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu")
_LEADS_WITH_CLASS = {"clip_vision_model": True, "siglip_vision_model": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """The fields that shape a vision tower. Pictures are squares of `image_size` pixels, patches of `patch_size`."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_channels: int
    image_size: int
    patch_size: int
    hidden_act: str
    eps: float

    @property
    def is_clip(self) -> bool:
        """A class embedding comes before the patches, a norm before the layers, and patches have no bias."""
        return _LEADS_WITH_CLASS[self.model_type]

    @property
    def positions(self) -> int:
        """Of one picture; pixels beyond the last whole patch are not seen."""
        return (self.image_size // self.patch_size) ** 2 + self.is_clip


def read_vision(inner: Mapping[str, Any], problems: list[WaybillError], where: str) -> VisionConfig | None:
    """A config of a tower; None when it is not one or cannot be right, which `problems` then say."""
    before = len(problems)
    kind = choice(Fields(inner, {}, problems, where), "model_type", tuple(_LEADS_WITH_CLASS))
    if len(problems) > before:
        return None
    fields = Fields(inner, PART_DEFAULTS[kind], problems, where)
    config = VisionConfig(
        model_type=kind,
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers", high=LARGEST_COUNT),
        num_heads=fields.integer("num_attention_heads", high=LARGEST_COUNT),
        num_channels=fields.integer("num_channels", high=LARGEST_COUNT),
        image_size=fields.integer("image_size"),
        patch_size=fields.integer("patch_size"),
        hidden_act=choice(fields, "hidden_act", ACTIVATIONS),
        eps=fields.number("layer_norm_eps"),
    )
    divides(fields, config.hidden_size, config.num_heads, ("hidden_size", "num_attention_heads"))
    if config.patch_size > config.image_size and not fields.wrong & {"image_size", "patch_size"}:
        problems.append(
            BadConfig(
                "patch_size cannot be right",
                where=f"{where}: patch_size",
                expected=f"at most image_size {config.image_size}",
                found=str(config.patch_size),
                fix="check the field against the model's published config",
            )
        )
    return config if len(problems) == before else None


def vision_stack(config: VisionConfig, root: str, layers: int) -> Stack:
    """The first `layers` layers of a tower that lies at `root`."""
    return Stack(
        path=f"{root}.encoder.layers",
        layers=layers,
        hidden=config.hidden_size,
        heads=config.num_heads,
        head_dim=config.hidden_size // config.num_heads,
        inner=config.intermediate_size,
        activation=config.hidden_act,
        eps=config.eps,
        fields=("hidden_size", "num_attention_heads", "intermediate_size"),
        biased=frozenset(("q", "k", "v", "out", "up", "down")),
        names=LayerNames(
            attention="self_attn",
            attention_norm="layer_norm1",
            projections=("q_proj", "k_proj", "v_proj", "out_proj"),
            up=("mlp.fc1",),
            down="mlp.fc2",
            feed_forward_norm="layer_norm2",
        ),
    )


def vision_parameters(
    config: VisionConfig, root: str, layers: int, packings: Mapping[str, Packing]
) -> Iterator[ParameterSpec]:
    """Every parameter that hidden states up to those of layer `layers` depend on."""
    hidden, patch = ("hidden_size", config.hidden_size), ("patch_size", config.patch_size)
    if config.is_clip:
        yield vector(f"{root}.embeddings.class_embedding", hidden)
    kernel = (hidden, ("num_channels", config.num_channels), patch, patch)
    yield from convolution(f"{root}.embeddings.patch_embedding", kernel, bias=not config.is_clip)
    positions = (f"positions of image_size {config.image_size} in patches of {config.patch_size}", config.positions)
    yield table(f"{root}.embeddings.position_embedding.weight", positions, hidden, "positions", packings)
    if config.is_clip:
        yield from norm_parameters(f"{root}.pre_layrnorm", config.hidden_size, "hidden_size", centred=True)
    yield from stack_parameters(vision_stack(config, root, layers), packings)


def vision_rules(config: VisionConfig, root: str, layers: int) -> list[Drop | DropUnder]:
    """What of a tower is not needed for hidden states up to those of layer `layers`."""
    unused = [f"{root}.post_layernorm", *(f"{root}.encoder.layers.{n}" for n in range(layers, config.num_layers))]
    if not config.is_clip:
        unused.append(f"{root}.head")
    return [
        Drop(f"{root}.embeddings.position_ids", "the numbers 0, 1, … of old exports"),
        *(DropUnder(path, "features are taken before it") for path in unused),
    ]
