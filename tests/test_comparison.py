"""waybill.compare: what differs is named, by the name it has and no other; what only looks different is the same."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ggufs
import waybill
from checkpoints import BF16, Recipe, gpt_oss, llama, qwen2_moe, qwen3, qwen3_moe, write_tokenizer
from floating import Blocks, pack_fp8, pack_mxfp4
from packing import HEAD, TABLE, Scheme, pack
from waybill.checkpoint import RangeReader
from waybill.comparison import Comparison, ValueDifference, read_side, work
from waybill.config.gguf import WITH_MINIMUM

GPTQ = Scheme("gptq", 4, 32)
Q = "model.layers.0.self_attn.q_proj"
LAYER = "model.layers.1.mlp.down_proj.weight"


def exported(folder: Path, package: Path, **options: Any) -> Path:
    waybill.build(write_tokenizer(folder), **options).save(package)
    return package


def names(comparison: Comparison) -> dict[str, list[str]]:
    """What differs, by section; nothing where nothing does."""
    sections = ("config", "components", "layouts", "tensors", "weights")
    found = {section: [each.name for each in getattr(comparison, section) or ()] for section in sections}
    found["values"] = [each.weight for each in comparison.values or ()]
    return {section: listed for section, listed in found.items() if listed}


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return llama(np.float32)


@pytest.fixture
def folder(recipe: Recipe, tmp_path: Path) -> Path:
    return recipe.write(tmp_path / "a")


def edited(recipe: Recipe, folder: Path, **tensors: Any) -> Path:
    return Recipe(dict(recipe.config), recipe.tensors | tensors).write(folder)


# Two checkpoints


@pytest.mark.parametrize("values", [False, True])
def test_the_same_tensors_in_other_shards_are_the_same(
    recipe: Recipe, folder: Path, tmp_path: Path, values: bool
) -> None:
    other = recipe.write(tmp_path / "b", shard_of=lambda name: len(name) % 3)
    comparison = waybill.compare(folder, other, values=values)
    assert comparison.same
    assert names(comparison) == {}
    assert comparison.tensors_compared == len(recipe.tensors)


def test_what_digests_have_proven_equal_is_not_read_again(
    recipe: Recipe, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    plain = RangeReader.read_into
    monkeypatch.setattr(
        RangeReader, "read_into", lambda own, file, segments: (read.append(1), plain(own, file, segments))[1]
    )
    waybill.compare(folder, recipe.write(tmp_path / "b"), values=True)
    assert len(read) == 2 * len(recipe.tensors)


@pytest.mark.parametrize("bit", [0, 77])
def test_one_flipped_bit_is_exactly_that_tensor(recipe: Recipe, folder: Path, tmp_path: Path, bit: int) -> None:
    octets = recipe.tensors[LAYER].copy()
    octets.view(np.uint8).reshape(-1)[bit] ^= 1
    comparison = waybill.compare(folder, edited(recipe, tmp_path / "b", **{LAYER: octets}), values=True)
    assert names(comparison) == {"tensors": [LAYER], "values": [LAYER]}
    sides = comparison.tensors[0].sides
    assert sides["a"].digest != sides["b"].digest
    assert sides["a"][:2] == sides["b"][:2] == ("F32", list(octets.shape))


def test_a_tensor_that_is_added_missing_or_of_another_form_is_named_and_not_read(
    recipe: Recipe, folder: Path, tmp_path: Path
) -> None:
    other = Recipe(dict(recipe.config), dict(recipe.tensors))
    other.tensors["model.extra.weight"] = other.tensors.pop("model.norm.weight")
    other.tensors[LAYER] = other.tensors[LAYER].astype(BF16)
    other.tensors[HEAD] = other.tensors[HEAD][:-1]
    found = {each.name: each.sides for each in waybill.compare(folder, other.write(tmp_path / "b")).tensors}
    assert {name: {side: str(form) for side, form in sides.items()} for name, sides in found.items()} == {
        HEAD: {"a": "F32[128, 64]", "b": "F32[127, 64]"},
        LAYER: {"a": "F32[64, 96]", "b": "BF16[64, 96]"},
        "model.extra.weight": {"b": "F32[64]"},
        "model.norm.weight": {"a": "F32[64]"},
    }


def test_a_field_of_a_config_is_named_with_its_path(recipe: Recipe, folder: Path, tmp_path: Path) -> None:
    ropes = {"rope_type": "linear", "factor": 2.0}
    Recipe(recipe.config | {"rope_scaling": ropes, "flag": 1}, recipe.tensors).write(folder)
    other = Recipe(recipe.config | {"rope_scaling": ropes | {"factor": 4.0}, "flag": True}, recipe.tensors)
    other.write(tmp_path / "b", generation_config={"eos_token_id": [1, 2]})
    comparison = waybill.compare(folder, tmp_path / "b")
    assert [each.as_dict() for each in comparison.config] == [
        {"name": "config.json: rope_scaling.factor", "a": 2.0, "b": 4.0},
        {"name": "config.json: flag", "a": 1, "b": True},
        {"name": "generation_config.json: eos_token_id", "b": [1, 2]},
    ]
    assert names(comparison).keys() == {"config"}


def test_digests_are_blake3_and_without_it_blake2(
    recipe: Recipe, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from blake3 import blake3

    changed = recipe.tensors[LAYER] + 1
    other = edited(recipe, tmp_path / "b", **{LAYER: changed})
    assert waybill.compare(folder, other).tensors[0].sides["b"].digest == blake3(changed.tobytes()).hexdigest()
    monkeypatch.setitem(sys.modules, "blake3", None)
    assert (
        waybill.compare(folder, other).tensors[0].sides["b"].digest
        == hashlib.blake2b(changed.tobytes(), digest_size=32).hexdigest()
    )


def test_digests_are_made_a_chunk_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    plain = RangeReader.read_into

    def read(own: RangeReader, file: str, segments: list[tuple[int, memoryview]]) -> None:
        sizes.extend(len(view) for _, view in segments)
        plain(own, file, segments)

    monkeypatch.setattr(RangeReader, "read_into", read)
    monkeypatch.setattr("waybill.comparison.CHUNK", 1000)
    assert waybill.compare(folder, folder).same
    assert max(sizes) == 1000
    assert sum(sizes) == 2 * waybill.open(folder).nbytes


def test_progress_tells_of_every_byte(recipe: Recipe, folder: Path, tmp_path: Path) -> None:
    other = edited(recipe, tmp_path / "b", **{LAYER: recipe.tensors[LAYER].astype(BF16)})
    for values in (False, True):
        told: list[int] = []
        waybill.compare(folder, other, values=values, progress=told.append)
        assert sum(told) == work(read_side(folder), read_side(other), values=values)


# By value


@pytest.mark.parametrize(
    "scheme",
    [GPTQ, Scheme("gptq_v2", 8, 16), Scheme("awq", 4, 32), Scheme("olive", 2, 16), Scheme("ct", 4, 32, symmetric=True)],
    ids=str,
)
def test_a_packed_checkpoint_has_the_values_of_its_dequantized_twin(scheme: Scheme, tmp_path: Path) -> None:
    packed, dense = pack(llama(np.float32), scheme)
    a, b = packed.write(tmp_path / "a"), dense.write(tmp_path / "b")
    comparison = waybill.compare(a, b, values=True)
    assert (comparison.weights, comparison.values) == ([], [])
    assert comparison.weights_compared == len(dense.tensors)
    assert not comparison.same
    layouts = {each.name: {side: str(layout) for side, layout in each.sides.items()} for each in comparison.layouts}
    assert layouts[f"{Q}.weight"] == {
        "a": f"{ {'ct': 'compressed-tensors', 'gptq_v2': 'gptq'}.get(scheme.form, scheme.form) } {scheme.bits}-bit, "
        f"group {scheme.group}, {'symmetric' if scheme.symmetric else 'asymmetric'}"
    }
    assert [each.name for each in comparison.components] == ["decoder.layout"]


@pytest.mark.parametrize("pair", ["fp8", "fp8 rows", "mxfp4"])
def test_so_has_one_of_small_floats(pair: str, tmp_path: Path) -> None:
    if pair == "mxfp4":
        packed, dense = pack_mxfp4(qwen3_moe(np.float32, banks=True))
    else:
        packed, dense = pack_fp8(
            llama(np.float32), Blocks() if pair == "fp8" else Blocks(rows=1, columns=-1, compressed=True)
        )
    comparison = waybill.compare(packed.write(tmp_path / "a"), dense.write(tmp_path / "b"), values=True)
    assert (comparison.weights, comparison.values) == ([], [])


def test_experts_in_banks_are_those_stored_one_by_one(tmp_path: Path) -> None:
    banks = qwen3_moe(np.float32, banks=True)
    single = Recipe(dict(banks.config), dict(banks.tensors))
    for name, bank in banks.tensors.items():
        if ".experts." in name:
            del single.tensors[name]
            path, _, leaf = name.rpartition(".")
            halves = np.split(bank, 2, 1) if leaf == "gate_up_proj" else [bank]
            for part, rows in zip(("gate_proj", "up_proj") if len(halves) > 1 else ("down_proj",), halves, strict=True):
                single.tensors |= {f"{path}.{e}.{part}.weight": one for e, one in enumerate(rows)}
    a, b = banks.write(tmp_path / "a"), single.write(tmp_path / "b")
    comparison = waybill.compare(a, b, values=True)
    assert names(comparison).keys() == {"tensors"}
    assert comparison.weights_compared == len(single.tensors)


def test_the_worst_weight_comes_first_and_no_number_is_infinitely_far(
    recipe: Recipe, folder: Path, tmp_path: Path
) -> None:
    table, head, norm = (recipe.tensors[name].copy() for name in (TABLE, HEAD, "model.norm.weight"))
    table[3, 5] += np.float32(0.5)
    head[-1, -1] += np.float32(8)
    norm[1] = np.nan
    other = edited(recipe, tmp_path / "b", **{TABLE: table, HEAD: head, "model.norm.weight": norm})
    comparison = waybill.compare(folder, other, values=True)
    assert comparison.values is not None
    assert comparison.values[0] == ValueDifference("model.norm.weight", np.inf)
    assert [each.weight for each in comparison.values[1:]] == [HEAD, TABLE]
    assert [round(each.largest, 3) for each in comparison.values[1:]] == [8.0, 0.5]
    assert json.loads(json.dumps(comparison.as_dict(), allow_nan=False))["values"]["differ"][0]["max_abs"] is None
    assert waybill.compare(other, other, values=True).same


def test_values_are_compared_a_block_of_rows_at_a_time(
    recipe: Recipe, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("waybill.comparison.VALUES", 7 * 64)
    head = recipe.tensors[HEAD].copy()
    head[-1, 0] += 1
    comparison = waybill.compare(folder, edited(recipe, tmp_path / "b", **{HEAD: head}), values=True)
    assert names(comparison)["values"] == [HEAD]
    packed, dense = pack_fp8(recipe, Blocks())
    twins = waybill.compare(packed.write(tmp_path / "c"), dense.write(tmp_path / "d"), values=True)
    assert twins.values == []


def test_weights_of_another_shape_are_listed_and_not_compared(recipe: Recipe, folder: Path, tmp_path: Path) -> None:
    other = Recipe(dict(recipe.config), recipe.tensors | {HEAD: recipe.tensors[HEAD][:-1]})
    del other.tensors["model.norm.weight"]
    comparison = waybill.compare(folder, other.write(tmp_path / "b"), values=True)
    found = [each.as_dict() for each in comparison.weights or ()]
    assert {"name": HEAD, "a": [128, 64], "b": [127, 64]} in found
    assert {"name": "model.norm.weight", "a": [64]} in found
    assert len(found) == 2
    assert comparison.values == []


@pytest.mark.parametrize("architecture", ["llama", "qwen3moe"])
@pytest.mark.parametrize("kind", ["F16", "Q4_0", "Q8_0", "Q6_K", "Q4_1", "Q5_1", "Q2_K", "Q4_K"])
def test_a_gguf_file_has_the_values_of_its_twin_and_of_its_package(
    architecture: str, kind: str, tmp_path: Path
) -> None:
    file, widened = tmp_path / "model.gguf", kind in WITH_MINIMUM and architecture == "qwen3moe"
    folder = ggufs.model(architecture, kind, output__weight="F32", token_embd__weight="F32").write(file)
    twin = folder.write(tmp_path / "dense")
    comparison = waybill.compare(file, twin, values=True, dequantize=widened)
    assert (comparison.weights, comparison.values) == ([], [])
    waybill.build(waybill.open(file, dequantize=widened)).save(tmp_path / "package")
    comparison = waybill.compare(file, tmp_path / "package", dequantize=widened)
    assert (comparison.weights, comparison.values, comparison.config) == ([], [], [])


# Packages


PACKED = {
    "float": lambda: llama(BF16),
    "qwen3": lambda: qwen3(BF16),
    "gptq": lambda: pack(llama(np.float32), GPTQ).packed,
    "group -1": lambda: pack(llama(np.float32), replace(GPTQ, group=-1)).packed,
    "group 48, refined": lambda: pack(llama(np.float32), Scheme("olive", 4, 48)).packed,
    "awq": lambda: pack(llama(np.float32), Scheme("awq", 4, 32)).packed,
    "olive with tables": lambda: (
        pack(llama(np.float32), Scheme("olive", 8, 32, symmetric=True), table=True, head=True).packed
    ),
    "mixed": lambda: pack(llama(np.float32), GPTQ, overrides={Q: {"bits": 8}}).packed,
    "one float": lambda: pack(llama(np.float32), GPTQ, keep=[Q]).packed,
    "experts": lambda: qwen3_moe(np.float32),
    "shared experts": lambda: qwen2_moe(np.float32, banks=True),
    "packed experts": lambda: pack(qwen3_moe(np.float32), Scheme("olive", 4, 32)).packed,
    "fp8": lambda: pack_fp8(llama(np.float32), Blocks()).packed,
}


@pytest.mark.parametrize("title", PACKED)
def test_a_package_is_the_checkpoint_it_was_made_from(title: str, tmp_path: Path) -> None:
    folder = PACKED[title]().write(tmp_path / "a")
    comparison = waybill.compare(folder, exported(folder, tmp_path / "package"))
    assert names(comparison) == {}
    assert comparison.same
    assert comparison.weights_compared == len(read_side(folder).weights)


@pytest.mark.parametrize("widen", [False, True])
def test_experts_with_biases_and_sinks_are_found_again(widen: bool, tmp_path: Path) -> None:
    packed, dense = pack_mxfp4(gpt_oss(np.float32))
    folder = (packed if widen else dense).write(tmp_path / "a")
    package = exported(folder, tmp_path / "package", widen_mxfp4=widen)
    comparison = waybill.compare(folder, package)
    assert names(comparison).keys() == ({"layouts"} if widen else set())
    assert comparison.weights_compared == len(read_side(folder).weights)
    assert waybill.compare(folder, dense.write(tmp_path / "dense"), values=True).values == []


@pytest.mark.parametrize("link", [False, True])
def test_a_package_is_not_another_checkpoint(recipe: Recipe, folder: Path, tmp_path: Path, link: bool) -> None:
    tensor = recipe.tensors[f"{Q}.weight"].copy()
    tensor[5, 6] -= 2
    package = tmp_path / "package"
    waybill.build(write_tokenizer(folder), link=link).save(package, link=link)
    other = edited(recipe, tmp_path / "b", **{f"{Q}.weight": tensor})
    for pair in ((package, other), (other, package)):
        assert names(waybill.compare(*pair)) == {"values": [f"{Q}.weight"]}


def test_two_packages_differ_in_how_they_run_and_in_their_bytes(folder: Path, tmp_path: Path) -> None:
    one = exported(folder, tmp_path / "one")
    two = exported(folder, tmp_path / "two", logits="all", dtype="float16")
    assert waybill.compare(one, one, values=True).same
    comparison = waybill.compare(one, two, values=True)
    assert LAYER in names(comparison)["tensors"]
    assert LAYER in names(comparison)["values"]
    assert not comparison.layouts
    assert names(comparison)["config"] == ["model.onnx: blake3"]


def test_a_head_left_out_because_it_is_the_table_is_compared_as_the_table(tmp_path: Path) -> None:
    tied = llama(np.float32, tie_word_embeddings=True)
    tied.tensors[HEAD] = tied.tensors[TABLE]
    folder = tied.write(tmp_path / "a")
    comparison = waybill.compare(folder, exported(folder, tmp_path / "package"))
    assert comparison.same
    assert comparison.weights_compared == len(tied.tensors)


# Refusals: what each of the two is refused for elsewhere


def test_what_cannot_be_opened_is_refused_as_elsewhere(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(waybill.WaybillError) as nowhere:
        waybill.compare(folder, tmp_path / "nowhere")
    assert nowhere.value.code == "not-a-checkpoint"
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "waybill.json").write_text("{")
    with pytest.raises(waybill.WaybillError) as broken:
        waybill.compare(tmp_path / "package", folder)
    assert broken.value.code == "bad-package"


@pytest.mark.parametrize("change", [{"architectures": ["GPT2LMHeadModel"]}, {"hidden_size": "x"}], ids=str)
def test_an_unreadable_config_is_refused_and_arithmetic_nobody_runs_is_not(
    recipe: Recipe, folder: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    Recipe(recipe.config | change, recipe.tensors).write(tmp_path / "b")
    with pytest.raises(waybill.Refused) as refused:
        waybill.compare(folder, tmp_path / "b")
    assert refused.value.problems[0].code in ("unsupported-architecture", "bad-config")
    Recipe(recipe.config | {"hidden_act": "gelu"}, recipe.tensors).write(tmp_path / "b")
    assert names(waybill.compare(folder, tmp_path / "b")) == {"config": ["config.json: hidden_act"]}


def test_settings_nested_without_end_are_refused(recipe: Recipe, folder: Path, tmp_path: Path) -> None:
    for levels, fails in ((60, False), (400, True)):
        nested: Any = 1
        for level in range(levels):
            nested = {"in": nested} if level % 2 else [nested]
        other = Recipe(recipe.config | {"odd": nested}, recipe.tensors).write(tmp_path / "b")
        if not fails:
            assert names(waybill.compare(folder, other)) == {"config": ["config.json: odd"]}
            continue
        with pytest.raises(waybill.Refused, match="nested too deeply") as refused:
            waybill.compare(folder, other)
        assert [problem.code for problem in refused.value.problems] == ["bad-json"]


def test_a_package_that_contradicts_itself_is_refused(folder: Path, tmp_path: Path) -> None:
    package = exported(folder, tmp_path / "package")
    data = package / "model.onnx.data"
    data.write_bytes(data.read_bytes()[:-4096])
    with pytest.raises(waybill.Refused) as refused:
        waybill.compare(package, folder)
    assert {problem.code for problem in refused.value.problems} == {"package-mismatch"}


def test_a_package_whose_config_is_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    package = exported(folder, tmp_path / "package")
    config = json.loads((package / "config.json").read_text())
    (package / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    with pytest.raises(waybill.WaybillError) as refused:
        waybill.compare(package, folder)
    assert refused.value.what == "an initializer is not what config.json says of its weight"
    assert refused.value.where == "model.layers.0.mlp.down_proj.weight (model.onnx.data)"
    for size in (1 << 62, -1, "x"):
        (package / "config.json").write_text(json.dumps(config | {"num_hidden_layers": size}))
        with pytest.raises(waybill.Refused) as impossible:
            waybill.compare(package, folder)
        assert {problem.code for problem in impossible.value.problems} == {"bad-config"}
    (package / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with pytest.raises(waybill.WaybillError) as strange:
        waybill.compare(package, folder)
    assert strange.value.what == "the package holds a weight that its config.json does not know"
