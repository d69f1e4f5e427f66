"""Packages of several graphs: whatever is wrong between them is found, and nothing is left half written."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from blake3 import blake3

import waybill
from waybill.errors import BadPackage, CannotWrite, WaybillError
from waybill.onnx import writing
from waybill.onnx.package import ModelPackage
from zoo import LAYOUTS, ZOO, pack

T5, LLAVA = ZOO[0], ZOO[2]
BOTH = next(layout for layout in LAYOUTS if layout.title == "decoder 4, the other 8 bits")
PRODUCED = "waybill.json"
RUN = "genai_config.json"


@pytest.fixture(scope="module", params=[T5, LLAVA], ids=["T5", "LLaVA"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package and its checkpoint, side by side."""
    folder = tmp_path_factory.mktemp("whole")
    checkpoint = pack(request.param, request.param.make(True, folder / "model"), BOTH)[0].write(folder / "checkpoint")
    waybill.build(checkpoint).save(folder / "package")
    return folder


@pytest.fixture
def package(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole / "package", tmp_path / "package")
    return tmp_path / "package"


@contextmanager
def edited(package: Path, name: str) -> Iterator[dict[str, Any]]:
    content = json.loads((package / name).read_text())
    yield content
    (package / name).write_text(json.dumps(content))


def first(content: dict[str, Any]) -> str:
    """The component that runs first, by name."""
    return str(next(iter(content["components"])))


def section(model: dict[str, Any]) -> str:
    """The part that runs first, by the library's word for it."""
    return next(part for part in ("encoder", "vision") if part in model)


def signed(package: Path) -> None:
    """Digests of the graphs as they are now: whoever changes a graph can do that too."""
    with edited(package, PRODUCED) as bill:
        for component in bill["components"].values():
            component["blake3"] = blake3((package / component["file"]).read_bytes()).hexdigest()


@contextmanager
def graph(package: Path, name: str = "decoder") -> Iterator[onnx.GraphProto]:
    """A graph, to be changed and signed again."""
    model = onnx.load(package / f"{name}.onnx", load_external_data=False)
    yield model.graph
    onnx.save(model, package / f"{name}.onnx")
    signed(package)


def problem(package: Path, checkpoint: Path | None = None) -> WaybillError:
    report = waybill.verify(package, checkpoint)
    assert "not run: the package is not what it should be" in report.runs.values()
    return report.problems[0]


def swap_files(package: Path) -> None:
    with edited(package, PRODUCED) as bill:
        name = f"{first(bill)}.onnx"
    (package / name).rename(package / "other")
    (package / "decoder.onnx").rename(package / name)
    (package / "other").rename(package / "decoder.onnx")


def swap_names(package: Path) -> None:
    with edited(package, PRODUCED) as bill:
        components, name = bill["components"], first(bill)
        components[name], components["decoder"] = components["decoder"], components[name]


def swap_sections(package: Path) -> None:
    with edited(package, RUN) as run:
        decoder, part = run["model"]["decoder"], run["model"][section(run["model"])]
        decoder["filename"], part["filename"] = part["filename"], decoder["filename"]


def swap_both(package: Path) -> None:
    swap_names(package)
    swap_sections(package)


def lose_a_component(package: Path) -> None:
    with edited(package, PRODUCED) as bill:
        del bill["components"][first(bill)]


def lose_it_everywhere(package: Path) -> None:
    lose_a_component(package)
    with edited(package, RUN) as run:
        del run["model"][section(run["model"])]


def rename_a_component(package: Path) -> None:
    with edited(package, PRODUCED) as bill:
        bill["components"]["again"] = bill["components"].pop(first(bill))


def misname_an_input(package: Path) -> None:
    with edited(package, RUN) as run:
        run["model"][section(run["model"])]["inputs"]["more"] = "pixel_masks"


def cut_the_data(package: Path) -> None:
    data = package / "model.onnx.data"
    data.write_bytes(data.read_bytes()[:-64])


def overlap(package: Path) -> None:
    """A weight of the decoder, moved into one of the other graph's, with the right digest."""
    with edited(package, PRODUCED) as bill:
        mine, theirs = (bill["components"][name]["initializers"] for name in ("decoder", first(bill)))
        host = next(entry for name, entry in theirs.items() if name not in mine and entry["bytes"] > 2048)
        name = next(n for n, entry in mine.items() if n not in theirs and entry["bytes"] == 256)
        mine[name] |= {"file": host["file"], "offset": host["offset"] + 64}
        octets = (package / host["file"]).read_bytes()[host["offset"] + 64 :][:256]
        mine[name]["blake3"] = blake3(octets).hexdigest()
        place = {"location": host["file"], "offset": str(host["offset"] + 64), "length": "256"}
    with graph(package) as decoder:
        (tensor,) = (tensor for tensor in decoder.initializer if tensor.name == name)
        for entry in tensor.external_data:
            entry.value = place[entry.key]


def hide_numbers(package: Path) -> None:
    with graph(package) as decoder:
        decoder.node.insert(0, onnx.helper.make_node("Constant", [], ["hidden"], value_floats=[0.5] * 4096))


DAMAGE = {
    swap_files: "the graph is not the one that was exported",
    swap_names: "genai_config.json does not describe the graph",
    swap_sections: "genai_config.json does not describe the graph",
    swap_both: "genai_config.json does not describe the graph",
    lose_a_component: "genai_config.json does not describe the graph",
    lose_it_everywhere: "genai_config.json does not describe",
    rename_a_component: "genai_config.json does not describe the graph",
    misname_an_input: "genai_config.json does not describe the graph",
    cut_the_data: "an initializer ends after its file does",
    overlap: "two initializers overlap",
    hide_numbers: "the graph holds a weight that waybill.json does not list",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_what_is_wrong_between_graphs_is_found_without_the_checkpoint(
    damage: Callable[[Path], None], package: Path
) -> None:
    damage(package)
    assert problem(package).what.startswith(DAMAGE[damage])


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_and_with_it(damage: Callable[[Path], None], whole: Path, package: Path) -> None:
    damage(package)
    assert waybill.verify(package, whole / "checkpoint").problems


def test_a_component_under_two_names_is_no_package(package: Path) -> None:
    with edited(package, PRODUCED) as bill:
        bill["components"]["again"] = bill["components"]["decoder"]
    with pytest.raises(BadPackage, match="a graph of its own for each"):
        waybill.verify(package)


def test_a_weight_that_a_branch_holds(whole: Path, package: Path) -> None:
    """In T5's decoder, whose layers choose between keys that are there and keys that have to be made."""
    with graph(package) as decoder:
        branches = [node for node in decoder.node if node.op_type == "If"]
        for node in branches[:1]:
            node.attribute[0].g.initializer.append(onnx.numpy_helper.from_array(np.ones((8, 8), np.float32), "hidden"))
    if branches:
        assert problem(package).what == "the graph holds a weight that waybill.json does not list"


TOKENS = {"decoder_start_token_id": 9, "image_token_id": 9, "pad_token_id": 9, "eos_token_id": 9, "prompt_ids": [4]}


@pytest.mark.parametrize("name", TOKENS)
def test_a_token_that_is_not_the_checkpoints(name: str, whole: Path, package: Path) -> None:
    with edited(package, RUN) as run:
        run["model"][name] = TOKENS[name]
    found = problem(package, whole / "checkpoint")
    assert found.where == f"genai_config.json: {name}"
    assert found.expected.endswith(", as in the checkpoint")


def test_more_positions_than_a_table_has(tmp_path: Path) -> None:
    whisper = ZOO[4].make(True, tmp_path / "model").write(tmp_path / "checkpoint")
    waybill.build(whisper).save(tmp_path / "package")
    with edited(tmp_path / "package", RUN) as run:
        run["model"]["context_length"] += 1
    found = problem(tmp_path / "package", tmp_path / "checkpoint")
    assert (found.where, found.found) == ("genai_config.json: context_length", "33")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_nothing_is_left_when_the_second_graph_cannot_be_written(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serialized, written = writing._serialized, []

    def full(*arguments: Any) -> bytes:
        written.append(arguments)
        if len(written) % 2 == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return serialized(*arguments)

    monkeypatch.setattr(writing, "_serialized", full)
    built = waybill.build(whole / "checkpoint")
    with pytest.raises(CannotWrite):
        built.save(tmp_path / "new")
    assert list(tmp_path.iterdir()) == []
    shutil.copytree(whole / "package", tmp_path / "old")
    with pytest.raises(CannotWrite):
        built.save(tmp_path / "old", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert contents(tmp_path / "old") == contents(whole / "package")


def test_a_package_that_was_opened_can_be_saved_elsewhere(whole: Path, tmp_path: Path) -> None:
    opened = ModelPackage.load(whole / "package")
    assert opened.nbytes == waybill.build(whole / "checkpoint").nbytes
    opened.save(tmp_path / "copy")
    assert contents(tmp_path / "copy") == contents(whole / "package")


def test_a_linked_package_writes_what_is_not_stored_as_it_is(whole: Path, tmp_path: Path) -> None:
    receipt = waybill.build(whole / "checkpoint", link=True).save(tmp_path / "package", link=True)
    with edited(tmp_path / "package", PRODUCED) as bill:
        own = {
            name.rpartition(".")[2]
            for component in bill["components"].values()
            for name, entry in component["initializers"].items()
            if entry["file"] == "model.onnx.data"
        }
    assert own <= {"scales", "zero_points", "cos_cache", "sin_cache"}
    assert receipt.linked_bytes > receipt.data_bytes
    assert waybill.verify(tmp_path / "package", whole / "checkpoint").problems == []
