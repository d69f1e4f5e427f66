"""The codecs and the algebra on any codes, zero points and scales: packing is undone exactly, and cutting commutes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints import BF16
from packers import (
    Array,
    arrays,
    awq,
    compressed,
    decoded,
    formula,
    gptq,
    layout,
    normalized,
    olive,
    pack,
    same,
    written,
)
from waybill.checkpoint import RangeReader
from waybill.codecs.registry import CODECS
from waybill.errors import ActOrder, ZeroPointMismatch
from waybill.plan.bill import CHUNK, Binding
from waybill.plan.stream import stream
from waybill.weights.affine import AffinePackedWeight, concat_affine, stack_affine
from waybill.weights.dtypes import NUMPY_DTYPES

some = settings(max_examples=50, deadline=None, derandomize=True)


@dataclass(frozen=True)
class Layer:
    """A layer as a producer knows it, and as it writes it."""

    form: str
    bits: int
    group_size: int
    symmetric: bool
    q: Array
    z: Array
    s: Array
    with_g_idx: bool = False

    @property
    def group(self) -> int:
        return self.q.shape[-1] if self.group_size == -1 else self.group_size

    @property
    def block(self) -> dict[str, Any]:
        numbers = {"bits": self.bits, "group_size": self.group_size}
        if self.form == "olive":
            return {"quant_method": "olive", "symmetric": self.symmetric, **numbers}
        if self.form == "awq":
            return {"quant_method": "awq", "zero_point": not self.symmetric, "version": "gemm", **numbers}
        if self.form.startswith("ct"):
            weights = {"num_bits": self.bits, "group_size": self.group_size, "symmetric": self.symmetric}
            form = "int-quantized" if self.form == "ct_int" else "pack-quantized"
            groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
            return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}
        return {"quant_method": "gptq", "sym": self.symmetric, "checkpoint_format": self.form, **numbers}

    @property
    def packed(self) -> dict[str, Array]:
        if self.form == "olive":
            return olive(self.q, None if self.symmetric else self.z, self.s, self.bits)
        if self.form == "awq":
            return awq(self.q, self.z, self.s)
        if self.form.startswith("ct"):
            return compressed(self.q, None if self.symmetric else self.z, self.s, self.bits, self.form)
        g_idx = np.arange(self.q.shape[1]) // self.group if self.with_g_idx else None
        return gptq(self.q, self.z, self.s, self.bits, version=1 if self.form == "gptq" else 2, g_idx=g_idx)

    @property
    def dense(self) -> Array:
        return formula(self.q, self.z, self.s, self.group)


def made(form: str, bits: int, group: int, symmetric: bool, shape: Sequence[int], seed: int, **more: Any) -> Layer:
    """Random integers, and scales of any sign with zeros among them."""
    rng = np.random.default_rng(seed)
    groups = 1 if group == -1 else -(-shape[-1] // group)
    q = rng.integers(0, 1 << bits, shape, np.uint8)
    z = rng.integers(0, 1 << bits, (*shape[:-1], groups), np.uint8)
    s = (rng.standard_normal(z.shape) * rng.integers(0, 9, z.shape).clip(0, 1)).astype(more.pop("dtype", np.float16))
    z = np.full_like(z, 1 << (bits - 1)) if symmetric else z
    return Layer(form, bits, group, symmetric, q, z, s, **more)


@st.composite
def layers(
    draw: st.DrawFn, forms: Sequence[str] = ("gptq", "gptq_v2", "awq", "olive", "ct", "ct_old", "ct_int")
) -> Layer:
    """Every form, width, group size and shape that the formats allow; small."""
    form = draw(st.sampled_from(forms))
    bits = {"awq": 4, "ct_int": 8}.get(form) or draw(st.sampled_from([2, 4, 8]))
    group = draw(st.sampled_from([16, 32, 48, 64, 128, -1]))
    step = {"awq": 1, "ct_int": 1, "olive": 8 // bits}.get(form, 32 // bits)
    if group == -1:
        inputs = 16 * draw(st.integers(1, 8))
    elif form == "awq":
        inputs = group * draw(st.integers(1, 4))
    else:
        inputs = step * draw(st.integers(1, 3 * max(group, 16) // step))
    rows = 1 if form == "olive" or form.startswith("ct") else 32 // bits
    outputs = rows * draw(st.integers(1, 40 // rows + 1))
    more = {"with_g_idx": draw(st.booleans())} if form.startswith("gptq") else {}
    dtype = draw(st.sampled_from([np.float16, BF16, np.float32]))
    seed = draw(st.integers(0, 2**32 - 1))
    return made(form, bits, group, draw(st.booleans()), (outputs, inputs), seed, dtype=dtype, **more)


@contextmanager
def loaded(*many: Layer) -> Iterator[tuple[list[AffinePackedWeight], RangeReader]]:
    with tempfile.TemporaryDirectory() as folder:
        named = {f"l{i}": layer.packed for i, layer in enumerate(many)}
        with written(Path(folder), **named) as (sidecars, reader):
            pairs = zip(many, sidecars, strict=True)
            yield [normalized(parts, layout(layer.block)) for layer, parts in pairs], reader


# Packing is undone


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("group", [16, 32, 64, 128, -1])
@pytest.mark.parametrize(
    ("form", "bits"),
    [(form, bits) for form in ("gptq", "gptq_v2", "olive", "ct") for bits in (2, 4, 8)] + [("awq", 4), ("ct_int", 8)],
)
def test_every_width_and_group_size_is_read_and_cut(form: str, bits: int, group: int, symmetric: bool) -> None:
    inputs = 128 if group == -1 else 2 * group + (0 if form == "awq" else 16)
    layer = made(form, bits, group, symmetric, (32, inputs), bits)
    with loaded(layer) as ((weight,), reader):
        assert same(decoded(weight, reader), layer.dense)
        assert same(decoded(weight.narrow(0, 3, 22), reader), layer.dense[3:25])
        if group != -1:
            assert same(decoded(weight.narrow(1, group, inputs - group), reader), layer.dense[:, group:])
        assert same(decoded(weight.refine(16), reader), layer.dense)


@some
@given(layer=layers())
def test_a_normalized_layer_is_what_the_producer_meant(layer: Layer) -> None:
    with loaded(layer) as ((weight,), reader):
        assert weight.shape == layer.q.shape
        assert weight.layout.bits == layer.bits
        assert same(decoded(weight, reader), layer.dense)


@some
@given(layer=layers())
def test_the_bytes_past_the_end_of_a_ragged_last_group_are_zero(layer: Layer) -> None:
    with loaded(layer) as ((weight,), reader):
        codes, _, _ = arrays(weight, reader)
    flat = codes.reshape(codes.shape[0], -1)
    assert not flat[:, -(-layer.q.shape[1] * layer.bits // 8) :].any()


@some
@given(layer=layers(forms=("gptq",)), at=st.integers(0, 2**31))
def test_version_1_zero_points_come_back_from_words_that_borrowed(layer: Layer, at: int) -> None:
    z = layer.z.copy()
    z.flat[at % z.size] = 0
    layer = Layer("gptq", layer.bits, layer.group_size, False, layer.q, z, layer.s)
    with loaded(layer) as ((weight,), reader):
        _, _, zeros = arrays(weight, reader)
    assert zeros is not None
    assert np.array_equal(zeros, z)


@pytest.mark.parametrize("form", ["gptq", "gptq_v2", "awq", "olive"])
@pytest.mark.parametrize("zero", [0, 15])
def test_zero_points_at_both_ends_are_kept(form: str, zero: int) -> None:
    layer = made(form, 4, 16, False, (16, 48), 1)
    layer.z[:] = zero
    with loaded(layer) as ((weight,), reader):
        assert same(decoded(weight, reader), layer.dense)


@pytest.mark.parametrize("form", ["gptq", "gptq_v2", "awq", "olive"])
def test_layers_larger_than_a_transpose_tile_are_whole(form: str) -> None:
    layer = made(form, 4, 16, False, (200, 1040), 2)
    with loaded(layer) as ((weight,), reader):
        assert same(decoded(weight, reader), layer.dense)
        assert same(decoded(weight.narrow(0, 61, 77).narrow(1, 496, 544), reader), layer.dense[61:138, 496:])


def test_a_bank_of_experts_is_read_with_its_leading_axis() -> None:
    layer = made("olive", 4, 16, False, (3, 10, 48), 3)
    with loaded(layer) as ((weight,), reader):
        assert same(decoded(weight, reader), layer.dense)
        assert same(decoded(weight.select(0, 2).narrow(1, 16, 32), reader), layer.dense[2, :, 16:])
        assert same(decoded(weight.narrow(1, 3, 5), reader), layer.dense[:, 3:8])


# Cutting, refining and joining commute with decoding


@some
@given(layer=layers(), data=st.data())
def test_cutting_along_n_then_decoding_is_decoding_then_cutting(layer: Layer, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, layer.q.shape[0] - 1))
    length = data.draw(st.integers(1, layer.q.shape[0] - start))
    with loaded(layer) as ((weight,), reader):
        assert same(decoded(weight.narrow(0, start, length), reader), layer.dense[start : start + length])


@some
@given(layer=layers(), data=st.data())
def test_cutting_along_k_at_groups_then_decoding_is_decoding_then_cutting(layer: Layer, data: st.DataObject) -> None:
    groups, group, inputs = layer.z.shape[1], layer.group, layer.q.shape[1]
    first = data.draw(st.integers(0, groups - 1))
    last = data.draw(st.integers(first + 1, groups))
    start, stop = first * group, min(last * group, inputs)
    with loaded(layer) as ((weight,), reader):
        cut = weight.narrow(1, start, stop - start)
        assert cut.shape == (layer.q.shape[0], stop - start)
        assert same(decoded(cut, reader), layer.dense[:, start:stop])


@some
@given(layer=layers(), data=st.data())
def test_a_cut_along_k_inside_a_group_is_an_error(layer: Layer, data: st.DataObject) -> None:
    start = data.draw(st.integers(1, layer.q.shape[1]))
    with loaded(layer) as ((weight,), _):
        if start % layer.group == 0:
            weight.narrow(1, start - layer.group, layer.group)
        else:
            with pytest.raises(ValueError, match="splits a group"):
                weight.narrow(1, start, layer.q.shape[1] - start)


@some
@given(layer=layers(), data=st.data())
def test_refining_changes_no_value(layer: Layer, data: st.DataObject) -> None:
    finer = data.draw(st.sampled_from([g for g in range(16, layer.group + 1, 16) if layer.group % g == 0]))
    with loaded(layer) as ((weight,), reader):
        refined = weight.refine(finer)
        assert refined.layout.group == finer
        assert same(decoded(refined, reader), layer.dense)
        groups = refined.scales.shape[1]
        start = data.draw(st.integers(0, groups - 1)) * finer
        kept = refined.narrow(1, start, layer.q.shape[1] - start)
        assert same(decoded(kept, reader), layer.dense[:, start:])
        row = data.draw(st.integers(0, layer.q.shape[0] - 1))
        assert same(decoded(refined.narrow(0, row, 1), reader), layer.dense[row : row + 1])


@some
@given(layer=layers())
def test_written_out_midpoints_and_added_rows_change_no_value(layer: Layer) -> None:
    rows = layer.q.shape[0]
    with loaded(layer) as ((weight,), reader):
        assert same(decoded(replace(weight, zero_points=weight.zeros), reader), layer.dense)
        padded = decoded(weight.pad(0, rows + 3), reader)
    assert same(padded[:rows], layer.dense)
    assert not padded[rows:].any()


@st.composite
def equals(draw: st.DrawFn, count: int) -> list[Layer]:
    """Layers that agree in all but the numbers and, for Olive, in being symmetric."""
    first = draw(layers())
    out = [first]
    for _ in range(count - 1):
        symmetric = draw(st.booleans()) if first.form == "olive" else first.symmetric
        seed = draw(st.integers(0, 2**32 - 1))
        args = (first.form, first.bits, first.group_size, symmetric, first.q.shape, seed)
        out.append(made(*args, dtype=first.s.dtype, with_g_idx=first.with_g_idx))
    return out


@some
@given(many=equals(3), data=st.data())
def test_joined_and_stacked_layers_decode_to_joined_and_stacked_ones(many: list[Layer], data: st.DataObject) -> None:
    rows = many[0].q.shape[0]
    start = data.draw(st.integers(0, 3 * rows - 1))
    with loaded(*many) as (weights, reader):
        joined, stacked = concat_affine(weights, 0), stack_affine(weights)
        whole = np.concatenate([layer.dense for layer in many])
        assert same(decoded(joined, reader), whole)
        assert same(decoded(joined.narrow(0, start, 3 * rows - start), reader), whole[start:])
        assert same(decoded(stacked, reader), np.stack([layer.dense for layer in many]))
        assert same(decoded(stacked.select(0, 1), reader), many[1].dense)


@pytest.mark.parametrize("first", [True, False])
def test_a_symmetric_and_an_asymmetric_member_join_to_an_asymmetric_weight(first: bool) -> None:
    many = [made("olive", 4, 16, symmetric, (5, 48), 6 + symmetric) for symmetric in (first, not first)]
    with loaded(*many) as (weights, reader):
        joined = concat_affine(weights, 0)
        assert same(decoded(joined, reader), np.concatenate([layer.dense for layer in many]))
        assert not joined.layout.symmetric


@some
@given(many=equals(4), data=st.data())
def test_sharding_then_merging_then_stacking_is_merging_then_sharding(many: list[Layer], data: st.DataObject) -> None:
    rows = many[0].q.shape[0]
    start = data.draw(st.integers(0, rows - 1))
    length = data.draw(st.integers(1, rows - start))
    (gate0, up0, gate1, up1) = [layer.dense[start : start + length] for layer in many]
    wanted = np.stack([np.concatenate([gate0, up0]), np.concatenate([gate1, up1])])
    with loaded(*many) as (weights, reader):
        parts = [weight.narrow(0, start, length) for weight in weights]
        sharded = stack_affine([concat_affine(parts[:2], 0), concat_affine(parts[2:], 0)])
        assert same(decoded(sharded, reader), wanted)
        bank = stack_affine([concat_affine(weights[:2], 0), concat_affine(weights[2:], 0)])
        halves = [bank.narrow(1, at + start, length) for at in (0, rows)]
        assert same(decoded(concat_affine(halves, 1), reader), wanted)


@some
@given(layer=layers(), data=st.data())
def test_streaming_a_weight_gives_the_bytes_that_materializing_it_gives(layer: Layer, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, layer.q.shape[0] - 1))
    with loaded(layer) as ((weight,), reader):
        parts = weight.narrow(0, start, layer.q.shape[0] - start).refine(16).parts
        bindings = tuple(Binding(role, v.shape, v.dtype, (), (), 0, v) for role, v in parts.items())
        results = [out for _, out in stream(bindings, reader, lambda b: np.empty(b.nbytes, np.uint8))]
        found = [r.view(NUMPY_DTYPES[b.dtype]).reshape(b.shape) for b, r in zip(bindings, results, strict=True)]
        wanted = [a for a in arrays(weight.refine(16), reader) if a is not None]
    assert all(np.array_equal(f, w[start:]) for f, w in zip(found, wanted, strict=True))


@pytest.mark.parametrize("form", ["gptq", "awq"])
def test_a_weight_streamed_in_several_blocks_is_whole(form: str) -> None:
    layer = made(form, 4, 128, False, (1040, 6144), 7)
    assert layer.q.size // 2 > CHUNK // 4
    with loaded(layer) as ((weight,), reader):
        codes = weight.narrow(0, 5, 1030).codes
        binding = Binding("codes", codes.shape, codes.dtype, (), (), 0, codes)
        ((_, out),) = stream((binding,), reader, lambda b: np.empty(b.nbytes, np.uint8))
    assert np.array_equal(out.reshape(1030, -1), pack(layer.q[5:1035], 4, 8))


# What only the bytes can say


@some
@given(layer=layers(forms=("gptq", "gptq_v2")), data=st.data())
def test_permuted_group_numbers_are_refused_when_bytes_are_read(layer: Layer, data: st.DataObject) -> None:
    g_idx = np.arange(layer.q.shape[1], dtype=np.int32) // layer.group
    at = data.draw(st.integers(0, g_idx.size - 1))
    g_idx[at] += data.draw(st.sampled_from([-1, 1, 7]))
    with tempfile.TemporaryDirectory() as folder:
        packed = layer.packed | {"g_idx": g_idx}
        with written(Path(folder), w=packed) as ((sidecars,), reader):
            weight = normalized(sidecars, layout(layer.block))
            with pytest.raises(ActOrder) as refused:
                decoded(weight, reader)
    assert refused.value.code == "act-order"


def test_a_rank_sees_a_permutation_in_its_own_groups() -> None:
    layer = made("gptq", 4, 16, True, (8, 64), 4)
    g_idx = np.arange(64) // 16
    g_idx[20], g_idx[40] = g_idx[40], g_idx[20]
    with tempfile.TemporaryDirectory() as folder:
        packed = layer.packed | {"g_idx": g_idx.astype(np.int32)}
        with written(Path(folder), w=packed) as ((sidecars,), reader):
            weight = normalized(sidecars, layout(layer.block))
            for start in (0, 48):
                kept = weight.narrow(1, start, 16)
                assert same(decoded(kept, reader), layer.dense[:, start : start + 16])
            with pytest.raises(ActOrder):
                decoded(weight.narrow(1, 32, 32), reader)


def test_act_order_in_the_metadata_is_refused_from_headers_unless_groups_are_static_or_one() -> None:
    for group, static, refused in [(16, False, True), (16, True, False), (-1, False, False)]:
        layer = made("gptq", 4, group, True, (8, 64), 5)
        config = layout(layer.block | {"desc_act": True, "static_groups": static})
        with tempfile.TemporaryDirectory() as folder, written(Path(folder), w=layer.packed) as ((sidecars,), _):
            problems = CODECS["gptq"].check("w", sidecars, config)
        assert [type(problem) for problem in problems] == ([ActOrder] if refused else [])


@some
@given(layer=layers(), at=st.integers(0, 2**31), by=st.integers(1, 3))
def test_one_zero_point_off_the_midpoint_of_a_symmetric_layer_is_refused(layer: Layer, at: int, by: int) -> None:
    z = np.full_like(layer.z, 1 << (layer.bits - 1))
    z.flat[at % z.size] = ((1 << (layer.bits - 1)) + by) % (1 << layer.bits)
    asymmetric = Layer(layer.form, layer.bits, layer.group_size, False, layer.q, z, layer.s)
    block = Layer(layer.form, layer.bits, layer.group_size, True, layer.q, z, layer.s).block
    with tempfile.TemporaryDirectory() as folder, written(Path(folder), w=asymmetric.packed) as ((sidecars,), reader):
        weight = normalized(sidecars, layout(block))
        with pytest.raises(ZeroPointMismatch) as refused:
            decoded(weight, reader)
    assert refused.value.where == "w"
    assert refused.value.found.startswith(str(z.flat[at % z.size]))
