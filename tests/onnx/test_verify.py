"""waybill verify: good packages are proven, and whatever is wrong with one is named."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from blake3 import blake3

import waybill
from checkpoints import BF16, Recipe, llama, qwen2, qwen2_moe, qwen3, qwen3_moe
from commands import Capture, Patch, run
from packing import Scheme, pack
from waybill.codecs import awq, decoders, gptq
from waybill.errors import BadPackage, MissingRuntime, Refused
from waybill.onnx.verify.report import Report
from waybill.plan import assemble
from waybill.weights import affine, dtypes

GPTQ = Scheme("gptq", 4, 32)
DOWN = "model.layers.0.mlp.down_proj"
QKV = "model.layers.0.self_attn.qkv_proj"


def packed(recipe: Recipe, scheme: Scheme, **options: Any) -> Recipe:
    return pack(recipe, scheme, **options).packed


def export(folder: Path, recipe: Recipe, *, link: bool = False, **options: Any) -> tuple[Path, Path]:
    """A package and the checkpoint it was made from."""
    checkpoint = recipe.write(folder / "checkpoint")
    waybill.build(checkpoint, link=link, **options).save(folder / "package", link=link)
    return folder / "package", checkpoint


@contextmanager
def bill(package: Path) -> Iterator[dict[str, Any]]:
    """waybill.json, to be changed."""
    path = package / "waybill.json"
    content = json.loads(path.read_text())
    yield content
    path.write_text(json.dumps(content))


def initializers(content: dict[str, Any]) -> dict[str, Any]:
    found = content["components"]["decoder"]["initializers"]
    assert isinstance(found, dict)
    return found


def flip(package: Path, name: str, at: int = 0, bits: int = 1) -> None:
    """Change one byte of an initializer, and nothing else."""
    entry = initializers(json.loads((package / "waybill.json").read_text()))[name]
    path = package / entry["file"]
    octets = bytearray(path.read_bytes())
    octets[entry["offset"] + at] ^= bits
    path.write_bytes(octets)


def seal(package: Path) -> None:
    """Make every digest right again, as whoever tampers with a package would."""
    with bill(package) as content:
        for entry in initializers(content).values():
            octets = (package / entry["file"]).read_bytes()[entry["offset"] : entry["offset"] + entry["bytes"]]
            entry["blake3"] = blake3(octets).hexdigest()
        content["components"]["decoder"]["blake3"] = blake3((package / "model.onnx").read_bytes()).hexdigest()


def problems(report: Report) -> list[tuple[str, str]]:
    return [(problem.code, problem.where.split(" ")[0]) for problem in report.problems]


def proven(package: Path, checkpoint: Path, bytes_told: list[int] | None = None) -> Report:
    told: list[int] = [] if bytes_told is None else bytes_told
    report = waybill.verify(package, checkpoint, progress=told.append)
    report.require_clean()
    assert report.runs["decoder"].startswith("session opened")
    assert report.weights
    return report


# Good packages

FAMILIES = {
    "llama": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen2-moe": lambda dtype: qwen2_moe(dtype, shared_expert_intermediate_size=64),
    "qwen3-moe": qwen3_moe,
    "qwen3-moe banks": lambda dtype: qwen3_moe(dtype, banks=True),
}


@pytest.mark.parametrize("stored", [BF16, np.float16, np.float32], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_float_package_is_proven_equal_to_its_checkpoint(
    tmp_path: Path, family: str, dtype: str, stored: Any
) -> None:
    report = proven(*export(tmp_path, FAMILIES[family](stored), dtype=dtype))
    assert report.sources == len(waybill.open(tmp_path / "checkpoint").tensors)


SCHEMES = [
    *(Scheme(form, bits, 32, sym) for form in ("gptq", "gptq_v2") for bits in (2, 4, 8) for sym in (True, False)),
    *(Scheme(form, bits, 32, sym) for form in ("olive", "olive_dotted") for bits in (2, 4, 8) for sym in (True, False)),
    Scheme("awq", 4, 32, True),
    Scheme("awq", 4, 32, False),
    Scheme("auto_round", 4, 32, True),
    Scheme("auto_round", 2, 32, False),
    Scheme("gptq", 4, 48),  # blocks of 16, and a last group that K does not fill
    Scheme("gptq", 4, -1),
    Scheme("olive", 4, 32, False, np.float32),
    Scheme("olive", 4, 32, False, BF16),
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_packed_package_is_proven_equal_to_its_checkpoint(tmp_path: Path, scheme: Scheme) -> None:
    proven(*export(tmp_path, packed(llama(np.float32), scheme)))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("scheme", [GPTQ, Scheme("awq", 4, 32), Scheme("olive", 8, 32), Scheme("auto_round", 4, 32)])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3-moe"])
def test_every_family_is_proven_in_every_form(tmp_path: Path, family: str, scheme: Scheme, dtype: str) -> None:
    proven(*export(tmp_path, packed(FAMILIES[family](np.float32), scheme), dtype=dtype))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_packed_banks_are_proven(tmp_path: Path, bits: int, symmetric: bool) -> None:
    proven(*export(tmp_path, packed(qwen3_moe(np.float32, banks=True), Scheme("olive", bits, 32, symmetric))))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("tables", [{"table": True}, {"head": True}, {"table": True, "head": True},
                                    {"table": True, "tie": True}], ids=str)  # fmt: skip
def test_packed_tables_are_proven_whatever_name_the_graph_knows_them_by(
    tmp_path: Path, tables: dict[str, bool], symmetric: bool
) -> None:
    proven(*export(tmp_path, packed(llama(np.float32), Scheme("olive", 4, 32, symmetric), **tables)))


def test_weights_that_are_packed_in_several_ways_are_proven(tmp_path: Path) -> None:
    overrides = {DOWN: {"bits": 8}, "model.layers.1.self_attn.q_proj": {"group": 16}}
    recipe = packed(llama(np.float32), GPTQ, overrides=overrides, keep=["model.layers.1.mlp.up_proj"])
    proven(*export(tmp_path, recipe))


def test_a_tied_head_that_is_stored_again_is_proven_to_be_the_table(tmp_path: Path) -> None:
    recipe = qwen3(BF16)
    recipe.tensors["lm_head.weight"] = recipe.tensors["model.embed_tokens.weight"]
    package, checkpoint = export(tmp_path, recipe)
    assert proven(package, checkpoint).sources == len(recipe.tensors)
    recipe.tensors["lm_head.weight"] = recipe.tensors["lm_head.weight"].copy()
    recipe.tensors["lm_head.weight"][3, 5] += 1
    report = waybill.verify(package, recipe.write(tmp_path / "other"))
    assert problems(report) == [("package-mismatch", "model.embed_tokens.weight")]
    assert "at row 3, column 5, as in lm_head.weight row 3" in report.problems[0].expected


@pytest.mark.parametrize("options", [{"link": True}, {"logits": "all"}, {"exact": True}], ids=str)
def test_options_of_the_export_do_not_matter(tmp_path: Path, options: dict[str, Any]) -> None:
    proven(*export(tmp_path, llama(np.float32), **options))


def test_a_sharded_checkpoint_and_dropped_tensors_are_accounted_for(tmp_path: Path) -> None:
    recipe = packed(llama(np.float32), GPTQ)
    recipe.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    checkpoint = recipe.write(tmp_path / "checkpoint", shard_of=lambda name: len(name) % 3)
    waybill.build(checkpoint).save(tmp_path / "package")
    report = proven(tmp_path / "package", checkpoint)
    assert list(report.dropped) == ["model.layers.0.self_attn.rotary_emb.inv_freq"]


def test_a_package_that_was_moved_is_still_whole_and_needs_no_checkpoint(tmp_path: Path) -> None:
    package, checkpoint = export(tmp_path, packed(llama(np.float32), GPTQ))
    shutil.move(package, tmp_path / "elsewhere")
    shutil.rmtree(checkpoint)
    told: list[int] = []
    report = waybill.verify(tmp_path / "elsewhere", progress=told.append)
    report.require_clean()
    assert report.weights is None
    assert sum(told) == report.data_bytes


def test_progress_counts_every_byte_once_for_its_digest_and_once_for_its_proof(tmp_path: Path) -> None:
    package, checkpoint = export(tmp_path, packed(qwen3_moe(np.float32), GPTQ))
    told: list[int] = []
    report = proven(package, checkpoint, told)
    assert sum(told) == 2 * report.data_bytes


def test_what_no_cpu_can_run_is_proven_without_being_run(tmp_path: Path) -> None:
    package, checkpoint = export(tmp_path, llama(BF16), dtype="bfloat16", ep="cuda")
    report = waybill.verify(package, checkpoint)
    report.require_clean()
    assert report.runs["decoder"].startswith("not run here: dtype: needs float32 or float16")
    assert report.weights


# One byte is wrong

PARTS = [
    (f"{QKV}.codes", 5),
    (f"{QKV}.scales", 5),
    (f"{QKV}.zero_points", 0),
    ("model.norm.weight", 0),
    ("model.embed_tokens.weight", 77),
    ("cos_cache", 9),
]


@pytest.mark.parametrize(("name", "at"), PARTS)
def test_a_flipped_byte_is_found_by_its_digest(tmp_path: Path, name: str, at: int) -> None:
    package, _ = export(tmp_path, packed(llama(np.float32), GPTQ))
    flip(package, name, at)
    report = waybill.verify(package)
    assert problems(report) == [("package-mismatch", name)]
    assert report.problems[0].expected.startswith("BLAKE3 ")
    assert report.runs["decoder"].startswith("not run")


@pytest.mark.parametrize(
    ("name", "at", "bits", "place"),
    [
        (f"{QKV}.codes", 32 * 65 + 20, 0x10, "row 65, column 41, as in model.layers.0.self_attn.k_proj.weight row 1"),
        (f"{QKV}.scales", 4 * 195 + 2, 1, "row 97, column 1, as in model.layers.0.self_attn.v_proj.weight row 1"),
        (f"{QKV}.zero_points", 3, 0x10, "row 3, column 1, as in model.layers.0.self_attn.q_proj.weight row 3"),
        ("model.norm.weight", 4 * 7, 1, "row 7, column 0, as in model.norm.weight row 7"),
        ("cos_cache", 4 * (8 * 3 + 2) + 2, 1, "row 3, column 2, as in the config, cos_cache row 3"),
    ],
)  # fmt: skip
def test_a_flipped_byte_under_a_right_digest_is_found_by_the_checkpoint(
    tmp_path: Path, name: str, at: int, bits: int, place: str
) -> None:
    package, checkpoint = export(tmp_path, packed(llama(np.float32), GPTQ))
    flip(package, name, at, bits)
    seal(package)
    waybill.verify(package).require_clean()
    report = waybill.verify(package, checkpoint)
    assert problems(report) == [("package-mismatch", name)]
    assert f"at {place}" in report.problems[0].expected


def test_the_same_code_in_another_expert_names_the_expert(tmp_path: Path) -> None:
    package, checkpoint = export(tmp_path, packed(qwen3_moe(np.float32), GPTQ))
    name = "model.layers.0.mlp.experts.gate_up_proj.codes"
    flip(package, name, 32 * (64 * 2 + 7))
    seal(package)
    (problem,) = waybill.verify(package, checkpoint).problems
    assert problem.where == f"{name} (model.onnx.data)"
    assert "matrix 2, row 7, column 0, as in model.layers.0.mlp.experts.2.up_proj.weight row 3" in problem.expected


def test_everything_wrong_is_reported_together(tmp_path: Path) -> None:
    package, _ = export(tmp_path, packed(llama(np.float32), GPTQ))
    for name, at in PARTS:
        flip(package, name, at)
    with pytest.raises(Refused) as refused:
        waybill.verify(package).require_clean()
    assert {problem.where.split(" ")[0] for problem in refused.value.problems} == {name for name, _ in PARTS}


# Files and places


def test_a_truncated_data_file_names_what_it_lacks(tmp_path: Path) -> None:
    package, _ = export(tmp_path, llama(np.float32))
    data = package / "model.onnx.data"
    data.write_bytes(data.read_bytes()[:-1])
    (problem,) = waybill.verify(package).problems
    assert problem.what == "an initializer ends after its file does"
    assert problem.where == "sin_cache (model.onnx.data)"


def test_a_missing_data_file_is_one_problem(tmp_path: Path) -> None:
    package, _ = export(tmp_path, llama(np.float32))
    (package / "model.onnx.data").unlink()
    (problem,) = waybill.verify(package).problems
    assert (problem.code, problem.found) == ("bad-package", "nothing there")


def test_swapped_places_are_found_by_the_graph(tmp_path: Path) -> None:
    package, _ = export(tmp_path, llama(np.float32))
    with bill(package) as content:
        one, other = (initializers(content)[f"model.layers.0.mlp.{p}_proj.weight"] for p in ("gate", "up"))
        one["offset"], other["offset"] = other["offset"], one["offset"]
    names = {"model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"}
    found = {problem.what for problem in waybill.verify(package).problems}
    assert found > {f"the graph and waybill.json disagree about {name}" for name in names}


def test_swapped_places_in_graph_and_bill_are_found_by_the_digests_and_then_by_the_checkpoint(tmp_path: Path) -> None:
    package, checkpoint = export(tmp_path, llama(np.float32))
    names = [f"model.layers.0.mlp.{p}_proj.weight" for p in ("gate", "up")]
    with bill(package) as content:
        one, other = (initializers(content)[name] for name in names)
        one["offset"], other["offset"] = other["offset"], one["offset"]
        rewrite(package, {name: {"offset": initializers(content)[name]["offset"]} for name in names})
        content["components"]["decoder"]["blake3"] = blake3((package / "model.onnx").read_bytes()).hexdigest()
    assert sorted(where for _, where in problems(waybill.verify(package))) == names
    seal(package)
    waybill.verify(package).require_clean()
    report = waybill.verify(package, checkpoint)
    assert sorted(where for _, where in problems(report)) == names


def rewrite(package: Path, changes: dict[str, dict[str, Any]]) -> None:
    """Change external references of the graph."""
    model = ir.load(package / "model.onnx")
    for name, change in changes.items():
        value = model.graph.initializers[name]
        old = value.const_value
        assert isinstance(old, ir.ExternalTensor)
        stated: dict[str, Any] = {"location": old.location, "offset": old.offset, "length": old.length} | change
        value.const_value = ir.ExternalTensor(
            stated["location"],
            stated["offset"],
            stated["length"],
            old.dtype,
            shape=old.shape,
            name=name,
            base_dir=package,
        )
    (package / "model.onnx").write_bytes(ir.to_proto(model).SerializeToString(deterministic=True))


def test_overlapping_initializers_are_refused(tmp_path: Path) -> None:
    package, _ = export(tmp_path, llama(np.float32))
    with bill(package) as content:
        entry = initializers(content)["model.norm.weight"]
        entry["offset"] = initializers(content)["model.embed_tokens.weight"]["offset"] + 64
        rewrite(package, {"model.norm.weight": {"offset": entry["offset"]}})
    seal(package)
    (problem,) = waybill.verify(package).problems
    assert problem.what == "two initializers overlap"


def test_a_changed_graph_is_refused(tmp_path: Path) -> None:
    package, _ = export(tmp_path, llama(np.float32))
    model = ir.load(package / "model.onnx")
    model.producer_name = "someone else"
    (package / "model.onnx").write_bytes(ir.to_proto(model).SerializeToString(deterministic=True))
    (problem,) = waybill.verify(package).problems
    assert (problem.code, problem.where) == ("package-mismatch", "model.onnx")


def test_a_graph_that_is_none_is_refused(tmp_path: Path) -> None:
    package, _ = export(tmp_path, llama(np.float32))
    (package / "model.onnx").write_bytes(b"no graph")
    (problem,) = waybill.verify(package).problems
    assert (problem.code, problem.what) == ("bad-package", "the graph cannot be read")


def test_an_initializer_the_bill_does_not_list_is_refused(tmp_path: Path) -> None:
    package, _ = export(tmp_path, llama(np.float32))
    with bill(package) as content:
        del initializers(content)["model.norm.weight"]
    assert problems(waybill.verify(package)) == [("package-mismatch", "model.norm.weight")]


def test_an_entry_the_graph_does_not_use_is_refused(tmp_path: Path) -> None:
    package, _ = export(tmp_path, llama(np.float32))
    with bill(package) as content:
        initializers(content)["spare"] = initializers(content)["model.norm.weight"]
    assert problems(waybill.verify(package)) == [("package-mismatch", "spare")]


def test_a_weight_inside_the_graph_is_refused(tmp_path: Path) -> None:
    package, _ = export(tmp_path, llama(np.float32))
    model = ir.load(package / "model.onnx")
    model.graph.initializers["model.norm.weight"].const_value = ir.tensor(np.ones(64, np.float32))
    model.graph.initializers["lm_head.weight"].const_value = ir.tensor(np.ones((128, 64), np.float32))
    (package / "model.onnx").write_bytes(ir.to_proto(model).SerializeToString(deterministic=True))
    seal(package)
    found = problems(waybill.verify(package))
    assert ("package-mismatch", "lm_head.weight") in found
    assert ("package-mismatch", "model.norm.weight") in found


def test_a_weight_beside_the_listed_ones_is_refused(tmp_path: Path) -> None:
    package, _ = export(tmp_path, llama(np.float32))
    model = ir.load(package / "model.onnx")
    spare = ir.Value(name="spare", const_value=ir.tensor(np.ones(512, np.float32), name="spare"))
    model.graph.register_initializer(spare)
    (package / "model.onnx").write_bytes(ir.to_proto(model).SerializeToString(deterministic=True))
    seal(package)
    assert problems(waybill.verify(package)) == [("package-mismatch", "spare")]


def test_a_weight_in_an_attribute_or_under_a_name_twice_is_refused(tmp_path: Path) -> None:
    package, _ = export(tmp_path, llama(np.float32))
    proto = ir.to_proto(ir.load(package / "model.onnx"))
    hidden = ir.to_proto(ir.node("Constant", [], {"value": ir.tensor(np.ones(2, np.float32))}, name="hidden"))
    proto.graph.node.append(hidden)
    again = next(tensor for tensor in proto.graph.initializer if tensor.name == "model.norm.weight")
    proto.graph.initializer.append(again)
    (package / "model.onnx").write_bytes(proto.SerializeToString(deterministic=True))
    seal(package)
    found = problems(waybill.verify(package))
    assert sorted(found) == [("package-mismatch", "hidden.value"), ("package-mismatch", "model.norm.weight")]


@pytest.mark.parametrize("shape", [[], [1 << 40, 0], [1, 1, 1, 1, 64]], ids=str)
def test_a_shape_no_weight_has_is_refused(tmp_path: Path, shape: list[int]) -> None:
    package, _ = export(tmp_path, llama(np.float32))
    with bill(package) as content:
        entry = initializers(content)["model.norm.weight"]
        entry["shape"], entry["bytes"] = shape, 4 * int(np.prod(shape, dtype=object))
    with pytest.raises(BadPackage, match=r"waybill\.json is malformed"):
        waybill.verify(package)


def test_another_shape_of_the_same_bytes_is_refused(tmp_path: Path) -> None:
    package, _ = export(tmp_path, llama(np.float32))
    with bill(package) as content:
        initializers(content)["model.norm.weight"]["shape"] = [8, 8]
    (problem,) = waybill.verify(package).problems
    assert (problem.code, problem.expected[:9]) == ("package-mismatch", "F32[8, 8]")


def test_logits_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    recipe = llama(np.float32)
    recipe.tensors["lm_head.weight"][3] = np.nan
    package, _ = export(tmp_path, recipe)
    (problem,) = waybill.verify(package).problems
    assert (problem.code, problem.what) == ("bad-package", "the package computes logits that are not finite")


def test_a_graph_the_runtime_refuses_is_refused_in_its_words(tmp_path: Path) -> None:
    package, _ = export(tmp_path, llama(np.float32))
    model = ir.load(package / "model.onnx")
    next(node for node in model.graph if node.op_type == "Sigmoid").op_type = "NoSuchOperator"
    (package / "model.onnx").write_bytes(ir.to_proto(model).SerializeToString(deterministic=True))
    seal(package)
    (problem,) = waybill.verify(package).problems
    assert (problem.code, problem.what) == ("bad-package", "ONNX Runtime cannot run the package")
    assert "NoSuchOperator" in problem.found


# Untrusted waybill.json


def test_not_a_package(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", llama().write(tmp_path / "checkpoint")):
        with pytest.raises(BadPackage, match="not a package"):
            waybill.verify(path)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": 1, "format": 1}', "{" * 100_000], ids=len)
def test_a_waybill_that_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "waybill.json").write_text(text)
    with pytest.raises(BadPackage):
        waybill.verify(tmp_path)


@pytest.mark.parametrize("path", ["../model.onnx.data", "/etc/passwd", "a/../../x", ".", "", "a//b", "C:\\x", "a\n"])
@pytest.mark.parametrize("whose", ["component", "initializer"])
def test_a_path_that_leads_out_is_refused(tmp_path: Path, path: str, whose: str) -> None:
    package, _ = export(tmp_path, llama(np.float32))
    with bill(package) as content:
        component = content["components"]["decoder"]
        (component if whose == "component" else initializers(content)["model.norm.weight"])["file"] = path
    with pytest.raises(BadPackage) as refused:
        waybill.verify(package)
    assert refused.value.expected == "a file of the package"


def test_a_link_that_leads_out_is_refused(tmp_path: Path) -> None:
    package, _ = export(tmp_path, llama(np.float32))
    (package / "model.onnx.data").rename(tmp_path / "data")
    (package / "model.onnx.data").symlink_to(tmp_path / "data")
    (problem,) = waybill.verify(package).problems
    assert problem.what == "a file of the package leads out of it"


@pytest.mark.parametrize(
    ("key", "value"),
    [("offset", -1), ("offset", 1.5), ("offset", True), ("offset", 1 << 63), ("bytes", 3), ("bytes", "64"),
     ("shape", [64, -1]), ("shape", 64),
     ("shape", []), ("shape", [1 << 40, 0]), ("shape", [1 << 62] * 4), ("dtype", "F8"), ("role", "spare"),
     ("blake3", "00"), ("sources", "x"), ("sources", [1]), ("role", "codes"),
     ("packing", {"bits": 3, "block_size": 32}),
     ("packing", {"bits": 4, "block_size": 33}), ("file", None)],
)  # fmt: skip
def test_an_entry_of_the_wrong_form_is_refused_by_its_path(tmp_path: Path, key: str, value: Any) -> None:
    package, _ = export(tmp_path, llama(np.float32))
    with bill(package) as content:
        initializers(content)["model.norm.weight"][key] = value
    with pytest.raises(BadPackage) as refused:
        waybill.verify(package)
    assert refused.value.where.startswith("waybill.json: components.decoder.initializers.model.norm.weight")


@pytest.mark.parametrize("key", ["format", "options", "providers", "components", "dropped"])
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    package, _ = export(tmp_path, llama(np.float32))
    with bill(package) as content:
        del content[key]
    with pytest.raises(BadPackage) as refused:
        waybill.verify(package)
    assert key in refused.value.expected


@pytest.mark.parametrize("number", [1, 3, 0, "1", None, True, 2.0])
def test_an_unknown_format_is_refused(tmp_path: Path, number: Any) -> None:
    package, _ = export(tmp_path, llama(np.float32))
    with bill(package) as content:
        content["format"] = number
    with pytest.raises(BadPackage, match="a format this version does not know"):
        waybill.verify(package)


def test_whatever_a_bill_says_the_answer_is_a_report_or_a_refusal(tmp_path: Path) -> None:
    package, checkpoint = export(tmp_path, packed(llama(np.float32), GPTQ))
    original = (package / "waybill.json").read_text()
    content = json.loads(original)
    few = {name: initializers(content)[name] for name in (f"{QKV}.codes", f"{QKV}.scales", "cos_cache")}
    content["components"]["decoder"]["initializers"] = few
    for path in list(paths(content)):
        for value in (None, [1]):
            changed = json.loads(original)
            place = changed
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = value
            (package / "waybill.json").write_text(json.dumps(changed))
            try:
                waybill.verify(package, checkpoint).as_dict()
            except BadPackage:
                continue


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value inside a JSON value."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield (*path, key)
        yield from paths(value[key], (*path, key))


@pytest.mark.parametrize("seed", range(30))
def test_whatever_a_graph_holds_the_answer_is_a_report(tmp_path: Path, seed: int) -> None:
    package, _ = export(tmp_path, llama(np.float32, num_hidden_layers=1))
    octets = bytearray((package / "model.onnx").read_bytes())
    for at in np.random.default_rng(seed).integers(0, len(octets), 5):
        octets[at] ^= 0xFF
    (package / "model.onnx").write_bytes(octets)
    assert waybill.verify(package).problems


def test_a_skeleton_has_nothing_to_prove(tmp_path: Path) -> None:
    checkpoint = llama(np.float32).write(tmp_path / "checkpoint")
    waybill.build(checkpoint, load_weights=False).save(tmp_path / "package", allow_unbound=True)
    with pytest.raises(BadPackage, match="a graph without weights"):
        waybill.verify(tmp_path / "package")


# Another checkpoint


def test_another_checkpoint_of_the_same_shapes_differs_in_every_weight(tmp_path: Path) -> None:
    package, _ = export(tmp_path, llama(np.float32))
    other = llama(np.float32).write(tmp_path / "other")
    report = waybill.verify(package, other)
    names = {where for _, where in problems(report)}
    assert names == {name for name in read_names(package) if not name.endswith("_cache")}
    assert all(problem.code == "package-mismatch" for problem in report.problems)


def read_names(package: Path) -> list[str]:
    return list(initializers(json.loads((package / "waybill.json").read_text())))


def test_a_checkpoint_of_another_kind_is_refused_without_a_traceback(tmp_path: Path) -> None:
    package, checkpoint = export(tmp_path, packed(llama(np.float32), GPTQ))
    (other, dense) = export(tmp_path / "dense", llama(np.float32))
    for one, against in ((package, dense), (other, checkpoint), (other, qwen3_moe().write(tmp_path / "moe"))):
        report = waybill.verify(one, against)
        assert {problem.code for problem in report.problems} == {"package-mismatch"}


def test_zero_points_the_package_leaves_out_must_be_the_midpoint(tmp_path: Path) -> None:
    recipe = packed(llama(np.float32), Scheme("gptq", 4, 32, True))
    package, _ = export(tmp_path, recipe)
    recipe.tensors[f"{DOWN}.qzeros"] = recipe.tensors[f"{DOWN}.qzeros"] - 1
    report = waybill.verify(package, recipe.write(tmp_path / "other"))
    assert problems(report) == [("package-mismatch", f"{DOWN}.codes")]
    assert report.problems[0].found.startswith("left out, and taken to be 8")


@pytest.mark.parametrize("words", [96, 160])
def test_a_checkpoint_with_another_number_of_rows_is_a_mismatch(tmp_path: Path, words: int) -> None:
    package, _ = export(tmp_path, llama(np.float32))
    report = waybill.verify(package, llama(np.float32, vocab_size=words).write(tmp_path / "other"))
    (problem,) = (problem for problem in report.problems if problem.where.startswith("lm_head"))
    assert problem.what == "an initializer has other rows than its sources"


@pytest.mark.parametrize("scheme", [Scheme("gptq", 8, 32), Scheme("gptq", 4, 16), Scheme("awq", 4, 16)], ids=str)
def test_a_checkpoint_that_is_packed_another_way_is_a_mismatch(tmp_path: Path, scheme: Scheme) -> None:
    recipe = llama(np.float32)
    package, _ = export(tmp_path, packed(recipe, GPTQ))
    report = waybill.verify(package, packed(recipe, scheme).write(tmp_path / "other"))
    assert "an initializer has another form than its source" in {problem.what for problem in report.problems}


def test_a_weight_the_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    recipe = llama(np.float32)
    package, _ = export(tmp_path, recipe)
    del recipe.tensors["model.norm.weight"]
    report = waybill.verify(package, recipe.write(tmp_path / "other"))
    assert "a weight is not in the checkpoint" in {problem.what for problem in report.problems}


def test_a_bank_of_another_number_of_experts_is_a_mismatch(tmp_path: Path) -> None:
    package, _ = export(tmp_path, qwen3_moe(np.float32, banks=True))
    other = qwen3_moe(np.float32, banks=True, num_experts=2)
    report = waybill.verify(package, other.write(tmp_path / "other"))
    (problem,) = (p for p in report.problems if p.where.startswith("model.layers.0.mlp.experts.down_proj"))
    assert problem.what == "an initializer has other rows than its sources"


def test_a_tensor_nobody_accounts_for_is_named(tmp_path: Path) -> None:
    recipe = llama(np.float32)
    package, _ = export(tmp_path, recipe)
    recipe.tensors["model.extra.weight"] = np.zeros(3, np.float32)
    report = waybill.verify(package, recipe.write(tmp_path / "other"))
    assert problems(report) == [("package-mismatch", "model.extra.weight")]


@pytest.mark.parametrize("claim", [{}, {"same_as": "model.nothing.weight"}], ids=str)
def test_a_tensor_is_not_accounted_for_by_saying_it_was_looked_at(tmp_path: Path, claim: dict[str, str]) -> None:
    recipe = llama(np.float32)
    package, _ = export(tmp_path, recipe)
    name = "model.extra.weight"
    with bill(package) as content:
        content["components"]["decoder"]["checked"] = [{"name": name, "sources": [name], "operations": []} | claim]
    recipe.tensors[name] = np.zeros(3, np.float32)
    report = waybill.verify(package, recipe.write(tmp_path / "other"))
    assert problems(report) == [("package-mismatch", name)]


def test_a_weight_that_says_it_was_made_from_others_is_named(tmp_path: Path) -> None:
    package, checkpoint = export(tmp_path, llama(np.float32))
    with bill(package) as content:
        one, other = (initializers(content)[f"model.layers.0.mlp.{p}_proj.weight"] for p in ("gate", "up"))
        one["sources"], other["sources"] = other["sources"], one["sources"]
    assert len(waybill.verify(package, checkpoint).problems) == 2


# An exporter that is wrong is caught, since the proof does not share its code


def awq_in_plain_order(wrong: Patch) -> None:
    wrong.setattr(decoders, "AWQ_ORDER", (0, 1, 2, 3, 4, 5, 6, 7))


def awq_zeros_in_plain_order(wrong: Patch) -> None:
    wrong.setattr(awq, "AWQ_ORDER", (0, 1, 2, 3, 4, 5, 6, 7))


def gptq_zeros_as_stored(wrong: Patch) -> None:
    wrong.setattr(gptq, "_REPEATED_ONE", {4: 0})


def another_midpoint(wrong: Patch) -> None:
    wrong.setattr(affine.Constant, "decode", lambda self, arrays, start, extent: np.full(extent, 7, np.uint8))


def up_before_gate(wrong: Patch) -> None:
    stack = assemble.stack_weights
    wrong.setattr(assemble, "stack_weights", lambda parts, axis=0: stack(parts[::-1] if axis else parts, axis))


def experts_in_reverse(wrong: Patch) -> None:
    stack = assemble.stack_weights
    wrong.setattr(assemble, "stack_weights", lambda parts, axis=0: stack(parts if axis else parts[::-1], axis))


def values_before_keys(wrong: Patch) -> None:
    concat = assemble.concat_weights
    wrong.setattr(assemble, "concat_weights", lambda parts, axis: concat([parts[0], *parts[:0:-1]], axis))


def blocks_shifted(wrong: Patch) -> None:
    whole = affine.Refined.decode
    wrong.setattr(
        affine.Refined, "decode", lambda self, a, s, e: np.roll(whole(self, a, s, e), 0 if self.split else 1, -1)
    )


def cut_to_float16(wrong: Patch) -> None:
    def towards_zero(values: Any, dtype: Any) -> Any:
        rounded = values.astype(dtype)
        return np.where(np.abs(rounded) > np.abs(values), np.nextafter(rounded, dtype.type(0)), rounded)

    wrong.setattr(dtypes, "cast", towards_zero)


WRONG = [
    (awq_in_plain_order, packed(llama(np.float32), Scheme("awq", 4, 32)), "codes"),
    (awq_zeros_in_plain_order, packed(llama(np.float32), Scheme("awq", 4, 32)), "zero_points"),
    (gptq_zeros_as_stored, packed(llama(np.float32), GPTQ), "zero_points"),
    (another_midpoint, packed(llama(np.float32), Scheme("olive", 4, 32, True), table=True), "zero_points"),
    (up_before_gate, qwen3_moe(np.float32, banks=True), "gate_up_proj"),
    (up_before_gate, packed(qwen3_moe(np.float32), GPTQ), "gate_up_proj.codes"),
    (experts_in_reverse, qwen3_moe(np.float32), "down_proj"),
    (values_before_keys, packed(llama(np.float32), GPTQ), "qkv_proj.codes"),
    (values_before_keys, qwen2(np.float32), "qkv_proj.bias"),
    (blocks_shifted, packed(llama(np.float32), Scheme("gptq", 4, 48)), "scales"),
    (cut_to_float16, llama(np.float32), "norm.weight"),
]


@pytest.mark.parametrize(("mistake", "recipe", "named"), WRONG, ids=lambda value: getattr(value, "__name__", None))
def test_a_mistake_of_the_exporter_is_found(
    tmp_path: Path, monkeypatch: Patch, mistake: Callable[[Patch], None], recipe: Recipe, named: str
) -> None:
    with monkeypatch.context() as wrong:
        mistake(wrong)
        package, checkpoint = export(tmp_path, recipe, dtype="float16" if mistake is cut_to_float16 else None)
    waybill.verify(package).require_clean()
    report = waybill.verify(package, checkpoint)
    assert any(where.endswith(named) for _, where in problems(report))
    assert {code for code, _ in problems(report)} == {"package-mismatch"}


# The command


def test_the_command_says_what_was_proven(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    package, checkpoint = export(tmp_path, packed(llama(np.float32), GPTQ))
    code, out, _ = run(monkeypatch, capsys, "verify", package, "--checkpoint", checkpoint)
    assert code == 0
    assert [line.split(":")[0] for line in out.splitlines()][-1] == "decoder"
    assert "every digest right" in out
    assert "weights equal the checkpoint value by value" in out
    code, out, _ = run(monkeypatch, capsys, "verify", package, "--json")
    content = json.loads(out)
    assert (code, content["proven"], content["checkpoint"], content["problems"]) == (0, True, None, [])


def test_the_command_ends_with_one_and_every_problem(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    package, checkpoint = export(tmp_path, packed(llama(np.float32), GPTQ))
    flip(package, f"{QKV}.codes")
    code, out, err = run(monkeypatch, capsys, "verify", package, "--checkpoint", checkpoint)
    assert (code, out) == (1, "")
    assert err.count("[package-mismatch]") == 2
    assert err.endswith("refused: 2 problems\n")
    code, out, _ = run(monkeypatch, capsys, "verify", package, "--json")
    assert (code, json.loads(out)["proven"]) == (1, False)
    code, _, err = run(monkeypatch, capsys, "verify", checkpoint)
    assert (code, "[bad-package]" in err) == (1, True)


@pytest.mark.parametrize("missing_package", ["onnxruntime", "onnx_ir"])
def test_without_the_runtime_the_command_to_install_it_is_named(
    tmp_path: Path, monkeypatch: Patch, missing_package: str
) -> None:
    package, _ = export(tmp_path, llama(np.float32))
    monkeypatch.setitem(sys.modules, missing_package, None)
    with pytest.raises(MissingRuntime) as missing:
        waybill.verify(package)
    assert missing.value.fix == "pip install 'waybill[onnx]'"


@pytest.mark.parametrize(
    "place, value",
    [("decoder.head_size", 32), ("decoder.num_key_value_heads", 1), ("vocab_size", 3), ("context_length", 1 << 20)],
)
def test_a_description_of_another_graph_is_refused(tmp_path: Path, place: str, value: int) -> None:
    package, _ = export(tmp_path, llama(np.float32))
    path = package / "genai_config.json"
    config = json.loads(path.read_text())
    *parents, name = place.split(".")
    (config["model"][parents[0]] if parents else config["model"])[name] = value
    path.write_text(json.dumps(config))
    (problem,) = waybill.verify(package).problems
    assert (problem.code, problem.where) == ("package-mismatch", f"genai_config.json: {name}")


def test_a_package_without_its_description_is_refused(tmp_path: Path) -> None:
    package, _ = export(tmp_path, llama(np.float32))
    (package / "genai_config.json").unlink()
    (problem,) = waybill.verify(package).problems
    assert problem.code == "bad-package"
