"""waybill export: a package, a JSON document or text, and how the command ends: 0 done, 1 refused, 2 wrong usage."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import BF16, Recipe, file_bytes, lively, llama, qwen3, write_tokenizer
from commands import Capture, Patch, run, run_unread
from packing import Scheme, pack

FILES = {"config.json", "genai_config.json", "model.onnx", "model.onnx.data", "tokenizer.json", "waybill.json"}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_tokenizer(llama(np.float32, eos_token_id=2).write(tmp_path / "checkpoint"))


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return tmp_path / "place" / "package"


def export_json(patch: Patch, capsys: Capture, *arguments: object) -> dict[str, Any]:
    code, out, err = run(patch, capsys, "export", *arguments, "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert isinstance(document, dict)
    return document


# Done.


def test_the_answer_is_one_json_document(checkpoint: Path, package: Path, monkeypatch: Patch, capsys: Capture) -> None:
    done = export_json(monkeypatch, capsys, checkpoint, package)
    assert {path.name for path in package.iterdir()} == FILES
    assert done["package"] == str(package)
    assert done["components"] == ["decoder"]
    assert done["data_bytes"] == (package / "model.onnx.data").stat().st_size
    assert done["linked_bytes"] == 0
    assert done["summary"] == "consumed 21 of 21 tensors (100.0% of bytes), 0 unbound"
    assert done["seconds"] >= done["flush_seconds"] >= 0
    assert done["notices"] == []
    assert done["schema"] == "waybill/export/1"
    assert len(done) == 11


def test_text_says_what_was_written_and_where(
    checkpoint: Path, package: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    code, out, err = run(monkeypatch, capsys, "export", checkpoint, package)
    assert code == 0
    assert out == f"wrote {package}: {(package / 'model.onnx.data').stat().st_size / 1000:.3g} kB of weights\n"
    progress, summary = err.splitlines()
    assert re.fullmatch(r"writing [\d.]+ kB: [\d.]+ s, [\d.]+ [kMG]B/s", progress)
    assert summary.startswith("consumed 21 of 21 tensors (100.0% of bytes), 0 unbound; ")


def test_linked_bytes_are_counted_apart(checkpoint: Path, package: Path, monkeypatch: Patch, capsys: Capture) -> None:
    code, out, _ = run(monkeypatch, capsys, "export", checkpoint, package, "--link")
    assert code == 0
    assert " of weights and " in out
    assert out.endswith(" linked\n")
    done = export_json(monkeypatch, capsys, checkpoint, package, "--link", "--overwrite")
    assert done["linked_bytes"] == sum(tensor.nbytes for tensor in llama(np.float32).tensors.values())


def test_notices_go_to_stderr_and_change_no_exit_code(
    tmp_path: Path, package: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    recipe = llama(np.float32)
    del recipe.config["rope_theta"]
    code, _, err = run(monkeypatch, capsys, "export", recipe.write(tmp_path / "checkpoint"), package)
    assert code == 0
    assert err.startswith("note: config.json states no rope_theta; the class default 10000 is used\n")


@pytest.mark.parametrize(("arguments", "options", "dtype"), [
    ([], {"ep": "cpu", "exact": False, "logits": "last"}, "F32"),
    (["--exact", "--logits", "all"], {"ep": "cpu", "exact": True, "logits": "all"}, "F32"),
    (["--dtype", "float16"], {"ep": "cpu", "exact": False, "logits": "last"}, "F16"),
    (["--ep", "cuda"], {"ep": "cuda", "exact": False, "logits": "last"}, "BF16"),
])  # fmt: skip
def test_options_are_in_the_bill_of_the_package(
    arguments: list[str], options: dict[str, Any], dtype: str, tmp_path: Path, package: Path, monkeypatch: Patch,
    capsys: Capture,
) -> None:  # fmt: skip
    export_json(monkeypatch, capsys, llama(BF16).write(tmp_path / "checkpoint"), package, *arguments)
    bill = json.loads((package / "waybill.json").read_text())
    assert (bill["options"], bill["dtype"]) == (options, dtype)


def test_the_bill_says_which_providers_run_the_package_and_why_the_others_do_not(
    checkpoint: Path, package: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    export_json(monkeypatch, capsys, checkpoint, package)
    providers = json.loads((package / "waybill.json").read_text())["providers"]
    assert providers["CPUExecutionProvider"] == {"runs": True}
    assert not providers["CUDAExecutionProvider"]["runs"]
    assert "its attention knows no float32" in providers["CUDAExecutionProvider"]["because"][0]


def test_a_package_does_not_know_where_it_was_made(
    checkpoint: Path, package: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    export_json(monkeypatch, capsys, write_tokenizer(checkpoint), package)
    for path in package.iterdir():
        assert str(checkpoint.parent).encode() not in path.read_bytes()


def test_two_exports_of_a_checkpoint_are_the_same_bytes(
    checkpoint: Path, package: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    again = package.with_name("again")
    for folder in (package, again):
        export_json(monkeypatch, capsys, checkpoint, folder)
    assert {path.name: path.read_bytes() for path in package.iterdir()} == {
        path.name: path.read_bytes() for path in again.iterdir()
    }


# Refused: exit code 1, and nothing is written.


def broken(name: str) -> Recipe:
    recipe = llama(np.float32)
    if name == "missing-weight":
        del recipe.tensors["model.norm.weight"]
    elif name == "unclaimed-weight":
        recipe.tensors["model.stray"] = np.zeros((3, 3), np.float32)
    elif name == "shape-mismatch":
        recipe.tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((7, 64), np.float32)
    elif name == "unsupported-architecture":
        recipe.config["architectures"] = ["BertModel"]
    elif name == "unsupported-by-runtime":
        recipe = lively(qwen3(np.float32, head_dim=32))
        recipe = pack(recipe, Scheme("olive"), table=True).packed
        recipe.config["torch_dtype"] = "bfloat16"
    return recipe


@pytest.mark.parametrize("name", ["missing-weight", "unclaimed-weight", "shape-mismatch", "unsupported-architecture"])
@pytest.mark.parametrize("as_json", [False, True])
def test_a_bad_checkpoint_is_refused_before_a_weight_is_read(
    name: str, as_json: bool, tmp_path: Path, package: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    folder = broken(name).write(tmp_path / "checkpoint")
    code, out, err = run_unread(monkeypatch, capsys, "export", folder, package, *["--json"] * as_json)
    assert code == 1
    assert not package.parent.exists()
    if as_json:
        assert ([problem["code"] for problem in json.loads(out)["problems"]], err) == ([name], "")
    else:
        assert f"[{name}]" in err
        assert (out, err[:9]) == ("", "refused: ")


def test_what_the_provider_cannot_run_is_refused(
    tmp_path: Path, package: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    folder = broken("unsupported-by-runtime").write(tmp_path / "checkpoint")
    code, out, err = run_unread(monkeypatch, capsys, "export", folder, package, "--ep", "cuda")
    assert (code, out) == (1, "")
    assert "bfloat16 cannot hold float16 scales [unsupported-by-runtime]" in err
    assert not package.parent.exists()


def test_a_damaged_file_is_refused_and_nothing_stays(
    checkpoint: Path, package: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    (checkpoint / "model.safetensors").write_bytes(file_bytes({"w": {}}))
    code, out, err = run(monkeypatch, capsys, "export", checkpoint, package)
    assert (code, out) == (1, "")
    assert "[bad-header]" in err
    assert not package.parent.exists()


def test_a_value_that_does_not_fit_is_refused_and_nothing_stays(
    tmp_path: Path, package: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    recipe = llama(np.float32)
    recipe.tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = 1e6
    folder = recipe.write(tmp_path / "checkpoint")
    code, out, err = run(monkeypatch, capsys, "export", folder, package, "--dtype", "float16")
    assert (code, out, package.parent.exists()) == (1, "", False)
    assert "a value does not fit F16 [cast-overflow]" in err


def test_what_is_there_is_said_before_the_checkpoint_is_opened(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    (tmp_path / "package").mkdir()
    code, out, err = run(monkeypatch, capsys, "export", tmp_path / "nowhere", tmp_path / "package")
    assert (code, out) == (1, "")
    assert "[target-exists]" in err


# Wrong usage: exit code 2.


@pytest.mark.parametrize(("arguments", "words"), [
    (["DIR"], "output"),
    ([], "checkpoint"),
    (["DIR", "OUT", "more"], "unexpected"),
    (["DIR", "OUT", "--nope"], "--nope"),
    (["DIR", "OUT", "--dtype", "int8"], "unknown dtype [bad-option]"),
    (["DIR", "OUT", "--ep", "tpu"], "unknown execution provider [bad-option]"),
    (["DIR", "OUT", "--logits", "some"], "unknown choice of logits [bad-option]"),
])  # fmt: skip
def test_wrong_usage_ends_with_two(
    arguments: list[str], words: str, checkpoint: Path, package: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    names = {"DIR": str(checkpoint), "OUT": str(package)}
    code, out, err = run(monkeypatch, capsys, "export", *(names.get(a, a) for a in arguments))
    assert (code, out) == (2, "")
    assert words in err.lower() or words in err
    assert not package.parent.exists()


def test_help_ends_well(monkeypatch: Patch, capsys: Capture) -> None:
    code, out, err = run(monkeypatch, capsys, "export", "--help")
    assert (code, err) == (0, "")
    assert "Example: waybill export" in out


# Processes.


def test_an_export_loads_neither_torch_nor_onnxruntime(checkpoint: Path, package: Path) -> None:
    program = (
        "import sys\nfrom waybill.cli.app import main\ntry:\n    main()\n"
        "finally:\n    print(sorted({'torch', 'transformers', 'onnxruntime'} & sys.modules.keys()), file=sys.stderr)"
    )
    command = [sys.executable, "-W", "error", "-c", program, "export", checkpoint, package, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout)["package"] == str(package)
    assert done.stderr == "[]\n"


@pytest.mark.parametrize("ended", [">&-", ">/dev/full"])
@pytest.mark.parametrize("arguments", ["plan {}", "plan {} --json", "inspect {} --json"])
def test_an_output_nobody_can_write_to_is_no_traceback(checkpoint: Path, ended: str, arguments: str) -> None:
    command = f"{sys.executable} -m waybill {arguments.format(checkpoint)} {ended}"
    done = subprocess.run(command, shell=True, check=False, capture_output=True, text=True)
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr
    assert done.returncode == (0 if ended == ">&-" else 1)


def test_a_refusal_does_not_move_to_stdout_when_stderr_is_closed(tmp_path: Path) -> None:
    command = f"{sys.executable} -m waybill plan {tmp_path} --json 2>&-"
    done = subprocess.run(command, shell=True, check=False, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert json.loads(done.stdout)["schema"] == "waybill/refusal/1"
    done = subprocess.run(command.replace("--json", ""), shell=True, check=False, stdout=subprocess.PIPE, text=True)
    assert (done.returncode, done.stdout) == (1, "")


def test_a_link_that_links_nothing_says_so(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    narrow = write_tokenizer(llama(BF16, eos_token_id=2).write(tmp_path / "narrow"))
    code, _, err = run(monkeypatch, capsys, "export", narrow, tmp_path / "package", "--link")
    assert code == 0
    assert "note: nothing could be linked" in err
    assert len(export_json(monkeypatch, capsys, narrow, tmp_path / "again", "--link")["notices"]) == 1


def test_a_table_of_a_billion_positions_is_refused(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    long = llama(np.float32, max_position_embeddings=10**9).write(tmp_path / "long")
    code, _, err = run_unread(monkeypatch, capsys, "export", long, tmp_path / "package")
    assert code == 1
    assert "found    1,000,000,000" in err
    assert not (tmp_path / "package").exists()
