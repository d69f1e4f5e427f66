"""waybill generate on an exported package: what it prints for a checkpoint, without what a checkpoint needs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import lively, llama, write_tokenizer
from commands import Capture, Patch, run
from packages import write_package

PROMPTS = ["w5 w17 w9", "w2", "w40 w41 w42 w43"]
NEW_TOKENS = 6
ECHO = "{% for m in messages %} w7 {{ m.content }}{% endfor %} w9"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint and its package, with the same tokenizer, chat template and stop token."""
    root, recipe = tmp_path_factory.mktemp("both"), lively(llama(np.float32, eos_token_id=[126, 127]))
    pair = (
        write_tokenizer(recipe.write(root / "checkpoint")),
        write_package(root / "package", recipe, eos_token_id=[126, 127]),
    )
    for folder in pair:
        (folder / "chat_template.jinja").write_text(ECHO)
    return pair


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return write_package(tmp_path / "package", lively(llama(np.float32)))


def outcome(text: str) -> Any:
    """A JSON answer with its timings by name only: they differ from run to run."""
    answer = json.loads(text)
    return answer | {"timings": sorted(answer["timings"])}


@pytest.mark.parametrize(
    "options",
    [
        ("-p", PROMPTS[0]),
        ("-p", PROMPTS[0], "-p", PROMPTS[1], "-p", PROMPTS[2]),
        ("-p", PROMPTS[0], "--chat"),
        ("-p", PROMPTS[0], "--temperature", 2.0, "--top-k", 1),
        ("-p", PROMPTS[0], "--device", "cpu"),
    ],
    ids=["one", "batch", "chat", "sampled", "on the CPU"],
)
def test_a_package_answers_as_its_checkpoint_does(
    monkeypatch: Patch, capsys: Capture, folders: tuple[Path, Path], options: tuple[object, ...]
) -> None:
    arguments = ("-n", NEW_TOKENS, *options)
    shown = [run(monkeypatch, capsys, "generate", folder, *arguments)[:2] for folder in folders]
    assert shown[0] == shown[1]
    answers = [run(monkeypatch, capsys, "generate", folder, *arguments, "--json")[1] for folder in folders]
    assert outcome(answers[0]) == outcome(answers[1])


def test_a_file_of_prompts_is_a_batch(
    monkeypatch: Patch, capsys: Capture, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "prompts").write_text("\n".join(PROMPTS))
    flags = [part for prompt in PROMPTS for part in ("-p", prompt)]
    given = [
        run(monkeypatch, capsys, "generate", folders[1], *options, "-n", NEW_TOKENS, "--json")[1]
        for options in (flags, ("--prompts-file", tmp_path / "prompts"))
    ]
    assert outcome(given[0]) == outcome(given[1])


def test_what_was_opened_is_told_on_stderr(monkeypatch: Patch, capsys: Capture, package: Path) -> None:
    code, out, err = run(monkeypatch, capsys, "generate", package, "-p", PROMPTS[0], "-n", NEW_TOKENS)
    assert (code, len(out.split())) == (0, NEW_TOKENS)
    assert "model.onnx: 2 layers, KV cache in float32; loaded in " in err
    assert "prefill 3 tokens" in err


def test_generation_stops_where_the_package_says(monkeypatch: Patch, capsys: Capture, tmp_path: Path) -> None:
    def tokens(name: str, **settings: Any) -> list[int]:
        folder = write_package(tmp_path / name, lively(llama(np.float32)), **settings)
        answer = run(monkeypatch, capsys, "generate", folder, "-p", PROMPTS[0], "-n", NEW_TOKENS, "--json")[1]
        made: list[int] = json.loads(answer)["token_ids"]
        return made

    free = tokens("free")
    for number, stated in enumerate((free[3], [1, free[3]])):
        assert tokens(f"stop{number}", eos_token_id=stated) == free[: free.index(free[3])]


def test_neither_torch_nor_transformers_is_loaded(package: Path) -> None:
    (package / "chat_template.jinja").write_text(ECHO)
    script = (
        "import sys\nfrom waybill.cli.app import main\n"
        "try:\n    main()\nfinally:\n"
        "    print(*({'torch', 'transformers', 'onnx', 'onnx_ir', 'onnxruntime'} & sys.modules.keys()))"
    )
    options = ["generate", str(package), "-p", PROMPTS[0], "-n", "2", "--chat", "--temperature", "1"]
    command = [sys.executable, "-W", "error", "-c", script, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[1:] == ["onnxruntime"]


@pytest.mark.parametrize(
    "options", [("--dtype", "float16"), ("--device", "cuda"), ("--check-finite",), ("--device", "cuda:1")]
)
def test_what_the_export_decided_is_no_option(
    monkeypatch: Patch, capsys: Capture, package: Path, options: tuple[str, ...]
) -> None:
    code, out, err = run(monkeypatch, capsys, "generate", package, "-p", PROMPTS[0], *options)
    assert (code, out) == (2, "")
    assert "a package runs as it was exported [bad-option]" in err
    assert f"found    {' '.join(options)}\n" in err


def test_a_package_is_not_cut_into_ranks(monkeypatch: Patch, capsys: Capture, package: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = run(monkeypatch, capsys, "generate", package, "-p", PROMPTS[0])
    assert (code, "torchrun with 2 ranks" in err) == (2, True)


def test_usage_is_checked_before_the_package(monkeypatch: Patch, capsys: Capture, package: Path) -> None:
    (package / "genai_config.json").write_text("{}")
    assert run(monkeypatch, capsys, "generate", package)[0] == 2
    assert run(monkeypatch, capsys, "generate", package, "-p", "w5", "--temperature", -1)[0] == 2


@pytest.mark.parametrize(
    "lost, code",
    [("model.onnx", "bad-package"), ("model.onnx.data", "bad-package"), ("tokenizer.json", "no-tokenizer")],
)
def test_a_package_that_lacks_a_file_is_refused(
    monkeypatch: Patch, capsys: Capture, package: Path, lost: str, code: str
) -> None:
    (package / lost).unlink()
    status, out, err = run(monkeypatch, capsys, "generate", package, "-p", PROMPTS[0])
    assert (status, out) == (1, "")
    assert f"[{code}]" in err


def test_a_config_that_is_broken_or_leads_outside_is_refused(
    monkeypatch: Patch, capsys: Capture, package: Path
) -> None:
    path = package / "genai_config.json"
    good = path.read_text()
    for text, code in (
        ("{", "bad-json"),
        ('{"model": {}}', "bad-package"),
        (good.replace('"model.onnx"', '"../model.onnx"'), "path-escape"),
    ):
        path.write_text(text)
        status, out, err = run(monkeypatch, capsys, "generate", package, "-p", PROMPTS[0])
        assert (status, out) == (1, "")
        assert f"[{code}]" in err


def test_a_request_longer_than_the_context_is_refused_before_the_graph_is_opened(
    monkeypatch: Patch, capsys: Capture, package: Path
) -> None:
    (package / "model.onnx").write_bytes(b"never opened")
    status, out, err = run(monkeypatch, capsys, "generate", package, "-p", PROMPTS[0], "-n", 254)
    assert (status, out) == (1, "")
    assert "3 prompt tokens and 254 new ones, of 256 positions" in err
