"""The prover's decoder against layers the producers packed: codes and zero points as integers, scales as stored."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import waybill
import waybill.onnx.verify.decoding
import waybill.onnx.verify.origin
from waybill.checkpoint.header import read_header
from waybill.errors import ActOrder, FileChanged, PackingMismatch
from waybill.families.decoder import decoder_components
from waybill.manifest.quantization import read_quantization
from waybill.onnx.verify.decoding import PackedMatrix, StoredTensors, packed_matrix

GOLDEN = Path(__file__).parents[1] / "golden"
LAYERS = GOLDEN / "layers"
INDEX: dict[str, dict[str, Any]] = {
    entry["file"].removesuffix(".safetensors"): entry["config"]
    for entry in json.loads((LAYERS / "INDEX.json").read_text())
    if "fp8" not in entry["file"] and "fp4" not in entry["file"]  # small floats: a package holds them as such
}
BANK = "olive_main_moe3d_w4_g32_asym"
OTHERS = {
    BANK,
    "ct_pack_w4_g32_sym_actorder",
    "autoawq_gemv_w4_g64",
    "autoawq_gemvfast_w4_g64",
    "gptqmodel_v2_w4_g32_asym_actorder",
    "olive_main_w4_g0_sym",
}


def bits_of(config: dict[str, Any]) -> int:
    """Of the one layout a block describes."""
    groups = config.get("config_groups")
    return int(groups["group_0"]["weights"]["num_bits"] if groups else config["bits"])


READABLE = sorted(name for name, config in INDEX.items() if bits_of(config) in (2, 4, 8) and name not in OTHERS)
CHECKPOINTS = [path.name for path in sorted((GOLDEN / "checkpoints").iterdir())]


def layer(name: str, expert: int | None = None) -> PackedMatrix:
    """A layer file under the names of a weight called x.weight, or of a bank called x."""
    headers = {
        tensor.name: tensor for tensor in read_header(LAYERS / f"{name}.safetensors", f"{name}.safetensors").tensors
    }
    problems: list[Any] = []
    manifest = read_quantization({"quantization_config": INDEX[name]}, {}, decoder_components({}), problems)
    plan = manifest.for_component("decoder")
    assert plan is not None
    assert not problems
    named = {}
    for header in headers.values():
        for role in (*waybill.onnx.verify.decoding.SIDECARS, "weight"):
            if header.name == role or header.name.endswith((f"_{role}", f".{role}")):
                full = f"x_{role}" if expert is not None else f"x.{role}"
                named[full] = header._replace(name=full)
    weight = "x" if expert is not None else "x.weight"
    return packed_matrix(StoredTensors(LAYERS, named), weight, plan.layout, expert)


@pytest.mark.parametrize("name", READABLE)
def test_a_producers_layer_decodes_to_the_producers_integers(name: str) -> None:
    matrix, wanted = layer(name), load_file(LAYERS / f"{name}.safetensors")
    codes = matrix.codes(0, matrix.rows)
    assert np.array_equal(codes, wanted["ref.q"])
    assert np.array_equal(matrix.zeros, wanted["ref.zp"])
    assert np.array_equal(codes[8:16], matrix.codes(8, 16))
    group_of = np.arange(matrix.columns) // matrix.group
    values = (codes.astype(np.float32) - matrix.zeros.astype(np.float32)[:, group_of]) * matrix.scales.astype(
        np.float32
    )[:, group_of]
    assert np.array_equal(values, wanted["expected_dequant"])


def test_every_expert_of_a_producers_bank_decodes_to_the_producers_integers() -> None:
    wanted = load_file(LAYERS / f"{BANK}.safetensors")
    for expert in range(len(wanted["ref.q"])):
        matrix = layer(BANK, expert)
        assert np.array_equal(matrix.codes(0, matrix.rows), wanted["ref.q"][expert])
        assert np.array_equal(matrix.zeros, wanted["ref.zp"][expert])


def test_there_are_layers_of_every_form() -> None:
    forms = {(layer(name).form, layer(name).bits) for name in READABLE}
    several = ("gptq", "olive", "compressed-tensors")
    assert forms == {("awq", 4), *((form, bits) for form in several for bits in (2, 4, 8))}


@pytest.mark.parametrize("name", ["gptqmodel_v2_w4_g32_asym_actorder", "ct_pack_w4_g32_sym_actorder"])
def test_permuted_groups_are_refused(name: str) -> None:
    with pytest.raises(ActOrder):
        layer(name)


def test_parts_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(PackingMismatch):
        layer("olive_main_w4_g0_sym")


def test_a_file_that_ends_too_early_is_named(tmp_path: Path) -> None:
    (header, *_) = read_header(LAYERS / "autoawq_gemm_w4_g32.safetensors", "short").tensors
    (tmp_path / "short").write_bytes(b"x" * 100)
    with pytest.raises(FileChanged, match="short"):
        StoredTensors(tmp_path, {header.name: header}).whole(header.name)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_package_of_a_producers_checkpoint_is_proven(tmp_path: Path, name: str) -> None:
    checkpoint = GOLDEN / "checkpoints" / name
    waybill.build(checkpoint).save(tmp_path / "package")
    report = waybill.verify(tmp_path / "package", checkpoint)
    report.require_clean()
    assert report.weights


@pytest.mark.parametrize("module", ["decoding", "origin", "compare", "proof"])
def test_the_prover_shares_no_code_with_what_it_proves(module: str) -> None:
    path = Path(waybill.onnx.verify.decoding.__file__).with_name(f"{module}.py")
    imported = {node.module or "" for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)}
    shared = ("waybill.codecs", "waybill.plan", "waybill.weights.affine", "waybill.weights.lazy", "waybill.rules")
    assert [name for name in imported if name.startswith(shared)] == []
