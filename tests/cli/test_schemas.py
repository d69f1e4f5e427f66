"""What --json prints keeps to the schemas in docs/schemas, whatever the command is given and however it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import numpy as np
import pytest

import waybill
from checkpoints import lively, llama, qwen3_moe, write_tokenizer
from commands import Capture, Patch, run
from floating import Blocks, pack_fp8
from packing import Scheme, pack
from waybill.cli.app import app

if TYPE_CHECKING:
    from references import Make

SCHEMAS = Path(__file__).parents[2] / "docs" / "schemas"
COMMANDS = sorted(str(each.name) for each in app.registered_commands)


def schema(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((SCHEMAS / f"{name}.json").read_text("utf-8"))
    return found


def answered(patch: Patch, capsys: Capture, *arguments: object, name: str = "", code: int = 0) -> dict[str, Any]:
    """The one document a command prints, which keeps to its schema; nothing else is said."""
    ended, out, err = run(patch, capsys, *arguments, "--json")
    document: dict[str, Any] = json.loads(out)
    name = name or str(arguments[0])
    assert (ended, err) == (code, "")
    assert document["schema"] == f"waybill/{name}/1"
    jsonschema.Draft202012Validator(schema(name)).validate(document)
    return document


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A packed checkpoint that answers, and its package."""
    root = tmp_path_factory.mktemp("both")
    folder = write_tokenizer(pack(lively(llama(np.float32)), Scheme("gptq", 4, 32)).packed.write(root / "checkpoint"))
    waybill.build(folder).save(root / "package")
    return folder, root / "package"


def test_every_command_has_a_schema_and_every_schema_a_command() -> None:
    assert sorted(path.stem for path in SCHEMAS.iterdir()) == sorted([*COMMANDS, "refusal"])


@pytest.mark.parametrize("name", [*COMMANDS, "refusal"])
def test_schemas_are_schemas_and_let_nothing_pass_that_they_do_not_name(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(schema(name))
    with pytest.raises(jsonschema.ValidationError, match="Additional properties"):
        jsonschema.validate({"schema": f"waybill/{name}/1", "stray": 1}, schema(name) | {"required": []})
    problem = schema(name).get("$defs", {}).get("problem", schema("refusal")["$defs"]["problem"])
    assert problem == schema("refusal")["$defs"]["problem"]


@pytest.mark.parametrize("title", ["Whisper", "LLaVA: CLIP, Llama", "T5, gated"])
def test_models_of_several_components(
    title: str, make: Make, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    from references import PACKED

    both = make(title, PACKED)
    capsys.readouterr()  # what transformers says while it makes one
    assert len(answered(monkeypatch, capsys, "inspect", both.checkpoint)["components"]) > 1
    answered(monkeypatch, capsys, "plan", both.checkpoint, "--target", "onnx")
    assert len(answered(monkeypatch, capsys, "export", both.checkpoint, tmp_path / "package")["components"]) > 1
    answered(monkeypatch, capsys, "verify", both.package, "--checkpoint", both.checkpoint)
    assert answered(monkeypatch, capsys, "compare", both.checkpoint, both.package)["same"]


def test_decoders(both: tuple[Path, Path], tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    folder, package = both
    answered(monkeypatch, capsys, "inspect", folder)
    answered(monkeypatch, capsys, "plan", folder, "--tp", 2, "--rank", 1)
    answered(monkeypatch, capsys, "export", folder, tmp_path / "linked", "--link")
    assert answered(monkeypatch, capsys, "verify", package)["proven"]
    for model in both:
        assert answered(monkeypatch, capsys, "generate", model, "-p", "w5 w6", "-n", 2)["token_ids"]
        many = answered(monkeypatch, capsys, "generate", model, "-p", "w5", "-p", "w6", "-n", 2)
        assert len(many["outputs"]) == 2


def test_experts_and_small_floats(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    packed, dense = pack_fp8(qwen3_moe(np.float32), Blocks())
    a, b = packed.write(tmp_path / "a"), dense.write(tmp_path / "b")
    answered(monkeypatch, capsys, "inspect", a)
    answered(monkeypatch, capsys, "plan", b, "--target", "onnx", "--ep", "cuda", "--dtype", "float16")
    found = answered(monkeypatch, capsys, "compare", a, b, "--values", code=3)
    assert found["layouts"] and found["tensors"] and found["components"] and found["config"]
    assert found["values"]["differ"] == []


def test_reports_of_what_does_not_add_up(
    both: tuple[Path, Path], tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    recipe = llama()
    del recipe.tensors["model.norm.weight"]
    for folder in (recipe.write(tmp_path / "lacking"), llama(hidden_act="gelu").write(tmp_path / "other")):
        for command in ("inspect", "plan"):
            assert answered(monkeypatch, capsys, command, folder, code=1)["problems"]
    (recipe.write(tmp_path / "broken") / "config.json").write_text("{")
    assert answered(monkeypatch, capsys, "inspect", tmp_path / "broken", code=1)["architecture"] is None
    folder, package = both
    other = lively(llama(np.float32), seed=1).write(tmp_path / "elsewhere")
    assert answered(monkeypatch, capsys, "verify", package, "--checkpoint", other, code=1)["problems"]
    assert answered(monkeypatch, capsys, "compare", other, package, code=3)["values"]["differ"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_refusal_is_a_document_too(command: str, tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    rest = {"export": [tmp_path / "out"], "compare": [tmp_path / "b"], "generate": ["-p", "hello"]}.get(command, [])
    refusal = answered(monkeypatch, capsys, command, tmp_path / "nowhere", *rest, name="refusal", code=1)
    (problem,) = refusal["problems"]
    assert problem["code"] in ("not-a-checkpoint", "bad-package")
    assert problem["where"] == str(tmp_path / "nowhere")


def test_all_that_was_found_is_in_one_refusal_and_wrong_options_end_with_two(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    recipe = llama()
    del recipe.tensors["model.norm.weight"], recipe.tensors["lm_head.weight"]
    folder = write_tokenizer(recipe.write(tmp_path / "a"))
    refusal = answered(monkeypatch, capsys, "export", folder, tmp_path / "out", name="refusal", code=1)
    assert [problem["code"] for problem in refusal["problems"]] == ["missing-weight", "missing-head"]
    refusal = answered(monkeypatch, capsys, "plan", folder, "--dtype", "int7", name="refusal", code=2)
    assert [problem["code"] for problem in refusal["problems"]] == ["bad-option"]


def test_of_several_ranks_one_answers(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setenv("RANK", "1")
    assert run(monkeypatch, capsys, "plan", tmp_path, "--json") == (1, "", "")
