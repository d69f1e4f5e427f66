"""T5 (arXiv 1910.10683; v1.1 and FLAN have a gated feed-forward): an encoder, and a decoder with cross-attention.

No biases, norms that only scale, scores that are not scaled, and positions that enter as a learned bias on scores,
which the first layer of each stack holds for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from waybill.config.architectures import PART_DEFAULTS
from waybill.config.composite import Composite, choice, first_id
from waybill.config.fields import LARGEST_COUNT, Fields
from waybill.config.model import read_dtype
from waybill.errors import BadConfig, WaybillError
from waybill.families.stack import LayerNames, Stack, norm_parameters, stack_parameters, table
from waybill.manifest import ComponentManifest, Task, resolve_components
from waybill.plan.family import Family, Reading
from waybill.plan.parameter import Merges, Packing, ParameterSpec
from waybill.rules import Drop, RuleTable

SHARED = "shared.weight"
HEAD = "lm_head.weight"
TASK = Task(
    name="text-to-text",
    components={"encoder": "encoder", "decoder": "decoder"},
    roles={"encoder": "encoder", "decoder": "decoder"},
)
SOURCES = {"encoder": ("encoder",), "decoder": ("decoder",)}
ALIASES = {"encoder": {"embed_tokens": "shared"}, "decoder": {"lm_head": "lm_head"}}
FARTHEST = 2048
"""The largest distance with a bucket of its own that a graph has room for; published models have 128."""
_ACTIVATIONS = ("relu", "gelu", "gelu_new", "silu")
_FIELDS = ("d_model", "num_heads", "d_ff")


@dataclass(frozen=True, slots=True, kw_only=True)
class T5Config(Composite):
    """The fields that shape a T5."""

    d_model: int
    d_kv: int
    d_ff: int
    num_layers: int
    num_decoder_layers: int
    num_heads: int
    num_buckets: int
    """Of relative distances, each with a bias for every head."""
    max_distance: int
    """Distances from here on share the last bucket."""
    eps: float
    activation: str
    gated: bool
    scale_logits: bool
    """Whether hidden states are multiplied by d_model ** -0.5 before the head: T5 does, v1.1 does not."""

    @property
    def biases_scores(self) -> bool:
        """Positions are a bias on scores."""
        return True

    @property
    def context_length(self) -> int:
        """No position is the last; this only bounds what a cache may be asked for."""
        return 1 << 16

    @property
    def hidden_size(self) -> int:
        """Of both stacks."""
        return self.d_model

    def run_facts(self, hf_config: Mapping[str, Any], generation: Mapping[str, Any]) -> dict[str, Any]:
        """An answer begins with a token of its own, which is the padding's unless stated.

        Raises:
            BadConfig: it is none of the model's tokens.
        """
        places = {"generation_config.json": generation, "config.json": hf_config}
        start = first_id("decoder_start_token_id", places, self.vocab_size)
        if start is None:
            start = first_id("pad_token_id", {"config.json": hf_config}, self.vocab_size)
        return {"decoder_start_token_id": start or 0}


def read_t5(raw: Mapping[str, Any]) -> Reading:
    """A config.json of this family."""
    problems: list[WaybillError] = []
    notices: list[str] = []
    fields = Fields(raw, PART_DEFAULTS["t5"], problems, "config.json")
    layers = fields.integer("num_layers", high=LARGEST_COUNT)
    form = fields.text("feed_forward_proj")
    gated = form.startswith("gated-")
    activation = "gelu_new" if form == "gated-gelu" else form.removeprefix("gated-")
    choice(Fields({"feed_forward_proj": activation}, {}, problems, "config.json"), "feed_forward_proj", _ACTIVATIONS)
    buckets = fields.integer("relative_attention_num_buckets", low=4, high=LARGEST_COUNT)
    farthest = fields.integer("relative_attention_max_distance", low=4, high=FARTHEST)
    if farthest <= buckets // 2 and not fields.wrong:
        problems.append(
            BadConfig(
                "relative_attention_max_distance cannot be right",
                where="config.json: relative_attention_max_distance",
                expected=f"more than the {buckets // 2} distances that have a bucket of their own",
                found=str(farthest),
                fix="check the field against the model's published config",
            )
        )
    tied = raw.get("tie_word_embeddings") is not False
    config = T5Config(
        model_type="t5",
        architectures=["T5ForConditionalGeneration"],
        dtype=read_dtype(fields, notices),
        vocab_size=fields.integer("vocab_size"),
        tie_word_embeddings=tied,
        d_model=fields.integer("d_model"),
        d_kv=fields.integer("d_kv"),
        d_ff=fields.integer("d_ff"),
        num_layers=layers,
        num_decoder_layers=fields.integer("num_decoder_layers", high=LARGEST_COUNT)
        if fields.stated("num_decoder_layers")
        else layers,
        num_heads=fields.integer("num_heads", high=LARGEST_COUNT),
        num_buckets=buckets,
        max_distance=farthest,
        eps=fields.number("layer_norm_epsilon"),
        activation=activation,
        gated=gated,
        # transformers 5 says it by its own name, and older files by the tie they then had.
        scale_logits=fields.boolean("scale_decoder_outputs") if fields.stated("scale_decoder_outputs") else tied,
    )
    return Reading(config, problems, notices)


def t5_components(hf_config: Mapping[str, Any]) -> ComponentManifest:
    """The encoder owns the table that both stacks look tokens up in; the decoder owns the head."""
    return resolve_components(TASK, SOURCES, aliases=ALIASES, hf_config=hf_config)


def t5_module_kind(module: str) -> str:
    """Which modules are tables."""
    if module == "lm_head":
        return "head"
    if module == "shared" or module.endswith("embed_tokens"):
        return "embedding"
    return "positions" if module.endswith("relative_attention_bias") else "linear"


def t5_stacks(config: T5Config) -> tuple[Stack, Stack]:
    """The encoder's layers and the decoder's."""

    def stack(path: str, layers: int, cross: bool) -> Stack:
        feed_forward = f"layer.{2 if cross else 1}"
        dense = f"{feed_forward}.DenseReluDense"
        return Stack(
            path=path,
            layers=layers,
            hidden=config.d_model,
            heads=config.num_heads,
            head_dim=config.d_kv,
            inner=config.d_ff,
            activation=config.activation,
            eps=config.eps,
            rms=True,
            scale=1.0,
            fields=_FIELDS,
            names=LayerNames(
                attention="layer.0.SelfAttention",
                attention_norm="layer.0.layer_norm",
                projections=("q", "k", "v", "o"),
                cross="layer.1.EncDecAttention" if cross else None,
                cross_norm="layer.1.layer_norm" if cross else None,
                up=(f"{dense}.wi_0", f"{dense}.wi_1") if config.gated else (f"{dense}.wi",),
                down=f"{dense}.wo",
                feed_forward_norm=f"{feed_forward}.layer_norm",
            ),
        )

    return stack("encoder.block", config.num_layers, False), stack("decoder.block", config.num_decoder_layers, True)


def relative_bias_name(stack: Stack) -> str:
    """The parameter that holds a stack's biases, [buckets, heads]."""
    return f"{stack.layer(0)}.{stack.names.attention}.relative_attention_bias.weight"


def t5_parameters(config: T5Config, packings: Mapping[str, Packing], _: Merges) -> list[ParameterSpec]:
    """Every parameter. Old exports store the shared table again under each stack."""
    return list(_parameters(config, packings))


def _parameters(config: T5Config, packings: Mapping[str, Packing]) -> Iterator[ParameterSpec]:
    rows, hidden = ("vocab_size", config.vocab_size), ("d_model", config.d_model)
    yield table(SHARED, rows, hidden, "embedding", packings)
    for stack in t5_stacks(config):
        name = stack.path.partition(".")[0]
        yield table(f"{name}.embed_tokens.weight", rows, hidden, "embedding", packings, tied_to=SHARED)
        buckets = ("relative_attention_num_buckets", config.num_buckets)
        yield table(relative_bias_name(stack), buckets, ("num_heads", config.num_heads), "positions", packings)
        yield from stack_parameters(stack, packings)
        yield from norm_parameters(f"{name}.final_layer_norm", config.d_model, "d_model", centred=False)
    yield table(HEAD, rows, hidden, "head", packings, tied_to=SHARED if config.tie_word_embeddings else None)


T5 = Family(
    name="t5",
    read=read_t5,
    components=t5_components,
    kind_of=t5_module_kind,
    rules=lambda _: RuleTable(
        (
            Drop(
                "decoder.block.{i}.layer.{j}.EncDecAttention.relative_attention_bias.weight",
                "old exports store it; cross-attention has no positions",
            ),
        )
    ),
    parameters=t5_parameters,
    layer_fields={"encoder.block": "num_layers", "decoder.block": "num_decoder_layers"},
)
