"""Attention of parts of graphs, against torch and against the attention of whole models in transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F
from transformers import T5Config, WhisperConfig
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.models.whisper.modeling_whisper import WhisperAttention

from checkpoints import Array
from parts import Model, Values, close, rand, tensor
from waybill.onnx.graph import INT32
from waybill.onnx.matrix import Matrices
from waybill.onnx.parts.attention import attend, attend_across, attend_cached, cross_cache
from waybill.onnx.parts.masks import causal_bias, padding_bias
from waybill.onnx.parts.positions import new_positions, request_lengths, span
from waybill.onnx.parts.relative import bucket_table, relative_bias

HEADS, HEAD_DIM = 4, 16
WIDTH = HEADS * HEAD_DIM

dtypes = pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["float32", "float16"])


def split(x: Array) -> torch.Tensor:
    """[B, S, N·H] -> [B, N, S, H]."""
    return tensor(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)


def attention(q: Array, k: Array, v: Array, bias: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    made = F.scaled_dot_product_attention(split(q), split(k), split(v), attn_mask=bias, **options)
    return made.transpose(1, 2).flatten(2)


def additive(seen: Array) -> torch.Tensor:
    return torch.where(torch.from_numpy(seen), 0.0, -torch.inf)


def weights_of(module: torch.nn.Module) -> dict[str, Array]:
    """Its parameters, made larger than they start: attention is then far from even."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.2)
    return {name: parameter.detach().numpy() for name, parameter in module.named_parameters()}


# Attention over what is there.


@dtypes
@pytest.mark.parametrize("scale", [None, 1.0, 0.5])
def test_queries_attend_to_all_keys(dtype: Any, scale: float | None) -> None:
    q, k, v = (rand(2, 7, WIDTH, dtype=dtype, seed=at) for at in range(3))
    model = Model(lambda m, q, k, v: attend(m.graph, "y", q, k, v, heads=HEADS, scale=scale), [q, k, v])
    assert close(model(q, k, v)[0], attention(q, k, v, scale=scale))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("heads", [1, HEADS])
def test_scores_are_biased_for_one_or_all_requests_and_heads(rows: int, heads: int) -> None:
    q, k, v = (rand(2, 7, WIDTH, seed=at) for at in range(3))
    bias = rand(rows, heads, 7, 7)
    model = Model(lambda m, q, k, v, b: attend(m.graph, "y", q, k, v, heads=HEADS, bias=b), [q, k, v, bias])
    assert close(model(q, k, v, bias)[0], attention(q, k, v, tensor(bias)))


@dtypes
def test_padding_is_not_seen_whether_masked_or_biased(dtype: Any) -> None:
    q, k, v = (rand(2, 7, WIDTH, dtype=dtype, seed=at) for at in range(3))
    mask = np.arange(7) < np.array([[7], [4]])
    wanted = attention(q, k, v, additive(mask[:, None, None]))

    def build(m: Matrices, q: ir.Value, k: ir.Value, v: ir.Value, mask: ir.Value) -> Values:
        queries = span(m.graph, "rows", m.graph.op("length", "Shape", q, start=1, end=2))
        rows = m.graph.op("queries", "Unsqueeze", queries, m.graph.constant([0]))
        bias = padding_bias(m.graph, "padding", mask, rows, m.dtype)
        seen = m.graph.op("mask", "Cast", mask, to=INT32)
        return attend(m.graph, "a", q, k, v, heads=HEADS, mask=seen), attend(
            m.graph, "b", q, k, v, heads=HEADS, bias=bias
        )

    inputs = [q, k, v, mask.astype(np.int64)]
    assert all(close(made, wanted) for made in Model(build, inputs)(*inputs))


@dtypes
def test_a_causal_bias_hides_what_comes_after_each_requests_own_positions(dtype: Any) -> None:
    q, k, v = (
        rand(2, 3, WIDTH, dtype=dtype),
        rand(2, 7, WIDTH, dtype=dtype, seed=1),
        rand(2, 7, WIDTH, dtype=dtype, seed=2),
    )
    queries, keys = np.array([[4, 5, 6], [0, 1, 2]]), np.arange(7)
    wanted = attention(q, k, v, additive(keys <= queries[:, None, :, None]))

    def build(m: Matrices, q: ir.Value, k: ir.Value, v: ir.Value, rows: ir.Value, columns: ir.Value) -> Values:
        return attend(m.graph, "y", q, k, v, heads=HEADS, bias=causal_bias(m.graph, "causal", rows, columns, m.dtype))

    inputs = [q, k, v, queries, keys]
    assert close(Model(build, inputs)(*inputs)[0], wanted)


# Attention over another sequence.


@dtypes
@pytest.mark.parametrize("new", [1, 5])
def test_a_cross_cache_is_made_once_and_attended_to_at_every_step(dtype: Any, new: int) -> None:
    k, v = (rand(2, 9, WIDTH, dtype=dtype, seed=at) for at in (1, 2))
    mask = np.arange(9) < np.array([[9], [6]])
    made = Model(lambda m, k, v: cross_cache(m.graph, "cross", k, v, heads=HEADS), [k, v])(k, v)
    assert [cache.shape for cache in made] == [(2, HEADS, 9, HEAD_DIM)] * 2

    def build(m: Matrices, q: ir.Value, k: ir.Value, v: ir.Value, mask: ir.Value) -> Values:
        seen = m.graph.op("mask", "Cast", mask, to=INT32)
        return attend_across(m.graph, "y", q, (k, v), heads=HEADS, mask=seen)

    inputs = [rand(2, new, WIDTH, dtype=dtype), *made, mask.astype(np.int64)]
    model = Model(build, inputs)
    for seed in range(2):
        q = rand(2, new, WIDTH, dtype=dtype, seed=seed)
        assert close(model(q, *inputs[1:])[0], attention(q, k, v, additive(mask[:, None, None])))


# Attention over a cache.


def in_place(model: Model, x: Array, lengths: Sequence[int], heads: int, room: int) -> list[Array]:
    """A graph of x, mask and a cache, stepwise: prompts of `lengths` at once, then one position a step, up to the last.

    The cache is `room` long, past and present at once. Returns each request's outputs.
    """
    binding = model.session.io_binding()
    cache = [ort.OrtValue.ortvalue_from_numpy(np.zeros((len(x), heads, room, HEAD_DIM), x.dtype)) for _ in "kv"]
    names = [value.name for value in model.session.get_outputs()]
    for at, values in enumerate(cache):
        binding.bind_ortvalue_input(f"in{at + 2}", values)
        binding.bind_ortvalue_output(names[at + 1], values)
    ends = np.array(lengths)
    new = x[:, : ends.max()]
    made: list[list[Array]] = [[] for _ in x]
    while True:
        binding.bind_cpu_input("in0", np.ascontiguousarray(new))
        binding.bind_cpu_input("in1", (np.arange(ends.max()) < ends[:, None]).astype(np.int64))
        binding.bind_output(names[0])
        model.session.run_with_iobinding(binding)
        y = binding.get_outputs()[-1].numpy()
        for row, outputs in enumerate(made):
            outputs.append(y[row, : ends[row]] if not outputs else y[row])
        if ends.max() == x.shape[1]:
            return [np.concatenate(outputs) for outputs in made]
        new = x[np.arange(len(x)), ends][:, None]
        ends += 1


def cached(
    m: Matrices, x: ir.Value, ends: tuple[ir.Value, ir.Value], past: Any, kv_heads: int, **options: Any
) -> Sequence[ir.Value]:
    """Queries, keys and values of x, and attention over the cache."""
    last, total = ends
    lengths = m.graph.op("last32", "Cast", last, to=INT32), m.graph.op("total32", "Cast", total, to=INT32)
    q, k, v = (m.product(p, x, f"{p}.weight", f"{p}.bias") for p in "qkv")
    return attend_cached(m.graph, "y", q, k, v, past, lengths, heads=HEADS, kv_heads=kv_heads, **options)


def empty_cache(kv_heads: int, dtype: Any = np.float32) -> list[Array]:
    return [np.zeros((2, kv_heads, 1, HEAD_DIM), dtype)] * 2


unequal = pytest.mark.parametrize("lengths", [(5, 5), (5, 3), (1, 1), (2, 6)])


@dtypes
@unequal
@pytest.mark.parametrize("kv_heads", [HEADS, 2])
def test_a_cache_is_extended_in_place_without_rotation(lengths: tuple[int, int], kv_heads: int, dtype: Any) -> None:
    x = rand(2, 9, 32, dtype=dtype)
    shapes = {"q.weight": WIDTH, "k.weight": kv_heads * HEAD_DIM, "v.weight": kv_heads * HEAD_DIM}
    weights = {name: rand(rows, 32, dtype=dtype) * dtype(0.2) for name, rows in shapes.items()}
    inputs = [x, np.ones((2, 9), np.int64), *empty_cache(kv_heads, dtype)]
    model = Model(
        lambda m, x, mask, *past: cached(m, x, request_lengths(m.graph, mask), past, kv_heads, scale=0.3),
        inputs,
        weights,
    )
    q, k, v = (F.linear(tensor(x), tensor(w)).numpy() for w in weights.values())
    wanted = attention(q, k, v, scale=0.3, is_causal=True, enable_gqa=True)
    for row, made in enumerate(in_place(model, x, lengths, kv_heads, 16)):
        assert close(made, wanted[row, : len(made)])


# Relative position bias.

DISTANCES = 4096
buckets = pytest.mark.parametrize(
    ("count", "farthest"), [(32, 128), (32, 64), (16, 20), (64, 500), (12, 37), (32, 4096)]
)


@buckets
@pytest.mark.parametrize("bidirectional", [True, False])
def test_every_distance_has_the_bucket_that_transformers_gives_it(
    count: int, farthest: int, bidirectional: bool
) -> None:
    distances = torch.arange(-DISTANCES, DISTANCES + 1)
    wanted = T5Attention._relative_position_bucket(distances, bidirectional, count, farthest).numpy()
    table = bucket_table(count, bidirectional=bidirectional, max_distance=farthest)
    assert len(table) == farthest * (2 if bidirectional else 1) + 1
    index = np.clip(distances.numpy(), -farthest, farthest if bidirectional else 0) + farthest
    assert np.array_equal(table[index], wanted)


@buckets
@pytest.mark.parametrize("bidirectional", [True, False])
@dtypes
def test_the_graph_finds_every_distances_bucket(count: int, farthest: int, bidirectional: bool, dtype: Any) -> None:
    queries, keys = np.array([[DISTANCES], [0]]), np.arange(2 * DISTANCES + 1)
    weights = {"b.weight": np.arange(count, dtype=dtype)[:, None]}
    model = Model(
        lambda m, q, k: relative_bias(m, "bias", "b.weight", q, k, bidirectional=bidirectional, max_distance=farthest),
        [queries, keys],
        weights,
    )
    (made,) = model(queries, keys)
    wanted = T5Attention._relative_position_bucket(
        torch.from_numpy(keys - queries), bidirectional, count, farthest
    ).numpy()
    assert made.shape == (2, 1, 1, len(keys))
    assert np.array_equal(made[:, 0, 0], wanted)


@pytest.mark.parametrize(("count", "bidirectional"), [(24, False), (48, True), (1, False), (2, True)])
def test_buckets_that_cannot_reach_the_farthest_distance_are_refused(count: int, bidirectional: bool) -> None:
    with pytest.raises(ValueError, match=f"{count} buckets do not reach to a distance of 12"):
        bucket_table(count, bidirectional=bidirectional, max_distance=12)


FARTHEST = 20


def t5(decoder: bool) -> tuple[T5Attention, dict[str, Array]]:
    config = T5Config(
        d_model=32, d_kv=HEAD_DIM, num_heads=HEADS, is_decoder=decoder, relative_attention_max_distance=FARTHEST
    )
    config._attn_implementation = "eager"
    module = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).eval()
    return module, weights_of(module)


def test_self_attention_of_a_t5_encoder_is_that_of_transformers() -> None:
    module, weights = t5(decoder=False)
    x, mask = rand(2, 20, 32), np.arange(20) < np.array([[20], [13]])

    def build(m: Matrices, x: ir.Value, mask: ir.Value) -> Values:
        seen = m.graph.op("mask", "Cast", mask, to=INT32)
        keys = span(m.graph, "keys", m.graph.op("length", "Shape", x, start=1, end=2))
        queries = m.graph.op("queries", "Unsqueeze", keys, m.graph.constant([0]))
        bias = relative_bias(
            m, "bias", "relative_attention_bias.weight", queries, keys, bidirectional=True, max_distance=FARTHEST
        )
        q, k, v = (m.product(p, x, f"{p}.weight") for p in "qkv")
        return m.product("o", attend(m.graph, "y", q, k, v, heads=HEADS, scale=1.0, mask=seen, bias=bias), "o.weight")

    inputs = [x, mask.astype(np.int64)]
    wanted = module(tensor(x), mask=additive(mask[:, None, None]))[0]
    assert close(Model(build, inputs, weights)(*inputs)[0], wanted)


@unequal
def test_self_attention_of_a_t5_decoder_is_that_of_transformers_step_by_step(lengths: tuple[int, int]) -> None:
    module, weights = t5(decoder=True)
    x = rand(2, 30, 32)

    def build(m: Matrices, x: ir.Value, mask: ir.Value, *past: ir.Value) -> Values:
        last, total = request_lengths(m.graph, mask)
        queries, keys = new_positions(m.graph, x, last), span(m.graph, "keys", total)
        bias = relative_bias(
            m, "bias", "relative_attention_bias.weight", queries, keys, bidirectional=False, max_distance=FARTHEST
        )
        y, *present = cached(m, x, (last, total), past, HEADS, scale=1.0, bias=bias)
        return m.product("o", y, "o.weight"), *present

    model = Model(build, [x, np.ones((2, 30), np.int64), *empty_cache(HEADS)], weights)
    wanted = module(tensor(x), mask=additive(np.tri(30, dtype=bool)))[0]
    for row, made in enumerate(in_place(model, x, lengths, HEADS, 64)):
        assert close(made, wanted[row, : len(made)])


# Speech.


def whisper() -> tuple[WhisperAttention, dict[str, Array]]:
    config = WhisperConfig(d_model=WIDTH, attn_implementation="eager")
    module = WhisperAttention(WIDTH, HEADS, layer_idx=0, config=config).eval()
    return module, {name.replace("_proj", ""): values for name, values in weights_of(module).items()}


def test_self_attention_of_a_whisper_encoder_is_that_of_transformers() -> None:
    module, weights = whisper()
    x = rand(2, 9, WIDTH)

    def build(m: Matrices, x: ir.Value) -> Values:
        q, k, v = (m.product(p, x, f"{p}.weight", f"{p}.bias") for p in "qkv")
        return m.product("o", attend(m.graph, "y", q, k, v, heads=HEADS), "out.weight", "out.bias")

    assert close(Model(build, [x], weights)(x)[0], module(tensor(x))[0])


@unequal
def test_self_attention_of_a_whisper_decoder_is_that_of_transformers_step_by_step(lengths: tuple[int, int]) -> None:
    module, weights = whisper()
    x = rand(2, 9, WIDTH)

    def build(m: Matrices, x: ir.Value, mask: ir.Value, *past: ir.Value) -> Values:
        y, *present = cached(m, x, request_lengths(m.graph, mask), past, HEADS)
        return m.product("o", y, "out.weight", "out.bias"), *present

    model = Model(build, [x, np.ones((2, 9), np.int64), *empty_cache(HEADS)], weights)
    wanted = module(tensor(x), attention_mask=additive(np.tri(9, dtype=bool)[None, None]))[0]
    for row, made in enumerate(in_place(model, x, lengths, HEADS, 16)):
        assert close(made, wanted[row, : len(made)])


def test_cross_attention_of_a_whisper_decoder_is_that_of_transformers() -> None:
    module, weights = whisper()
    x, states = rand(2, 3, WIDTH), rand(2, 9, WIDTH, seed=1)

    def once(m: Matrices, states: ir.Value) -> Values:
        k, v = (m.product(p, states, f"{p}.weight", f"{p}.bias") for p in "kv")
        return cross_cache(m.graph, "cross", k, v, heads=HEADS)

    def step(m: Matrices, x: ir.Value, *cache: ir.Value) -> Values:
        q = m.product("q", x, "q.weight", "q.bias")
        return m.product("o", attend_across(m.graph, "y", q, cache, heads=HEADS), "out.weight", "out.bias")

    cache = Model(once, [states], weights)(states)
    wanted = module(tensor(x), key_value_states=tensor(states))[0]
    assert close(Model(step, [x, *cache], weights)(x, *cache)[0], wanted)
