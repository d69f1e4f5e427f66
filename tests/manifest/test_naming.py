"""Names: spelled one way on disk and another at run time, owned by components, and meant by patterns in either form."""

from __future__ import annotations

from typing import Any

import pytest

from waybill.config.producers import read_plan
from waybill.config.quantization import ComponentQuantizationManifest
from waybill.errors import WaybillError
from waybill.manifest import Task, resolve_components
from waybill.manifest.naming import Naming, Spelling
from waybill.manifest.quantization import Policy

TASK = Task(
    name="image-text-to-text",
    components={"vision_encoder": "model.vision_tower", "embedding": "model.embed", "decoder": "model.language_model"},
    roles={"vision_encoder": "vision_encoder", "embedding": "embedding", "decoder": "decoder"},
)
SOURCES = {
    "vision_encoder": ("model.vision_tower",),
    "embedding": ("model.language_model.embed_tokens",),
    "decoder": ("model.language_model",),
}
ALIASES = {"decoder": {"lm_head": "lm_head"}}
GATE = {"decoder": {"model.language_model.layers.*.mlp.gate": frozenset({"olive"})}}
COMPONENTS = resolve_components(TASK, SOURCES, aliases=ALIASES, excluded_methods=GATE)
SPELLINGS = (
    Spelling("language_model.model", "model.language_model"),
    Spelling("language_model.lm_head", "lm_head"),
    Spelling("vision_tower", "model.vision_tower"),
    Spelling("vision_tower.vision_model", "model.vision_tower"),
)


def kind_of(module: str) -> str:
    if module == "lm_head":
        return "head"
    return {"embed_tokens": "embedding", "positions": "positions"}.get(module.rpartition(".")[2], "linear")


NAMING = Naming(COMPONENTS, kind_of, SPELLINGS)


@pytest.mark.parametrize(
    ("stored", "runtime", "component"),
    [
        ("language_model.model.layers.0.mlp.up", "model.language_model.layers.0.mlp.up", "decoder"),
        ("language_model.lm_head.weight", "lm_head.weight", "decoder"),
        ("lm_head", "lm_head", "decoder"),
        ("language_model.model.embed_tokens.weight", "model.language_model.embed_tokens.weight", "embedding"),
        ("vision_tower.layers.1.fc1", "model.vision_tower.layers.1.fc1", "vision_encoder"),
        ("vision_tower.vision_model.layers.1.fc1", "model.vision_tower.layers.1.fc1", "vision_encoder"),
        ("model.vision_tower.layers.1.fc1", "model.vision_tower.layers.1.fc1", "vision_encoder"),
        ("vision_towers.layers.1.fc1", "vision_towers.layers.1.fc1", ""),
        ("decoder.lm_head.weight", "decoder.lm_head.weight", ""),
    ],
)
def test_a_stored_name_has_one_runtime_name_and_one_owner(stored: str, runtime: str, component: str) -> None:
    assert (NAMING.runtime(stored), NAMING.component(stored)) == (runtime, component)


def test_the_spellings_a_file_uses_are_counted() -> None:
    names = ["vision_tower.a", "vision_tower.vision_model.b", "vision_tower.vision_model.c", "lm_head.weight"]
    assert {str(spelling): count for spelling, count in NAMING.used(names).items()} == {
        "vision_tower for model.vision_tower": 1,
        "vision_tower.vision_model for model.vision_tower": 2,
    }


def test_a_module_is_meant_by_its_stored_and_by_its_runtime_name() -> None:
    assert NAMING.names("language_model.model.norm") == ("language_model.model.norm", "model.language_model.norm")
    assert NAMING.names("language_model.lm_head") == ("language_model.lm_head", "lm_head")


def test_a_module_is_meant_by_its_name_in_any_spelling_of_its_root() -> None:
    names = ("vision_tower.fc1", "model.vision_tower.fc1", "vision_tower.vision_model.fc1")
    assert {frozenset(NAMING.names(name)) for name in names} == {frozenset(names)}
    assert NAMING.names("vision_towers.fc1") == ("vision_towers.fc1",)


def policy(**entry: Any) -> Policy:
    problems: list[WaybillError] = []
    block = {"quant_method": "olive", "bits": 4, "group_size": 32, "symmetric": True, **entry}
    plan = read_plan(block, "component_quantization.decoder", problems, by_path=True)
    assert plan is not None
    return Policy(NAMING, ComponentQuantizationManifest({"decoder": plan, "embedding": plan}))


STORED = "language_model.model.layers.1.mlp.up"


@pytest.mark.parametrize(
    ("pattern", "hits"),
    [
        ("model.language_model.layers.1.mlp.up", True),
        ("language_model.model.layers.1.mlp.up", True),
        ("model.language_model.layers.1", True),
        ("model.language_model.layers.1.mlp.u", False),
        ("layers.1", False),
        ("model.language_model.layers.10", False),
        (r"re:.*\.layers\.1\..*", True),
        (r"re:layers\.1\..*", False),
    ],
)
def test_the_literals_of_a_component_entry_are_paths_and_its_expressions_match_whole_names(
    pattern: str, hits: bool
) -> None:
    assert (policy(modules_to_not_convert=[pattern]).of(STORED) is None) is hits
    changed = policy(overrides={pattern: {"bits": 8}}).of(STORED)
    assert changed is not None
    assert changed.bits == (8 if hits else 4)


def test_a_component_without_an_entry_is_float_whatever_the_others_are() -> None:
    assert policy().of("vision_tower.layers.1.fc1") is None
    assert policy().reason("vision_tower.layers.1.fc1") == "the metadata, which has no entry for vision_encoder"


def test_a_head_is_float_unless_the_entry_says_otherwise() -> None:
    for name in ("lm_head", "language_model.lm_head"):
        assert policy().of(name) is None
        assert policy(quantize_lm_head=True).of(name) is not None
        assert policy(lm_head=True).of(name) is not None


def test_quantize_embeddings_means_token_tables_and_never_learned_positions() -> None:
    tables = policy(quantize_embeddings=True)
    assert policy().of("language_model.model.embed_tokens") is None
    assert tables.of("language_model.model.embed_tokens") is not None
    assert tables.of("model.language_model.positions") is None


def test_what_a_model_excludes_from_a_method_stays_float_with_all_below_it() -> None:
    for module in ("language_model.model.layers.0.mlp.gate", "model.language_model.layers.11.mlp.gate.inner.proj"):
        forced = policy(overrides={module: {"bits": 4}})
        assert forced.of(module) is None
        assert forced.reason(module) == "the model, which keeps it float under olive"
    assert policy().of("model.language_model.layers.0.mlp.gates") is not None


def test_an_alias_hook_is_asked_with_the_config_and_needs_no_model_type() -> None:
    def hook(*, hf_config: Any) -> dict[str, dict[str, str]]:
        return {
            part: {f"layers.{n}": f"{part}.block.{n}" for n in range(hf_config.get(f"{part}_layers", 1))}
            for part in ("encoder", "decoder")
        }

    task = Task(
        name="text-to-text",
        components={"encoder": "", "decoder": ""},
        roles={"encoder": "encoder", "decoder": "decoder"},
    )
    roots = {"encoder": ("encoder",), "decoder": ("decoder",)}
    found = resolve_components(task, roots, alias_hook=hook, hf_config={"encoder_layers": 2, "decoder_layers": 3})
    assert [len(component.aliases) for component in found.components] == [2, 3]
    assert found.by_name("decoder").source_module_names("layers.2") == ("decoder.block.2",)
    assert found.by_name("encoder").source_module_names("layers.2") == ("encoder.layers.2",)
    without = resolve_components(task, roots, alias_hook=hook)
    assert [len(component.aliases) for component in without.components] == [1, 1]


def test_a_top_level_head_is_the_decoders_and_never_a_head_below_it() -> None:
    decoder = COMPONENTS.by_name("decoder")
    assert decoder.source_module_names("lm_head") == ("lm_head",)
    assert COMPONENTS.owner_of("lm_head") is decoder
    assert COMPONENTS.owner_of("decoder.lm_head") is None
