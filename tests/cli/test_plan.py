"""waybill plan: the bill of a load as text and JSON, and how the command ends: 0 done, 1 refused, 2 wrong usage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import BF16, Recipe, file_bytes, llama, qwen2, qwen3, qwen3_moe
from commands import Capture, Patch
from commands import run_unread as run

NORM = "model.norm.weight"


def plan_json(patch: Patch, capsys: Capture, *arguments: object) -> tuple[int, dict[str, Any]]:
    code, out, _ = run(patch, capsys, "plan", *arguments, "--json")
    bill = json.loads(out)
    assert isinstance(bill, dict)
    return code, bill


# What the JSON promises


def test_a_clean_plan_is_one_json_document(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    recipe = llama()
    recipe.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    code, bill = plan_json(monkeypatch, capsys, recipe.write(tmp_path))
    assert code == 0
    assert bill["problems"] == bill["notices"] == []
    assert [bill[key] for key in ("target", "tp", "rank", "dtype")] == ["torch", 1, 0, "BF16"]
    assert bill["ignored"] == [
        {"name": "model.layers.0.self_attn.rotary_emb.inv_freq", "reason": "recomputed from the config"}
    ]
    assert bill["summary"] == "consumed 21 of 22 tensors (100.0% of bytes), 1 dropped by rule, 0 unbound"
    stored = sum(t.nbytes for t in recipe.tensors.values() if t.dtype == BF16)
    assert bill["totals"] == {
        "bytes_read": stored, "result_bytes": stored, "peak_bytes": stored, "tensors": 22, "consumed": 21,
    }  # fmt: skip


def test_bindings_say_where_every_byte_comes_from(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    _, bill = plan_json(monkeypatch, capsys, qwen3().write(tmp_path))
    bindings = {binding["target"]: binding for binding in bill["bindings"]}
    assert len(bindings) == len(bill["bindings"]) == 18
    members = [f"model.layers.1.self_attn.{m}_proj.weight" for m in "qkv"]
    assert bindings["model.layers.1.self_attn.qkv_proj.weight"] == {
        "target": "model.layers.1.self_attn.qkv_proj.weight",
        "shape": [256, 64],
        "dtype": "BF16",
        "sources": members,
        "operations": ["concat 3 on axis 0"],
        "bytes_read": 256 * 64 * 2,
    }
    assert sum(binding["bytes_read"] for binding in bindings.values()) == bill["totals"]["bytes_read"]


def test_a_rank_is_planned_for(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    code, bill = plan_json(monkeypatch, capsys, qwen3().write(tmp_path), "--tp", "2", "--rank", "1")
    assert (code, bill["tp"], bill["rank"]) == (0, 2, 1)
    bindings = {binding["target"]: binding for binding in bill["bindings"]}
    assert bindings["model.embed_tokens.weight"]["shape"] == [64, 64]
    assert bindings["model.embed_tokens.weight"]["operations"] == ["narrow axis 0 64:128"]
    assert bindings[NORM]["operations"] == ["replicate"]


def test_another_dtype_is_a_cast_and_needs_scratch(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    _, bill = plan_json(monkeypatch, capsys, llama().write(tmp_path), "--dtype", "float32")
    assert bill["dtype"] == "F32"
    assert all("cast BF16 to F32" in binding["operations"] for binding in bill["bindings"])
    assert bill["totals"]["result_bytes"] == 2 * bill["totals"]["bytes_read"]
    assert bill["totals"]["peak_bytes"] > bill["totals"]["result_bytes"]


# Refusals


def alter(config: dict[str, Any] | None = None, lose: str = "", **tensors: Any) -> Callable[[Recipe, Path], None]:
    """Writes a recipe with a field changed, tensors lost or tensors added."""

    def write(recipe: Recipe, folder: Path) -> None:
        recipe.config |= config or {}
        kept = {name: t for name, t in recipe.tensors.items() if not lose or lose not in name}
        Recipe(recipe.config, kept | tensors).write(folder)

    return write


def damage(file: str, content: bytes) -> Callable[[Recipe, Path], None]:
    def write(recipe: Recipe, folder: Path) -> None:
        (recipe.write(folder) / file).write_bytes(content)

    return write


def index(weight_map: Any) -> Callable[[Recipe, Path], None]:
    def write(recipe: Recipe, folder: Path) -> None:
        recipe.write(folder, **{"model.safetensors.index": {"weight_map": weight_map}})

    return write


def lose_shard(recipe: Recipe, folder: Path) -> None:
    (recipe.write(folder, shard_of=lambda n: len(n) % 2) / "model-00002-of-00002.safetensors").unlink()


def cut_shard(recipe: Recipe, folder: Path) -> None:
    file = recipe.write(folder) / "model.safetensors"
    os.truncate(file, file.stat().st_size - 8)


def link_out(recipe: Recipe, folder: Path) -> None:
    file = recipe.write(folder) / "model.safetensors"
    file.unlink()
    file.symlink_to("/dev/null")


def pickled(recipe: Recipe, folder: Path) -> None:
    (recipe.write(folder) / "model.safetensors").rename(folder / "pytorch_model.bin")


def twice(recipe: Recipe, folder: Path) -> None:
    recipe.write(folder)
    Recipe(recipe.config, {NORM: recipe.tensors[NORM]}).write(folder / "x")
    (folder / "x" / "model.safetensors").rename(folder / "more.safetensors")


def prefixed(recipe: Recipe, folder: Path) -> None:
    Recipe(recipe.config, {f"language_model.{name}": t for name, t in recipe.tensors.items()}).write(folder)


SHAPE = np.zeros((7, 64), BF16)
BROKEN: dict[str, tuple[Callable[[], Recipe], Callable[[Recipe, Path], None], str]] = {
    "bad-json": (llama, damage("config.json", b"{"), "config.json"),
    "path-escape": (llama, link_out, "model.safetensors"),
    "no-safetensors": (llama, pickled, "pytorch_model.bin"),
    "not-safetensors": (llama, damage("model.safetensors", b"version https://git-lfs.github.com/spec/v1"), "Git LFS"),
    "bad-header": (llama, damage("model.safetensors", file_bytes({"w": {}})), "'w'"),
    "wrong-length": (llama, cut_shard, "8 bytes are missing"),
    "missing-shard": (llama, lose_shard, "model-00002-of-00002.safetensors"),
    "bad-index": (llama, index(["x"]), "model.safetensors.index.json"),
    "missing-tensor": (llama, index({NORM: "model.safetensors", "ghost": "model.safetensors"}), "ghost"),
    "duplicate-tensor": (llama, twice, "more.safetensors"),
    "bad-config": (llama, alter({"vocab_size": "128"}), "vocab_size"),
    "config-conflict": (qwen3_moe, alter({"num_local_experts": 8}), "num_experts: 4, num_local_experts: 8"),
    "unsupported-feature": (llama, alter({"hidden_act": "gelu"}), "gelu"),
    "unsupported-architecture": (llama, alter({"architectures": ["BertModel"]}), "BertModel"),
    "unsupported-rope": (llama, alter({"rope_scaling": {"type": "magic"}}), "magic"),
    "unsupported-quantization": (llama, alter({"quantization_config": {"quant_method": "hqq"}}), "hqq"),
    "missing-weight": (llama, alter(lose=NORM), NORM),
    "missing-head": (llama, alter(lose="lm_head"), "lm_head.weight"),
    "incomplete-merge": (qwen2, alter(lose="1.self_attn.k_proj.bias"), "model.layers.1.self_attn.k_proj.bias"),
    "unclaimed-weight": (llama, alter(**{"model.stray": SHAPE}), "model.stray"),
    "claimed-twice": (qwen3_moe, alter(**{"model.layers.0.mlp.experts.down_proj": np.zeros((4, 64, 32), BF16)}),
                      "model.layers.0.mlp.experts.down_proj"),
    "prefix-drift": (llama, prefixed, "language_model."),
    "shape-mismatch": (llama, alter(**{"model.layers.0.mlp.up_proj.weight": SHAPE}), "[7, 64]"),
    "vocab-mismatch": (llama, alter(**{"model.embed_tokens.weight": SHAPE}), "7 rows, vocab_size says 128"),
    "dtype-mismatch": (llama, alter(**{NORM: np.zeros(64, np.int64)}), "I64[64]"),
    "expert-mismatch": (qwen3_moe, alter(lose="1.mlp.experts.3."), "no expert 3"),
}  # fmt: skip


@pytest.mark.parametrize("code", BROKEN)
def test_every_refusal_of_a_checkpoint_is_json_and_text_and_exit_code_one(
    code: str, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    recipe, write, words = BROKEN[code]
    write(recipe(), tmp_path)
    ended, bill = plan_json(monkeypatch, capsys, tmp_path)
    assert ended == 1
    assert bill["bindings"] == []
    assert bill["totals"]["bytes_read"] == 0
    assert {problem["code"] for problem in bill["problems"]} == {code}
    for problem in bill["problems"]:
        assert set(problem) == {"code", "what", "where", "expected", "found", "fix"}
        assert all(isinstance(value, str) and value for value in problem.values())
    assert words in json.dumps(bill["problems"], ensure_ascii=False)

    ended, out, err = run(monkeypatch, capsys, "plan", tmp_path)
    assert (ended, "consumed" in out) == (1, False)
    assert f"[{code}]" in err
    assert words in err
    count = len(bill["problems"])
    assert err.endswith(f"refused: {count} problem{'s' if count > 1 else ''}\n")


def test_illegal_ranks_are_refused_with_the_legal_ones(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    code, bill = plan_json(monkeypatch, capsys, llama().write(tmp_path), "--tp", "3", "--rank", "2")
    (problem,) = bill["problems"]
    assert (code, problem["code"], problem["expected"]) == (1, "illegal-tp", "one of 1, 2, 4")


def test_an_empty_config_is_refused_and_not_an_empty_success(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    (llama().write(tmp_path) / "config.json").write_text("{}")
    code, bill = plan_json(monkeypatch, capsys, tmp_path)
    assert (code, [p["code"] for p in bill["problems"]]) == (1, ["unsupported-architecture"])


def test_refused_prompts_end_with_one(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    (tmp_path / "prompts").write_bytes(b"\xff")
    code, out, err = run(monkeypatch, capsys, "generate", tmp_path, "--prompts-file", tmp_path / "prompts")
    assert (code, out) == (1, "")
    assert "the prompts file cannot be read [bad-request]" in err


# Usage


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "DIR", "--nope"], "--nope"),
        (["plan"], "checkpoint"),
        (["plan", "DIR", "DIR"], "unexpected"),
        (["plan", "DIR", "--tp", "0"], "--tp"),
        (["plan", "DIR", "--tp", "two"], "--tp"),
        (["plan", "DIR", "--rank", "-1"], "--rank"),
        (["plan", "DIR", "--rank", "1"], "rank 1 of 1"),
        (["plan", "DIR", "--dtype", "int8"], "unknown dtype [bad-option]"),
        (["plan", "DIR", "--target", "tpu"], "unknown target [bad-option]"),
        (["inspect", "DIR", "--tp", "2"], "--tp"),
        (["plam", "DIR"], "plam"),
        ([], "Usage"),
    ],
)
def test_wrong_usage_ends_with_two(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    llama().write(tmp_path)
    code, out, err = run(monkeypatch, capsys, *(str(tmp_path) if a == "DIR" else a for a in arguments))
    assert (code, out) == (2, "")
    assert words in err


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["inspect", "--help"], ["--version"]])
def test_help_and_version_end_well(arguments: list[str], monkeypatch: Patch, capsys: Capture) -> None:
    code, out, err = run(monkeypatch, capsys, *arguments)
    assert (code, err) == (0, "")
    assert "waybill" in out


# Text


def test_equal_layers_are_one_row_unless_asked_for(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    llama().write(tmp_path)
    _, folded, _ = run(monkeypatch, capsys, "plan", tmp_path)
    _, full, _ = run(monkeypatch, capsys, "plan", tmp_path, "--full")
    assert "model.layers.{0–1}.self_attn.o_proj.weight" in folded
    assert "model.layers.1.self_attn.o_proj.weight" in full
    for out in (folded, full):
        assert out.endswith("consumed 21 of 21 tensors (100.0% of bytes), 0 unbound\n")


def test_notices_go_to_stderr_and_change_no_exit_code(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    recipe = llama()
    del recipe.config["rope_theta"]
    code, out, err = run(monkeypatch, capsys, "plan", recipe.write(tmp_path))
    assert (code, err) == (0, "note: config.json states no rope_theta; the class default 10000 is used\n")
    assert "rope_theta" not in out


# Processes


def test_optimized_python_refuses_the_same(tmp_path: Path) -> None:
    alter(lose="1.self_attn.v_proj")(llama(), tmp_path)
    command = ["-m", "waybill", "plan", str(tmp_path), "--json"]
    plain, optimized = (
        subprocess.run([sys.executable, *flags, *command], capture_output=True, text=True, check=False)
        for flags in ([], ["-O"])
    )
    assert plain.returncode == optimized.returncode == 1
    assert json.loads(plain.stdout) == json.loads(optimized.stdout)


def test_a_bank_of_a_trillion_empty_experts_is_refused_in_bounded_memory(tmp_path: Path) -> None:
    qwen3_moe(banks=True).write(tmp_path)
    bank = {"dtype": "F32", "shape": [1 << 40, 2, 0], "data_offsets": [0, 0]}
    header = file_bytes({"model.layers.0.mlp.experts.gate_up_proj": bank})
    (tmp_path / "model.safetensors").write_bytes(header)
    program = (
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "from waybill.cli.app import main\nmain()"
    )
    command = [sys.executable, "-c", program, "plan", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (1, "")
    assert "model.layers.0.mlp.experts.gate_up_proj" in done.stdout


# For ONNX


def test_the_bill_of_an_export_says_its_size_and_what_can_run_it(
    monkeypatch: Patch, capsys: Capture, tmp_path: Path
) -> None:
    folder = llama(BF16).write(tmp_path)
    code, bill = plan_json(monkeypatch, capsys, folder, "--target", "onnx")
    assert (code, bill["target"], bill["dtype"]) == (0, "onnx", "F32")
    assert bill["free_disk_bytes"] > 0
    assert bill["totals"]["result_bytes"] == 2 * bill["totals"]["bytes_read"]
    assert bill["providers"]["CPUExecutionProvider"] == {"runs": True}
    assert not bill["providers"]["CUDAExecutionProvider"]["runs"]
    _, out, _ = run(monkeypatch, capsys, "plan", folder, "--target", "onnx", "--ep", "cuda", "--dtype", "bfloat16")
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in out.splitlines() if "ExecutionProvider" in line}
    assert lines["CUDAExecutionProvider"].strip() == "can run it"
    assert "its kernels know no bfloat16" in lines["CPUExecutionProvider"]


def test_what_no_provider_asked_for_can_run_is_refused(monkeypatch: Patch, capsys: Capture, tmp_path: Path) -> None:
    code, _, err = run(monkeypatch, capsys, "plan", llama().write(tmp_path), "--target", "onnx", "--dtype", "bfloat16")
    assert code == 1
    assert "[unsupported-by-runtime]" in err
    assert "export with --ep cuda" in err


@pytest.mark.parametrize(
    "options", [("--ep", "cuda"), ("--link",), ("--target", "onnx", "--tp", "2"), ("--target", "onnx", "--ep", "metal")]
)
def test_options_that_mean_nothing_for_the_target_are_wrong_usage(
    monkeypatch: Patch, capsys: Capture, tmp_path: Path, options: tuple[str, ...]
) -> None:
    code, out, err = run(monkeypatch, capsys, "plan", llama().write(tmp_path), *options)
    assert (code, out) == (2, "")
    assert "[bad-option]" in err
