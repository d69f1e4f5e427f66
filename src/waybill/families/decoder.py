"""Decoder-only language models: names on disk, components, and every parameter, declared once for all targets.

Llama, Qwen2, Qwen3 and their MoEs store one tensor per projection under the names quantizers speak, so most rules are
silent identities. Shapes follow Hugging Face: a linear weight is [out, in]. Merged members lie in the order in which
the layer splits its output: q, k, v and gate, up. The same decoder inside a larger model has another root.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from waybill.config import ModelConfig, read_model_config
from waybill.config.architectures import GGUF_ARCHITECTURE, architecture_of
from waybill.families.gguf import DIALECT
from waybill.manifest import ComponentManifest, Task, resolve_components
from waybill.plan.family import Family, Reading
from waybill.plan.parameter import AS_ENGINE, Kind, Merges, Packing, ParameterSpec, Part, Shard, mergeable
from waybill.rules import Drop, DropUnder, Move, RuleTable

ROOT = "model"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
TEXT_GENERATION = Task(name="text-generation", components={"decoder": ""}, roles={"decoder": "decoder"})
"""One component, which is the whole model."""
_METHODS = frozenset(("gptq", "awq", "olive", "auto-round", "compressed-tensors"))
_INPUT_MAJOR = _METHODS | {"fp8"}
"""Methods that do not say along which axis they pack a bank that lies [E, K, N] where it is float."""
_RECOMPUTED = "recomputed from the config"


def decoder_components(hf_config: Mapping[str, Any]) -> ComponentManifest:
    """A text model is a package of one component, which owns every weight."""
    architecture = architecture_of(hf_config)
    unknown = {f"{ROOT}.layers.*.mlp.experts": _INPUT_MAJOR} if architecture and architecture.sinks else {}
    excluded = {"decoder": decoder_exclusions() | unknown}
    return resolve_components(TEXT_GENERATION, {"decoder": ("",)}, excluded_methods=excluded, hf_config=hf_config)


def decoder_exclusions(root: str = ROOT) -> dict[str, frozenset[str]]:
    """Routers and the gates of shared experts: no method packs them, whatever metadata says."""
    return {f"{root}.layers.*.mlp.{gate}": _METHODS for gate in ("gate", "router", "shared_expert_gate")}


def decoder_module_kind(module: str) -> str:
    """Which modules are tables or banks: quantizers have switches of their own for them."""
    if module == "lm_head":
        return "head"
    if module.endswith(("embed_tokens", "embed_tokens_per_layer")):
        return "embedding"
    return "experts" if module.endswith((".experts.gate_up_proj", ".experts.down_proj")) else "linear"


def decoder_rules(config: ModelConfig, root: str = ROOT) -> list[Move | Drop | DropUnder]:
    """What of a decoder's stored weights is taken apart, and what is not needed."""
    layer = root + ".layers.{i}"
    after = range(config.num_layers, config.num_layers + config.extra_layers)
    return [
        *(_whole_banks(layer) if config.swiglu else _split_banks(layer)),
        Drop(f"{layer}.self_attn.rotary_emb.inv_freq", _RECOMPUTED),
        Drop(f"{root}.rotary_emb.inv_freq", _RECOMPUTED),
        Drop("rope_freqs.weight", "its factors were read with the config"),
        Drop(f"{layer}.self_attn.masked_bias", "a mask constant of old exports"),
        DropUnder("mtp", "multi-token prediction, not part of the decoder"),
        *(DropUnder(f"{root}.layers.{n}", "multi-token prediction, not part of the decoder") for n in after),
    ]


def _split_banks(layer: str) -> Iterator[Move]:
    """transformers 5 can write a layer's experts as banks: [E, 2I, H] with the gate rows first, and [E, H, I]. GGUF
    keeps gate and up in banks of their own."""
    for bank, member in (("gate_up", "{gate|up}"), ("down", "down"), ("gate", "gate"), ("up", "up")):
        yield Move(f"{layer}.mlp.experts.{bank}_proj", f"{layer}.mlp.experts.{{e}}.{member}_proj.weight")


def _whole_banks(layer: str) -> Iterator[Move]:
    """Banks that are stored in no other form: float [E, H, 2I] and [E, I, H], where gate and up alternate."""
    for name in ("gate_up_proj", "down_proj"):
        bank = f"{layer}.mlp.experts.{name}"
        yield Move(bank, f"{bank}.weight", turned=True)
        yield Move(f"{bank}_bias", f"{bank}.bias")


def decoder_merges(root: str = ROOT) -> list[Move]:
    """What of a decoder's weights targets merge or stack."""
    attention, mlp = root + ".layers.{i}.self_attn", root + ".layers.{i}.mlp"
    leaves = ("weight", "bias")
    return [
        *(Move(f"{attention}.{{q|k|v}}_proj.{leaf}", f"{attention}.qkv_proj.{leaf}") for leaf in leaves),
        *(Move(f"{mlp}.{{gate|up}}_proj.{leaf}", f"{mlp}.gate_up_proj.{leaf}") for leaf in leaves),
        Move(f"{mlp}.shared_expert.{{gate|up}}_proj.weight", f"{mlp}.shared_expert.gate_up_proj.weight"),
        Move(mlp + ".experts.{e}.{gate|up}_proj.weight", f"{mlp}.experts.gate_up_proj"),
        Move(mlp + ".experts.{e}.down_proj.weight", f"{mlp}.experts.down_proj"),
    ]


DECODER_MERGES = RuleTable(decoder_merges())


def decoder_parameters(
    config: ModelConfig,
    packings: Mapping[str, Packing] = MappingProxyType({}),
    merges: Merges = AS_ENGINE,
    root: str = ROOT,
) -> list[ParameterSpec]:
    """Every parameter of the decoder, in the order of the model's state dict.

    Args:
        config: the model.
        packings: how each packed weight lies on disk, by module weight name; the others are float. Projections that
            are packed differently are not merged.
        merges: what the target wants merged.
        root: the path of the decoder without its head.
    """
    return list(_Blueprint(config, packings, merges, root).parameters())


@dataclass(frozen=True, slots=True)
class _Blueprint:
    config: ModelConfig
    packings: Mapping[str, Packing]
    merges: Merges
    root: str

    def parameters(self) -> Iterator[ParameterSpec]:
        config, root = self.config, self.root
        embedding = f"{root}.embed_tokens.weight"
        yield self._table(embedding, "embedding")
        for layer in range(config.num_layers):
            path = f"{root}.layers.{layer}"
            yield self._vector(f"{path}.input_layernorm.weight", config.hidden_size, "hidden_size")
            yield from self._attention(f"{path}.self_attn")
            yield self._vector(f"{path}.post_attention_layernorm.weight", config.hidden_size, "hidden_size")
            yield from self._feed_forward(f"{path}.mlp", moe=config.is_moe_layer(layer))
            if config.hidden_size_per_layer_input:
                yield from self._per_layer_block(path)
        yield self._vector(f"{root}.norm.weight", config.hidden_size, "hidden_size")
        if config.hidden_size_per_layer_input:
            yield from self._per_layer_inputs(root)
        yield self._table(HEAD, "head", tied_to=embedding if config.tie_word_embeddings else None)

    def _attention(self, path: str) -> Iterator[ParameterSpec]:
        config = self.config
        hidden, head_dim = config.hidden_size, config.head_dim
        counts = {"num_attention_heads": config.num_qo_heads, "num_key_value_heads": config.num_kv_heads}
        fields = {"q": "num_attention_heads", "k": "num_key_value_heads", "v": "num_key_value_heads"}

        def part(field: str, columns: tuple[int, ...]) -> Part:
            heads = counts[field]
            basis = f"{field} {heads} × head_dim {head_dim}" + (f", hidden_size {hidden}" if columns else "")
            return Part((heads * head_dim, *columns), Shard(0, groups=heads), basis)

        weights = {f"{path}.{member}_proj": part(field, (hidden,)) for member, field in fields.items()}
        biases = {f"{path}.{member}_proj": part(field, ()) for member, field in fields.items()}
        wanted = self.merges.qkv and (self.merges.normed_qkv or not config.qk_norm)
        yield from self._merged(f"{path}.qkv_proj", weights, biases if config.attention_bias else None, wanted)
        basis = f"hidden_size {hidden}, num_attention_heads {config.num_qo_heads} × head_dim {head_dim}"
        yield self._linear(f"{path}.o_proj", Part((hidden, config.num_qo_heads * head_dim), Shard(1), basis))
        if config.sinks:
            heads = config.num_qo_heads
            sinks = Part((heads,), Shard(0, groups=heads), f"num_attention_heads {heads}")
            yield ParameterSpec(name=f"{path}.sinks", kind="vector", parts=(sinks,))
        if config.attention_output_bias:
            yield self._vector(f"{path}.o_proj.bias", hidden, "hidden_size")
        if config.qk_norm:
            yield self._vector(f"{path}.q_norm.weight", head_dim, "head_dim")
            yield self._vector(f"{path}.k_norm.weight", head_dim, "head_dim")

    def _feed_forward(self, path: str, *, moe: bool) -> Iterator[ParameterSpec]:
        config = self.config
        if not moe:
            yield from self._mlp(path, "intermediate_size", config.intermediate_size)
            return
        yield from self._whole_banks(path) if config.swiglu else self._experts(path)
        if inner := config.shared_expert_intermediate_size:
            yield from self._mlp(f"{path}.shared_expert", "shared_expert_intermediate_size", inner)
            gate = Part((1, config.hidden_size), None, f"one gate, hidden_size {config.hidden_size}")
            yield ParameterSpec(name=f"{path}.shared_expert_gate.weight", kind="router", parts=(gate,))

    def _mlp(self, path: str, field: str, inner: int) -> Iterator[ParameterSpec]:
        hidden = self.config.hidden_size
        basis = f"{field} {inner}, hidden_size {hidden}"
        names = [f"{path}.{member}_proj" for member in ("gate", "up")]
        weights = dict.fromkeys(names, Part((inner, hidden), Shard(0), basis))
        biases = dict.fromkeys(names, Part((inner,), Shard(0), f"{field} {inner}"))
        wanted = self.merges.gate_up
        yield from self._merged(f"{path}.gate_up_proj", weights, biases if self.config.mlp_bias else None, wanted)
        yield self._linear(f"{path}.down_proj", Part((hidden, inner), Shard(1), basis))
        if self.config.mlp_bias:
            yield self._vector(f"{path}.down_proj.bias", hidden, "hidden_size")

    def _experts(self, path: str) -> Iterator[ParameterSpec]:
        config = self.config
        hidden, inner, count = config.hidden_size, config.moe_intermediate_size, config.num_experts
        basis = f"moe_intermediate_size {inner}, hidden_size {hidden}"
        router = Part((count, hidden), None, f"num_experts {count}, hidden_size {hidden}")
        yield ParameterSpec(name=f"{path}.gate.weight", kind="router", parts=(router,))
        up = Part((inner, hidden), Shard(0), basis)
        down = Part((hidden, inner), Shard(1), basis)
        for name, parts, members in (("gate_up_proj", (up, up), "gate|up"), ("down_proj", (down,), "down")):
            names = [f"{path}.experts.{e}.{m}_proj.weight" for e in range(count) for m in members.split("|")]
            packing = self._common(names)
            yield ParameterSpec(
                name=f"{path}.experts.{name}",
                kind="experts",
                parts=parts,
                stack=count,
                packing=packing,
                interleave=self.merges.interleave and len(parts) > 1,
            )

    def _whole_banks(self, path: str) -> Iterator[ParameterSpec]:
        """A router and experts with biases. Gate and up rows alternate, and a pair moves together."""
        config = self.config
        hidden, inner, count = config.hidden_size, config.moe_intermediate_size, config.num_experts
        experts = f"num_local_experts {count}"
        router = Part((count, hidden), None, f"{experts}, hidden_size {hidden}")
        yield ParameterSpec(name=f"{path}.router.weight", kind="router", parts=(router,))
        yield self._vector(f"{path}.router.bias", count, "num_local_experts")
        basis = f"{experts}, intermediate_size {inner}, hidden_size {hidden}"
        pairs = Shard(1, groups=inner)
        banks = {
            "gate_up_proj": (Part((count, 2 * inner, hidden), pairs, basis), Part((count, 2 * inner), pairs, basis)),
            "down_proj": (Part((count, hidden, inner), Shard(2), basis), Part((count, hidden), None, basis)),
        }
        for name, (weight, bias) in banks.items():
            bank = f"{path}.experts.{name}"
            packing = self.packings.get(f"{bank}.weight")
            yield ParameterSpec(name=f"{bank}.weight", kind="experts", parts=(weight,), axis=1, packing=packing)
            yield ParameterSpec(name=f"{bank}.bias", kind="vector", parts=(bias,), axis=1)

    def _per_layer_inputs(self, root: str) -> Iterator[ParameterSpec]:
        """What the inputs of all layers are made from: looked up by tokens, and projected from their embeddings."""
        config, field = self.config, "hidden_size_per_layer_input"
        size, rows = config.hidden_size_per_layer_input, config.vocab_size_per_layer_input
        width = config.num_layers * size
        across = f"num_hidden_layers {config.num_layers} × {field} {size}"
        table = Part((rows, width), None, f"vocab_size_per_layer_input {rows}, {across}")
        name = f"{root}.embed_tokens_per_layer.weight"
        yield ParameterSpec(name=name, kind="embedding", parts=(table,), packing=self.packings.get(name))
        projection = Part((width, config.hidden_size), None, f"{across}, hidden_size {config.hidden_size}")
        yield self._linear(f"{root}.per_layer_model_projection", projection)
        yield self._vector(f"{root}.per_layer_projection_norm.weight", size, field)

    def _per_layer_block(self, path: str) -> Iterator[ParameterSpec]:
        """What one layer does with its input."""
        hidden, size = self.config.hidden_size, self.config.hidden_size_per_layer_input
        basis = f"hidden_size_per_layer_input {size}, hidden_size {hidden}"
        yield self._linear(f"{path}.per_layer_input_gate", Part((size, hidden), None, basis))
        yield self._linear(f"{path}.per_layer_projection", Part((hidden, size), None, basis))
        yield self._vector(f"{path}.post_per_layer_input_norm.weight", hidden, "hidden_size")

    def _merged(
        self, path: str, weights: Mapping[str, Part], biases: Mapping[str, Part] | None, wanted: bool
    ) -> Iterator[ParameterSpec]:
        """One parameter of all members when that is wanted and they are float or packed alike, else each by itself."""
        alike = mergeable([self.packings.get(f"{name}.weight") for name in weights], list(weights.values()))
        if wanted and alike:
            packing = self._common([f"{name}.weight" for name in weights])
            yield ParameterSpec(name=f"{path}.weight", kind="linear", parts=tuple(weights.values()), packing=packing)
            if biases:
                yield ParameterSpec(name=f"{path}.bias", kind="vector", parts=tuple(biases.values()))
            return
        for name, part in weights.items():
            yield replace(self._linear(name, part), apart=wanted)
            if biases:
                yield ParameterSpec(name=f"{name}.bias", kind="vector", parts=(biases[name],))

    def _common(self, names: list[str]) -> Packing | None:
        """The packing of a parameter made of several weights.

        A weight without one may be missing rather than float, so the first that has one speaks for all.
        """
        alike = [packing for name in names if (packing := self.packings.get(name)) is not None]
        return alike[0].joined(alike[1:]) if alike else None

    def _linear(self, path: str, part: Part) -> ParameterSpec:
        name = f"{path}.weight"
        return ParameterSpec(name=name, kind="linear", parts=(part,), packing=self.packings.get(name))

    def _vector(self, name: str, length: int, field: str) -> ParameterSpec:
        """Norm weights and row-parallel biases: whole on every rank."""
        return ParameterSpec(name=name, kind="vector", parts=(Part((length,), None, f"{field} {length}"),))

    def _table(self, name: str, kind: Kind, tied_to: str | None = None) -> ParameterSpec:
        """Embedding and head, padded the same way, so that a tied head can use the embedding's rows."""
        shape = (self.config.vocab_size, self.config.hidden_size)
        part = Part(shape, Shard(0, pad=True), f"vocab_size {shape[0]}, hidden_size {shape[1]}")
        return ParameterSpec(name=name, kind=kind, parts=(part,), tied_to=tied_to, packing=self.packings.get(name))


def _read(hf_config: Mapping[str, Any]) -> Reading:
    where = "GGUF metadata" if GGUF_ARCHITECTURE in hf_config else "config.json"
    return Reading(*read_model_config(hf_config, where))


DECODER = Family(
    name="decoder",
    read=_read,
    components=decoder_components,
    kind_of=decoder_module_kind,
    rules=lambda config: RuleTable(decoder_rules(config)),
    parameters=decoder_parameters,
    merges=DECODER_MERGES,
    gguf=DIALECT,
    layer_fields={"model.layers": "num_hidden_layers"},
)
