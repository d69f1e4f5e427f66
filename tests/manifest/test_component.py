"""Components: resolved from a task, its roles and the model's sources; local paths to Hugging Face module names."""

from __future__ import annotations

from typing import Any

import pytest

from waybill.errors import UnresolvedComponent
from waybill.families.decoder import decoder_components
from waybill.manifest import ComponentDescriptor, ComponentManifest, Task, resolve_components

VISION_TEXT = Task(
    name="image-text-to-text",
    components={"decoder": "language_model", "vision": "visual"},
    roles={"decoder": "decoder", "vision": "vision_encoder"},
)
SOURCES = {"decoder": ("model.language_model", "lm_head"), "vision": ("model.visual",)}


def descriptor(*roots: str, name: str = "decoder", path: str = "", **aliases: str) -> ComponentDescriptor:
    paths = {local.replace("__", "."): name for local, name in aliases.items()}
    return ComponentDescriptor(name=name, module_attribute_path=path, role="", source_paths=roots, aliases=paths)


def test_a_text_model_is_one_component_that_owns_every_module() -> None:
    manifest = decoder_components({"model_type": "llama"})
    assert manifest.only is manifest.by_name("decoder")
    for module in ("lm_head", "model.layers.0.mlp.up_proj", "anything"):
        assert manifest.owner_of(module) is manifest.only
        assert manifest.components[0].source_module_names(module) == (module,)


def test_a_module_belongs_to_the_component_with_the_longest_root_by_whole_segments() -> None:
    manifest = resolve_components(VISION_TEXT, {"decoder": ("model", "lm_head"), "vision": ("model.visual",)})
    owners = {
        "lm_head": "decoder",
        "model.layers.0": "decoder",
        "model.visual.blocks.0": "vision",
        "model.visuals": "decoder",
    }
    assert {m: o.name for m in owners if (o := manifest.owner_of(m))} == owners
    assert manifest.owner_of("lm_headings") is None


@pytest.mark.parametrize(
    ("roots", "local", "expected"),
    [
        (("model.language_model",), "model.layers.0.gate", ("model.language_model.layers.0.gate",)),
        (("model.language_model",), "model", ("model.language_model",)),
        (("model",), "model.layers.0", ("model.layers.0",)),
        (("model.language_model.layers",), "model.layers.0.gate", ("model.language_model.layers.0.gate",)),
        (("model.language_model.layers", "model.norm"), "model.layers.0", ("model.language_model.layers.0",)),
        (("model.text.layers", "model.sound.layers"), "layers.0", ("model.text.layers.0", "model.sound.layers.0")),
        (("a", "model.language_model"), "model.norm", ("model.language_model.norm",)),
        (("model.language_model",), "model.language_model.norm", ("model.language_model.norm",)),
        (("decoder", "lm_head"), "lm_head", ("lm_head",)),
        (("decoder", "lm_head"), "lm_head.inner", ("lm_head.inner",)),
    ],
)
def test_a_local_path_is_anchored_at_each_source_root(
    roots: tuple[str, ...], local: str, expected: tuple[str, ...]
) -> None:
    assert descriptor(*roots).source_module_names(local) == expected


def test_a_path_that_shares_nothing_with_a_root_lies_below_the_components_own() -> None:
    own = ("encoder.block.0.layer",)
    assert descriptor("encoder", "lm_head", name="encoder").source_module_names("block.0.layer") == own
    hung = descriptor("model.encoder", "lm_head", name="audio", path="model.encoder")
    assert hung.source_module_names("block.0.layer") == ("model.encoder.block.0.layer",)
    assert descriptor("lm_head", name="encoder").source_module_names("block.0.layer") == ("block.0.layer",)


def test_an_alias_is_the_only_name_of_its_path_and_of_all_below_it() -> None:
    one = descriptor("encoder", name="encoder", block__0="encoder.stack.first", block__0__norm="encoder.norms.first")
    assert one.source_module_names("block.0") == ("encoder.stack.first",)
    assert one.source_module_names("block.0.layer.q") == ("encoder.stack.first.layer.q",)
    assert one.source_module_names("block.0.norm") == ("encoder.norms.first",)
    assert one.source_module_names("block.1") == ("encoder.block.1",)
    assert one.source_module_names("block.01") == ("encoder.block.01",)
    assert one.source_module_names("encoder.stack.first.layer.q") == ("encoder.stack.first.layer.q",)


def test_a_head_that_an_alias_names_is_put_under_no_root() -> None:
    assert descriptor("decoder", lm_head="lm_head").source_module_names("lm_head") == ("lm_head",)
    assert descriptor("decoder").source_module_names("lm_head") == ("decoder.lm_head",)


def test_a_hook_is_asked_when_a_model_type_is_known_and_not_without_one() -> None:
    asked: list[Any] = []

    def hook(*, model_type: str, hf_config: Any) -> dict[str, tuple[str, ...]]:
        asked.append(model_type)
        return {"vision": (f"{model_type}.vision",)}

    def vision(**known: Any) -> tuple[str, ...]:
        return resolve_components(VISION_TEXT, SOURCES, hook=hook, **known).by_name("vision").source_paths

    for unknown in ({}, {"hf_config": {}}):
        with pytest.raises(UnresolvedComponent) as refused:
            vision(**unknown)
        assert refused.value.found == "role decoder, source paths none"
        assert refused.value.fix == "state model_type: the model's sources depend on it"
    assert resolve_components(VISION_TEXT, SOURCES).by_name("vision").source_paths == ("model.visual",)
    assert vision(hf_config={"model_type": "stated"}) == ("stated.vision",)
    assert vision(hf_config={"model_type": "stated"}, model_type="given") == ("given.vision",)
    assert asked == ["stated", "given"]


@pytest.mark.parametrize(
    ("roles", "sources", "found"),
    [
        ({"decoder": "decoder"}, SOURCES, "role none, source paths model.visual"),
        (VISION_TEXT.roles, {"decoder": ("model",)}, "role vision_encoder, source paths none"),
        (VISION_TEXT.roles, {"decoder": ("model",), "vision": ()}, "role vision_encoder, source paths none"),
    ],
)
def test_a_component_without_a_role_or_a_source_is_refused(roles: Any, sources: Any, found: str) -> None:
    task = Task(name="image-text-to-text", components=VISION_TEXT.components, roles=roles)
    with pytest.raises(UnresolvedComponent) as refused:
        resolve_components(task, sources)
    assert refused.value.where == "task image-text-to-text: vision"
    assert refused.value.found == found


def test_an_unknown_name_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(UnresolvedComponent) as refused:
        resolve_components(VISION_TEXT, SOURCES).by_name("audio")
    assert (refused.value.expected, refused.value.found) == ("decoder | vision", "'audio'")


def test_one_component_selected_from_two_is_not_a_package_of_one() -> None:
    whole = resolve_components(VISION_TEXT, SOURCES)
    assert whole.only is None
    assert whole.select(["decoder"]).only is None
    single = ComponentManifest(whole.components[:1])
    assert single.only is single.select(["decoder"]).only is whole.components[0]


def test_what_another_path_is_an_alias_of_lies_under_no_root() -> None:
    encoder = ComponentDescriptor(
        name="encoder",
        module_attribute_path="encoder",
        role="encoder",
        source_paths=("encoder",),
        aliases={"embed_tokens": "shared"},
    )
    assert encoder.source_module_names("embed_tokens") == ("shared",)
    assert encoder.source_module_names("shared") == ("shared",)


def test_a_module_is_excluded_from_the_methods_that_are_named_and_from_no_other() -> None:
    decoder = ComponentDescriptor(
        name="decoder",
        module_attribute_path="",
        role="decoder",
        source_paths=("",),
        excluded_methods={"layers.*.gate": frozenset({"awq"})},
    )
    assert decoder.excludes("layers.3.gate.up", "awq")
    assert not decoder.excludes("layers.3.gate.up", "gptq")
    assert not decoder.excludes("layers.3", "awq")
    assert not decoder.excludes("layers.3.gates", "awq")
