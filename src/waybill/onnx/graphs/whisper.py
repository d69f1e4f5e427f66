"""Whisper as two graphs: an encoder that runs once a recording, and a decoder that attends to what it made."""

from __future__ import annotations

from waybill.families.whisper import DECODER, EMBEDDING, ENCODER, HEAD, POSITIONS, WhisperConfig, decoder_stack
from waybill.onnx.graph import INT32, Graph
from waybill.onnx.graphs.workbench import Workbench
from waybill.onnx.matrix import Matrices
from waybill.onnx.parts.audio import encode_audio
from waybill.onnx.parts.positions import last_positions, new_positions, pick, request_lengths
from waybill.onnx.parts.stack import other_sequence, run_stack


def whisper_graphs(config: WhisperConfig, bench: Workbench) -> dict[str, Graph]:
    """Both graphs, by component."""
    return {"encoder": _encoder(config, bench.matrices()), "decoder": _decoder(config, bench)}


def _encoder(config: WhisperConfig, matrices: Matrices) -> Graph:
    """`input_features` [B, mel bins, frames] to `encoder_hidden_states` [B, positions, D]."""
    graph, audio = matrices.graph, config.audio
    features = graph.input("input_features", matrices.dtype, ("batch_size", audio.mel_bins, audio.frames))
    states = encode_audio(matrices, audio, ENCODER, features, final_norm=f"{ENCODER}.layer_norm")
    graph.output(states, "encoder_hidden_states", matrices.dtype, ("batch_size", audio.positions, audio.d_model))
    return graph


def _decoder(config: WhisperConfig, bench: Workbench) -> Graph:
    """`input_ids` [B, S], what the encoder made, and the caches, to `logits`."""
    matrices = bench.matrices()
    graph = matrices.graph
    ids = graph.input("input_ids", "I64", ("batch_size", "sequence_length"))
    mask = graph.input("attention_mask", "I64", ("batch_size", "total_sequence_length"))
    across = other_sequence(graph, config.hidden_size, matrices.dtype, masked=False)
    last, total = request_lengths(graph, mask)
    lengths = graph.op("lengths", "Cast", last, to=INT32), graph.op("total_length", "Cast", total, to=INT32)
    tokens = matrices.rows(f"{DECODER}.embed_tokens", ids, EMBEDDING)
    positions = matrices.rows(f"{DECODER}.embed_positions", new_positions(graph, ids, last), POSITIONS)
    x = graph.op("embeddings", "Add", tokens, positions)
    norm = f"{DECODER}.layer_norm"
    x = run_stack(matrices, decoder_stack(config), x, final_norm=norm, lengths=lengths, across=across)
    if not bench.options.all_logits:
        x = pick(graph, "last", x, last_positions(graph, ids, last, total))
    bench.logits(matrices, x, HEAD, config.vocab_size)
    return graph
