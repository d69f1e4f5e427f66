"""genai_config.json: what is read from it, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import llama
from packages import write_package
from waybill.errors import BadJson, BadPackage, PathEscape
from waybill.onnx.folder import is_package, read_package

Config = dict[str, Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_package(tmp_path / "package", llama(np.float32), eos_token_id=[2, 7])


def edit(folder: Path, change: Callable[[Config], object]) -> None:
    config = json.loads((folder / "genai_config.json").read_text())
    change(config)
    (folder / "genai_config.json").write_text(json.dumps(config))


def test_a_package_is_a_folder_with_a_genai_config(folder: Path, tmp_path: Path) -> None:
    assert is_package(folder)
    for other in (tmp_path, tmp_path / "nothing", folder / "model.onnx", Path("x" * 5000), Path("a\0b")):
        assert not is_package(other)


def test_a_package_says_how_to_run_it(folder: Path) -> None:
    package = read_package(folder)
    assert package.graph == folder / "model.onnx"
    assert (package.vocab_size, package.context_length) == (128, 256)
    assert (package.num_kv_heads, package.head_dim) == (2, 16)
    assert (package.stop_ids, package.threads) == ({2, 7}, 1)


def test_threads_and_stop_tokens_may_go_unsaid(folder: Path) -> None:
    edit(folder, lambda c: (c["model"].pop("eos_token_id"), c["model"]["decoder"].pop("session_options")))
    package = read_package(folder)
    assert (package.stop_ids, package.threads) == (frozenset(), 0)


@pytest.mark.parametrize(
    "change, found",
    [
        (lambda c: c.pop("model"), "no model"),
        (lambda c: c.update(model=[1]), "model: [1]"),
        (lambda c: c["model"].pop("decoder"), "no decoder"),
        (lambda c: c["model"].pop("vocab_size"), "no vocab_size"),
        (lambda c: c["model"].update(vocab_size="128"), "vocab_size: '128'"),
        (lambda c: c["model"].update(context_length=0), "context_length: 0"),
        (lambda c: c["model"].update(context_length=True), "context_length: True"),
        (lambda c: c["model"].update(context_length=1 << 40), "context_length: 1099511627776"),
        (lambda c: c["model"]["decoder"].update(head_size=-64), "head_size: -64"),
        (lambda c: c["model"]["decoder"].update(num_key_value_heads=1.5), "num_key_value_heads: 1.5"),
        (lambda c: c["model"]["decoder"].update(filename=["model.onnx"]), "filename: ['model.onnx']"),
        (lambda c: c["model"]["decoder"].update(filename=""), "filename: ''"),
        (lambda c: c["model"]["decoder"].update(session_options=4), "session_options: 4"),
        (
            lambda c: c["model"]["decoder"].update(session_options={"intra_op_num_threads": "all"}),
            "intra_op_num_threads: 'all'",
        ),
        (
            lambda c: c["model"]["decoder"].update(session_options={"intra_op_num_threads": 100_000}),
            "intra_op_num_threads: 100000",
        ),
        (lambda c: c["model"].update(eos_token_id="2"), "eos_token_id: '2'"),
        (lambda c: c["model"].update(eos_token_id=[2, True]), "eos_token_id: [2, True]"),
    ],
)
def test_a_config_that_describes_no_decoder_is_refused(
    folder: Path, change: Callable[[Config], object], found: str
) -> None:
    edit(folder, change)
    with pytest.raises(BadPackage, match="does not describe a decoder") as refused:
        read_package(folder)
    assert refused.value.found == found
    assert refused.value.where == str(folder / "genai_config.json")


def test_a_config_that_is_no_json_is_refused(folder: Path) -> None:
    (folder / "genai_config.json").write_text("{'model': 1}")
    with pytest.raises(BadJson, match=r"genai_config\.json is not a readable"):
        read_package(folder)


@pytest.mark.parametrize("name", ["../model.onnx", "/etc/passwd", "a/../../model.onnx", "..\\model.onnx", "a\0.onnx"])
def test_a_graph_outside_the_folder_is_refused(folder: Path, name: str) -> None:
    edit(folder, lambda c: c["model"]["decoder"].update(filename=name))
    with pytest.raises(PathEscape, match="the graph lies outside the package folder"):
        read_package(folder)


@pytest.mark.parametrize("name", ["other.onnx", "sub/model.onnx", "x" * 5000])
def test_a_graph_that_is_not_there_is_refused(folder: Path, name: str) -> None:
    edit(folder, lambda c: c["model"]["decoder"].update(filename=name))
    with pytest.raises(BadPackage, match="the package has no graph") as refused:
        read_package(folder)
    assert refused.value.found == "model.onnx"
    (folder / "model.onnx").unlink()
    with pytest.raises(BadPackage) as refused:
        read_package(folder)
    assert refused.value.found == "no .onnx file"
