"""Packages that were tampered with: refused by whoever looks at them, and never a way to other files.

`verify` holds every byte against waybill.json. `generate` runs what it is given, as far as it can be run in bounds: it
takes no digest, so a tampered weight is found by `verify` alone. More: tests/onnx/test_verify.py.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import waybill
from checkpoints import llama, write_tokenizer
from strangers import PACKAGE, judged, refused
from waybill.errors import BadPackage, Refused
from waybill.onnx.package import ModelPackage, SavedComponent
from waybill.onnx.verify.entries import read_entries
from waybill.onnx.verify.structure import examine

Edit = Callable[[Path], None]
VERIFY, GENERATE, _ = PACKAGE


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    checkpoint = write_tokenizer(llama(np.float32, num_hidden_layers=1).write(folder / "checkpoint"))
    waybill.build(checkpoint).save(folder / "package")
    return folder / "package"


@pytest.fixture
def package(exported: Path, tmp_path: Path) -> Path:
    shutil.copytree(exported, tmp_path / "package")
    return tmp_path / "package"


def in_the_graph(change: Callable[[onnx.ModelProto], None]) -> Edit:
    def edit(package: Path) -> None:
        model = onnx.load(package / "model.onnx", load_external_data=False)
        change(model)
        (package / "model.onnx").write_bytes(model.SerializeToString())

    return edit


def says_of_data(key: str, value: str) -> Edit:
    """Every external tensor states this."""

    def change(model: onnx.ModelProto) -> None:
        for tensor in model.graph.initializer:
            for entry in tensor.external_data:
                if entry.key == key:
                    entry.value = value

    return in_the_graph(change)


def moved_out(name: str, link: bool) -> Edit:
    """A file of the package lies beside it, and a link or the graph leads there."""

    def edit(package: Path) -> None:
        (package / name).rename(package.parent / "secret")
        if link:
            (package / name).symlink_to("../secret")

    return edit


def both(*edits: Edit) -> Edit:
    def edit(package: Path) -> None:
        for one in edits:
            one(package)

    return edit


def linked_folder(package: Path) -> None:
    (package.parent / "elsewhere").mkdir()
    (package / "model.onnx.data").rename(package.parent / "elsewhere" / "data")
    (package / "inner").symlink_to("../elsewhere", target_is_directory=True)


def a_pipe(name: str) -> Edit:
    def edit(package: Path) -> None:
        (package / name).unlink()
        os.mkfifo(package / name)

    return edit


def holding(name: str, text: str) -> Edit:
    def edit(package: Path) -> None:
        (package / name).write_text(text)

    return edit


def cut(name: str, kept: int) -> Edit:
    return lambda package: os.truncate(package / name, kept)


def a_tensor_of_a_terabyte(model: onnx.ModelProto) -> None:
    tensor = model.graph.initializer.add()
    tensor.name, tensor.data_type = "huge", onnx.TensorProto.FLOAT
    tensor.dims.extend([1 << 38])


def a_hundred_gigabytes_of_zeros(model: onnx.ModelProto) -> None:
    shape = model.graph.initializer.add()
    shape.name, shape.data_type = "shape", onnx.TensorProto.INT64
    shape.dims.append(1)
    shape.int64_data.append(1 << 35)
    model.graph.node.append(onnx.helper.make_node("ConstantOfShape", ["shape"], ["zeros"]))
    model.graph.node.append(onnx.helper.make_node("ReduceSum", ["zeros"], ["sum"]))
    name = model.graph.output[0].name
    for node in model.graph.node:
        for at, made in enumerate(node.output):
            if made == name:
                node.output[at] = "before"
    model.graph.node.append(onnx.helper.make_node("Add", ["before", "sum"], [name]))


DATA, GRAPH = "model.onnx.data", "model.onnx"
TAMPERED: dict[str, Edit] = {
    "data in the parent folder": both(moved_out(DATA, False), says_of_data("location", "../secret")),
    "data by an absolute path": says_of_data("location", "/etc/passwd"),
    "data by a link out of the folder": moved_out(DATA, True),
    "data in a linked folder": both(linked_folder, says_of_data("location", "inner/data")),
    "data that is a pipe": a_pipe(DATA),
    "data that is a device": says_of_data("location", "/dev/zero"),
    "a range past the end": says_of_data("length", str(1 << 40)),
    "an offset past the end": says_of_data("offset", str(1 << 40)),
    "an offset before the beginning": says_of_data("offset", "-4096"),
    "an offset that is no number": says_of_data("offset", "0x10"),
    "data cut short": cut(DATA, 100),
    "a graph by a link out of the folder": moved_out(GRAPH, True),
    "a graph cut short": cut(GRAPH, 1000),
    "an empty graph": cut(GRAPH, 0),
    "a graph of other bytes": holding(GRAPH, "onnx" * 999),
    "a graph that computes a hundred gigabytes": in_the_graph(a_hundred_gigabytes_of_zeros),
    "a bill by a link out of the folder": moved_out("waybill.json", True),
    "a bill of nothing": holding("waybill.json", ""),
    "a bill that is nested without end": holding("waybill.json", '{"a":' * 970),
    "a description by a link out of the folder": moved_out("genai_config.json", True),
    "a description that is nested without end": holding("genai_config.json", '{"model":' * 970),
}  # fmt: skip


@pytest.mark.parametrize("how", TAMPERED)
def test_a_tampered_package_is_refused_by_verify_and_by_generate(package: Path, how: str) -> None:
    TAMPERED[how](package)
    assert refused(package, PACKAGE) <= {"bad-package", "package-mismatch", "path-escape", "bad-json"}


def test_a_tensor_that_no_file_holds_is_found_by_verify(package: Path) -> None:
    in_the_graph(a_tensor_of_a_terabyte)(package)
    assert refused(package, [VERIFY]) == {"package-mismatch"}
    judged(package, [GENERATE])  # nothing uses it


def described(package: Path, field: str, value: Any) -> None:
    config = json.loads((package / "genai_config.json").read_text())
    place = config["model"]["decoder"] if field in config["model"]["decoder"] else config["model"]
    place[field] = value
    (package / "genai_config.json").write_text(json.dumps(config))


FIELDS = ("context_length", "vocab_size", "head_size", "num_key_value_heads", "filename", "session_options", "inputs",
          "outputs", "eos_token_id", "decoder", "suppress_tokens", "vision", "encoder")  # fmt: skip
ODD: tuple[Any, ...] = (
    None, True, 0, -1, (1 << 31) - 1, 1 << 16, 10**400, 1e308, "", "../model.onnx", "/etc/passwd", "model\0",
    "x" * 5000, [], {}, [[]], {"intra_op_num_threads": 1024}, {"filename": "../model.onnx"},
)  # fmt: skip


@pytest.mark.parametrize("field", FIELDS)
def test_whatever_the_description_says_the_answer_is_a_refusal_or_an_answer(package: Path, field: str) -> None:
    folders = [package.parent / str(at) for at in range(len(ODD))]
    for folder, value in zip(folders, ODD, strict=True):
        shutil.copytree(package, folder)
        described(folder, field, value)
    judged(folders, PACKAGE)


def test_a_graph_cut_off_anywhere_is_found(package: Path) -> None:
    whole = (package / GRAPH).read_bytes()
    (component,) = read_entries(package).components.values()
    assert not examine(package, component)[0]
    for kept in range(0, len(whole), 7):
        (package / GRAPH).write_bytes(whole[:kept])
        assert examine(package, component)[0]


def test_a_description_cut_off_anywhere_is_refused(package: Path) -> None:
    whole = (package / "genai_config.json").read_bytes().rstrip()
    folders = [package.parent / str(kept) for kept in range(0, len(whole), len(whole) // 20)]
    for folder in folders:
        shutil.copytree(package, folder)
        (folder / "genai_config.json").write_bytes(whole[: int(folder.name)])
    assert refused(folders, PACKAGE) == {"bad-json"}


def test_a_package_is_not_copied_with_what_its_links_lead_to(package: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a secret")
    (package / "notes.txt").symlink_to("../secret")
    with pytest.raises(BadPackage, match="a file of the package leads out of it"):
        ModelPackage.load(package).save(tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_no_graph_is_opened_whose_data_lies_elsewhere(package: Path) -> None:
    says_of_data("location", "/etc/passwd")(package)
    component = ModelPackage.load(package)["decoder"]
    assert isinstance(component, SavedComponent)
    with pytest.raises(Refused, match="refused: "):
        component.model()
