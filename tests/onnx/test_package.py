"""Packages in Python: a mapping of components that gives ONNX models, whether built, saved or opened again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import waybill
from checkpoints import lively, llama, qwen3_moe
from packing import Scheme, pack
from waybill.errors import BadPackage, PackageMismatch, Refused, UnboundPackage
from waybill.onnx import package as module
from waybill.onnx.package import ModelPackage


def initializers(package: ModelPackage) -> dict[str, bytes]:
    """Every initializer's bytes; looking at one reads it."""
    graph = package["decoder"].model().graph
    return {name: value.const_value.tobytes() for name, value in graph.initializers.items() if value.const_value}


@pytest.mark.parametrize("kind", ["float", "packed", "experts"])
def test_what_is_built_saved_and_opened_again_is_the_same(kind: str, tmp_path: Path) -> None:
    recipe = lively((qwen3_moe if kind == "experts" else llama)(np.float32))
    recipe = recipe if kind == "float" else pack(recipe, Scheme("olive"), table=True, head=True).packed
    built = waybill.build(recipe.write(tmp_path / "checkpoint"))
    held = initializers(built)
    receipt = built.save(tmp_path / "saved")
    opened = ModelPackage.load(tmp_path / "saved")
    assert list(opened) == list(built) == ["decoder"]
    assert opened.nbytes == built.nbytes <= receipt.data_bytes
    assert initializers(opened) == held
    opened.save(tmp_path / "again")
    assert initializers(ModelPackage.load(tmp_path / "again")) == held
    waybill.verify(tmp_path / "again", tmp_path / "checkpoint").require_clean()


def test_a_skeleton_has_a_graph_and_no_values(tmp_path: Path) -> None:
    package = waybill.build(llama(np.float32).write(tmp_path), load_weights=False)
    graph = package["decoder"].model().graph
    assert len(graph) > 10
    with pytest.raises(UnboundPackage) as refused:
        graph.initializers["model.norm.weight"].const_value.numpy()  # type: ignore[union-attr]
    assert refused.value.where == "model.norm.weight"


def test_a_folder_that_is_no_package_is_not_opened(tmp_path: Path) -> None:
    with pytest.raises(BadPackage):
        ModelPackage.load(tmp_path)


def test_a_package_is_looked_at_once_more_before_it_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = module.write_package

    def cut_short(component: object, layout: object, staging: Path, progress: object) -> None:
        write(component, layout, staging, progress)  # type: ignore[arg-type]
        with (staging / "model.onnx.data").open("r+b") as data:
            data.truncate(1000)

    monkeypatch.setattr(module, "write_package", cut_short)
    package = waybill.build(llama(np.float32).write(tmp_path / "checkpoint"))
    with pytest.raises(Refused) as refused:
        package.save(tmp_path / "package")
    assert all(isinstance(problem, PackageMismatch) for problem in refused.value.problems)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_what_a_runtime_will_miss_is_noticed(tmp_path: Path) -> None:
    recipe = lively(llama(np.float32, tie_word_embeddings=True))
    recipe.tensors["lm_head.weight"] = recipe.tensors["model.embed_tokens.weight"] + 1
    folder = recipe.write(tmp_path)
    notices = " ".join(waybill.build(folder).notices)
    assert "the file holds a different one; the file's is used" in notices
    assert "generation will not stop by itself" in notices
    assert "there is no tokenizer.json" in notices
    (folder / "tokenizer.json").write_text("{}")
    recipe.config |= {"eos_token_id": 2}
    recipe.tensors["lm_head.weight"] = recipe.tensors["model.embed_tokens.weight"]
    assert waybill.build(recipe.write(folder)).notices == []
