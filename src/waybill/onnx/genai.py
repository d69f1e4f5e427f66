"""genai_config.json: what a runtime must know of a package. A decoder's runs in ONNX Runtime's generation library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from waybill.checkpoint import Checkpoint
from waybill.config.composite import Config
from waybill.onnx.component import Component
from waybill.onnx.folder import SECTIONS
from waybill.plan import Plan
from waybill.text.tokenizer import stop_tokens

SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty")
"""Fields of generation_config.json that mean the same there."""


def genai_config(plan: Plan, components: Mapping[str, Component], ep: str) -> dict[str, Any]:
    """The smallest file the library accepts, and what runtimes otherwise would have to guess.

    Token ids come from generation_config.json first. Several stop tokens stay a list; pad is one.
    """
    config, generation = plan.require_clean(), plan.checkpoint.generation_config
    sections = {SECTIONS[component.descriptor.role]: component for component in components.values()}
    return {
        "model": {
            "type": plan.family,
            **model_facts(config, plan.checkpoint),
            **{
                name: {"filename": component.file, **_names(component)}
                for name, component in sections.items()
                if name != "decoder"
            },
            "decoder": _decoder(sections["decoder"], config.hidden_size, ep),
        },
        "search": {
            "max_length": config.context_length,
            "past_present_share_buffer": True,
            **{name: generation[name] for name in SAMPLING if generation.get(name) is not None},
        },
    }


def model_facts(config: Config, checkpoint: Checkpoint) -> dict[str, Any]:
    """What is the model's, however it is exported: its tokens, and how many positions it has.

    Raises:
        BadConfig: a token is stated in a way that means nothing.
    """
    hf_config, generation = checkpoint.config, checkpoint.generation_config
    outer = {**hf_config, **{k: v for k, v in _text(hf_config).items() if hf_config.get(k) is None}}
    stops = sorted(stop_tokens(generation, outer))
    begin = _first_id(generation.get("bos_token_id"), outer.get("bos_token_id"))
    pad = _first_id(generation.get("pad_token_id"), outer.get("pad_token_id"), *stops)
    ids: dict[str, Any] = {"bos_token_id": begin, "eos_token_id": stops[0] if len(stops) == 1 else stops or None}
    ids["pad_token_id"] = pad if pad is not None else 0
    return {
        "vocab_size": config.vocab_size,
        "context_length": config.context_length,
        **{name: value for name, value in ids.items() if value is not None},
        **config.run_facts(hf_config, generation),
    }


def _text(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = hf_config.get("text_config")
    return inner if isinstance(inner, Mapping) else {}


def _decoder(component: Component, hidden: int, ep: str) -> dict[str, Any]:
    """Its sizes are read off the graph's own caches."""
    graph = component.graph
    heads = {n.attributes["num_heads"].as_int() for n in graph.nodes if n.op_type == "GroupQueryAttention"}
    caches = [value for value in graph.inputs if (value.name or "").startswith("past_key_values.")]
    _, kv_heads, _, head_dim = caches[0].shape or (0, 0, 0, 0)
    providers: list[dict[str, Any]] = [] if ep == "cpu" else [{ep: {}}]
    inputs = [value.name or "" for value in graph.inputs]
    return {
        "filename": component.file,
        "hidden_size": hidden,
        "head_size": head_dim,
        "num_attention_heads": max(heads),
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": len(caches) // 2,
        "session_options": {"provider_options": providers},
        "inputs": {
            **{name: name for name in inputs if "." not in name},
            "past_key_names": "past_key_values.%d.key",
            "past_value_names": "past_key_values.%d.value",
        },
        "outputs": {
            "logits": "logits",
            "present_key_names": "present.%d.key",
            "present_value_names": "present.%d.value",
        },
    }


def _names(component: Component) -> dict[str, Any]:
    """Inputs and outputs of another graph, each under its own name."""
    graph = component.graph
    return {
        "inputs": {value.name: value.name for value in graph.inputs},
        "outputs": {value.name: value.name for value in graph.outputs},
    }


def _first_id(*stated: Any) -> int | None:
    """The first that is a token id; of a list, its first."""
    for value in stated:
        first = value[0] if isinstance(value, list) and value else value
        if type(first) is int and first >= 0:
            return first
    return None
