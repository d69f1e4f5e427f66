"""T5 as two graphs: an encoder that runs once a request, and a decoder that attends to what it made."""

from __future__ import annotations

import onnx_ir as ir

from waybill.families.t5 import HEAD, SHARED, T5Config, relative_bias_name, t5_stacks
from waybill.onnx.graph import INT32, Graph
from waybill.onnx.graphs.workbench import Workbench
from waybill.onnx.matrix import Matrices
from waybill.onnx.parts.masks import padding_bias
from waybill.onnx.parts.positions import last_positions, new_positions, pick, request_lengths, span
from waybill.onnx.parts.relative import relative_bias
from waybill.onnx.parts.stack import other_sequence, run_stack
from waybill.weights.dtypes import NUMPY_DTYPES


def t5_graphs(config: T5Config, bench: Workbench) -> dict[str, Graph]:
    """Both graphs, by component."""
    return {"encoder": _encoder(config, bench.matrices()), "decoder": _decoder(config, bench)}


def _encoder(config: T5Config, matrices: Matrices) -> Graph:
    """`input_ids` and `attention_mask` [B, E] to `encoder_hidden_states` [B, E, D]; padding is seen by nobody."""
    graph, (stack, _) = matrices.graph, t5_stacks(config)
    axes = ("batch_size", "encoder_sequence_length")
    ids = graph.input("input_ids", "I64", axes)
    mask = graph.input("attention_mask", "I64", axes)
    keys = span(graph, "positions", graph.op("positions/count", "Shape", ids, start=1, end=2))
    queries = graph.op("positions/queries", "Unsqueeze", keys, graph.constant([0]))
    bias = graph.op(
        "scores/bias",
        "Add",
        _relative(config, matrices, relative_bias_name(stack), queries, keys, bidirectional=True),
        padding_bias(graph, "scores/padding", mask, queries, matrices.dtype),
    )
    x = matrices.rows("encoder.embed_tokens", ids, SHARED)
    states = run_stack(matrices, stack, x, final_norm="encoder.final_layer_norm", bias=bias)
    graph.output(states, "encoder_hidden_states", matrices.dtype, (*axes, config.d_model))
    return graph


def _decoder(config: T5Config, bench: Workbench) -> Graph:
    """`input_ids` [B, S], what the encoder made, and the caches, to `logits`."""
    matrices = bench.matrices()
    graph, (_, stack) = matrices.graph, t5_stacks(config)
    ids = graph.input("input_ids", "I64", ("batch_size", "sequence_length"))
    mask = graph.input("attention_mask", "I64", ("batch_size", "total_sequence_length"))
    across = other_sequence(graph, config.d_model, matrices.dtype, masked=True)
    last, total = request_lengths(graph, mask)
    lengths = graph.op("lengths", "Cast", last, to=INT32), graph.op("total_length", "Cast", total, to=INT32)
    queries, keys = new_positions(graph, ids, last), span(graph, "positions/keys", total)
    bias = _relative(config, matrices, relative_bias_name(stack), queries, keys, bidirectional=False)
    x = matrices.rows("decoder.embed_tokens", ids, SHARED)
    x = run_stack(matrices, stack, x, final_norm="decoder.final_layer_norm", bias=bias, lengths=lengths, across=across)
    if not bench.options.all_logits:
        x = pick(graph, "last", x, last_positions(graph, ids, last, total))
    if config.scale_logits:
        factor = graph.constant(config.d_model**-0.5, NUMPY_DTYPES[matrices.dtype].type)
        x = graph.op("scaled", "Mul", x, factor)
    bench.logits(matrices, x, HEAD, config.vocab_size)
    return graph


def _relative(
    config: T5Config, matrices: Matrices, weight: str, queries: ir.Value, keys: ir.Value, *, bidirectional: bool
) -> ir.Value:
    return relative_bias(
        matrices,
        "scores/relative",
        weight,
        queries,
        keys,
        bidirectional=bidirectional,
        max_distance=config.max_distance,
    )
