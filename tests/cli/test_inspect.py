"""waybill inspect: what a checkpoint is, in one look at its headers, as text and as JSON."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import waybill
from checkpoints import Recipe, file_bytes, llama, qwen3, qwen3_moe
from commands import Capture, Patch, run


def inspect_json(patch: Patch, capsys: Capture, folder: Path) -> tuple[int, dict[str, Any]]:
    code, out, _ = run(patch, capsys, "inspect", folder, "--json")
    report = json.loads(out)
    assert isinstance(report, dict)
    return code, report


SMALL_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 28,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
"""A 0.6B model as its config.json describes it."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The 0.6B model with all its 311 tensors, tied head stored again: 1.5 GB of data, every byte of it a hole."""
    layer = {
        "input_layernorm": [1024], "post_attention_layernorm": [1024], "self_attn.q_norm": [128],
        "self_attn.k_norm": [128], "self_attn.q_proj": [2048, 1024], "self_attn.k_proj": [1024, 1024],
        "self_attn.v_proj": [1024, 1024], "self_attn.o_proj": [1024, 2048], "mlp.gate_proj": [3072, 1024],
        "mlp.up_proj": [3072, 1024], "mlp.down_proj": [1024, 3072],
    }  # fmt: skip
    shapes = {"lm_head.weight": [151936, 1024], "model.embed_tokens.weight": [151936, 1024]}
    shapes |= {f"model.layers.{n}.{name}.weight": shape for n in range(28) for name, shape in layer.items()}
    shapes["model.norm.weight"] = [1024]
    header: dict[str, Any] = {}
    at = 0
    for name, shape in shapes.items():
        end = at + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
        at = end
    folder = tmp_path_factory.mktemp("small")
    (folder / "config.json").write_text(json.dumps(SMALL_QWEN3))
    file = folder / "model.safetensors"
    file.write_bytes(file_bytes(header))
    os.truncate(file, file.stat().st_size + at)
    return folder


def test_the_facts_of_a_known_model(small: Path, monkeypatch: Patch, capsys: Capture) -> None:
    code, report = inspect_json(monkeypatch, capsys, small)
    assert code == 0
    assert report["problems"] == report["notices"] == []
    expected = {
        "architecture": "Qwen3ForCausalLM", "model_type": "qwen3", "num_layers": 28, "num_qo_heads": 16,
        "num_kv_heads": 8, "head_dim": 128, "hidden_size": 1024, "intermediate_size": 3072, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rope": {"base": 1e6, "type": "default", "scaling": None},
        "num_experts": 0, "dtype": "BF16", "kv_cache_bytes_per_token": 114688, "legal_tp": [1, 2, 4, 8, 16],
        "tensors": 311, "tie": "stored", "parameters": 751632384, "bytes": 1503264768,
        "bytes_by_dtype": {"BF16": 1503264768}, "path": str(small),
    }  # fmt: skip
    assert {key: report[key] for key in expected} == expected
    size = (small / "model.safetensors").stat().st_size
    assert report["shards"] == [{"name": "model.safetensors", "bytes": size, "tensors": 311}]


def test_the_plan_of_a_known_model(small: Path) -> None:
    bill = waybill.plan(small)
    bill.require_clean()
    shapes = {binding.target: binding.shape for binding in bill.bindings}
    assert len(shapes) == 227
    assert [(b.target, b.tied_to) for b in bill.bindings if b.tied_to] == [
        ("lm_head.weight", "model.embed_tokens.weight")
    ]
    assert shapes["model.layers.27.self_attn.qkv_proj.weight"] == (4096, 1024)
    assert shapes["model.layers.0.mlp.gate_up_proj.weight"] == (6144, 1024)
    assert bill.result_bytes == 1503264768 - 2 * 151936 * 1024
    assert bill.summary() == "consumed 311 of 311 tensors (100.0% of bytes), 0 unbound"


def test_two_ranks_of_a_known_model_read_it_once_between_them(small: Path) -> None:
    ranks = [waybill.plan(small, tp=2, rank=rank) for rank in range(2)]
    shapes = {binding.target: binding.shape for binding in ranks[1].bindings}
    assert shapes["model.layers.0.self_attn.qkv_proj.weight"] == (2048, 1024)
    assert shapes["lm_head.weight"] == (75968, 1024)
    replicated = 2 * (28 * (2 * 1024 + 2 * 128) + 1024)
    assert sum(rank.bytes_read for rank in ranks) == 1503264768 + replicated


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts bytes as Linux does")
def test_inspect_reads_the_header_and_hardly_a_byte_more(small: Path, monkeypatch: Patch, capsys: Capture) -> None:
    def read_so_far() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    inspect_json(monkeypatch, capsys, small)  # imports are paid for here
    with (small / "model.safetensors").open("rb") as file:
        header = 8 + int.from_bytes(file.read(8), "little")
    before = read_so_far()
    inspect_json(monkeypatch, capsys, small)
    assert read_so_far() - before < header + (64 << 10)


def test_a_moe_report_counts_experts(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    code, report = inspect_json(monkeypatch, capsys, qwen3_moe().write(tmp_path))
    assert code == 0
    assert [report[k] for k in ("num_experts", "num_experts_per_tok", "moe_intermediate_size")] == [4, 2, 32]


@pytest.mark.parametrize(
    ("recipe", "drop", "tie"),
    [(llama, "", "distinct"), (llama, "lm_head.weight", "absent"), (qwen3, "", "shared")],
)
def test_the_tie_is_named(
    tmp_path: Path, recipe: Any, drop: str, tie: str, monkeypatch: Patch, capsys: Capture
) -> None:
    made: Recipe = recipe()
    made.tensors.pop(drop, None)
    code, report = inspect_json(monkeypatch, capsys, made.write(tmp_path))
    assert (code, report["tie"]) == (1 if tie == "absent" else 0, tie)


def test_problems_are_objects_and_the_exit_code_is_one(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    recipe = llama()
    del recipe.tensors["model.norm.weight"], recipe.tensors["lm_head.weight"]
    code, report = inspect_json(monkeypatch, capsys, recipe.write(tmp_path))
    assert code == 1
    assert [p["code"] for p in report["problems"]] == ["missing-weight", "missing-head"]
    for problem in report["problems"]:
        assert set(problem) == {"code", "what", "where", "expected", "found", "fix"}
        assert all(isinstance(value, str) and value for value in problem.values())


def test_a_config_that_cannot_be_read_still_gives_a_report(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    (llama().write(tmp_path) / "config.json").write_text("{")
    code, report = inspect_json(monkeypatch, capsys, tmp_path)
    assert code == 1
    assert report["architecture"] is None
    assert (report["tensors"], report["tie"]) == (21, "unknown")
    assert [p["code"] for p in report["problems"]] == ["bad-json"]


def test_the_text_names_what_matters(small: Path, monkeypatch: Patch, capsys: Capture) -> None:
    code, out, err = run(monkeypatch, capsys, "inspect", small)
    assert (code, err) == (0, "")
    for words in ("Qwen3ForCausalLM, 28 layers", "16 query heads, 8 key-value heads, head_dim 128", "base 1e+06",
                  "751,632,384 parameters, 1.5 GB in 311 tensors", "114,688 bytes a token in BF16",
                  "1, 2, 4, 8, 16", "model.safetensors (1.5 GB)", "compared with the embedding"):  # fmt: skip
        assert words in out


def test_the_text_ends_with_the_problems_on_stderr(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    (llama().write(tmp_path) / "config.json").write_text(json.dumps(llama().config | {"hidden_act": "gelu"}))
    code, out, err = run(monkeypatch, capsys, "inspect", tmp_path)
    assert code == 1
    assert "LlamaForCausalLM, 2 layers" in out
    assert "hidden_act 'gelu' is not supported [unsupported-feature]" in err
    assert err.endswith("refused: 1 problem\n")


@pytest.mark.parametrize("path", ["nowhere", "file", "x" * 5000, "a\nb\x1b[2J"], ids=lambda p: repr(p)[:12])
@pytest.mark.parametrize("command", ["inspect", "plan"])
def test_a_path_that_is_no_checkpoint_is_a_refusal(
    command: str, path: str, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    (tmp_path / "file").touch()
    code, out, err = run(monkeypatch, capsys, command, tmp_path / path)
    assert (code, out) == (1, "")
    assert "not a checkpoint [not-a-checkpoint]" in err
    assert "\x1b" not in err


HOSTILE = "\x1b[2J\x1b[31m"


def hostile_shard(recipe: Recipe, folder: Path) -> None:
    (recipe.write(folder) / "model.safetensors").rename(folder / f"{HOSTILE}.safetensors")


def hostile_rope(recipe: Recipe, folder: Path) -> None:
    recipe.config["rope_scaling"] = {"rope_type": "linear", "factor": 2.0, HOSTILE: f"{HOSTILE}\ud800"}
    recipe.write(folder)


def hostile_architecture(recipe: Recipe, folder: Path) -> None:
    recipe.config["architectures"] = [f"{HOSTILE}\ud800"]
    recipe.write(folder)


def hostile_tensor(recipe: Recipe, folder: Path) -> None:
    recipe.tensors[f"mtp.{HOSTILE}\ud800"] = recipe.tensors["model.norm.weight"]
    recipe.tensors[f"{HOSTILE}\ud800"] = recipe.tensors["model.norm.weight"]
    recipe.write(folder)


@pytest.mark.parametrize("attack", [hostile_shard, hostile_rope, hostile_architecture, hostile_tensor])
@pytest.mark.parametrize("command", ["inspect", "plan"])
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_nothing_a_stranger_wrote_reaches_the_terminal_raw(
    attack: Any, command: str, form: list[str], tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    attack(llama(), tmp_path)
    code, out, err = run(monkeypatch, capsys, command, tmp_path, *form)
    assert code in (0, 1)
    assert "\x1b" not in out + err
    if form:
        json.loads(out)


def in_process(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, which then says which heavy modules it imported."""
    program = (
        "import sys\nfrom waybill.cli.app import main\n"
        "try:\n    main()\n"
        "finally:\n    print(sorted({'torch', 'transformers', 'onnxruntime'} & sys.modules.keys()), file=sys.stderr)"
    )
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
        **options,
    )


@pytest.mark.parametrize("command", ["inspect", "plan"])
def test_neither_torch_nor_transformers_is_imported(command: str, tmp_path: Path) -> None:
    done = in_process(command, llama().write(tmp_path), "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["problems"] == []
    assert done.stderr == "[]\n"


def test_a_config_that_is_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    (llama().write(tmp_path) / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    assert in_process("inspect", tmp_path).returncode == 1
