"""Qwen2-Audio (arXiv 2407.10759): Whisper's encoder, every two states averaged into one, before a language model.

The decoder is given one embedding for each average; in a prompt as many places of the audio token stand for a
recording, and `audio_tokens` says how many that are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from waybill.config import ModelConfig
from waybill.config.architectures import PART_DEFAULTS
from waybill.config.composite import Composite, nested, read_outer_dtype, read_text
from waybill.config.fields import Fields
from waybill.errors import WaybillError
from waybill.families.audio import AudioConfig, audio_parameters, read_audio
from waybill.families.multimodal import (
    ALIASES,
    EMBEDDING,
    EVERY_FILE,
    MERGES,
    PROJECTOR,
    ROOT,
    SOURCES,
    SPELLINGS,
    language_parameters,
    language_rules,
    multimodal_module_kind,
)
from waybill.families.stack import linear
from waybill.manifest import ComponentManifest, Task, resolve_components
from waybill.manifest.naming import Spelling
from waybill.plan.family import Family, Reading
from waybill.plan.parameter import Merges, Packing, ParameterSpec
from waybill.rules import RuleTable

TOWER = "model.audio_tower"
PROJECTION = f"{PROJECTOR}.linear"
POOLED = 2
"""States that are averaged into one."""
TASK = Task(
    name="audio-text-to-text",
    components={"audio_encoder": TOWER, "embedding": EMBEDDING.removesuffix(".weight"), "decoder": ROOT},
    roles={"audio_encoder": "audio_encoder", "embedding": "embedding", "decoder": "decoder"},
)


def audio_tokens(valid_frames: int) -> int:
    """How many audio tokens stand for a recording of that many frames, padding not counted.

    The second convolution leaves every other frame, the first included; of those every whole pair is averaged.
    """
    return (valid_frames + 1) // 2 // POOLED


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2AudioConfig(Composite):
    """The fields that shape a Qwen2-Audio, besides its language model's."""

    text: ModelConfig
    audio: AudioConfig
    audio_token_id: int

    def run_facts(self, hf_config: Mapping[str, Any], generation: Mapping[str, Any]) -> dict[str, Any]:
        """The token whose places recordings take."""
        return {"audio_token_id": self.audio_token_id}


def read_qwen2_audio(raw: Mapping[str, Any]) -> Reading:
    """A config.json of this family."""
    problems: list[WaybillError] = []
    notices: list[str] = []
    audio = nested(raw, "audio_config", problems, "config.json")
    text = read_text(_typed(raw), problems, notices)
    if text is None:
        return Reading(None, problems, notices)
    fields = Fields(raw, PART_DEFAULTS["qwen2_audio"], problems, "config.json")
    inner = Fields(audio, PART_DEFAULTS["qwen2_audio_encoder"], problems, "config.json: audio_config")
    config = Qwen2AudioConfig(
        model_type="qwen2_audio",
        architectures=["Qwen2AudioForConditionalGeneration"],
        dtype=read_outer_dtype(raw, fields, notices),
        vocab_size=text.vocab_size,
        tie_word_embeddings=text.tie_word_embeddings,
        text=text,
        audio=read_audio(inner),
        audio_token_id=fields.integer("audio_token_index", low=0, high=text.vocab_size - 1, alias="audio_token_id"),
    )
    return Reading(config, problems, notices)


def _typed(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config, whose language model is a Qwen2 where it does not say what it is."""
    text = raw.get("text_config")
    if not isinstance(text, Mapping) or text.get("model_type") is not None:
        return raw
    return {**raw, "text_config": {**text, "model_type": "qwen2"}}


def qwen2_audio_components(hf_config: Mapping[str, Any]) -> ComponentManifest:
    """The encoder owns the projector too: what it makes fits among the language model's embeddings."""
    sources = {"audio_encoder": (TOWER, PROJECTOR), **SOURCES}
    return resolve_components(TASK, sources, aliases=ALIASES, hf_config=hf_config)


def qwen2_audio_module_kind(module: str) -> str:
    """Which modules are tables or kernels."""
    return "conv" if module.endswith((".conv1", ".conv2")) else multimodal_module_kind(module)


def qwen2_audio_parameters(
    config: Qwen2AudioConfig, packings: Mapping[str, Packing], merges: Merges
) -> list[ParameterSpec]:
    """Every parameter."""
    return list(_parameters(config, packings, merges))


def _parameters(config: Qwen2AudioConfig, packings: Mapping[str, Packing], merges: Merges) -> Iterator[ParameterSpec]:
    yield from audio_parameters(config.audio, TOWER, packings)
    sizes = ("hidden_size", config.hidden_size), ("d_model", config.audio.d_model)
    yield from linear(PROJECTION, *sizes, packings, bias=True)
    yield from language_parameters(config.text, packings, merges)


QWEN2_AUDIO = Family(
    name="qwen2_audio",
    read=read_qwen2_audio,
    components=qwen2_audio_components,
    kind_of=qwen2_audio_module_kind,
    rules=lambda config: RuleTable(language_rules(config.text)),
    parameters=qwen2_audio_parameters,
    merges=MERGES,
    spellings=(*SPELLINGS, Spelling("audio_tower", TOWER, EVERY_FILE)),
    layer_fields={f"{TOWER}.layers": "encoder_layers", f"{ROOT}.layers": "num_hidden_layers"},
)
