"""The engine's parameters, declared once and without torch: the planner needs them to plan, the layers to be built.

Shapes follow Hugging Face: a linear weight is [out, in]. Merged members lie in the order in which the layer splits its
output: q, k, v and gate, up.
"""

from __future__ import annotations

from collections.abc import Iterator

from waybill.config import ModelConfig
from waybill.plan.parameter import Kind, ParameterSpec, Part, Shard
from waybill.plan.planner import Target
from waybill.rules import Move, RuleTable

_ATTENTION = "model.layers.{i}.self_attn"
_MLP = "model.layers.{i}.mlp"

ENGINE_RULES = RuleTable(
    (
        *(Move(f"{_ATTENTION}.{{q|k|v}}_proj.{leaf}", f"{_ATTENTION}.qkv_proj.{leaf}") for leaf in ("weight", "bias")),
        *(Move(f"{_MLP}.{{gate|up}}_proj.{leaf}", f"{_MLP}.gate_up_proj.{leaf}") for leaf in ("weight", "bias")),
        Move(_MLP + ".experts.{e}.{gate|up}_proj.weight", f"{_MLP}.experts.gate_up_proj"),
        Move(_MLP + ".experts.{e}.down_proj.weight", f"{_MLP}.experts.down_proj"),
    )
)
"""Hugging Face module names to the engine's: what is merged, what is stacked."""

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def engine_parameters(config: ModelConfig) -> list[ParameterSpec]:
    """Every parameter of the decoder, in the order of the model's state dict."""
    specs = [_table(EMBEDDING, "embedding", config)]
    for layer in range(config.num_layers):
        specs += _layer(f"model.layers.{layer}", layer, config)
    specs.append(_vector("model.norm.weight", config.hidden_size, "hidden_size"))
    specs.append(_table(HEAD, "head", config, tied_to=EMBEDDING if config.tie_word_embeddings else None))
    return specs


TORCH = Target("torch", ENGINE_RULES, engine_parameters)


def _layer(path: str, layer: int, config: ModelConfig) -> Iterator[ParameterSpec]:
    yield _vector(f"{path}.input_layernorm.weight", config.hidden_size, "hidden_size")
    yield from _attention(f"{path}.self_attn", config)
    yield _vector(f"{path}.post_attention_layernorm.weight", config.hidden_size, "hidden_size")
    if config.is_moe_layer(layer):
        yield from _experts(f"{path}.mlp", config)
    else:
        yield from _mlp(f"{path}.mlp", config)


def _attention(path: str, config: ModelConfig) -> Iterator[ParameterSpec]:
    hidden, head_dim = config.hidden_size, config.head_dim
    counts = {"num_attention_heads": config.num_qo_heads, "num_key_value_heads": config.num_kv_heads}
    members = ("num_attention_heads", "num_key_value_heads", "num_key_value_heads")

    def part(field: str, columns: tuple[int, ...]) -> Part:
        heads = counts[field]
        basis = f"{field} {heads} × head_dim {head_dim}" + (f", hidden_size {hidden}" if columns else "")
        return Part((heads * head_dim, *columns), Shard(0, groups=heads), basis)

    yield _spec(f"{path}.qkv_proj.weight", "linear", *(part(field, (hidden,)) for field in members))
    if config.attention_bias:
        yield _spec(f"{path}.qkv_proj.bias", "vector", *(part(field, ()) for field in members))
    basis = f"hidden_size {hidden}, num_attention_heads {config.num_qo_heads} × head_dim {head_dim}"
    yield _spec(f"{path}.o_proj.weight", "linear", Part((hidden, config.num_qo_heads * head_dim), Shard(1), basis))
    if config.attention_output_bias:
        yield _vector(f"{path}.o_proj.bias", hidden, "hidden_size")
    if config.qk_norm:
        yield _vector(f"{path}.q_norm.weight", head_dim, "head_dim")
        yield _vector(f"{path}.k_norm.weight", head_dim, "head_dim")


def _mlp(path: str, config: ModelConfig) -> Iterator[ParameterSpec]:
    hidden, inner = config.hidden_size, config.intermediate_size
    basis = f"intermediate_size {inner}, hidden_size {hidden}"
    up = Part((inner, hidden), Shard(0), basis)
    yield _spec(f"{path}.gate_up_proj.weight", "linear", up, up)
    if config.mlp_bias:
        bias = Part((inner,), Shard(0), f"intermediate_size {inner}")
        yield _spec(f"{path}.gate_up_proj.bias", "vector", bias, bias)
    yield _spec(f"{path}.down_proj.weight", "linear", Part((hidden, inner), Shard(1), basis))
    if config.mlp_bias:
        yield _vector(f"{path}.down_proj.bias", hidden, "hidden_size")


def _experts(path: str, config: ModelConfig) -> Iterator[ParameterSpec]:
    hidden, inner, count = config.hidden_size, config.moe_intermediate_size, config.num_experts
    basis = f"moe_intermediate_size {inner}, hidden_size {hidden}"
    router = Part((count, hidden), None, f"num_experts {count}, hidden_size {hidden}")
    up = Part((inner, hidden), Shard(0), basis)
    yield _spec(f"{path}.gate.weight", "linear", router)
    yield _spec(f"{path}.experts.gate_up_proj", "experts", up, up, stack=count)
    yield _spec(f"{path}.experts.down_proj", "experts", Part((hidden, inner), Shard(1), basis), stack=count)


def _spec(name: str, kind: Kind, *parts: Part, stack: int = 0) -> ParameterSpec:
    return ParameterSpec(name=name, kind=kind, parts=parts, stack=stack)


def _vector(name: str, length: int, field: str) -> ParameterSpec:
    """Norm weights and row-parallel biases: whole on every rank."""
    return _spec(name, "vector", Part((length,), None, f"{field} {length}"))


def _table(name: str, kind: Kind, config: ModelConfig, tied_to: str | None = None) -> ParameterSpec:
    """Embedding and head, padded the same way, so that a tied head can use the embedding's rows."""
    shape = (config.vocab_size, config.hidden_size)
    part = Part(shape, Shard(0, pad=True), f"vocab_size {shape[0]}, hidden_size {shape[1]}")
    return ParameterSpec(name=name, kind=kind, parts=(part,), tied_to=tied_to)
