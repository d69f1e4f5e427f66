"""Metadata of packages with several components: each statement reaches the component it is about, and no other."""

from __future__ import annotations

from typing import Any

import pytest

from checkpoints import LAYERS, llama
from packing import Scheme, pack
from waybill.checkpoint import read_checkpoint
from waybill.codecs.grouping import group_records
from waybill.config.quantization import ComponentQuantizationManifest
from waybill.errors import WaybillError
from waybill.families.decoder import decoder_components, decoder_module_kind
from waybill.manifest import ComponentManifest, Task, resolve_components
from waybill.manifest.naming import Naming
from waybill.manifest.quantization import Policy, read_quantization

OLIVE = {"quant_method": "olive", "bits": 4, "group_size": 32, "symmetric": True}
OLIVE8 = OLIVE | {"bits": 8, "group_size": 64}
SPEECH = Task(
    name="speech",
    components={"decoder": "decoder", "vision": "visual", "audio": "audio"},
    roles={"decoder": "decoder", "vision": "vision_encoder", "audio": "audio_encoder"},
)
SEVERAL = resolve_components(SPEECH, {"decoder": ("model",), "vision": ("visual",), "audio": ("audio",)})


def read(
    config: dict[str, Any], components: ComponentManifest = SEVERAL, **side_files: Any
) -> tuple[ComponentQuantizationManifest, list[WaybillError]]:
    problems: list[WaybillError] = []
    return read_quantization(config, side_files, components, problems), problems


@pytest.mark.parametrize(
    "config",
    [
        {"component_quantization": {"decoder": OLIVE, "vision": OLIVE8, "audio": None}},
        {"quantization_config": {"components": {"decoder": OLIVE, "vision": OLIVE8}}},
        {"text_config": {"quantization_config": OLIVE}, "vision_config": {"quantization_config": OLIVE8}},
        {"component_quantization": {"decoder": OLIVE}, "vision_config": {"quantization_config": OLIVE8}},
    ],
)
def test_components_have_layouts_of_their_own_and_those_not_named_are_float(config: dict[str, Any]) -> None:
    manifest, problems = read(config)
    assert problems == []
    bits = {n: p and (p.layout.bits, p.layout.group_size) for n in SPEECH.components for p in [manifest.plans.get(n)]}
    assert bits == {"decoder": (4, 32), "vision": (8, 64), "audio": None}


def test_what_is_said_of_the_whole_model_is_said_of_a_single_component_whatever_its_name() -> None:
    one = resolve_components(Task(name="t", components={"anything": ""}, roles={"anything": "r"}), {"anything": ("",)})
    manifest, problems = read({"quantization_config": OLIVE}, one)
    assert (list(manifest.plans), problems) == (["anything"], [])


def test_what_is_said_of_the_whole_model_is_never_said_of_a_selection_of_its_components() -> None:
    for components in (SEVERAL, SEVERAL.select(["decoder"])):
        manifest, _ = read({"quantization_config": OLIVE}, components, **{"quantize_config.json": OLIVE})
        assert manifest.plans == {}


def test_two_places_that_disagree_about_one_component_are_refused() -> None:
    _, (problem,) = read({"component_quantization": {"audio": OLIVE}, "audio_config": {"quantization_config": OLIVE8}})
    assert problem.code == "config-conflict"
    assert (
        problem.where == "config.json: component_quantization.audio and config.json: audio_config.quantization_config"
    )
    assert problem.found == "bits: 4 and 8"


@pytest.mark.parametrize(
    ("entries", "found"),
    [
        ({"decodr": OLIVE}, "a component the model does not have: 'decodr'"),
        ({"decoder": "int4"}, "'int4'"),
    ],
)
def test_an_entry_that_cannot_be_used_is_refused(entries: dict[str, Any], found: str) -> None:
    manifest, (problem,) = read({"component_quantization": entries})
    assert problem.code == "bad-config"
    assert problem.found == found
    assert problem.expected == "an object or null, for one of decoder, vision, audio"
    assert manifest.plans == {}


def test_packed_weights_of_a_component_without_an_entry_are_refused_by_its_name(tmp_path: Any) -> None:
    checkpoint = read_checkpoint(pack(llama(), Scheme("olive")).packed.write(tmp_path))
    task = Task(name="t", components={"a": "", "b": ""}, roles={"a": "a", "b": "b"})
    layers = tuple(f"model.layers.{n}" for n in range(1, LAYERS))
    components = resolve_components(task, {"a": ("model", "lm_head"), "b": layers})
    whole = read_quantization(checkpoint.config, {}, decoder_components({}), []).plans["decoder"]
    problems: list[WaybillError] = []
    quantization = ComponentQuantizationManifest({"a": whole})
    naming = Naming(components, decoder_module_kind)
    assert group_records(checkpoint, Policy(naming, quantization), problems) == []
    (problem,) = problems
    assert problem.code == "unsupported-quantization"
    assert problem.where.startswith("b: model.layers.1.")
    both = ComponentQuantizationManifest({"a": whole, "b": whole})
    records = group_records(checkpoint, Policy(naming, both), problems[1:])
    owners = {
        record.source_name.partition(".mlp")[0]: record.component for record in records if ".mlp" in record.source_name
    }
    assert owners == {f"model.layers.{n}": "ab"[n > 0] for n in range(LAYERS)}
