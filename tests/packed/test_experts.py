"""Mixtures of experts as they are packed: what users of other loaders met loads right here, or is refused by name.

Docstrings carry the code of the case. What must load is compared with its float twin.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import waybill
from checkpoints import Array, Recipe, lively, qwen2_moe, qwen3_moe
from packed.test_mutations import FILE, refusal, refusals
from packed.test_parity import PROMPTS, assert_equal, logits
from packing import Scheme, metadata, pack, quantize, sidecars
from parity.tolerances import LOGITS_FLOAT32
from waybill.errors import WaybillError
from waybill.families.llava import llava_components
from waybill.overview import describe

LAYER = "model.layers.1"
MLP = f"{LAYER}.mlp"
GATE_UP, DOWN = f"{MLP}.experts.gate_up_proj", f"{MLP}.experts.down_proj"
SHARED = [f"model.layers.{n}.mlp.shared_expert.{p}_proj" for n in range(2) for p in ("gate", "up", "down")]
FORMS = {
    "gptq": Scheme("gptq", group=16),
    "gptq-8-bit": Scheme("gptq_v2", bits=8, group=16, symmetric=True),
    "awq": Scheme("awq", group=16),
    "olive": Scheme("olive", group=16),
    "olive-2-bit": Scheme("olive_dotted", bits=2, group=16),
    "auto-round": Scheme("auto_round", group=16, symmetric=True),
}


def shared(**config: Any) -> Recipe:
    return lively(qwen2_moe(np.float32, **config), 8)


# The shared expert and the gates.


@pytest.mark.parametrize("form", FORMS)
def test_a_packed_shared_expert_stays_packed_and_its_gate_float(form: str, tmp_path: Path) -> None:
    """B54, B56: no exclusion mentions router and gate, and the file holds them as floats."""
    twins = pack(shared(), FORMS[form])
    assert not twins.packed.config["quantization_config"].get("modules_to_not_convert")
    state = assert_equal(twins, tmp_path).state_dict()
    assert f"{MLP}.shared_expert.gate_up_proj.codes" in state
    assert f"{MLP}.shared_expert.down_proj.codes" in state
    assert state[f"{MLP}.shared_expert_gate.weight"].shape == (1, 64)
    assert state[f"{MLP}.gate.weight"].is_floating_point()


@pytest.mark.parametrize("form", FORMS)
def test_a_float_shared_expert_beside_packed_experts_stays_float(form: str, tmp_path: Path) -> None:
    state = assert_equal(pack(shared(), FORMS[form], keep=SHARED), tmp_path).state_dict()
    assert f"{MLP}.shared_expert.gate_up_proj.weight" in state
    assert f"{DOWN}.codes" in state


@pytest.mark.parametrize("banks", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@torch.inference_mode()
def test_transformers_computes_the_same_from_the_float_twin(banks: bool, tmp_path: Path) -> None:
    twins = pack(shared(banks=banks, mlp_only_layers=[0]), FORMS["olive"])
    ours = logits(waybill.load(twins.packed.write(tmp_path / "packed"), dtype="float32"))
    theirs = AutoModelForCausalLM.from_pretrained(twins.dense.write(tmp_path / "dense"), dtype=torch.float32).eval()
    for prompt, row in zip(PROMPTS, ours, strict=True):
        whole = theirs(torch.tensor([prompt])).logits[0, -1]
        torch.testing.assert_close(row, whole, atol=LOGITS_FLOAT32, rtol=0)


def with_packed(recipe: Recipe, module: str, scheme: Scheme) -> Recipe:
    """A packed checkpoint in which one more module is packed."""
    tensor = recipe.tensors[f"{module}.weight"]
    packed = pack(recipe, scheme).packed
    del packed.tensors[f"{module}.weight"]
    packed.tensors |= sidecars(f"{module}.weight", *quantize(tensor, scheme), scheme)
    return packed


STATED: dict[str, Callable[[str], dict[str, Any]]] = {
    "gptq": lambda module: {"dynamic": {f"+:{re.escape(module)}$": {"bits": 4}}},
    "olive": lambda module: {"overrides": {module: {"bits": 4}}},
}


@pytest.mark.parametrize("stated", [False, True])
@pytest.mark.parametrize("form", ["gptq", "olive"])
@pytest.mark.parametrize("gate", ["gate", "shared_expert_gate"])
def test_a_packed_gate_is_refused_by_name_whatever_metadata_says(
    gate: str, form: str, stated: bool, tmp_path: Path
) -> None:
    """B56."""
    packed = with_packed(shared(num_experts=8), f"{MLP}.{gate}", FORMS[form])
    if stated:
        packed.config["quantization_config"] |= STATED[form](f"{MLP}.{gate}")
    problem = refusal(packed, tmp_path, "packing-mismatch", f"{MLP}.{gate}.")
    assert problem.what == "a weight is packed on disk, and float by the model"
    assert problem.expected == f"a float weight, by the model, which keeps it float under {form}"
    assert problem.fix == "use an export that leaves this module float; no metadata makes it a packed one"


@pytest.mark.parametrize("form", STATED)
def test_a_float_gate_that_metadata_calls_packed_loads(form: str, tmp_path: Path) -> None:
    twins = pack(shared(), FORMS[form])
    twins.packed.config["quantization_config"] |= STATED[form](f"{MLP}.shared_expert_gate")
    assert_equal(twins, tmp_path)


def test_a_report_counts_the_shared_expert(tmp_path: Path) -> None:
    report = describe(waybill.open(shared().write(tmp_path)))
    assert dict(report.rows(str))["experts"] == "4, 2 a token, intermediate 32, and one of 48 for every token"
    assert report.as_dict()["shared_expert_intermediate_size"] == 48


def test_a_shared_expert_no_cut_divides_names_the_field(tmp_path: Path) -> None:
    recipe = qwen2_moe(np.float32, shared_expert_intermediate_size=33)
    (problem,) = waybill.plan(recipe.write(tmp_path), tp=2).problems
    assert (problem.code, problem.found) == ("illegal-tp", "shared_expert_intermediate_size 33 is not divisible by 2")


def test_a_shared_expert_of_another_size_names_the_field(tmp_path: Path) -> None:
    recipe = qwen2_moe(np.float32)
    recipe.config["shared_expert_intermediate_size"] = 64
    found = waybill.plan(recipe.write(tmp_path)).problems
    assert {problem.code for problem in found} == {"shape-mismatch"}
    assert all("shared_expert_intermediate_size 64" in problem.expected for problem in found)


def test_routed_and_shared_experts_are_summed_over_ranks_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = waybill.load(shared().write(tmp_path), dtype="float32")
    sums: list[str] = []

    def count(where: str) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: (sums.append(where), x)[1]

    for module in ("mlp", "linear"):
        monkeypatch.setattr(f"waybill.engine.layers.{module}.all_reduce", count(module))
    logits(model)
    assert sums == ["linear", "mlp"] * 2  # each layer's attention, and its experts


# Banks and single experts.


def taken_apart(recipe: Recipe) -> Recipe:
    """Packed banks as packed projections of single experts, gate rows before up rows."""
    apart = Recipe(dict(recipe.config))
    for name, tensor in recipe.tensors.items():
        stem, bank, role = name.partition(".experts.")[0], *name.rpartition("proj_")[::2]
        if ".experts." not in name:
            apart.tensors[name] = tensor
            continue
        members = ["gate", "up"] if bank.endswith("gate_up_") else ["down"]
        for expert, whole in enumerate(tensor):
            for member, rows in zip(members, np.split(whole, len(members)), strict=True):
                apart.tensors[f"{stem}.experts.{expert}.{member}_proj.weight_{role}"] = rows
    return apart


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("make", [qwen2_moe, qwen3_moe])
def test_packed_banks_and_packed_single_experts_are_the_same_model(
    make: Callable[..., Recipe], bits: int, tmp_path: Path
) -> None:
    """B57, with 2I = H: no shape tells gate_up from its transpose."""
    recipe = lively(make(np.float32, banks=True))
    assert recipe.tensors[GATE_UP].shape[1:] == (64, 64)
    twins = pack(recipe, Scheme("olive", bits, 16))
    bank = assert_equal(twins, tmp_path / "banks")
    single = waybill.load(taken_apart(twins.packed).write(tmp_path / "single"), dtype="float32")
    state = single.state_dict()
    for name, tensor in bank.state_dict().items():
        assert torch.equal(tensor, state[name])
    assert torch.equal(logits(bank), logits(single))


def test_parts_of_a_packed_bank_do_not_collide_when_it_is_taken_apart(tmp_path: Path) -> None:
    """B58: a packed bank beside one of its own experts is one problem, and names both."""
    packed = pack(lively(qwen3_moe(np.float32, banks=True)), FORMS["olive"]).packed
    packed.tensors |= {n: t for n, t in taken_apart(packed).tensors.items() if f"{MLP}.experts.2.down_proj" in n}
    problem = refusal(packed, tmp_path, "claimed-twice", f"{MLP}.experts.2.down_proj.weight")
    assert problem.found == f"{DOWN} ({FILE}) and {MLP}.experts.2.down_proj.weight ({FILE})"


def altered(change: Callable[[dict[str, Array]], None], form: str = "gptq", *, banks: bool = False) -> Recipe:
    packed = pack(lively(qwen2_moe(np.float32, banks=banks)), FORMS[form]).packed
    change(packed.tensors)
    return packed


def one_more(tensors: dict[str, Array]) -> None:
    tensors |= {n.replace("experts.3.", "experts.4."): t for n, t in tensors.items() if f"{MLP}.experts.3." in n}


@pytest.mark.parametrize("form", ["gptq", "awq", "olive"])
def test_one_packed_expert_too_many_is_refused(form: str, tmp_path: Path) -> None:
    """B59."""
    problem = refusal(altered(one_more, form), tmp_path, "expert-mismatch", f"{MLP}.experts", "also expert 4")
    assert problem.fix == "set num_experts to 5 if the model was published with that many"


@pytest.mark.parametrize("form", ["gptq", "awq", "olive"])
def test_an_expert_without_scales_is_named(form: str, tmp_path: Path) -> None:
    """B59."""
    stem = f"{MLP}.experts.2.up_proj.{'weight_' if form == 'olive' else ''}"
    problem = refusal(altered(lambda tensors: tensors.pop(f"{stem}scales"), form), tmp_path, "incomplete-weight")  # type: ignore[arg-type, return-value]
    assert problem.where.startswith(f"{MLP}.experts.2.up_proj.weight")
    assert "no scales" in problem.what


def test_an_expert_in_two_shards_is_refused(tmp_path: Path) -> None:
    """B59."""
    packed = altered(lambda _: None)
    folder = packed.write(tmp_path, shard_of=lambda name: int(".1.mlp" in name))
    again = {n: t for n, t in packed.tensors.items() if f"{MLP}.experts.1.up" in n or ".0.mlp" not in n}
    other = Recipe(packed.config, {n: t for n, t in again.items() if ".1.mlp" not in n or "experts.1.up" in n})
    spare = other.write(tmp_path / "spare") / FILE
    spare.rename(folder / "model-00001-of-00002.safetensors")
    found = waybill.plan(folder).problems
    assert f"{MLP}.experts.1.up_proj.qweight" in str(next(p for p in found if p.code == "duplicate-tensor"))


# Geometry of a bank's sidecars.


def cut(name: str, *index: Any) -> Callable[[dict[str, Array]], None]:
    def change(tensors: dict[str, Array]) -> None:
        tensors[name] = np.ascontiguousarray(tensors[name][index])

    return change


def every_part(change: Callable[[str], Callable[[dict[str, Array]], None]]) -> Callable[[dict[str, Array]], None]:
    def whole(tensors: dict[str, Array]) -> None:
        for role in ("qweight", "scales", "qzeros"):
            change(f"{DOWN}_{role}")(tensors)

    return whole


ALL = slice(None)
GEOMETRY: dict[str, tuple[Callable[[dict[str, Array]], None], str, str]] = {
    "scales of too few experts": (cut(f"{DOWN}_scales", slice(3)), "packing-mismatch", "[4, 64, 2]"),
    "scales of too few rows": (cut(f"{DOWN}_scales", ALL, slice(63)), "packing-mismatch", "[4, 64, 2]"),
    "scales of too few groups": (cut(f"{DOWN}_scales", ALL, ALL, slice(1)), "packing-mismatch", "[4, 64, 2]"),
    "zero points of too few experts": (cut(f"{DOWN}_qzeros", slice(3)), "packing-mismatch", "U8[4, 64, 1]"),
    "zero points of too many groups": (
        lambda t: t.update({f"{DOWN}_qzeros": np.repeat(t[f"{DOWN}_qzeros"], 2, -1)}), "packing-mismatch",
        "U8[4, 64, 1]",
    ),
    "codes too narrow": (cut(f"{DOWN}_qweight", ALL, ALL, slice(8)), "packing-mismatch", "[4, 64, 1]"),
    "codes of words": (
        lambda t: t.update({f"{DOWN}_qweight": t[f"{DOWN}_qweight"].view(np.int32)}), "packing-mismatch", "U8[",
    ),
    "one matrix in place of a bank": (every_part(lambda name: cut(name, 0)), "shape-mismatch", "[64, 32]"),
    "too few experts in every part": (
        every_part(lambda name: cut(name, slice(3))), "expert-mismatch", "experts 0 to 3: num_experts is 4",
    ),
    "too few rows in every part": (
        every_part(lambda name: cut(name, ALL, slice(63))), "shape-mismatch", "hidden_size 64",
    ),
    "too narrow in every part": (
        lambda t: [cut(f"{DOWN}_{role}", ALL, ALL, slice(n))(t) for role, n in (("qweight", 8), ("scales", 1))][:0],
        "shape-mismatch", "moe_intermediate_size 32",
    ),
    "a bank of nothing": (every_part(lambda name: cut(name, slice(0))), "shape-mismatch", "a stack of matrices"),
}  # fmt: skip


@pytest.mark.parametrize("case", GEOMETRY)
def test_a_packed_bank_whose_parts_do_not_fit_is_refused_before_any_byte_is_read(case: str, tmp_path: Path) -> None:
    change, code, expected = GEOMETRY[case]
    found = refusals(altered(change, "olive", banks=True), tmp_path)
    mine = [problem for problem in found if problem.code == code and "experts" in problem.where]
    assert mine, found
    assert any(expected in problem.expected for problem in mine), mine


@pytest.mark.parametrize("lost", [GATE_UP, DOWN])
def test_a_layer_without_one_of_its_banks_is_refused(lost: str, tmp_path: Path) -> None:
    recipe = altered(lambda _: None, "olive", banks=True)
    recipe.tensors = {name: tensor for name, tensor in recipe.tensors.items() if not name.startswith(lost)}
    (problem,) = refusals(recipe, tmp_path)
    assert problem.code == "missing-weight"
    assert problem.found == "no expert 0–3 in any shard"


# Rules for single projections.

RULES: dict[str, dict[str, Any]] = {
    "exact": {"model.layers.0.mlp.experts.down_proj": {"bits": 8}, f"{DOWN}": {"bits": 8}},
    "re:": {r"re:model\.layers\.\d+\.mlp\.experts\.down_proj": {"bits": 8}},
    "one layer": {"model.layers.0.mlp.experts.down_proj": {"bits": 8}},
    "one layer whole": {r"re:.*\.0\.mlp\.experts\.(gate_up|down)_proj": {"bits": 8}},
    "the other way": {r"re:.*\.experts\.gate_up_proj": {"bits": 8}, r"re:.*\.experts\.down_proj": {"bits": 2}},
    "another group": {r"re:.*\.experts\.down_proj": {"group_size": 16}},
}


def by_rules(rules: dict[str, Any], make: Callable[..., Recipe] = qwen2_moe, **config: Any) -> tuple[Recipe, Recipe]:
    """Banks packed as Olive's overrides say, in 4 bits and groups of 32 elsewhere; and the float twin."""
    recipe = lively(make(np.float32, banks=True, **config))
    changes: dict[str, dict[str, Any]] = {}
    for name in recipe.tensors:
        for rule, change in rules.items():
            if rule == name or (rule.startswith("re:") and re.fullmatch(rule.removeprefix("re:"), name)):
                changes[name] = {"group" if key == "group_size" else key: value for key, value in change.items()}
    twins = pack(recipe, Scheme("olive", group=32), overrides=changes, keep=SHARED)
    twins.packed.config["quantization_config"] = metadata(
        Scheme("olive", group=32), SHARED, rules, table=False, head=False, moe=True, tie=False
    )
    return twins


@pytest.mark.parametrize("case", RULES)
def test_overrides_of_single_projections_of_experts_are_followed(case: str, tmp_path: Path) -> None:
    """B60: a rule means a bank by the path that Hugging Face has for it."""
    packed, dense = by_rules(RULES[case])
    ours = waybill.load(packed.write(tmp_path / "packed"), dtype="float32")
    theirs = waybill.load(dense.write(tmp_path / "dense"), dtype="float32")
    torch.testing.assert_close(logits(ours), logits(theirs), atol=LOGITS_FLOAT32, rtol=0)


def test_a_width_that_disk_does_not_have_is_refused(tmp_path: Path) -> None:
    """B60: a global width is not applied to a bank of another."""
    packed, _ = by_rules(RULES["exact"])
    packed.config["quantization_config"]["overrides"] = None
    problem = refusal(packed, tmp_path, "packing-mismatch", "mlp.experts.down_proj")
    assert "and 1 more of this form" in problem.where


def expert(number: int, member: str) -> str:
    return f"{MLP}.experts.{number}.{member}_proj"


UNEVEN: dict[str, tuple[dict[str, dict[str, Any]], str, str]] = {
    "bits of one": ({expert(2, "down"): {"bits": 8}}, expert(2, "down"), "expert 2: 8 bits, group 32, F16"),
    "bits of the first": ({expert(0, "down"): {"bits": 8}}, expert(0, "down"), "expert 0: 8 bits, group 32, F16"),
    "group of one": ({expert(3, "up"): {"group": 16}}, expert(3, "up"), "expert 3: 4 bits, group 16, F16"),
}


@pytest.mark.parametrize("case", UNEVEN)
def test_experts_of_one_bank_with_layouts_of_their_own_are_refused_and_named(case: str, tmp_path: Path) -> None:
    changes, odd, found = UNEVEN[case]
    packed = pack(lively(qwen3_moe(np.float32)), Scheme("gptq"), overrides=changes).packed
    problem = refusal(packed, tmp_path, "packing-mismatch", f"{odd}.weight")
    assert problem.what == "experts of one bank are packed differently"
    assert (problem.expected, problem.found) == ("4 bits, group 32, F16, as most of them", found)


def test_every_odd_expert_is_named_in_one_problem(tmp_path: Path) -> None:
    changes = {expert(n, "down"): {"bits": bits} for n, bits in ((1, 8), (2, 2), (5, 8))}
    packed = pack(lively(qwen3_moe(np.float32, num_experts=8)), Scheme("gptq"), overrides=changes).packed
    problem = refusal(packed, tmp_path, "packing-mismatch", *(f"{name}.weight" for name in changes))
    assert problem.found == "expert 1, 5: 8 bits, group 32, F16; expert 2: 2 bits, group 32, F16"


def test_a_float_expert_among_packed_ones_is_named(tmp_path: Path) -> None:
    packed = pack(lively(qwen3_moe(np.float32)), Scheme("gptq"), keep=[expert(1, "gate")]).packed
    problem: WaybillError = refusal(packed, tmp_path, "packing-mismatch", f"{expert(1, 'gate')}.weight")
    assert problem.found == "expert 1: float, F32"


@pytest.mark.parametrize("method", ["gptq", "awq", "olive"])
def test_routers_of_a_language_model_inside_another_are_float_too(method: str) -> None:
    decoder = llava_components({"model_type": "llava"}).by_name("decoder")
    mlp = "model.language_model.layers.3.mlp"
    assert decoder.excludes(f"{mlp}.gate", method)
    assert decoder.excludes(f"{mlp}.shared_expert_gate", method)
    assert not decoder.excludes(f"{mlp}.shared_expert.gate_proj", method)
    assert not decoder.excludes(f"{mlp}.gate_proj", method)
