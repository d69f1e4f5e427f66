"""Commands on a Hugging Face id: what they fetch, what they say, and what they refuse before the download."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import waybill
from checkpoints import llama, write_tokenizer
from commands import Capture, Patch, run, run_unread
from ggufs import VOCAB, model
from hub import COMMIT, REPO, Handler, Hub, connect, serving
from waybill import errors
from waybill.checkpoint.hub import HEADER_BYTES, METADATA_BYTES
from waybill.cli import progress
from waybill.engine import load

NOTE = f"note: {REPO}@{COMMIT}: headers alone, {2 * HEADER_BYTES:,} bytes\n"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: Patch) -> Iterator[Hub]:
    recipe = llama(np.float32, eos_token_id=2)
    served = write_tokenizer(recipe.write(tmp_path / "served", shard_of=lambda name: int("layers.1" in name)))
    with serving(served) as hub:
        connect(monkeypatch, hub, tmp_path / "home")
        yield hub


def test_inspect_says_what_the_model_is_and_what_that_cost(hub: Hub, monkeypatch: Patch, capsys: Capture) -> None:
    code, out, err = run_unread(monkeypatch, capsys, "inspect", f"{REPO}@v1.0")
    assert (code, err) == (0, NOTE)
    assert "LlamaForCausalLM, 2 layers" in out
    assert hub.weight_bytes == 2 * HEADER_BYTES


@pytest.mark.parametrize("command", ["inspect", "plan"])
def test_the_answer_is_that_of_the_folder(command: str, hub: Hub, monkeypatch: Patch, capsys: Capture) -> None:
    _, far, err = run_unread(monkeypatch, capsys, command, REPO, "--json")
    _, near, _ = run_unread(monkeypatch, capsys, command, hub.folder, "--json")
    assert err == ""
    own = {"path": None, "notices": None}
    assert json.loads(far) | own == json.loads(near) | own


def test_export_writes_the_package_of_the_folder_and_records_the_commit(
    hub: Hub, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    code, _, err = run(monkeypatch, capsys, "export", REPO, tmp_path / "far")
    assert code == 0
    assert NOTE in err
    assert run(monkeypatch, capsys, "export", hub.folder, tmp_path / "near")[0] == 0
    for file in ("model.onnx.data", "tokenizer.json", "genai_config.json", "config.json"):
        assert (tmp_path / "far" / file).read_bytes() == (tmp_path / "near" / file).read_bytes()
    assert json.loads((tmp_path / "far" / "waybill.json").read_text())["source"]["name"] == f"{REPO}@{COMMIT}"
    code, out, _ = run(monkeypatch, capsys, "verify", tmp_path / "far", "--checkpoint", f"{REPO}@{COMMIT}")
    assert (code, "weights equal the checkpoint" in out) == (0, True)


@pytest.mark.parametrize("option", [("--dtype", "float7"), ("--ep", "tpu")])
def test_export_refuses_before_the_download(
    option: tuple[str, str], hub: Hub, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    code, _, err = run_unread(monkeypatch, capsys, "export", REPO, tmp_path / "package", *option)
    assert (code, "[bad-option]" in err) == (2, True)
    assert hub.weight_bytes == 2 * HEADER_BYTES
    assert not (tmp_path / "package").exists()


def test_export_refuses_a_broken_checkpoint_before_the_download(
    hub: Hub, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    recipe = llama(np.float32)
    recipe.tensors["stranger.weight"] = np.zeros(3, np.float32)
    recipe.write(hub.folder, shard_of=lambda name: int("layers.1" in name))
    code, _, err = run_unread(monkeypatch, capsys, "export", REPO, tmp_path / "package")
    assert (code, "[unclaimed-weight]" in err) == (1, True)
    assert hub.weight_bytes == 2 * HEADER_BYTES


def test_a_download_that_fails_leaves_no_package(hub: Hub, tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:

    def fault(request: Handler) -> bool:
        if request.command == "GET" or not request.path.endswith(".safetensors"):
            return False
        request.refuse(403, "GatedRepo", "accept the licence first")
        return True

    hub.fault = fault
    code, out, err = run_unread(monkeypatch, capsys, "export", REPO, tmp_path / "package")
    assert (code, out, "[no-hub-access]" in err) == (1, "", True)
    assert list(tmp_path.glob("*package*")) == []


def test_generate_answers_as_from_the_folder(hub: Hub, monkeypatch: Patch, capsys: Capture) -> None:
    asked = ("-p", "w3 w4", "-n", "4", "--json")
    far = json.loads(run(monkeypatch, capsys, "generate", REPO, *asked)[1])
    near = json.loads(run(monkeypatch, capsys, "generate", hub.folder, *asked)[1])
    assert far["token_ids"] == near["token_ids"]
    assert far["text"] == near["text"]


def test_generate_refuses_a_prompt_before_weights_are_downloaded(hub: Hub, monkeypatch: Patch, capsys: Capture) -> None:
    code, _, err = run_unread(monkeypatch, capsys, "generate", REPO, "-p", "w3", "-n", "100000")
    assert (code, "[bad-request]" in err) == (1, True)
    assert hub.weight_bytes == 2 * HEADER_BYTES


def test_generate_reads_a_gguf_file_of_a_repository(hub: Hub, monkeypatch: Patch, capsys: Capture) -> None:
    written = model("llama")
    tokens = ["h", "e", "he", *(f"<{n}>" for n in range(VOCAB - 3))]
    written.metadata |= {
        "tokenizer.ggml.model": ("add_string", "gpt2"),
        "tokenizer.ggml.pre": ("add_string", "gpt-2"),
        "tokenizer.ggml.tokens": ("add_array", tokens),
        "tokenizer.ggml.merges": ("add_array", ["h e"]),
    }
    written.write(hub.folder / "tiny.gguf")
    asked = ("-p", "he", "-n", "2", "--json")
    far = json.loads(run(monkeypatch, capsys, "generate", f"{REPO}/tiny.gguf", *asked)[1])
    near = json.loads(run(monkeypatch, capsys, "generate", hub.folder / "tiny.gguf", *asked)[1])
    assert far["token_ids"] == near["token_ids"]


def test_a_gguf_file_without_a_tokenizer_is_refused_before_it_is_downloaded(
    hub: Hub, monkeypatch: Patch, capsys: Capture
) -> None:
    model("llama").write(hub.folder / "tiny.gguf")
    code, _, err = run(monkeypatch, capsys, "generate", f"{REPO}/tiny.gguf", "-p", "w3", "-n", "2")
    assert (code, "[no-tokenizer]" in err) == (1, True)
    assert hub.weight_bytes <= METADATA_BYTES


@pytest.mark.parametrize("command", [("inspect",), ("plan",), ("export",), ("generate", "-p", "x")])
def test_every_command_says_what_the_hub_says(
    command: tuple[str, ...], hub: Hub, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    name, *options = command
    places = [tmp_path / "package"] if name == "export" else []
    code, out, err = run(monkeypatch, capsys, name, "org/nothing", *places, *options)
    assert (code, out) == (1, "")
    assert err.startswith("there is no such repository on the hub, and no such path here [not-on-hub]\n")


def test_a_download_tells_its_bytes(hub: Hub, monkeypatch: Patch) -> None:
    shown: list[tuple[str, int]] = []
    told: list[int] = []

    class Shown:
        def __init__(self, label: str, total: int, *, wanted: bool = True) -> None:
            shown.append((label, total))

        def __enter__(self) -> Callable[[int], None]:
            return told.append

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(progress, "Progress", Shown)
    bill = waybill.plan(REPO)
    expected = bill.checkpoint.pending(bill.files)
    progress.download(progress.download(bill))
    assert shown == [("downloading", expected)]
    assert sum(told) == expected > bill.bytes_read


def test_ranks_that_were_told_of_two_commits_are_refused(hub: Hub, monkeypatch: Patch) -> None:
    bill = waybill.plan(REPO)
    monkeypatch.setattr(load, "broadcast", lambda values: values + 1)
    with pytest.raises(errors.FileChanged) as raised:
        load.fetch(bill, "cpu")
    assert raised.value.what == "the checkpoint changed on the hub while the ranks asked for it"
    assert hub.weight_bytes == 2 * HEADER_BYTES


def test_compare_downloads_an_id_and_says_where_a_folder_differs(
    hub: Hub, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    code, out, err = run(monkeypatch, capsys, "compare", REPO, hub.folder)
    assert (code, out) == (0, "21 tensors of the same name compared\nthe same\n")
    assert err.startswith("downloading ")
    other = llama(np.float32, eos_token_id=3).write(tmp_path / "other", shard_of=lambda name: int("layers.1" in name))
    code, out, err = run(monkeypatch, capsys, "compare", REPO, other)
    assert (code, "downloading" in err) == (3, False)
    assert "config.json: eos_token_id  2  3" in out
