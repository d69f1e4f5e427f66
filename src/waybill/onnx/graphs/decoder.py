"""The decoder as a graph: constructed from the config and the parameters' declarations, not traced.

Names of inputs and outputs are those of ONNX Runtime's generation library. B requests, S new positions, P past ones, T
in all; key and value buffers may be longer than P, and present may be the same memory as past.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from waybill.config import ModelConfig
from waybill.families.decoder import HEAD, ROOT
from waybill.onnx.graph import INT32, Graph
from waybill.onnx.graphs.workbench import Workbench
from waybill.onnx.matrix import Matrices
from waybill.onnx.parts.activation import activate
from waybill.onnx.parts.attention import attend_cached
from waybill.onnx.parts.moe import gated, routed
from waybill.onnx.parts.norm import rms_norm, rms_norm_of_sum
from waybill.onnx.parts.per_layer import given_to_layer, per_layer_inputs
from waybill.onnx.parts.positions import last_positions, pick, request_lengths, rotary_tables
from waybill.weights.dtypes import NUMPY_DTYPES


def decoder_graphs(config: ModelConfig, bench: Workbench) -> dict[str, Graph]:
    """The only graph of a language model."""
    return {"decoder": build_decoder(config, bench)}


def build_decoder(config: ModelConfig, bench: Workbench, *, root: str = ROOT, embeds: bool = False) -> Graph:
    """The whole graph; its parameters have names and shapes, and no bytes yet.

    Args:
        config: the model.
        bench: what graphs are made with.
        root: the path of the decoder without its head.
        embeds: whether it is given embeddings, [B, S, H], instead of tokens.

    Raises:
        ValueError: it is given embeddings, and its layers inputs that are looked up by tokens; no such config is read.
    """
    if embeds and config.hidden_size_per_layer_input:
        raise ValueError("per-layer inputs are looked up by tokens, and the graph is given embeddings")
    return _Decoder(config, bench, bench.matrices(), root).build(embeds)


@dataclass(slots=True)
class _Decoder:
    config: ModelConfig
    bench: Workbench
    matrices: Matrices
    root: str

    @property
    def graph(self) -> Graph:
        return self.matrices.graph

    @property
    def dtype(self) -> str:
        return self.matrices.dtype

    def build(self, embeds: bool) -> Graph:
        graph, config, root = self.graph, self.config, self.root
        new: tuple[str, str] = ("batch_size", "sequence_length")
        if embeds:
            residual = given = graph.input("inputs_embeds", self.dtype, (*new, config.hidden_size))
        else:
            given = graph.input("input_ids", "I64", new)
            residual = self.matrices.rows(f"{root}.embed_tokens", given, f"{root}.embed_tokens.weight")
        mask = graph.input("attention_mask", "I64", ("batch_size", "total_sequence_length"))
        last, total = request_lengths(graph, mask)
        lengths = graph.op("lengths", "Cast", last, to=INT32), graph.op("total_length", "Cast", total, to=INT32)
        rotary = self._rotary()
        own = per_layer_inputs(self.matrices, config, root, given, residual)
        epsilon = config.rms_norm_eps
        x = rms_norm(self.matrices, f"{root}.layers.0.input_layernorm", residual, epsilon)
        for layer in range(config.num_layers):
            path = f"{root}.layers.{layer}"
            y = self._attention(f"{path}.self_attn", x, layer, lengths, rotary)
            following = f"{path}.post_attention_layernorm"
            x, residual = rms_norm_of_sum(self.matrices, following, y, residual, epsilon)
            y = self._feed_forward(f"{path}.mlp", x, moe=config.is_moe_layer(layer))
            if own:
                residual = graph.op(f"{path}.mlp/sum", "Add", y, residual)
                y = given_to_layer(self.matrices, config, path, residual, own[layer])
            last_layer = layer + 1 == config.num_layers
            following = f"{root}.norm" if last_layer else f"{root}.layers.{layer + 1}.input_layernorm"
            x, residual = rms_norm_of_sum(self.matrices, following, y, residual, epsilon)
        if not self.bench.options.all_logits:
            x = pick(graph, "last", x, last_positions(graph, given, last, total))
        self.bench.logits(self.matrices, x, HEAD, config.vocab_size)
        return graph

    def _rotary(self) -> tuple[ir.Value, ir.Value]:
        cos, sin = rotary_tables(self.config.rotary_config)
        dtype = NUMPY_DTYPES[self.dtype]
        return (
            self.graph.table("cos_cache", cos.astype(dtype, copy=False), self.dtype),
            self.graph.table("sin_cache", sin.astype(dtype, copy=False), self.dtype),
        )

    def _attention(
        self,
        path: str,
        x: ir.Value,
        layer: int,
        lengths: tuple[ir.Value, ir.Value],
        rotary: tuple[ir.Value, ir.Value],
    ) -> ir.Value:
        """Grouped-query attention over the cache, which it extends; queries and keys are rotated inside."""
        graph, config = self.graph, self.config
        query: ir.Value
        key: ir.Value | None = None
        value: ir.Value | None = None
        if f"{path}.qkv_proj.weight" in self.matrices.specs:
            query = self.matrices.product(f"{path}.qkv_proj", x, f"{path}.qkv_proj.weight", f"{path}.qkv_proj.bias")
        else:
            query, key, value = (
                self.matrices.product(f"{path}.{p}_proj", x, f"{path}.{p}_proj.weight", f"{path}.{p}_proj.bias")
                for p in "qkv"
            )
            if config.qk_norm:
                query, key = self._head_norm(f"{path}.q_norm", query), self._head_norm(f"{path}.k_norm", key)
        past_key, past_value = (
            graph.input(f"past_key_values.{layer}.{kind}", self.dtype, self._cache_shape("past_sequence_length"))
            for kind in ("key", "value")
        )
        y, *present = attend_cached(
            graph, f"{path}.attention", query, key, value, (past_key, past_value), lengths,
            heads=config.num_qo_heads, kv_heads=config.num_kv_heads, rotary=rotary,
            sinks=self.matrices.vector(f"{path}.sinks") if config.sinks else None, window=config.window(layer),
        )  # fmt: skip
        for kind, out in zip(("key", "value"), present, strict=True):
            graph.output(out, f"present.{layer}.{kind}", self.dtype, self._cache_shape("total_sequence_length"))
        return self.matrices.product(f"{path}.o_proj", y, f"{path}.o_proj.weight", f"{path}.o_proj.bias")

    def _cache_shape(self, length: str) -> tuple[str, int, str, int]:
        return ("batch_size", self.config.num_kv_heads, length, self.config.head_dim)

    def _feed_forward(self, path: str, x: ir.Value, *, moe: bool) -> ir.Value:
        if not moe:
            return self._mlp(path, x)
        y = routed(self.matrices, self.config, path, x)
        if not self.config.shared_expert_intermediate_size:
            return y
        shared = self._mlp(f"{path}.shared_expert", x)
        return self.graph.op(f"{path}.sum", "Add", y, gated(self.matrices, f"{path}.shared_expert_gate", x, shared))

    def _mlp(self, path: str, x: ir.Value) -> ir.Value:
        """down(silu(gate(x)) · up(x))."""
        gate, up = (
            self.matrices.product(f"{path}.{p}_proj", x, f"{path}.{p}_proj.weight", f"{path}.{p}_proj.bias")
            for p in ("gate", "up")
        )
        product = self.graph.op(f"{path}.product", "Mul", activate(self.graph, f"{path}.silu", gate, "silu"), up)
        return self.matrices.product(f"{path}.down_proj", product, f"{path}.down_proj.weight", f"{path}.down_proj.bias")

    def _head_norm(self, path: str, x: ir.Value) -> ir.Value:
        """The norm of every head by itself; the attention operator's own has no CPU kernel."""
        graph = self.graph
        heads = graph.op(f"{path}/heads", "Reshape", x, graph.constant([0, 0, -1, self.config.head_dim]))
        normed = rms_norm(self.matrices, path, heads, self.config.rms_norm_eps)
        return graph.op(f"{path}/flat", "Reshape", normed, graph.constant([0, 0, -1]))
