"""LLaVA (arXiv 2304.08485; 1.5: 2310.03744): a vision tower, a projector of two layers, and a language model.

A picture's features are hidden states of the tower before its last layer or from several layers, projected to the
language model's size; each takes the place of one token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from waybill.config import ModelConfig
from waybill.config.architectures import PART_DEFAULTS
from waybill.config.composite import Composite, choice, nested, read_outer_dtype, read_text
from waybill.config.fields import LARGEST_COUNT, Fields
from waybill.errors import BadConfig, WaybillError
from waybill.families import multimodal
from waybill.families.multimodal import PROJECTOR
from waybill.families.stack import linear
from waybill.families.vision import ACTIVATIONS, VisionConfig, read_vision, vision_parameters, vision_rules
from waybill.manifest import ComponentManifest, Task, resolve_components
from waybill.manifest.naming import Spelling
from waybill.plan.family import Family, Reading
from waybill.plan.parameter import Merges, Packing, ParameterSpec
from waybill.rules import RuleTable

TOWER = "model.vision_tower"
TASK = Task(
    name="image-text-to-text",
    components={
        "vision_encoder": TOWER,
        "embedding": f"{multimodal.ROOT}.embed_tokens",
        "decoder": multimodal.ROOT,
    },
    roles={"vision_encoder": "vision_encoder", "embedding": "embedding", "decoder": "decoder"},
)
SOURCES = {"vision_encoder": (TOWER, PROJECTOR), **multimodal.SOURCES}
SPELLINGS = (
    *multimodal.SPELLINGS,
    Spelling("vision_tower", TOWER, multimodal.TRANSFORMERS_5),
    Spelling("vision_tower.vision_model", TOWER, multimodal.HUB),
    Spelling(f"{TOWER}.vision_model", TOWER, multimodal.TRANSFORMERS_4),
)
_INNER_TYPES = {"vision_config": "clip_vision_model", "text_config": "llama"}
"""What transformers takes an inner config to be that does not say it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlavaConfig(Composite):
    """The fields that shape a LLaVA."""

    text: ModelConfig
    vision: VisionConfig
    image_token: int
    """The token in whose places the features of pictures are put."""
    feature_layers: tuple[int, ...]
    """The hidden states that are features, side by side: 0 is what the first layer is given, i what layer i made."""
    drops_first: bool
    """Whether the first position, which in CLIP is the class embedding's, is left out of the features."""
    projector_act: str
    projector_bias: bool

    @property
    def image_tokens(self) -> int:
        """Features of one picture."""
        return self.vision.positions - self.drops_first

    @property
    def tower_layers(self) -> int:
        """Layers of the tower that features depend on."""
        return max(self.feature_layers)

    def run_facts(self, hf_config: Mapping[str, Any], generation: Mapping[str, Any]) -> dict[str, Any]:
        """The token that stands for pictures, and how often it stands for one."""
        return {"image_token_id": self.image_token, "image_tokens": self.image_tokens}


def read_llava(raw: Mapping[str, Any]) -> Reading:
    """A config.json of this family."""
    problems: list[WaybillError] = []
    notices: list[str] = []
    where = "config.json"
    fields = Fields(raw, PART_DEFAULTS["llava"], problems, where)
    tower = nested(_typed(raw), "vision_config", problems, where)
    vision = read_vision(tower, problems, f"{where}: vision_config") if tower else None
    before = len(problems)
    text = read_text(_typed(raw), problems, notices)
    sound = len(problems) == before
    token = fields.integer("image_token_index", low=0, alias="image_token_id")
    layers = _feature_layers(fields, vision)
    strategy = choice(fields, "vision_feature_select_strategy", ("default", "full"))
    activation = choice(fields, "projector_hidden_act", ACTIVATIONS)
    bias = fields.boolean("multimodal_projector_bias")
    dtype = read_outer_dtype(raw, fields, notices)
    if text is None or vision is None:
        return Reading(None, problems, notices)
    config = LlavaConfig(
        model_type="llava",
        architectures=["LlavaForConditionalGeneration"],
        dtype=dtype,
        vocab_size=text.vocab_size,
        tie_word_embeddings=text.tie_word_embeddings,
        text=text,
        vision=vision,
        image_token=token,
        feature_layers=layers,
        drops_first=strategy == "default",
        projector_act=activation,
        projector_bias=bias,
    )
    if sound and token >= text.vocab_size:
        _refuse(fields, "image_token_index", f"a token below vocab_size {text.vocab_size}", token)
    if config.image_tokens == 0:
        _refuse(fields, "vision_feature_select_strategy", "full, where a picture has one position", strategy)
    return Reading(config, problems, notices)


def _typed(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The config, whose inner ones say their model type."""
    inner = {
        key: {**raw[key], "model_type": raw[key].get("model_type") or kind}
        for key, kind in _INNER_TYPES.items()
        if isinstance(raw.get(key), Mapping)
    }
    return {**raw, **inner}


def _feature_layers(fields: Fields, vision: VisionConfig | None) -> tuple[int, ...]:
    """Which hidden states are features, counted from the first; the last `vision` has is what its last layer makes."""
    key = "vision_feature_layer"
    stated = fields.raw[key] if fields.stated(key) else fields.defaults[key]
    several = stated if isinstance(stated, list) else [stated]
    last = vision.num_layers if vision is not None else LARGEST_COUNT
    sound = 0 < len(several) <= LARGEST_COUNT and all(type(n) is int and -last - 1 <= n <= last for n in several)
    if not sound:
        _refuse(fields, key, f"an integer or a list of integers, each from {-last - 1} to {last}", stated)
        return (0,)
    return tuple(n + last + 1 if n < 0 else n for n in several)


def _refuse(fields: Fields, key: str, expected: str, found: object) -> None:
    fields.problems.append(
        BadConfig(
            f"{key} cannot be right",
            where=f"{fields.where}: {key}",
            expected=expected,
            found=repr(found)[:120],
            fix="check the field against the model's published config",
        )
    )


def llava_components(hf_config: Mapping[str, Any]) -> ComponentManifest:
    """The tower with its projector, the table of the tokens, and the language model that is given both."""
    aliases, excluded = multimodal.ALIASES, multimodal.EXCLUSIONS
    return resolve_components(TASK, SOURCES, aliases=aliases, excluded_methods=excluded, hf_config=hf_config)


def llava_rules(config: LlavaConfig) -> RuleTable:
    """What of both networks is taken apart, and what features do not need."""
    tower = vision_rules(config.vision, TOWER, config.tower_layers)
    return RuleTable([*tower, *multimodal.language_rules(config.text)])


def llava_parameters(config: LlavaConfig, packings: Mapping[str, Packing], merges: Merges) -> list[ParameterSpec]:
    """Every parameter that is used: the tower's later layers are not."""
    return [
        *vision_parameters(config.vision, TOWER, config.tower_layers, packings),
        *_projector(config, packings),
        *multimodal.language_parameters(config.text, packings, merges),
    ]


def _projector(config: LlavaConfig, packings: Mapping[str, Packing]) -> Iterator[ParameterSpec]:
    features = config.vision.hidden_size * len(config.feature_layers)
    given, made = ("vision hidden_size × feature layers", features), ("hidden_size", config.text.hidden_size)
    yield from linear(f"{PROJECTOR}.linear_1", made, given, packings, bias=config.projector_bias)
    yield from linear(f"{PROJECTOR}.linear_2", made, made, packings, bias=config.projector_bias)


LLAVA = Family(
    name="llava",
    read=read_llava,
    components=llava_components,
    kind_of=multimodal.multimodal_module_kind,
    rules=llava_rules,
    parameters=llava_parameters,
    merges=multimodal.MERGES,
    spellings=SPELLINGS,
    layer_fields={
        f"{multimodal.ROOT}.layers": "num_hidden_layers of text_config",
        f"{TOWER}.encoder.layers": "the count that vision_feature_layer needs",
    },
)
