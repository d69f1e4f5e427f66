"""A run of transformer layers as nodes, by the description its parameters were declared from.

B requests, S positions, D hidden elements, E positions of the other sequence, N heads, H elements a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from waybill.families.stack import Stack
from waybill.onnx.graph import INT32, Graph
from waybill.onnx.matrix import Matrices
from waybill.onnx.parts.activation import activate
from waybill.onnx.parts.attention import Pair, attend, attend_across, attend_cached, cross_cache
from waybill.onnx.parts.norm import layer_norm, layer_norm_of_sum, rms_norm, rms_norm_of_sum
from waybill.weights.dtypes import NUMPY_DTYPES


class Across(NamedTuple):
    """What cross-attention attends to.

    `states`: the other sequence's states [B, E, D] in a request's first step, and none, [B, 0, D], in those after it,
    which are given the keys and values that the first has made; `first` says which it is. `mask`: I32 [B, E], 1 where
    the other sequence has a position; None where it has everywhere.
    """

    states: ir.Value
    first: ir.Value
    mask: ir.Value | None = None


def other_sequence(graph: Graph, hidden: int, dtype: str, *, masked: bool) -> Across:
    """Inputs for another sequence, `encoder_hidden_states` and perhaps `encoder_attention_mask`."""
    axes = ("batch_size", "encoder_sequence_length")
    states = graph.input("encoder_hidden_states", dtype, (*axes, hidden))
    mask = graph.input("encoder_attention_mask", "I64", axes) if masked else None
    first = graph.op("cross/first", "Greater", graph.op("cross/size", "Size", states), graph.constant(0))
    return Across(states, first, None if mask is None else graph.op("cross/mask", "Cast", mask, to=INT32))


def run_stack(
    matrices: Matrices,
    stack: Stack,
    x: ir.Value,
    *,
    final_norm: str | None,
    bias: ir.Value | None = None,
    lengths: Pair | None = None,
    across: Across | None = None,
) -> ir.Value:
    """[B, S, D] -> [B, S, D], through all layers.

    Args:
        matrices: makes the nodes that use parameters.
        stack: the layers.
        x: their input.
        final_norm: the path of a norm after the last layer; None leaves it out.
        bias: added to the scores of self-attention, [1 or B, 1 or N, S, T].
        lengths: each request's last position I32 [B], and the longest length I32 [1]. With them attention is causal,
            over a cache that becomes inputs and outputs of the graph.
        across: what cross-attention attends to.
    """
    return _Stack(matrices, stack, bias, lengths, across).run(x, final_norm)[-1]


def hidden_states(matrices: Matrices, stack: Stack, x: ir.Value) -> list[ir.Value]:
    """[B, S, D] each, of layers that attend everywhere: x itself, and what each layer makes of it, before any norm."""
    return _Stack(matrices, stack, None, None, None).run(x, None)


@dataclass(frozen=True, slots=True)
class _Stack:
    matrices: Matrices
    stack: Stack
    bias: ir.Value | None
    lengths: Pair | None
    across: Across | None

    def run(self, x: ir.Value, final_norm: str | None) -> list[ir.Value]:
        """What each layer is given, and what the last one makes, normed where that is asked for.

        A norm and the sum it is of are one operator, so each block is followed by the next one's norm.
        """
        given: list[ir.Value] = []
        residual, y = x, None
        for number in range(self.stack.layers):
            for at, (norm, block) in enumerate(self._blocks(number)):
                normed, residual = self._normed(norm, y, residual)
                if at == 0:
                    given.append(residual)
                y = block(normed)
        if y is None:
            return [x]
        if final_norm is None:
            return [*given, self.matrices.graph.op(f"{self.stack.path}.out", "Add", y, residual)]
        return [*given, self._normed(final_norm, y, residual)[0]]

    def _blocks(self, number: int) -> Iterator[tuple[str, Callable[[ir.Value], ir.Value]]]:
        """The parts of one layer, each with the path of the norm before it."""
        path, names = self.stack.layer(number), self.stack.names
        yield f"{path}.{names.attention_norm}", partial(self._attention, f"{path}.{names.attention}", number)
        if names.cross is not None and self.across is not None:
            yield f"{path}.{names.cross_norm}", partial(self._cross, f"{path}.{names.cross}", number)
        yield f"{path}.{names.feed_forward_norm}", partial(self._feed_forward, path)

    def _normed(self, path: str, y: ir.Value | None, residual: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The norm of y + residual, and the sum; before the first block there is no y."""
        eps = self.stack.eps
        if y is None:
            return (rms_norm if self.stack.rms else layer_norm)(self.matrices, path, residual, eps), residual
        return (rms_norm_of_sum if self.stack.rms else layer_norm_of_sum)(self.matrices, path, y, residual, eps)

    def _projected(self, path: str, at: int, x: ir.Value, matrices: Matrices | None = None) -> ir.Value:
        name = f"{path}.{self.stack.names.projections[at]}"
        return (matrices or self.matrices).product(name, x, f"{name}.weight", f"{name}.bias")

    def _attention(self, path: str, number: int, x: ir.Value) -> ir.Value:
        stack, graph = self.stack, self.matrices.graph
        query, key, value = (self._projected(path, at, x) for at in range(3))
        if self.lengths is None:
            y = attend(graph, path, query, key, value, heads=stack.heads, scale=stack.scale, bias=self.bias)
        else:
            past = self._cache("past_key_values", number, "past_sequence_length")
            y, *present = attend_cached(
                graph, path, query, key, value, past, self.lengths,
                heads=stack.heads, kv_heads=stack.heads, scale=stack.scale, bias=self.bias,
            )  # fmt: skip
            self._made("present", number, "total_sequence_length", present)
        return self._projected(path, 3, y)

    def _cross(self, path: str, number: int, x: ir.Value) -> ir.Value:
        """Keys and values of the other sequence are made in the first step, and read where they lie in the others."""
        stack, graph, across = self.stack, self.matrices.graph, self.across
        if across is None:
            raise ValueError("cross-attention without another sequence")
        query = self._projected(path, 0, x)
        past = self._cache("past_cross_values", number, "encoder_sequence_length")

        def attended(branch: Graph, cache: Pair) -> ir.Value:
            label = f"{path}/{'first' if cache is not past else 'later'}"
            return attend_across(branch, label, query, cache, heads=stack.heads, scale=stack.scale, mask=across.mask)

        def first(branch: Graph) -> list[ir.Value]:
            inside = self.matrices.inside(branch)
            key, value = (self._projected(path, at, across.states, inside) for at in (1, 2))
            cache = cross_cache(branch, f"{path}/cache", key, value, heads=stack.heads)
            return [attended(branch, cache), *cache]

        def later(branch: Graph) -> list[ir.Value]:
            nothing = np.zeros((1, stack.heads, 0, stack.head_dim), NUMPY_DTYPES[self.matrices.dtype])
            none = [
                branch.op(f"{path}/none/{at}", "Identity", graph.constant(nothing, nothing.dtype.type)) for at in "kv"
            ]
            return [attended(branch, past), *none]

        y, *present = graph.choose(path, across.first, first, later)
        self._made("present_cross", number, "encoder_sequence_length", present)
        return self._projected(path, 3, y)

    def _cache(self, kind: str, number: int, length: str) -> Pair:
        shape = ("batch_size", self.stack.heads, length, self.stack.head_dim)
        key, value = (
            self.matrices.graph.input(f"{kind}.{number}.{part}", self.matrices.dtype, shape)
            for part in ("key", "value")
        )
        return key, value

    def _made(self, kind: str, number: int, length: str, values: list[ir.Value]) -> None:
        shape = ("batch_size", self.stack.heads, length, self.stack.head_dim)
        for part, value in zip(("key", "value"), values, strict=True):
            self.matrices.graph.output(value, f"{kind}.{number}.{part}", self.matrices.dtype, shape)

    def _feed_forward(self, path: str, x: ir.Value) -> ir.Value:
        """down(activation(up(x))), or down(activation(gate(x)) · up(x))."""
        names, graph = self.stack.names, self.matrices.graph
        gate, *up = (
            self.matrices.product(f"{path}.{name}", x, f"{path}.{name}.weight", f"{path}.{name}.bias")
            for name in names.up
        )
        y = activate(graph, f"{path}.activation", gate, self.stack.activation)
        if up:
            y = graph.op(f"{path}.gated", "Mul", y, up[0])
        return self.matrices.product(
            f"{path}.{names.down}", y, f"{path}.{names.down}.weight", f"{path}.{names.down}.bias"
        )
