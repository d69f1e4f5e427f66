"""ModelConfig: the fields a decoder needs, from any of the shapes config.json comes in."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from waybill.config.architectures import (
    ARCHITECTURES,
    BY_GGUF_NAME,
    GGUF_ARCHITECTURE,
    GGUF_DEFAULTS,
    KNOWN,
    Architecture,
    architecture_of,
    class_name,
)
from waybill.config.fields import LARGEST_COUNT, Fields
from waybill.config.rope import RotaryConfig, read_rotary
from waybill.config.sinks import ClampedSwiGLU, read_swiglu, read_windows
from waybill.errors import (
    BadConfig,
    Refused,
    UnsupportedArchitecture,
    UnsupportedFeature,
    WaybillError,
)

_ENDING = "ForCausalLM"
_WORTH_A_LINE = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "moe_intermediate_size", "shared_expert_intermediate_size", "num_experts_per_tok", "norm_topk_prob",
)  # fmt: skip
"""Fields whose class default, when config.json omits them, is easily not what the model was trained with."""
_SHAPING = {key for row in ARCHITECTURES.values() for key in row.defaults} | {
    "num_key_value_heads", "head_dim", "num_local_experts", "rope_scaling", "rope_parameters", "layer_types",
    "quantization_config", "hidden_size_per_layer_input", "vocab_size_per_layer_input",
}  # fmt: skip
"""Fields that a nested and an outer config may not state differently without a word."""
DTYPE_TAGS = {
    "float32": "F32", "f32": "F32", "fp32": "F32", "float": "F32",
    "float16": "F16", "f16": "F16", "fp16": "F16", "half": "F16",
    "bfloat16": "BF16", "bf16": "BF16",
}  # fmt: skip
"""Spellings of the float dtypes a model can run in, and the safetensors tag of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The fields of a Hugging Face config that shape the model, each with one meaning."""

    num_layers: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    intermediate_size: int
    rms_norm_eps: float
    rotary_config: RotaryConfig
    hidden_act: str
    tie_word_embeddings: bool
    attention_bias: bool
    model_type: str
    architectures: list[str]
    dtype: str | None = None
    """The safetensors tag of the dtype config.json states, if it does."""
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    """Of the expert that every token goes to beside those its router picks; 0 where there is none."""
    norm_topk_prob: bool = False
    mlp_only_layers: tuple[int, ...] = ()
    decoder_sparse_step: int = 1
    extra_layers: int = 0
    """Multi-token-prediction layers stored after the last decoder layer (num_nextn_predict_layers)."""
    hidden_size_per_layer_input: int = 0
    """Elements of the input that every layer is given for each token beside its states; 0 where there is none."""
    vocab_size_per_layer_input: int = 0
    """Rows of the table those inputs are looked up in: one for every token at least; 0 where there is none."""
    sinks: bool = False
    """Whether every query head has a logit that takes probability and gives no value."""
    windows: tuple[int, ...] = ()
    """Positions each layer attends to, the query's own among them, 0 for all; empty where no layer has a window."""
    swiglu: ClampedSwiGLU | None = None
    """Of experts that have biases, and whose gate and up rows alternate; None where experts are plain."""

    @property
    def text(self) -> ModelConfig:
        """The language model, which is all of it."""
        return self

    @property
    def context_length(self) -> int:
        """Positions the model was made for, prompt and answer together."""
        return self.rotary_config.max_position

    def run_facts(self, _hf_config: Mapping[str, Any], _generation: Mapping[str, Any]) -> dict[str, Any]:
        """What running the model takes besides its graph: nothing."""
        return {}

    @property
    def is_moe(self) -> bool:
        """Whether any layer routes to experts."""
        return self.num_experts > 0

    def is_moe_layer(self, layer: int) -> bool:
        """Whether this layer's feed-forward network is a bank of experts."""
        return self.is_moe and layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0

    def window(self, layer: int) -> int:
        """Positions the layer attends to, or 0: all."""
        return self.windows[layer] if self.windows else 0

    def kv_cache_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of keys and values one position adds over all layers, before any split across ranks."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes

    def parallel_obstacles(self, tp: int) -> list[str]:
        """Why the model cannot be cut into `tp` ranks; empty when it can. Vocabulary never is one: it pads."""
        return self._obstacles(tp, self._has_dense_layers())

    def _has_dense_layers(self) -> bool:
        return not self.is_moe or any(not self.is_moe_layer(layer) for layer in range(self.num_layers))

    def _obstacles(self, tp: int, dense: bool) -> list[str]:
        sizes = {"num_attention_heads": self.num_qo_heads}
        if dense:
            sizes["intermediate_size"] = self.intermediate_size
        if self.is_moe:
            sizes["moe_intermediate_size"] = self.moe_intermediate_size
            sizes["shared_expert_intermediate_size"] = self.shared_expert_intermediate_size  # 0 divides
        obstacles = [f"{name} {size} is not divisible by {tp}" for name, size in sizes.items() if size % tp]
        if self.num_kv_heads % tp and tp % self.num_kv_heads:
            obstacles.append(f"num_key_value_heads {self.num_kv_heads} neither divides {tp} nor is divided by it")
        return obstacles

    def legal_tp_sizes(self) -> tuple[int, ...]:
        """Every number of ranks this model can be cut into."""
        dense = self._has_dense_layers()
        return tuple(tp for tp in range(1, self.num_qo_heads + 1) if not self._obstacles(tp, dense))

    @classmethod
    def from_hf(cls, config: Any) -> ModelConfig:
        """From a transformers config object, or the dict of a config.json.

        Raises:
            Refused: with every missing, wrong, contradictory or unsupported field.
        """
        raw = config if isinstance(config, Mapping) else _as_dict(config)
        model, problems, notices = read_model_config(raw)
        if model is None or problems:
            raise Refused(problems)
        for notice in notices:
            warnings.warn(notice, stacklevel=2)
        return model


def _as_dict(config: Any) -> dict[str, Any]:
    return dict(config.to_dict()) if hasattr(config, "to_dict") else dict(vars(config))


def read_model_config(
    config: Mapping[str, Any], where: str = "config.json"
) -> tuple[ModelConfig | None, list[WaybillError], list[str]]:
    """The config, every problem, and what is worth a line. The config is None when the architecture is unknown."""
    problems: list[WaybillError] = []
    notices: list[str] = []
    raw = _text_config(config, notices, where)
    architecture = _architecture(raw, where, problems)
    if architecture is None:
        return None, problems, notices
    defaults = architecture.defaults
    if GGUF_ARCHITECTURE in raw:
        defaults = {key: value for key, value in defaults.items() if key in GGUF_DEFAULTS}
    fields = Fields(raw, defaults, problems, where)
    notices += [
        f"{where} states no {key}; the class default {defaults[key]} is used"
        for key in _WORTH_A_LINE
        if key in defaults and not fields.stated(key)
    ]
    model = _build(fields, architecture, notices)
    _refuse_features(model, fields, architecture)
    return model, problems, notices


def _text_config(config: Mapping[str, Any], notices: list[str], where: str) -> dict[str, Any]:
    """Flatten a nested text_config: its values win, and a disagreement with the outer level is said."""
    nested = config.get("text_config")
    if not isinstance(nested, Mapping):
        return dict(config)
    outer = {k: v for k, v in config.items() if k != "text_config" and v is not None}
    inner = {k: v for k, v in nested.items() if v is not None}
    for key in sorted(_SHAPING & inner.keys() & outer.keys()):
        if inner[key] != outer[key]:
            notices.append(
                f"{where}: text_config.{key} is {inner[key]!r}, top level {outer[key]!r}; text_config is followed"[:300]
            )
    return outer | inner | {"architectures": config.get("architectures")}


def _architecture(raw: Mapping[str, Any], where: str, problems: list[WaybillError]) -> Architecture | None:
    if GGUF_ARCHITECTURE in raw:
        return _gguf_architecture(str(raw[GGUF_ARCHITECTURE]), where, problems)
    if (row := architecture_of(raw)) is not None:
        return row
    name = class_name(raw)
    # Stems only: every name ends alike, and a shared ending is no likeness.
    stems = {known.removesuffix(_ENDING): known for known in KNOWN}
    near = get_close_matches(str(name).removesuffix(_ENDING), stems, n=1, cutoff=0.75)
    problems.append(
        UnsupportedArchitecture(
            "unknown architecture",
            where=f"{where}: architectures",
            expected=" | ".join(KNOWN),
            found=f"{name or 'none stated'} (model_type {raw.get('model_type')!r})"[:160],
            fix=f"did the config mean {stems[near[0]]}?" if near else "use a checkpoint of a supported architecture",
        )
    )
    return None


def _gguf_architecture(name: str, where: str, problems: list[WaybillError]) -> Architecture | None:
    if name not in BY_GGUF_NAME:
        problems.append(
            UnsupportedArchitecture(
                "unknown architecture",
                where=f"{where}: {GGUF_ARCHITECTURE}",
                expected=" | ".join(BY_GGUF_NAME),
                found=repr(name)[:160] if name else "none stated",
                fix="use the safetensors checkpoint if its architecture is supported, or a file of a listed one",
            )
        )
    return BY_GGUF_NAME.get(name)


def _build(fields: Fields, architecture: Architecture, notices: list[str]) -> ModelConfig:
    heads = fields.integer("num_attention_heads", high=LARGEST_COUNT)
    hidden = fields.integer("hidden_size")
    # An explicit head_dim wins; otherwise the class default; otherwise the heads share the hidden size.
    has_head_dim = fields.stated("head_dim") or "head_dim" in fields.defaults
    head_dim = fields.integer("head_dim") if has_head_dim else max(hidden // heads, 1)
    has_kv_heads = fields.stated("num_key_value_heads") or "num_key_value_heads" in fields.defaults
    config_bias = "attention_bias" in architecture.defaults and fields.boolean("attention_bias")
    # A field for q, k and v alone, or the architecture's own answer, goes before the one that speaks of all four.
    qkv_bias = fields.boolean("qkv_bias") if "qkv_bias" in architecture.defaults else architecture.qkv_bias
    moe, sinks = architecture.moe, architecture.sinks
    sparse = "decoder_sparse_step" in architecture.defaults
    layers = fields.integer("num_hidden_layers", high=LARGEST_COUNT)
    inner = fields.integer("intermediate_size")
    shared = "shared_expert_intermediate_size"
    vocab_size = fields.integer("vocab_size")
    per_layer_size, per_layer_rows = _per_layer_table(fields, vocab_size)
    return ModelConfig(
        num_layers=layers,
        num_qo_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", high=LARGEST_COUNT) if has_kv_heads else heads,
        head_dim=head_dim,
        hidden_size=hidden,
        vocab_size=vocab_size,
        intermediate_size=inner,
        rms_norm_eps=fields.number("rms_norm_eps"),
        rotary_config=read_rotary(fields, head_dim, notices),
        hidden_act=fields.text("hidden_act"),
        tie_word_embeddings=fields.boolean("tie_word_embeddings") or _tied_by_quantizer(fields.raw),
        attention_bias=config_bias if qkv_bias is None else qkv_bias,
        model_type=architecture.model_type,
        architectures=[architecture.name],
        dtype=read_dtype(fields, notices),
        attention_output_bias=config_bias,
        mlp_bias=architecture.mlp_bias and fields.boolean("mlp_bias"),
        qk_norm=architecture.qk_norm,
        num_experts=fields.integer("num_experts", low=0, high=LARGEST_COUNT, alias="num_local_experts") if moe else 0,
        num_experts_per_tok=fields.integer("num_experts_per_tok", high=LARGEST_COUNT) if moe else 0,
        moe_intermediate_size=inner if sinks else fields.integer("moe_intermediate_size") if moe else 0,
        shared_expert_intermediate_size=fields.integer(shared) if shared in architecture.defaults else 0,
        # A softmax over the chosen logits is the one over all of them, renormalized.
        norm_topk_prob=sinks or (moe and fields.boolean("norm_topk_prob")),
        mlp_only_layers=fields.integers("mlp_only_layers") if sparse else (),
        decoder_sparse_step=fields.integer("decoder_sparse_step") if sparse else 1,
        extra_layers=fields.integer("num_nextn_predict_layers", low=0, high=LARGEST_COUNT)
        if fields.stated("num_nextn_predict_layers")
        else 0,
        hidden_size_per_layer_input=per_layer_size,
        vocab_size_per_layer_input=per_layer_rows,
        sinks=sinks,
        windows=read_windows(fields, layers) if sinks else (),
        swiglu=read_swiglu(fields) if sinks else None,
    )


def _per_layer_table(fields: Fields, vocab_size: int) -> tuple[int, int]:
    """Elements of a layer's own input, and rows of the table of such inputs; (0, 0) where there are none.

    A table that has no row for some tokens is refused: no row stands for another.
    """
    width, rows = "hidden_size_per_layer_input", "vocab_size_per_layer_input"
    size = fields.integer(width, low=0) if fields.stated(width) else 0
    if size == 0:
        return 0, 0
    count = fields.integer(rows) if fields.stated(rows) else vocab_size
    if count < vocab_size and not fields.wrong & {rows, "vocab_size"}:
        fields.problems.append(
            BadConfig(
                "some tokens have no per-layer input",
                where=f"{fields.where}: {rows}",
                expected=f"at least vocab_size {vocab_size}: a row for every token",
                found=str(count),
                fix=f"state the number of rows the table is stored with; tokens from {count} on are not clipped",
            )
        )
    return size, count


def _tied_by_quantizer(raw: Mapping[str, Any]) -> bool:
    """Olive ties the packed table in its own metadata and unsets the flag at the top."""
    block = raw.get("quantization_config")
    return isinstance(block, Mapping) and block.get("tie_word_embeddings") is True


def read_dtype(fields: Fields, notices: list[str]) -> str | None:
    """The safetensors tag of the dtype a config states, if it does."""
    stated = {key: str(fields.raw[key]) for key in ("dtype", "torch_dtype") if fields.stated(key)}
    tags = {key: DTYPE_TAGS.get(name.removeprefix("torch.")) for key, name in stated.items()}
    if len(set(tags.values())) > 1 or None in tags.values():
        said = ", ".join(f"{key} {name}" for key, name in stated.items())
        notices.append(f"{fields.where} states {said}; {next(filter(None, tags.values()), 'the most common')} is used")
    return next(filter(None, tags.values()), None)


def _refuse_features(model: ModelConfig, fields: Fields, architecture: Architecture) -> None:
    def refuse(kind: type[WaybillError], key: str, expected: str, found: str) -> None:
        fields.problems.append(
            kind(
                f"{key} {found} is not supported" if kind is UnsupportedFeature else f"{key} cannot be right",
                where=f"{fields.where}: {key}",
                expected=expected,
                found=found,
                fix="check the field against the model's published config",
            )
        )

    wrong = fields.wrong
    if model.hidden_act != "silu" and "hidden_act" not in wrong:
        refuse(UnsupportedFeature, "hidden_act", "silu", repr(model.hidden_act))
    if model.num_qo_heads % model.num_kv_heads and not wrong & {"num_attention_heads", "num_key_value_heads"}:
        found = f"{model.num_qo_heads} query heads, {model.num_kv_heads} key-value heads"
        refuse(BadConfig, "num_key_value_heads", "a divisor of num_attention_heads", found)
    if model.head_dim % 2 and not wrong & {"head_dim", "hidden_size", "num_attention_heads"}:
        refuse(BadConfig, "head_dim", "an even number", str(model.head_dim))
    if 0 < model.num_experts < model.num_experts_per_tok and not wrong & {"num_experts", "num_experts_per_tok"}:
        found = f"{model.num_experts_per_tok} of {model.num_experts} experts"
        refuse(BadConfig, "num_experts_per_tok", "at most num_experts", found)
    if architecture.sliding_window and (key := _slides(fields, 0 if architecture.moe else model.num_layers)):
        found = str(fields.raw.get(key, "of 4096, the class default,"))
        refuse(UnsupportedFeature, key, "full attention in every layer", found[:160])


def _slides(fields: Fields, full_layers: int) -> str | None:
    """The field that gives some layer a window; the first max_window_layers have none, where there are that many."""
    kinds = fields.raw.get("layer_types")
    if isinstance(kinds, list):
        return "layer_types" if any(kind != "full_attention" for kind in kinds) else None
    # Omitted, the window is the class default of 4096; null says there is none.
    if not fields.boolean("use_sliding_window") or fields.raw.get("sliding_window", 4096) is None:
        return None
    return "sliding_window" if full_layers == 0 or fields.integer("max_window_layers", low=0) < full_layers else None
