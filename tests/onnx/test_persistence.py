"""What a package says of its components: written with it, and the same when it is opened again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import waybill
from checkpoints import lively, llama
from packing import Scheme
from packing import pack as pack_model
from waybill.errors import BadPackage
from waybill.families import t5 as t5_family
from waybill.onnx.package import ModelPackage
from zoo import LAYOUTS, ZOO, pack

FAMILIES = {tiny.title: tiny for tiny in ZOO}
BOTH = next(layout for layout in LAYOUTS if layout.title == "decoder 4, the other 8 bits")


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved T5, 8 bits and 4."""
    folder = tmp_path_factory.mktemp("t5")
    tiny = FAMILIES["T5, gated"]
    recipe = pack(tiny, tiny.make(True, folder / "whole"), BOTH)[0]
    waybill.build(recipe.write(folder / "packed")).save(folder / "package")
    return folder / "package"


@pytest.mark.parametrize("title", FAMILIES)
def test_an_opened_package_has_the_manifest_and_the_layouts_it_was_built_from(title: str, tmp_path: Path) -> None:
    tiny = FAMILIES[title]
    recipe = pack(tiny, tiny.make(True, tmp_path / "whole"), BOTH)[0]
    built = waybill.build(recipe.write(tmp_path / "packed"))
    built.save(tmp_path / "package")
    opened = ModelPackage.load(tmp_path / "package")
    assert opened.manifest == built.manifest
    assert opened.manifest.components == waybill.plan(tmp_path / "packed", "onnx").policy.naming.components.components
    assert {name: each.layout for name, each in opened.items()} == {name: each.layout for name, each in built.items()}
    stated = {name: each.layout and (each.layout.bits, each.layout.group_size) for name, each in opened.items()}
    expected = {tiny.first: (8, 32), "decoder": (4, 16)}
    assert stated == {name: expected.get(name) for name in opened}
    opened.save(tmp_path / "again")
    assert ModelPackage.load(tmp_path / "again").manifest == built.manifest


def test_the_bill_says_what_each_component_is_for_where_it_hangs_what_it_owns_and_how_it_is_packed(t5: Path) -> None:
    encoder, decoder = json.loads((t5 / "waybill.json").read_text())["components"].values()
    keys = ("role", "module", "source_paths", "aliases", "excluded_methods")
    assert [encoder[key] for key in keys] == ["encoder", "encoder", ["encoder"], {"embed_tokens": "shared"}, {}]
    assert [decoder[key] for key in keys] == ["decoder", "decoder", ["decoder"], {"lm_head": "lm_head"}, {}]
    assert decoder["layout"] == {
        "method": "olive", "bits": 4, "group_size": 16, "symmetric": False, "zero_offset": 0, "desc_act": False,
        "form": "", "scale_rows": 1, "divides": False,
    }  # fmt: skip


def test_a_role_is_not_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A component may be called otherwise than what it is for."""
    roles = {"encoder": "audio_encoder", "decoder": "decoder"}
    monkeypatch.setattr(t5_family, "TASK", replace(t5_family.TASK, roles=roles))
    built = waybill.build(FAMILIES["T5, gated"].make(True, tmp_path / "whole").write(tmp_path / "checkpoint"))
    built.save(tmp_path / "package")
    opened = ModelPackage.load(tmp_path / "package")
    assert [each.descriptor.role for each in opened.values()] == ["audio_encoder", "decoder"]
    assert opened.manifest.by_name("encoder").module_attribute_path == "encoder"


def test_a_whole_row_as_one_group_is_written_and_read(tmp_path: Path) -> None:
    recipe = pack_model(lively(llama()), Scheme("gptq", 4, -1, symmetric=True)).packed
    built = waybill.build(recipe.write(tmp_path / "packed"))
    built.save(tmp_path / "package")
    layout = ModelPackage.load(tmp_path / "package")["decoder"].layout
    assert layout is not None
    assert (layout, layout.group_size) == (built["decoder"].layout, -1)


def test_a_skeleton_says_what_its_components_are_too(tmp_path: Path) -> None:
    built = waybill.build(lively(llama()).write(tmp_path / "checkpoint"), load_weights=False)
    built.save(tmp_path / "package", allow_unbound=True)
    component = json.loads((tmp_path / "package" / "waybill.json").read_text())["components"]["decoder"]
    assert (component["role"], component["source_paths"], component["layout"]) == ("decoder", [""], None)


def _set(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda component: component.update({key: value})


def _layout(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda component: component["layout"].update({key: value})


@pytest.mark.parametrize(
    ("change", "where", "expected"),
    [
        (_set("role", 3), "role", "a text"),
        (_set("module", None), "module", "a text"),
        (_set("source_paths", "encoder"), "source_paths", "a list"),
        (_set("aliases", {"a": 1}), "aliases.a", "a text"),
        (_set("excluded_methods", {"a": "gptq"}), "excluded_methods.a", "a list"),
        (_set("layout", "int4"), "layout", "an object"),
        (_layout("method", "magic"), "layout.method", "gptq | awq | olive | compressed-tensors | fp8 | mxfp4"),
        (_layout("bits", 3), "layout.bits", "2 | 4 | 8"),
        (_layout("group_size", -2), "layout.group_size", "a size"),
        (_layout("symmetric", 1), "layout.symmetric", "true or false"),
        (lambda component: component.pop("role"), "", "the key 'role'"),
    ],
)
def test_a_bill_that_says_it_wrongly_is_malformed(
    change: Callable[[dict[str, Any]], None], where: str, expected: str, t5: Path, tmp_path: Path
) -> None:
    bill = json.loads((t5 / "waybill.json").read_text())
    change(bill["components"]["encoder"])
    (tmp_path / "waybill.json").write_text(json.dumps(bill))
    with pytest.raises(BadPackage) as refused:
        ModelPackage.load(tmp_path)
    place = ".".join(["waybill.json: components.encoder", *filter(None, [where])])
    assert (refused.value.where, refused.value.expected) == (place, expected)
