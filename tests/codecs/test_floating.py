"""Weights that are small floats: producers' own bytes decode exactly, and cutting commutes with decoding."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch

from checkpoints import BF16, Array
from floating import E4M3, E5M2, Blocks, float4, float8, quantize
from packers import layout, opened, same, written
from waybill.checkpoint import RangeReader, TensorHeader
from waybill.codecs.fp8 import float8_weight
from waybill.codecs.mxfp4 import mxfp4_weight
from waybill.codecs.registry import CODECS
from waybill.engine.layers.lookup import looked_up
from waybill.plan.boxes import materialize
from waybill.weights import stored
from waybill.weights.codebook import CodebookWeight, concat_codebooks, stack_codebooks
from waybill.weights.dequantize import dequantize_codes, table_of, unpack

LAYERS = Path(__file__).parents[1] / "golden" / "layers"
CONFIGS: dict[str, dict[str, Any]] = {
    entry["file"].removesuffix(".safetensors"): entry["config"]
    for entry in json.loads((LAYERS / "INDEX.json").read_text())
}
FP8 = sorted(name for name in CONFIGS if "fp8" in name)
BANK = "hf_mxfp4_gptoss"
some = settings(max_examples=50, deadline=None, derandomize=True)


def decoded(weight: CodebookWeight, reader: RangeReader) -> Array:
    return dequantize_codes(materialize(weight.codes, reader), materialize(weight.scales, reader), weight.layout)


def normalized(config: dict[str, Any], sidecars: dict[str, TensorHeader]) -> CodebookWeight:
    """Through the codec: headers must be accepted."""
    own = layout(config)
    codec = CODECS[own.method]
    assert not codec.check("w", sidecars, own)
    weight = codec.normalize("w", sidecars, own)
    assert isinstance(weight, CodebookWeight)
    return weight


def raw(name: str, key: str) -> Array:
    """The bytes of a tensor, flat, read without the library's dtypes."""
    octets: Array = load_torch(LAYERS / f"{name}.safetensors")[key].reshape(-1).view(torch.uint8).numpy()
    return octets


def scales_of(name: str) -> str:
    """The name of a golden layer's scales."""
    return "weight_scale" if name.startswith("ct_") else "weight_scale_inv"


def sidecars_of(headers: dict[str, TensorHeader]) -> dict[str, TensorHeader]:
    """The parts of a golden layer, by role."""
    roles = {"weight": "weight", "weight_scale": "weight_scale", "weight_scale_inv": "scale_inv"}
    return {role: headers[name] for name, role in roles.items() if name in headers}


def size_of(config: dict[str, Any]) -> list[int] | None:
    """Rows and columns of a block, None where a scale is a row's or the tensor's."""
    groups = config.get("config_groups")
    size: list[int] | None
    size = groups["group_0"]["weights"].get("block_structure") if groups else config["weight_block_size"]
    return size


# Golden bytes


@pytest.mark.parametrize("name", FP8)
def test_golden_fp8_is_reproduced_bit_for_bit(name: str) -> None:
    with opened(LAYERS, f"{name}.safetensors") as (tensors, reader):
        weight = normalized(CONFIGS[name], sidecars_of(tensors))
        found = decoded(weight, reader)
        assert same(found, materialize(stored(tensors["expected_dequant"]), reader))
        assert weight.layout.divides == name.startswith("gptqmodel")
        assert materialize(weight.scales, reader).tobytes() == raw(name, scales_of(name)).tobytes()


@pytest.mark.parametrize("name", FP8)
def test_golden_fp8_means_what_its_bits_and_formula_say(name: str) -> None:
    """Without the codec: one element at a time, from the definition of the float."""
    tensors = load_torch(LAYERS / f"{name}.safetensors")
    expected = tensors["expected_dequant"].numpy()
    codes = raw(name, "weight").reshape(expected.shape)
    rows, columns = codes.shape
    scales = tensors[scales_of(name)].float().numpy()
    size = size_of(CONFIGS[name])
    if size is None:
        scales, size = (scales.reshape(-1, 1), [1, columns]) if scales.size > 1 else (scales.reshape(1, 1), codes.shape)
    for n in range(0, rows, 5):
        for k in range(columns):
            value, scale = np.float32(float8(int(codes[n, k]))), scales[n // size[0], k // size[1]]
            assert expected[n, k] == (value / scale if name.startswith("gptqmodel") else value * scale)


def test_a_golden_mxfp4_bank_is_reproduced_bit_for_bit() -> None:
    expected = load_file(LAYERS / f"{BANK}.safetensors")["expected_dequant"]
    with opened(LAYERS, f"{BANK}.safetensors") as (tensors, reader):
        sidecars = {role: tensors[f"gate_up_proj_{role}"] for role in ("blocks", "scales")}
        weight = normalized(CONFIGS[BANK], sidecars)
        assert weight.shape == (2, 32, 64)
        assert same(decoded(weight, reader), expected)
        for expert in range(2):
            assert same(decoded(weight.select(0, expert), reader), expected[expert])
        again = stack_codebooks([weight.select(0, expert) for expert in (1, 0)])
        assert same(decoded(again, reader), expected[::-1])
        rows = weight.select(0, 1).narrow(0, 7, 12).narrow(1, 32, 32)
        assert same(decoded(rows, reader), expected[1, 7:19, 32:])


def test_a_golden_mxfp4_layer_of_compressed_tensors_is_reproduced_bit_for_bit() -> None:
    held = load_file(LAYERS / "ct_mxfp4.safetensors")
    with opened(LAYERS, "ct_mxfp4.safetensors") as (tensors, reader):
        weight = normalized(CONFIGS["ct_mxfp4"], {role: tensors[role] for role in ("weight_packed", "weight_scale")})
        assert same(decoded(weight, reader), held["expected_dequant"])
        assert np.array_equal(unpack(materialize(weight.codes, reader), 4), held["ref.codes"])
    values = np.array([float4(code) for code in range(16)])[held["ref.codes"]]
    powers = 2.0 ** (held["ref.e8m0"].astype(np.float64) - 127)
    assert np.array_equal(values * powers.repeat(32, axis=1), held["expected_dequant"])


@pytest.mark.parametrize(
    ("changes", "role", "expected"),
    [({"weight_packed": np.zeros((4, 40), np.uint8)}, "weight_packed", "U8[N, K/2]"),
     ({"weight_packed": np.zeros((4, 32), np.int8)}, "weight_packed", "U8[N, K/2]"),
     ({"weight_scale": np.ones((4, 3), np.uint8)}, "weight_scale", "U8[4, 2]"),
     ({"weight_scale": np.ones((4, 2), np.float32)}, "weight_scale", "U8[4, 2]"),
     ({"weight_zero_point": np.ones((4, 2), np.int8)}, "weight_zero_point", "nothing of that name beside floats")],
)  # fmt: skip
def test_a_mxfp4_layer_of_another_form_is_refused(
    changes: dict[str, Array], role: str, expected: str, tmp_path: Path
) -> None:
    parts = {"weight_packed": np.zeros((4, 32), np.uint8), "weight_scale": np.ones((4, 2), np.uint8)} | changes
    own = layout(CONFIGS["ct_mxfp4"])
    with written(tmp_path, w=parts) as ((sidecars,), _):
        (problem,) = CODECS[own.method].check("w", sidecars, own)
    assert problem.code == "packing-mismatch"
    assert role in problem.where + problem.found
    assert expected in problem.expected


def test_a_golden_mxfp4_bank_means_what_its_bits_and_formula_say() -> None:
    tensors = load_file(LAYERS / f"{BANK}.safetensors")
    blocks, scales = tensors["gate_up_proj_blocks"], tensors["gate_up_proj_scales"]
    for e, n, g, at in np.ndindex(blocks.shape):
        octet, power = int(blocks[e, n, g, at]), 2.0 ** (int(scales[e, n, g]) - 127)
        pair = tensors["expected_dequant"][e, n, 32 * g + 2 * at : 32 * g + 2 * at + 2]
        assert pair.tolist() == [float4(octet & 15) * power, float4(octet >> 4) * power]


def test_tables_are_the_definitions_of_the_floats() -> None:
    np.testing.assert_array_equal(table_of("E4M3"), np.array([float8(code) for code in range(256)], np.float32))
    wide = [float8(code, exponent=5, mantissa=2) for code in range(256)]
    np.testing.assert_array_equal(table_of("E5M2"), np.array(wide, np.float32))
    np.testing.assert_array_equal(table_of("E2M1"), np.array([float4(code) for code in range(16)], np.float32))
    assert np.signbit(table_of("E2M1")[8])
    np.testing.assert_array_equal(table_of("E8M0")[:255], 2.0 ** (np.arange(255) - 127.0))
    assert np.isnan(table_of("E8M0")[255])


# The engine's arithmetic


@pytest.mark.parametrize("name", [*FP8, BANK])
def test_the_engine_looks_up_exactly_these_values_and_any_rows_of_them(name: str) -> None:
    expected = load_torch(LAYERS / f"{name}.safetensors")["expected_dequant"]
    with opened(LAYERS, f"{name}.safetensors") as (headers, reader):
        if name == BANK:
            weight = normalized(CONFIGS[BANK], {role: headers[f"gate_up_proj_{role}"] for role in ("blocks", "scales")})
            weight, expected = weight.select(0, 1), expected[1]
        else:
            weight = normalized(CONFIGS[name], sidecars_of(headers))
        codes = torch.from_numpy(materialize(weight.codes, reader))
        scales = materialize(weight.scales, reader)
    held = {"F8_E8M0": np.uint8, "BF16": np.int16}.get(weight.scales.dtype, scales.dtype)
    of = torch.from_numpy(scales.view(held))
    of = of.view(torch.bfloat16) if weight.scales.dtype == "BF16" else of
    for rows in (torch.arange(len(codes)), torch.tensor([5, 0, 31, 5])):
        assert torch.equal(looked_up(codes[rows], of, weight.layout, rows, torch.float32), expected[rows])
        rounded = looked_up(codes[rows], of, weight.layout, rows, torch.bfloat16)
        assert torch.equal(rounded, expected[rows].to(torch.bfloat16))


# Constructors, for formats that spell the same numbers otherwise


def test_a_scale_for_each_row_is_a_block_of_one_row(tmp_path: Path) -> None:
    w = np.random.default_rng(1).standard_normal((6, 10)).astype(np.float32)
    codes, scales, dense = quantize(w, Blocks(1, -1, BF16))
    with written(tmp_path, w={"weight": codes, "weight_scale": scales[:, None]}) as ((parts,), reader):
        assert same(decoded(float8_weight(parts["weight"], parts["weight_scale"], (1, -1)), reader), dense)


def test_mxfp4_bytes_without_an_axis_of_blocks_are_the_same_weight(tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    octets, powers = random.integers(0, 256, (5, 48), np.uint8), random.integers(100, 140, (5, 3), np.uint8)
    values = np.array([[float4(o & 15), float4(o >> 4)] for o in octets.ravel().tolist()]).reshape(5, 96)
    wanted = (values * 2.0 ** (powers.astype(np.float64).repeat(32, 1) - 127)).astype(np.float32)
    with written(tmp_path, w={"packed": octets, "scale": powers}) as ((parts,), reader):
        assert same(decoded(mxfp4_weight(parts["packed"], parts["scale"]), reader), wanted)


# Any shapes


@st.composite
def layers(draw: st.DrawFn, *, rows: int | None = None) -> tuple[Array, Blocks]:
    shape = (rows or draw(st.integers(1, 40)), draw(st.integers(1, 40)))
    sizes = st.one_of(st.just(-1), st.integers(1, 48))
    r, c = draw(sizes), draw(sizes)
    r = r if c != -1 or r == -1 else 1  # without a size, one scale a tensor or a row
    inverse = draw(st.booleans())
    scales = np.float32 if inverse else draw(st.sampled_from([np.float32, BF16]))
    blocks = Blocks(r if c == -1 or r != -1 else shape[0], c, scales, gptqmodel=inverse or (r, c) == (1, -1))
    seed = draw(st.integers(0, 2**32 - 1))
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32), blocks


@contextmanager
def loaded(blocks: Blocks, *weights: Array) -> Iterator[tuple[list[CodebookWeight], list[Array], RangeReader]]:
    made = [quantize(weight, blocks) for weight in weights]
    parts = {f"w{n}": {"weight": codes, "scale_inv": scales} for n, (codes, scales, _) in enumerate(made)}
    with tempfile.TemporaryDirectory() as folder, written(Path(folder), **parts) as (sidecars, reader):
        yield [normalized(blocks.metadata, each) for each in sidecars], [dense for _, _, dense in made], reader


@some
@given(layer=layers(), data=st.data())
def test_a_cut_at_blocks_decodes_to_the_cut_and_any_other_is_refused(
    layer: tuple[Array, Blocks], data: st.DataObject
) -> None:
    weight, blocks = layer
    with loaded(blocks, weight) as ((held,), (dense,), reader):
        assert held.shape == dense.shape
        assert same(decoded(held, reader), dense)
        axis = data.draw(st.integers(0, 1))
        size, block = dense.shape[axis], (held.layout.rows, held.layout.columns)[axis]
        start = data.draw(st.integers(0, size - 1))
        length = data.draw(st.integers(1, size - start))
        whole = block >= size or (start % block == 0 and (length % block == 0 or start + length == size))
        if not whole and (start, length) != (0, size):
            with pytest.raises(ValueError, match="splits a block"):
                held.narrow(axis, start, length)
            return
        kept = held.narrow(axis, start, length)
        wanted = dense[start : start + length] if axis == 0 else dense[:, start : start + length]
        assert same(decoded(kept, reader), wanted)
        assert same(decoded(kept.row_by_row(), reader), wanted)
        first = data.draw(st.integers(0, kept.shape[0] - 1))
        assert same(decoded(kept.row_by_row().narrow(0, first, 1), reader), wanted[first : first + 1])


@some
@given(layer=layers(), data=st.data())
def test_joined_and_stacked_weights_decode_to_joined_and_stacked_ones(
    layer: tuple[Array, Blocks], data: st.DataObject
) -> None:
    weight, blocks = layer
    with loaded(blocks, weight, -2 * weight) as (held, dense, reader):
        assert same(decoded(stack_codebooks(held), reader), np.stack(dense))
        assert same(decoded(stack_codebooks(held).select(0, 1), reader), dense[1])
        if weight.shape[0] % held[0].layout.rows:
            with pytest.raises(ValueError, match="do not join"):
                concat_codebooks(held, 0)
            return
        joined = concat_codebooks(held, 0)
        assert same(decoded(joined, reader), np.concatenate(dense))
        assert same(decoded(joined.row_by_row(), reader), np.concatenate(dense))


@some
@given(layer=layers(), extra=st.integers(0, 50))
def test_rows_that_are_added_are_zero(layer: tuple[Array, Blocks], extra: int) -> None:
    weight, blocks = layer
    with loaded(blocks, weight) as ((held,), (dense,), reader):
        length = len(dense) + extra
        if held.layout.divides and held.layout.rows < len(dense):
            with pytest.raises(ValueError, match="not added"):
                held.pad(0, length)
            return
        padded = decoded(held.pad(0, length), reader)
    assert same(padded[: len(dense)], dense)
    assert not padded[len(dense) :].any()


def test_weights_of_different_blocks_or_meaning_do_not_join() -> None:
    w = np.ones((4, 4), np.float32)
    for one, other in [(Blocks(2, 2), Blocks(4, 2)), (Blocks(2, 2), Blocks(2, 2, codes=E5M2))]:
        with loaded(one, w) as ((first,), _, _), loaded(other, w) as ((second,), _, _):
            for join in (lambda pair: concat_codebooks(pair, 0), stack_codebooks):
                with pytest.raises(ValueError, match="do not"):
                    join([first, second])


def test_five_bits_of_exponent_are_read_as_such() -> None:
    w = np.random.default_rng(3).standard_normal((8, 8)).astype(np.float32)
    with loaded(Blocks(4, 4, codes=E5M2), w) as ((held,), (dense,), reader):
        assert held.layout.table == "E5M2"
        assert same(decoded(held, reader), dense)
    assert E4M3 != E5M2
