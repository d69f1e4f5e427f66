"""Failures that users of other loaders met, which modules are packed: one answer, the producer's, everywhere.

Docstrings carry the code of the case. What must load is compared value by value with its float twin.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import waybill
from checkpoints import LAYERS, Recipe, lively, llama, qwen3_moe
from commands import Capture, Patch, run_unread
from packed.meaning import MEMBERS, assert_every_rank_holds, assert_exported
from packing import Scheme, Twins, pack
from waybill.errors import Refused, WaybillError
from waybill.overview import describe
from waybill.weights.affine import AffinePackedWeight

LAYER = "model.layers.0"
NAMES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
         "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip


def of(*layers: int, names: tuple[str, ...] = NAMES) -> list[str]:
    return [f"model.layers.{layer}.{name}" for layer in layers for name in names]


def stating(twins: Twins, **changes: Any) -> Twins:
    """The same weights under other metadata."""
    twins.packed.config["quantization_config"] |= changes
    return twins


def excluding(form: str, patterns: Any, floats: list[str], recipe: Recipe | None = None) -> Twins:
    """`floats` are float on disk, and `patterns` is all that the metadata says of it."""
    twins = pack(recipe or lively(llama(np.float32)), Scheme(form), keep=floats)
    return stating(twins, modules_to_not_convert=patterns, **({"dynamic": {}} if form == "gptq" else {}))


def problems(twins: Twins, folder: Path) -> list[WaybillError]:
    return list(waybill.plan(twins.packed.write(folder)).problems)


@pytest.mark.parametrize("form", ["gptq", "awq"])
def test_an_excluded_layer_1_is_not_layer_10(form: str, tmp_path: Path) -> None:
    """B37."""
    recipe = lively(llama(np.float32, num_hidden_layers=12))
    twins = excluding(form, ["model.layers.1"], of(1), recipe)
    (rank,) = assert_every_rank_holds(twins, tmp_path)
    assert "model.layers.10.mlp.down_proj" in rank
    bill = waybill.plan(tmp_path / "packed")
    assert set(bill.packings) == {f"{name}.weight" for name in of(0, *range(2, 12))}


@pytest.mark.parametrize("form", ["gptq", "auto_round", "awq", "olive"])
def test_modules_of_layer_1_named_one_by_one_are_not_those_of_layer_10(form: str, tmp_path: Path) -> None:
    """B37: as expressions, entries, paths and substrings."""
    recipe = lively(llama(np.float32, num_hidden_layers=12))
    assert_every_rank_holds(pack(recipe, Scheme(form), keep=of(1)), tmp_path)
    assert len(waybill.plan(tmp_path / "packed").packings) == 7 * 11


@pytest.mark.parametrize("floats", [(1,), (1, 10, 11)])
def test_olives_substrings_mean_layer_10_too_and_the_disk_has_to_agree(floats: tuple[int, ...], tmp_path: Path) -> None:
    """B37: Olive itself would have left all three float."""
    recipe = lively(llama(np.float32, num_hidden_layers=12))
    twins = excluding("olive", ["model.layers.1"], of(*floats), recipe)
    if len(floats) == 3:
        assert_every_rank_holds(twins, tmp_path)
        return
    found = problems(twins, tmp_path)
    assert {each.code for each in found} == {"packing-mismatch"}
    assert all("model.layers.10." in each.where and "'model.layers.1'" in each.expected for each in found)


GATES = of(*range(LAYERS), names=("mlp.gate_proj",))
ATTENTION = of(0, names=NAMES[:4])
EXCLUSIONS: list[tuple[str, Any, list[str]]] = [
    *((form, patterns, []) for form in ("gptq", "awq") for patterns in (["lm_head"], ["mlp.gate"], ["visual"], [""])),
    *((form, patterns, []) for form in ("gptq", "awq", "olive") for patterns in (None, [], ["visual"], "lm_head")),
    *((form, ["model.layers.0.self_attn"], ATTENTION) for form in ("gptq", "awq", "olive")),
    *((form, "model.layers.1", of(1)) for form in ("gptq", "awq", "olive")),
    *((form, [r"re:.*mlp\.(gate|up)_proj"], of(0, 1, names=NAMES[4:6])) for form in ("gptq", "awq", "olive")),
    *((form, [r"re:model\.layers\.1\..*"], of(1)) for form in ("gptq", "awq", "olive")),
    *((form, [r"re:model\.layers\.1"], []) for form in ("gptq", "awq", "olive")),
    ("olive", ["mlp.gate"], GATES),
    ("olive", ["self_attn.q"], of(0, 1, names=NAMES[:1])),
]


@pytest.mark.parametrize(("form", "patterns", "floats"), EXCLUSIONS)
def test_an_exclusion_means_what_its_producer_means(
    form: str, patterns: Any, floats: list[str], tmp_path: Path
) -> None:
    """B38, B39."""
    assert_every_rank_holds(excluding(form, patterns, floats), tmp_path)


@pytest.mark.parametrize(
    ("form", "patterns", "floats"),
    [*((form, ["mlp.gate"], GATES) for form in ("gptq", "awq")), ("olive", ["mlp.down_proj.weight"], GATES)],
)
def test_a_pattern_that_hits_nothing_is_refused_where_the_disk_is_float(
    form: str, patterns: Any, floats: list[str], tmp_path: Path
) -> None:
    """B38: never read as if it were packed, nor the reverse."""
    (found,) = problems(excluding(form, patterns, floats), tmp_path)
    assert found.what == "weights are float on disk, and packed by the metadata"
    assert all(f"{name}.weight" in found.where for name in floats)
    assert "model-wide" in found.expected


def test_an_empty_pattern_of_olive_means_everything_and_the_disk_has_to_agree(tmp_path: Path) -> None:
    """B38."""
    found = problems(excluding("olive", [""], []), tmp_path)
    assert {each.what for each in found} == {"a weight is packed on disk, and float by the metadata"}
    assert all("''" in each.expected for each in found)


@pytest.mark.parametrize("form", ["gptq", "awq", "olive"])
def test_a_router_is_float_whether_it_is_excluded_or_not(form: str, tmp_path: Path) -> None:
    """B38: the short pattern that producers write for it."""
    for patterns in (["mlp.gate"], ["gate"] if form != "olive" else [".mlp.gate."], None):
        twins = excluding(form, patterns, [], lively(qwen3_moe(np.float32)))
        assert_every_rank_holds(twins, tmp_path / str(patterns))


@pytest.mark.parametrize(
    ("form", "patterns", "hits"),
    [("awq", ["model.layers.1", "visual", "lm_head"], [7, 0, 1]), ("gptq", ["mlp.gate", r"re:.*q_proj"], [0, 2]),
     ("olive", ["mlp.gate", "visual"], [2, 0])],
)  # fmt: skip
def test_each_pattern_says_how_many_modules_it_hit(
    form: str, patterns: list[str], hits: list[int], tmp_path: Path
) -> None:
    """B38: none is asked about."""
    report = describe(waybill.open(excluding(form, patterns, []).packed.write(tmp_path)))
    counted = [(p, n) for _, p, n in report.quantization["decoder"].patterns if p in patterns]
    assert counted == list(zip(patterns, hits, strict=True))
    lines = [text for _, text in report.rows(str)]
    asked = [text for text in lines if "is it spelled right?" in text]
    assert len(asked) == hits.count(0)


@pytest.mark.parametrize("form", ["gptq", "awq", "olive"])
def test_a_broken_expression_is_refused_and_quoted(form: str, tmp_path: Path) -> None:
    """B39."""
    (found,) = problems(excluding(form, ["re:("], []), tmp_path)
    assert found.code == "bad-pattern"
    assert found.where.endswith("quantization_config.modules_to_not_convert: (")


DYNAMIC = {"-:.*down_proj": {}, r"+:.*layers\.0\..*": {"bits": 8, "group_size": 16}}


@pytest.mark.parametrize("first", ["-", "+"])
def test_the_first_rule_of_gptq_wins(first: str, tmp_path: Path) -> None:
    """B39: with the exclusion first, down_proj is float in both layers; with it last, only in the second."""
    eights = of(0) if first == "+" else of(0, names=NAMES[:6])
    floats = of(1, names=NAMES[6:]) if first == "+" else of(0, 1, names=NAMES[6:])
    changed = {name: {"bits": 8, "group": 16} for name in eights}
    twins = pack(lively(llama(np.float32)), Scheme("gptq"), keep=floats, overrides=changed)
    rules = dict(sorted(DYNAMIC.items(), reverse=first == "-"))
    assert next(iter(rules)).startswith(first)
    assert_every_rank_holds(stating(twins, dynamic=rules), tmp_path)
    other = dict(reversed(rules.items()))
    codes = {found.code for found in problems(stating(twins, dynamic=other), tmp_path / "other")}
    assert codes == {"packing-mismatch"}


def layouts(report: dict[str, Any]) -> dict[str, str]:
    """Module to layout, from the JSON of inspect."""
    groups = report["quantization"]["decoder"]["groups"]
    return {m: group["layout"] for group in groups for m in group["modules"] if m.endswith("_proj")}


MIXES: dict[str, Callable[[], Twins]] = {
    "gptq": lambda: stating(
        pack(
            lively(llama(np.float32)), Scheme("gptq"), keep=of(0, 1, names=NAMES[6:]),
            overrides={name: {"bits": 8, "group": 16} for name in of(0, names=NAMES[:6])},
        ),
        dynamic=DYNAMIC,
    ),
    "awq": lambda: excluding("awq", ["model.layers.1.mlp", f"{LAYER}.self_attn.v_proj"],
                             [*of(1, names=NAMES[4:]), f"{LAYER}.self_attn.v_proj"]),
    "olive": lambda: excluding("olive", ["o_proj", r"re:.*\.1\.mlp\.up_proj"],
                               [*of(0, 1, names=NAMES[3:4]), "model.layers.1.mlp.up_proj"]),
}  # fmt: skip


@pytest.mark.parametrize("form", MIXES)
def test_every_way_in_selects_the_same_modules(form: str, tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    """B41: records, both plans, inspect, the command line, the engine and a package."""
    twins = MIXES[form]()
    assert_exported(twins, tmp_path)
    folder = tmp_path / "exported"
    want = {}
    for record in waybill.records(folder):
        if (module := record.source_name.removesuffix(".weight")).endswith("_proj"):
            weight = record.storage
            packed = isinstance(weight, AffinePackedWeight)
            want[module] = f"{weight.layout.bits}-bit, group {weight.layout.group}" if packed else "float"
    assert len(want) == 7 * LAYERS
    assert len(set(want.values())) > 1
    for target in ("torch", "onnx"):
        planned = waybill.plan(folder, target).packings
        said = {m: f"{planned[f'{m}.weight'].bits}-bit, group {planned[f'{m}.weight'].group}"
                if f"{m}.weight" in planned else "float" for m in want}  # fmt: skip
        assert said == want
    assert layouts(describe(waybill.open(folder)).as_dict()) == want
    names = {name for name in waybill.load(folder, dtype="float32").state_dict() if "_proj." in name}
    merged = {member: kind for kind, members in MEMBERS.items() for member in members}
    for module, layout in want.items():
        path, _, member = module.rpartition(".")
        role = "weight" if layout == "float" else "codes"
        assert names & {f"{module}.{role}", f"{path}.{merged.get(member, member)}.{role}"}, module
    _, out, _ = run_unread(monkeypatch, capsys, "inspect", folder, "--json")
    assert layouts(json.loads(out)) == want


@pytest.mark.parametrize(
    ("form", "file"),
    [("gptq", "quantize_config"), ("gptq_v2", "quantize_config"), ("awq", "quant_config"),
     *((form, "quantization_config") for form in ("gptq", "awq", "olive", "auto_round"))],
)  # fmt: skip
def test_metadata_in_a_file_of_its_own_is_read(form: str, file: str, tmp_path: Path) -> None:
    """B44: alone, and beside an equal copy."""
    twins = pack(lively(llama(np.float32)), Scheme(form), keep=of(0, names=NAMES[6:]))
    both = twins.packed.write(tmp_path / "both", **{file: twins.packed.config["quantization_config"]})
    stated = twins.packed.config.pop("quantization_config")
    alone = twins.packed.write(tmp_path / "alone", **{file: stated})
    dense = twins.dense.write(tmp_path / "dense")
    models = [waybill.load(folder, dtype="float32") for folder in (both, alone)]
    one, other = (model.state_dict() for model in models)
    assert one.keys() == other.keys()
    assert all(one[name].equal(other[name]) for name in one)
    assert any(name.endswith("codes") for name in one)
    down = f"{LAYER}.mlp.down_proj.weight"
    assert one[down].equal(waybill.load(dense, dtype="float32").state_dict()[down])


@pytest.mark.parametrize("form", ["gptq", "awq", "olive", "auto_round"])
def test_metadata_nested_in_the_config_of_the_text_model_is_read(form: str, tmp_path: Path) -> None:
    """B42: the same as at the top, and refused when the top says something else."""
    twins = pack(lively(llama(np.float32)), Scheme(form))
    stated = twins.packed.config.pop("quantization_config")
    twins.packed.config["text_config"] = {"quantization_config": stated}
    assert_every_rank_holds(twins, tmp_path)
    twins.packed.config["quantization_config"] = stated | {"group_size": 64}
    (found,) = problems(twins, tmp_path / "conflict")
    assert (found.code, found.found) == ("config-conflict", "group_size: 64 and 32")
    assert "text_config.quantization_config" in found.where


CONFLICTS: list[tuple[str, dict[str, Any], str]] = [
    ("gptq", {"bits": 8}, "bits: 4 and 8"),
    ("gptq", {"group_size": 128}, "group_size: 32 and 128"),
    ("gptq", {"checkpoint_format": "gptq_v2"}, "checkpoint_format: 'gptq' and 'gptq_v2'"),
    ("gptq", {"desc_act": True}, "desc_act: False and True"),
    ("gptq", {"dynamic": {"-:.*down_proj": {}}}, "dynamic: {} and {'-:.*down_proj': {}}"),
    ("gptq", {"lm_head": True}, "lm_head: False and True"),
    ("awq", {"zero_point": False}, "zero_point: True and False"),
    ("olive", {"embeds": True}, "embeds: False and True"),
    ("auto_round", {"extra_config": {"lm_head": {"bits": 4}}}, "extra_config: {} and {'lm_head': {'bits': 4}}"),
]


@pytest.mark.parametrize(("form", "change", "words"), CONFLICTS)
def test_two_files_that_disagree_are_refused_with_both(
    form: str, change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """B44."""
    recipe = pack(lively(llama(np.float32)), Scheme(form)).packed
    file = recipe.config["quantization_config"] | change
    with pytest.raises(Refused) as refused:
        waybill.load(recipe.write(tmp_path, quantization_config=file))
    (found,) = refused.value.problems
    assert (found.code, found.found) == ("config-conflict", words)
    assert "quantization_config.json" in found.where


def test_two_files_beside_a_silent_config_have_to_agree(tmp_path: Path) -> None:
    """B44."""
    recipe = pack(lively(llama(np.float32)), Scheme("gptq")).packed
    stated = recipe.config.pop("quantization_config")
    files = {"quantize_config": stated, "quantization_config": stated | {"bits": 8}}
    (found,) = waybill.plan(recipe.write(tmp_path, **files)).problems
    assert (found.code, found.found) == ("config-conflict", "bits: 4 and 8")
    assert all(f"{file}.json" in found.where for file in files)


@pytest.mark.parametrize("form", ["gptq", "awq", "olive", "auto_round"])
def test_packed_weights_that_nothing_describes_are_counted_and_refused(form: str, tmp_path: Path) -> None:
    """B44: integers are never read as floats."""
    twins = pack(lively(llama(np.float32)), Scheme(form))
    del twins.packed.config["quantization_config"]
    (found,) = problems(twins, tmp_path)
    parts = sum(name.endswith(("qweight", "scales", "qzeros", "g_idx")) for name in twins.packed.tensors)
    assert found.code == "unsupported-quantization"
    assert found.found.startswith(f"{parts} tensors of packed weights")
    assert "quantize_config.json" in found.expected
