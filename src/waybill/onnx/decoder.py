"""The decoder as a graph: constructed from the config and the parameters' declarations, not traced.

Names of inputs and outputs are those of ONNX Runtime's generation library. B requests, S new positions, P past ones, T
in all; key and value buffers may be longer than P, and present may be the same memory as past.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from waybill.blueprint import EMBEDDING, HEAD
from waybill.config import ModelConfig
from waybill.onnx.graph import MICROSOFT, Graph
from waybill.onnx.matrix import INT8_ACTIVATIONS, Matrices
from waybill.onnx.moe import routed
from waybill.onnx.positions import last_positions, pick, request_lengths, rotary_tables
from waybill.plan.parameter import ParameterSpec
from waybill.weights.dtypes import NUMPY_DTYPES

INT32 = int(ir.DataType.INT32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What an export decides about its graph.

    `exact`: packed products accumulate in float instead of rounding activations to 8 bits. `all_logits`: of every
    position, for scoring, instead of each request's last.
    """

    ep: str = "cpu"
    exact: bool = False
    all_logits: bool = False


def build_decoder(
    config: ModelConfig, specs: Mapping[str, ParameterSpec], dtype: str, options: Options, *, tied: bool
) -> Graph:
    """The whole graph; its parameters have names and shapes, and no bytes yet."""
    graph = Graph()
    level = 0 if options.exact or options.ep != "cpu" else INT8_ACTIVATIONS
    return _Decoder(config, Matrices(graph, specs, dtype, level), dtype, options).build(tied)


@dataclass(slots=True)
class _Decoder:
    config: ModelConfig
    matrices: Matrices
    dtype: str
    options: Options

    @property
    def graph(self) -> Graph:
        return self.matrices.graph

    def build(self, tied: bool) -> Graph:
        graph, config = self.graph, self.config
        ids = graph.input("input_ids", "I64", ("batch_size", "sequence_length"))
        mask = graph.input("attention_mask", "I64", ("batch_size", "total_sequence_length"))
        last, total = request_lengths(graph, mask)
        lengths = graph.op("lengths", "Cast", last, to=INT32), graph.op("total_length", "Cast", total, to=INT32)
        rotary = self._rotary()
        residual = self.matrices.rows("model.embed_tokens", ids, EMBEDDING)
        x = self._norm("model.layers.0.input_layernorm", residual)
        for layer in range(config.num_layers):
            path = f"model.layers.{layer}"
            y = self._attention(f"{path}.self_attn", x, layer, lengths, rotary)
            x, residual = self._add_norm(f"{path}.post_attention_layernorm", y, residual)
            if config.is_moe_layer(layer):
                y = routed(self.matrices, config, f"{path}.mlp", x)
            else:
                y = self._mlp(f"{path}.mlp", x)
            following = f"model.layers.{layer + 1}.input_layernorm"
            x, residual = self._add_norm(following if layer + 1 < config.num_layers else "model.norm", y, residual)
        if not self.options.all_logits:
            x = pick(graph, "last", x, last_positions(graph, ids, last, total))
        logits = self.matrices.product("lm_head", x, EMBEDDING if tied else HEAD)
        positions: int | str = "sequence_length" if self.options.all_logits else 1
        graph.output(logits, "logits", self.dtype, ("batch_size", positions, config.vocab_size))
        graph.outputs.insert(0, graph.outputs.pop())  # before the cache
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
        past = [
            graph.input(f"past_key_values.{layer}.{kind}", self.dtype, self._cache_shape("past_sequence_length"))
            for kind in ("key", "value")
        ]
        y, *present = graph.node(
            f"{path}.attention", "GroupQueryAttention", query, key, value, *past, *lengths, *rotary,
            outputs=3, domain=MICROSOFT, num_heads=config.num_qo_heads, kv_num_heads=config.num_kv_heads, do_rotary=1,
        )  # fmt: skip
        for kind, out in zip(("key", "value"), present, strict=True):
            graph.output(out, f"present.{layer}.{kind}", self.dtype, self._cache_shape("total_sequence_length"))
        return self.matrices.product(f"{path}.o_proj", y, f"{path}.o_proj.weight", f"{path}.o_proj.bias")

    def _cache_shape(self, length: str) -> tuple[str, int, str, int]:
        return ("batch_size", self.config.num_kv_heads, length, self.config.head_dim)

    def _mlp(self, path: str, x: ir.Value) -> ir.Value:
        """down(silu(gate(x)) · up(x))."""
        gate, up = (
            self.matrices.product(f"{path}.{p}_proj", x, f"{path}.{p}_proj.weight", f"{path}.{p}_proj.bias")
            for p in ("gate", "up")
        )
        sigmoid = self.graph.op(f"{path}.sigmoid", "Sigmoid", gate)
        silu = self.graph.op(f"{path}.silu", "Mul", gate, sigmoid)
        product = self.graph.op(f"{path}.product", "Mul", silu, up)
        return self.matrices.product(f"{path}.down_proj", product, f"{path}.down_proj.weight", f"{path}.down_proj.bias")

    def _norm(self, path: str, x: ir.Value) -> ir.Value:
        weight = self.matrices.vector(f"{path}.weight")
        eps = self.config.rms_norm_eps
        return self.graph.op(path, "SimplifiedLayerNormalization", x, weight, axis=-1, epsilon=eps, stash_type=1)

    def _add_norm(self, path: str, y: ir.Value, residual: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The norm of y + residual, and the sum."""
        weight = self.matrices.vector(f"{path}.weight")
        normed, *_, total = self.graph.node(
            path, "SkipSimplifiedLayerNormalization", y, residual, weight,
            outputs=4, unused=(1, 2), domain=MICROSOFT, epsilon=self.config.rms_norm_eps,
        )  # fmt: skip
        return normed, total

    def _head_norm(self, path: str, x: ir.Value) -> ir.Value:
        """The norm of every head by itself; the attention operator's own has no CPU kernel."""
        graph = self.graph
        heads = graph.op(f"{path}/heads", "Reshape", x, graph.constant([0, 0, -1, self.config.head_dim]))
        return graph.op(f"{path}/flat", "Reshape", self._norm(path, heads), graph.constant([0, 0, -1]))
