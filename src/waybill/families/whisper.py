"""Whisper (arXiv 2212.04356): an encoder of sound, and a decoder that attends to it and writes.

Both have learned positions, norms that centre, and biases on all but the keys. The head is the table of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from waybill.config.architectures import PART_DEFAULTS
from waybill.config.composite import Composite, divides
from waybill.config.fields import LARGEST_COUNT, Fields
from waybill.config.model import read_dtype
from waybill.errors import WaybillError
from waybill.families.audio import BIASED, EPS, AudioConfig, audio_parameters, layer_names, read_audio
from waybill.families.dictation import dictation_facts
from waybill.families.stack import Stack, norm_parameters, stack_parameters, table
from waybill.manifest import ComponentManifest, Task, resolve_components
from waybill.plan.family import Family, Reading
from waybill.plan.parameter import Merges, Packing, ParameterSpec
from waybill.rules import RuleTable

ENCODER = "model.encoder"
DECODER = "model.decoder"
EMBEDDING = f"{DECODER}.embed_tokens.weight"
POSITIONS = f"{DECODER}.embed_positions.weight"
HEAD = "proj_out.weight"
TASK = Task(
    name="automatic-speech-recognition",
    components={"encoder": ENCODER, "decoder": DECODER},
    roles={"encoder": "encoder", "decoder": "decoder"},
)
SOURCES = {"encoder": (ENCODER,), "decoder": (DECODER,)}
ALIASES = {"decoder": {"proj_out": "proj_out"}}


@dataclass(frozen=True, slots=True, kw_only=True)
class WhisperConfig(Composite):
    """The fields that shape a Whisper."""

    audio: AudioConfig
    decoder_layers: int
    decoder_heads: int
    decoder_inner: int
    max_target_positions: int
    """Positions of the decoder: the rows of a table."""

    @property
    def context_length(self) -> int:
        """No position after the table's last."""
        return self.max_target_positions

    @property
    def hidden_size(self) -> int:
        """Of both stacks."""
        return self.audio.d_model

    def run_facts(self, hf_config: Mapping[str, Any], generation: Mapping[str, Any]) -> dict[str, Any]:
        """The tokens that begin an answer, and those that may not be chosen.

        Raises:
            BadConfig: config.json or generation_config.json states them in a way that means nothing.
        """
        start = PART_DEFAULTS["whisper"]["decoder_start_token_id"]
        return dictation_facts(hf_config, generation, start=start, vocab_size=self.vocab_size)


def read_whisper(raw: Mapping[str, Any]) -> Reading:
    """A config.json of this family."""
    problems: list[WaybillError] = []
    notices: list[str] = []
    fields = Fields(raw, PART_DEFAULTS["whisper"], problems, "config.json")
    config = WhisperConfig(
        model_type="whisper",
        architectures=["WhisperForConditionalGeneration"],
        dtype=read_dtype(fields, notices),
        vocab_size=fields.integer("vocab_size"),
        tie_word_embeddings=fields.boolean("tie_word_embeddings"),
        audio=read_audio(fields),
        decoder_layers=fields.integer("decoder_layers", high=LARGEST_COUNT),
        decoder_heads=fields.integer("decoder_attention_heads", high=LARGEST_COUNT),
        decoder_inner=fields.integer("decoder_ffn_dim"),
        max_target_positions=fields.integer("max_target_positions"),
    )
    divides(fields, config.audio.d_model, config.decoder_heads, ("d_model", "decoder_attention_heads"))
    return Reading(config, problems, notices)


def whisper_components(hf_config: Mapping[str, Any]) -> ComponentManifest:
    """The decoder owns the table of tokens and the head."""
    return resolve_components(TASK, SOURCES, aliases=ALIASES, hf_config=hf_config)


def whisper_module_kind(module: str) -> str:
    """Which modules are tables or kernels."""
    if module == "proj_out":
        return "head"
    if module.endswith("embed_tokens"):
        return "embedding"
    if module.endswith("embed_positions"):
        return "positions"
    return "conv" if module.endswith((".conv1", ".conv2")) else "linear"


def decoder_stack(config: WhisperConfig) -> Stack:
    """The decoder's layers."""
    return Stack(
        path=f"{DECODER}.layers",
        layers=config.decoder_layers,
        hidden=config.hidden_size,
        heads=config.decoder_heads,
        head_dim=config.hidden_size // config.decoder_heads,
        inner=config.decoder_inner,
        activation=config.audio.activation,
        eps=EPS,
        fields=("d_model", "decoder_attention_heads", "decoder_ffn_dim"),
        names=layer_names(cross=True),
        biased=BIASED,
    )


def whisper_parameters(config: WhisperConfig, packings: Mapping[str, Packing], _: Merges) -> list[ParameterSpec]:
    """Every parameter."""
    return list(_parameters(config, packings))


def _parameters(config: WhisperConfig, packings: Mapping[str, Packing]) -> Iterator[ParameterSpec]:
    tokens, hidden = ("vocab_size", config.vocab_size), ("d_model", config.hidden_size)
    positions = ("max_target_positions", config.max_target_positions)
    yield from audio_parameters(config.audio, ENCODER, packings)
    yield table(EMBEDDING, tokens, hidden, "embedding", packings)
    yield table(POSITIONS, positions, hidden, "positions", packings)
    yield from stack_parameters(decoder_stack(config), packings)
    yield from norm_parameters(f"{DECODER}.layer_norm", config.hidden_size, "d_model", centred=True)
    yield table(HEAD, tokens, hidden, "head", packings, tied_to=EMBEDDING if config.tie_word_embeddings else None)


WHISPER = Family(
    name="whisper",
    read=read_whisper,
    components=whisper_components,
    kind_of=whisper_module_kind,
    rules=lambda _: RuleTable(()),
    parameters=whisper_parameters,
    layer_fields={f"{ENCODER}.layers": "encoder_layers", f"{DECODER}.layers": "decoder_layers"},
)
