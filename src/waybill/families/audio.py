"""The encoder Whisper (arXiv 2212.04356, section 2.2) hears with, which other models hear with too.

Two convolutions over the frames of a spectrogram, the second of which halves their number, then positions from a table
and transformer layers. It hears a stretch of fixed length: shorter recordings are padded by whoever makes the features.
transformers has a field scale_embedding, which its classes store and never multiply by: it changes nothing here either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from waybill.config.composite import choice, divides
from waybill.config.fields import LARGEST_COUNT, Fields
from waybill.families.stack import LayerNames, Stack, convolution, norm_parameters, stack_parameters, table
from waybill.plan.parameter import Packing, ParameterSpec

KERNEL = 3
"""Frames that a convolution looks at; one more is padded on each side."""
EPS = 1e-5
"""Of the norms; no config states it."""
BIASED = frozenset({"q", "v", "out", "up", "down"})
"""Linear modules with a bias: a constant on every key changes no attention."""
ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu")


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioConfig:
    """The fields that shape the encoder."""

    d_model: int
    layers: int
    heads: int
    inner: int
    mel_bins: int
    positions: int
    """States it makes of a recording."""
    activation: str

    @property
    def frames(self) -> int:
        """Frames of a spectrogram it is given, neither more nor fewer: two for each position."""
        return 2 * self.positions


def read_audio(fields: Fields) -> AudioConfig:
    """The encoder's part of a config; problems go where the fields' do."""
    config = AudioConfig(
        d_model=fields.integer("d_model"),
        layers=fields.integer("encoder_layers", high=LARGEST_COUNT),
        heads=fields.integer("encoder_attention_heads", high=LARGEST_COUNT),
        inner=fields.integer("encoder_ffn_dim"),
        mel_bins=fields.integer("num_mel_bins"),
        positions=fields.integer("max_source_positions", low=2),
        activation=choice(fields, "activation_function", ACTIVATIONS),
    )
    divides(fields, config.d_model, config.heads, ("d_model", "encoder_attention_heads"))
    return config


def layer_names(*, cross: bool) -> LayerNames:
    """Where a layer's modules lie, in an encoder or, with cross-attention, in a decoder."""
    return LayerNames(
        attention="self_attn",
        attention_norm="self_attn_layer_norm",
        projections=("q_proj", "k_proj", "v_proj", "out_proj"),
        cross="encoder_attn" if cross else None,
        cross_norm="encoder_attn_layer_norm" if cross else None,
        up=("fc1",),
        down="fc2",
        feed_forward_norm="final_layer_norm",
    )


def audio_stack(config: AudioConfig, root: str) -> Stack:
    """The layers of the encoder at `root`."""
    return Stack(
        path=f"{root}.layers",
        layers=config.layers,
        hidden=config.d_model,
        heads=config.heads,
        head_dim=config.d_model // config.heads,
        inner=config.inner,
        activation=config.activation,
        eps=EPS,
        fields=("d_model", "encoder_attention_heads", "encoder_ffn_dim"),
        names=layer_names(cross=False),
        biased=BIASED,
    )


def audio_parameters(config: AudioConfig, root: str, packings: Mapping[str, Packing]) -> Iterator[ParameterSpec]:
    """Every parameter of the encoder at `root`, in the order they are used."""
    hidden, kernel = ("d_model", config.d_model), ("kernel", KERNEL)
    yield from convolution(f"{root}.conv1", (hidden, ("num_mel_bins", config.mel_bins), kernel), bias=True)
    yield from convolution(f"{root}.conv2", (hidden, hidden, kernel), bias=True)
    positions = ("max_source_positions", config.positions)
    yield table(f"{root}.embed_positions.weight", positions, hidden, "positions", packings)
    yield from stack_parameters(audio_stack(config, root), packings)
    yield from norm_parameters(f"{root}.layer_norm", config.d_model, "d_model", centred=True)
