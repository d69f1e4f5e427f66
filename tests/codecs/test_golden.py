"""Layers packed by the producers' own packages: every supported one decodes bit for bit, every other is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from packers import Array, arrays, decoded, layout, normalized, opened, roles, same
from waybill.codecs.registry import CODECS
from waybill.errors import ActOrder, PackingMismatch, UnsupportedQuantization, WaybillError
from waybill.families.decoder import decoder_components
from waybill.manifest.quantization import read_quantization
from waybill.plan.boxes import materialize

LAYERS = Path(__file__).parents[1] / "golden" / "layers"
INDEX: dict[str, dict[str, Any]] = {
    entry["file"].removesuffix(".safetensors"): entry["config"]
    for entry in json.loads((LAYERS / "INDEX.json").read_text())
    if "fp8" not in entry["file"] and "mxfp4" not in entry["file"]  # see test_floating
}


def bits_of(config: dict[str, Any]) -> int:
    """Of the one layout a block describes."""
    groups = config.get("config_groups")
    return int(groups["group_0"]["weights"]["num_bits"] if groups else config["bits"])


BY_CONFIG = {name: f"{bits_of(c)} bits" for name, c in INDEX.items() if bits_of(c) in (3, 5, 6, 7)} | {
    "ct_nvfp4": "nvfp4-pack-quantized: its scales are divided by another scale, and such a quotient is rounded",
    "autoawq_gemv_w4_g64": "gemv",
    "autoawq_gemvfast_w4_g64": "gemv_fast",
}
BY_HEADERS = {
    "gptqmodel_v2_w4_g32_asym_actorder": ActOrder,
    "ct_pack_w4_g32_sym_actorder": ActOrder,
    "olive_main_w4_g0_sym": PackingMismatch,
}
SUPPORTED = sorted(INDEX.keys() - BY_CONFIG.keys() - BY_HEADERS.keys())
ROLES = ("qweight", "scales", "qzeros", "g_idx")
COMPRESSED = ("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "g_idx")
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
V1_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}


def stored(name: str) -> dict[str, Array]:
    return dict(load_file(LAYERS / f"{name}.safetensors"))


def parts(tensors: dict[str, Any], name: str) -> dict[str, Any]:
    return roles(tensors, COMPRESSED if name.startswith("ct_") else ROLES)


def problems_of(config: dict[str, Any]) -> list[WaybillError]:
    problems: list[WaybillError] = []
    read_quantization({"quantization_config": config}, {}, decoder_components({}), problems)
    return problems


# An independent decoder: one field at a time, in Python integers.


def field(word: Any, bits: int, slot: int) -> int:
    return (int(word) & 0xFFFFFFFF) >> (bits * slot) & ((1 << bits) - 1)


def gptq_fields(qweight: Array, qzeros: Array, bits: int, plus: int) -> tuple[Array, Array]:
    per = 32 // bits
    rows, outputs, groups = qweight.shape[0] * per, qweight.shape[1], qzeros.shape[0]
    q = [[field(qweight[k // per, n], bits, k % per) for k in range(rows)] for n in range(outputs)]
    raised = [[(int(word) + plus) & 0xFFFFFFFF for word in row] for row in qzeros]
    return np.array(q), np.array(
        [[field(raised[g][n // per], bits, n % per) for g in range(groups)] for n in range(outputs)]
    )


def awq_fields(qweight: Array, qzeros: Array) -> tuple[Array, Array]:
    def unpacked(words: Array) -> Array:
        out = np.empty((words.shape[1] * 8, words.shape[0]), int)
        for row in range(words.shape[0]):
            for column in range(words.shape[1]):
                for slot in range(8):
                    out[8 * column + ORDER[slot], row] = field(words[row, column], 4, slot)
        return out

    return unpacked(qweight), unpacked(qzeros)


def byte_fields(octets: Array, bits: int, count: int) -> Array:
    per = 8 // bits
    rows = octets.reshape(-1, octets.shape[-1])
    out = [[field(row[i // per], bits, i % per) for i in range(count)] for row in rows]
    return np.array(out).reshape(*octets.shape[:-1], count)


def compressed_fields(tensors: dict[str, Array], bits: int) -> tuple[Array, Array]:
    per, scales = 32 // bits, tensors["weight_scale"]
    if (signed := tensors.get("weight")) is not None:
        return signed.astype(int) + 128, np.full(scales.shape, 128)
    rows, columns = tensors["weight_shape"].tolist()
    words, zeros = tensors["weight_packed"], tensors.get("weight_zero_point")
    q = [[field(words[n, k // per], bits, k % per) for k in range(columns)] for n in range(rows)]
    if zeros is None:
        return np.array(q), np.full(scales.shape, 1 << (bits - 1))
    z = [[field(zeros[n // per, g], bits, n % per) for g in range(scales.shape[1])] for n in range(rows)]
    return np.array(q), np.array(z)


def independent(name: str) -> tuple[Array, Array]:
    """The codes and true zero points of a golden layer, by the formats' formulas."""
    config, tensors = INDEX[name], stored(name)
    bits = bits_of(config)
    if config["quant_method"] == "compressed-tensors":
        return compressed_fields(tensors, bits)
    form = config.get("packing_format", config["quant_method"])
    if form in ("awq", "auto_round:auto_awq"):
        return awq_fields(tensors["qweight"], tensors["qzeros"])
    if form != "olive":
        minus_one = form == "auto_round:auto_gptq" or config.get("checkpoint_format") == "gptq"
        return gptq_fields(tensors["qweight"], tensors["qzeros"], bits, V1_ONES[bits] if minus_one else 0)
    by_role = {role: value for key, value in tensors.items() for role in ROLES if key.endswith(role)}
    scales = by_role["scales"]
    q = byte_fields(by_role["qweight"], bits, by_role["qweight"].shape[-1] * 8 // bits)
    if "qzeros" not in by_role:
        return q, np.full(scales.shape, 1 << (bits - 1))
    return q, byte_fields(by_role["qzeros"], bits, scales.shape[-1])


def test_the_golden_layers_are_all_accounted_for() -> None:
    listed = {entry["file"] for entry in json.loads((LAYERS / "INDEX.json").read_text())}
    assert {file.name for file in LAYERS.glob("*.safetensors")} == listed
    assert {f"{name}.safetensors" for name in INDEX} < listed
    assert len(SUPPORTED) == 84


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_golden_layer_is_reproduced_bit_for_bit(name: str) -> None:
    with opened(LAYERS, f"{name}.safetensors") as (tensors, reader):
        weight = normalized(parts(tensors, name), layout(INDEX[name]))
        assert same(decoded(weight, reader), stored(name)["expected_dequant"])


@pytest.mark.parametrize("name", SUPPORTED)
def test_the_integers_of_a_golden_layer_are_those_an_independent_decoder_finds(name: str) -> None:
    tensors, (q, z) = stored(name), independent(name)
    assert np.array_equal(q, tensors["ref.q"])
    assert np.array_equal(z, tensors["ref.zp"])
    with opened(LAYERS, f"{name}.safetensors") as (headers, reader):
        weight = normalized(parts(headers, name), layout(INDEX[name]))
        codes, _, zeros = arrays(weight, reader)
    bits = bits_of(INDEX[name])
    assert np.array_equal(byte_fields(codes, bits, codes.shape[-1] * 8 // bits).reshape(q.shape), q)
    assert np.array_equal(np.full(z.shape, 1 << (bits - 1)) if zeros is None else zeros, z)


@pytest.mark.parametrize("name", SUPPORTED)
def test_scales_keep_the_bytes_and_dtype_the_producer_wrote(name: str) -> None:
    with opened(LAYERS, f"{name}.safetensors") as (tensors, reader):
        sidecars = parts(tensors, name)
        config = layout(INDEX[name])
        found = materialize(normalized(sidecars, config).scales, reader)
    kept = stored(name)[(sidecars.get("scales") or sidecars["weight_scale"]).name]
    kept = kept.T if config.method in ("gptq", "awq") else kept
    assert found.dtype == kept.dtype
    assert np.array_equal(found, kept)


@pytest.mark.parametrize("name", sorted(BY_CONFIG))
def test_a_layer_in_an_unsupported_form_is_refused_by_what_the_metadata_says(name: str) -> None:
    (problem,) = problems_of(INDEX[name])
    assert isinstance(problem, UnsupportedQuantization)
    assert problem.found == BY_CONFIG[name]


@pytest.mark.parametrize("name", sorted(BY_HEADERS))
def test_a_layer_that_a_codec_cannot_hold_is_refused_from_its_headers(name: str) -> None:
    config = layout(INDEX[name])
    with opened(LAYERS, f"{name}.safetensors") as (tensors, _):
        (problem,) = CODECS[config.method].check("w", parts(tensors, name), config)
    assert isinstance(problem, BY_HEADERS[name])


@pytest.mark.parametrize("name", [name for name, refusal in BY_HEADERS.items() if refusal is ActOrder])
def test_act_order_is_refused_when_bytes_are_read_even_if_the_metadata_does_not_mention_it(name: str) -> None:
    config = replace(layout(INDEX[name]), desc_act=False)
    with opened(LAYERS, f"{name}.safetensors") as (tensors, reader):
        weight = normalized(parts(tensors, name), config)
        with pytest.raises(ActOrder):
            decoded(weight, reader)


@pytest.mark.parametrize("name", [name for name in SUPPORTED if name.startswith("gptqmodel") and name.endswith("_sym")])
def test_the_wrong_checkpoint_format_on_a_symmetric_layer_is_refused(name: str) -> None:
    other = {"gptq": "gptq_v2", "gptq_v2": "gptq"}[INDEX[name]["checkpoint_format"]]
    config = layout(INDEX[name] | {"checkpoint_format": other, "format": other})
    with opened(LAYERS, f"{name}.safetensors") as (tensors, reader):
        weight = normalized(parts(tensors, name), config)
        with pytest.raises(WaybillError, match="zero-point-mismatch") as refused:
            decoded(weight, reader)
    assert "checkpoint_format" in refused.value.found
