"""Packed experts in packages: which widths, in which layers, which provider runs them, and who says so."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import waybill
from checkpoints import Recipe, file_bytes, lively, llama, qwen2_moe, qwen3_moe, write_tokenizer
from commands import Capture, Patch, run
from packing import Scheme, metadata, pack
from parity.tolerances import LOGITS_FLOAT32
from sessions import Package
from waybill.errors import Refused
from waybill.onnx.component import Component
from waybill.onnx.providers import SCRATCH
from waybill.onnx.target import in_blocks
from waybill.plan.parameter import AffinePacking, ParameterSpec, Part

CUDA: dict[str, Any] = {"ep": "cuda", "dtype": "float16"}
WIDTHS = ("expert_weight_bits", "fc1_expert_weight_bits", "fc2_expert_weight_bits", "fc3_expert_weight_bits")


def experts_of(recipe: Recipe, folder: Path, *keys: str) -> list[tuple[int | None, ...]]:
    """These attributes of every layer's experts in a package for CUDA; None where one is absent."""
    part = waybill.build(recipe.write(folder), **CUDA)["decoder"]
    assert isinstance(part, Component)
    nodes = [node for node in part.graph.nodes if node.op_type == "QMoE"]
    return [tuple(n.attributes[k].as_int() if k in n.attributes else None for k in keys) for n in nodes]


def uneven(*layers: tuple[int, int], make: Callable[..., Recipe] = qwen2_moe) -> Recipe:
    """Olive banks whose layers have these bits in gate_up and down, told apart by overrides."""
    recipe = lively(make(np.float32, banks=True, moe_intermediate_size=64, num_hidden_layers=len(layers)))
    banks = {
        f"model.layers.{n}.mlp.experts.{name}_proj": {"bits": bits}
        for n, widths in enumerate(layers)
        for name, bits in zip(("gate_up", "down"), widths, strict=True)
    }
    return pack(recipe, Scheme("olive", 4, 32), overrides=banks).packed


# Widths.


def test_layers_may_have_widths_of_their_own(tmp_path: Path) -> None:
    """Where a layer's widths differ each is stated, where they do not one is; fused, the third is half of the first."""
    recipe = uneven((4, 8), (8, 8), (8, 4), (4, 4), (2, 4))
    assert experts_of(recipe, tmp_path, *WIDTHS) == [
        (4, 4, 8, 4), (8, None, None, None), (4, 8, 4, 8), (4, None, None, None), (4, 2, 4, 2),
    ]  # fmt: skip
    assert {*experts_of(recipe, tmp_path, "swiglu_fusion", "block_size", "weights_prepacked")} == {(1, 32, 0)}


def test_one_rule_may_mean_a_projection_of_every_layer(tmp_path: Path) -> None:
    packed = uneven((4, 8), (4, 8))
    rule = {r"re:model\.layers\.\d+\.mlp\.experts\.down_proj": {"bits": 8}}
    packed.config["quantization_config"] = metadata(
        Scheme("olive", 4, 32), [], rule, table=False, head=False, moe=True, tie=False
    )
    assert experts_of(packed, tmp_path, *WIDTHS) == [(4, 4, 8, 4)] * 2


@pytest.mark.parametrize("widths", [(2, 8), (8, 2), (4, 2)])
def test_widths_no_provider_knows_are_refused_for_every_one(widths: tuple[int, int], tmp_path: Path) -> None:
    folder = uneven(widths, (4, 4)).write(tmp_path)
    for options in ({}, CUDA):
        (problem,) = waybill.plan(folder, "onnx", **options).problems
        assert (problem.code, problem.where) == ("unsupported-by-runtime", "model.layers.0.mlp.experts.gate_up_proj")
        assert problem.found == f"{widths[0]} and {widths[1]} bits"
        assert problem.fix == "use the engine, which runs it as it is"
    assert len(waybill.load(folder, dtype="float32").state_dict()) > 0


@pytest.mark.parametrize(("group", "inner"), [(16, 64), (32, 32)])
def test_experts_of_8_bits_have_rows_and_blocks_that_cuda_takes(group: int, inner: int, tmp_path: Path) -> None:
    recipe = lively(qwen3_moe(np.float32, banks=True, moe_intermediate_size=inner))
    folder = pack(recipe, Scheme("olive", 8, group)).packed.write(tmp_path)
    assert not waybill.plan(folder, "onnx").problems
    (problem,) = waybill.plan(folder, "onnx", **CUDA).problems
    assert problem.expected == "for experts of 8 bits, rows of a multiple of 64 in blocks of one of 32"
    assert problem.found == f"rows of {64 if inner == 64 else 32} in blocks of {group}"


def banks_of(*bits: int) -> list[ParameterSpec]:
    packings = (AffinePacking(each, 1024, "F16", True) for each in bits)
    part = Part((1024, 1024), None, "")
    return [
        ParameterSpec(name=f"x.experts.{name}", kind="experts", parts=(part,), stack=2, packing=packing)
        for name, packing in zip(("gate_up_proj", "down_proj"), packings, strict=True)
    ]


@pytest.mark.parametrize(("bits", "block"), [((4, 4), 1024), ((4, 8), 256), ((8, 4), 256), ((2, 4), 256)])
def test_blocks_of_unequal_banks_are_as_small_as_their_kernel_takes(bits: tuple[int, int], block: int) -> None:
    packings = [spec.packing for spec in in_blocks(banks_of(*bits))]
    assert [packing.group for packing in packings if packing is not None] == [block, block]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("bits", [2, 4])
@torch.inference_mode()
def test_a_package_computes_what_transformers_does_from_the_float_twin(bits: int, tmp_path: Path) -> None:
    """B62: rows of gate and up alternate, with their scales and zero points; no limit, and no other constants."""
    twins = pack(lively(qwen2_moe(np.float32)), Scheme("gptq", bits, 16))
    waybill.build(twins.packed.write(tmp_path / "packed"), exact=True, logits="all").save(tmp_path / "package")
    theirs = AutoModelForCausalLM.from_pretrained(twins.dense.write(tmp_path / "dense"), dtype=torch.float32).eval()
    prompt = [3, 17, 99, 4, 56]
    ours, _ = Package(tmp_path / "package").prefill([prompt])
    wanted = theirs(torch.tensor([prompt])).logits[0].numpy()
    np.testing.assert_allclose(ours[0], wanted, atol=LOGITS_FLOAT32, rtol=0)


# Who says what cannot run here.

NEED = "experts whose banks have the same number of bits"
WHY = f"model.layers.0.mlp.experts.gate_up_proj: needs {NEED}; found 4 and 8 bits"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A package of unequal banks, and the checkpoint it was made from."""
    root = tmp_path_factory.mktemp("uneven")
    checkpoint = write_tokenizer(uneven((4, 8), (8, 8)).write(root / "checkpoint"))
    waybill.build(checkpoint, **CUDA).save(root / "package")
    return root / "package", checkpoint


def test_plan_and_export_refuse_for_the_cpu_and_name_who_can(folders: tuple[Path, Path], tmp_path: Path) -> None:
    _, checkpoint = folders
    (problem,) = waybill.plan(checkpoint, "onnx").problems
    assert problem.expected == NEED
    assert problem.fix == "export with --ep cuda --dtype float16"
    with pytest.raises(Refused, match="4 and 8 bits"):
        waybill.build(checkpoint).save(tmp_path / "package")
    assert not (tmp_path / "package").exists()


def test_the_plan_for_another_provider_says_what_it_needs_and_why_the_cpu_cannot(
    folders: tuple[Path, Path], monkeypatch: Patch, capsys: Capture
) -> None:
    scratch = 4 * (128 * 64 + 64 * 64) * 2  # both banks of four experts, in 16 bits
    arguments = ("plan", folders[1], "--target", "onnx", "--ep", "cuda", "--dtype", "float16")
    code, out, _ = run(monkeypatch, capsys, *arguments, "--json")
    assert code == 0
    assert json.loads(out)["providers"] == {
        "CPUExecutionProvider": {"runs": False, "because": [WHY]},
        "CUDAExecutionProvider": {"runs": True, "scratch_bytes": scratch},
    }
    text = " ".join(run(monkeypatch, capsys, *arguments)[1].split())
    assert "can run it; unpacks a layer's experts into 98.3 kB of its memory" in text
    assert WHY in text


def test_the_bill_of_the_package_says_it_too(folders: tuple[Path, Path]) -> None:
    bill = json.loads((folders[0] / "waybill.json").read_text())
    assert bill["providers"]["CPUExecutionProvider"] == {"runs": False, "because": [WHY]}
    assert bill["providers"]["CUDAExecutionProvider"]["runs"]


def test_such_a_package_is_proven_in_every_value_and_not_run(
    folders: tuple[Path, Path], monkeypatch: Patch, capsys: Capture
) -> None:
    package, checkpoint = folders
    report = waybill.verify(package, checkpoint)
    report.require_clean()
    assert report.sources == len(waybill.open(checkpoint).tensors)
    assert report.runs == {"decoder": f"not run here: {WHY}"}
    code, out, _ = run(monkeypatch, capsys, "verify", package)
    assert code == 0
    assert f"decoder: not run here: {WHY}" in out


@pytest.mark.parametrize("role", ["codes", "scales", "zero_points"])
@pytest.mark.parametrize("bank", ["0.mlp.experts.gate_up_proj", "0.mlp.experts.down_proj", "1.mlp.experts.down_proj"])
def test_a_flipped_bit_in_either_width_is_found(bank: str, role: str, folders: tuple[Path, Path]) -> None:
    package, _ = folders
    with flipped(package, f"model.layers.{bank}.{role}"):
        (problem,) = waybill.verify(package).problems
    assert f"model.layers.{bank}.{role}" in problem.where
    waybill.verify(package).require_clean()


class flipped:
    """One bit of an initializer, for a while."""

    def __init__(self, package: Path, name: str) -> None:
        entry = json.loads((package / "waybill.json").read_text())["components"]["decoder"]["initializers"][name]
        self.file, self.at = package / entry["file"], entry["offset"] + 1

    def __enter__(self) -> None:
        with self.file.open("r+b") as file:
            file.seek(self.at)
            octet = file.read(1)[0]
            file.seek(self.at)
            file.write(bytes([octet ^ 2]))

    def __exit__(self, *_: object) -> None:
        self.__enter__()


def test_generate_refuses_it_with_that_reason_before_it_is_opened(
    folders: tuple[Path, Path], monkeypatch: Patch, capsys: Capture
) -> None:
    code, out, err = run(monkeypatch, capsys, "generate", folders[0], "--prompt", "w5 w17", "-n", "2")
    assert (code, out) == (1, "")
    assert "the package was exported for another provider [bad-package]" in err
    assert f"{NEED}; found 4 and 8 bits" in " ".join(err.split())


# A layer of a real geometry.

EXPERTS, INNER, HIDDEN = 128, 768, 2048


def real_layer(folder: Path, down_bits: int, *, banks: bool) -> Path:
    """One layer of 128 experts in 4 bits, gate and up; zeros of which the disk holds nothing, but for the scales."""
    recipe = llama(np.float16, num_hidden_layers=1)
    recipe.config |= {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": HIDDEN, "head_dim": 128,
        "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": EXPERTS, "num_experts_per_tok": 8,
        "moe_intermediate_size": INNER, "norm_topk_prob": True, "vocab_size": 128,
    }  # fmt: skip
    scheme = Scheme("olive" if banks else "gptq", 4, 128)
    rule = {r"re:.*\.experts\.down_proj": {"bits": down_bits}} if down_bits != 4 else {}
    attention = ["re:.*self_attn.*"] if banks else []
    stated = metadata(scheme, attention, rule, table=False, head=False, moe=True, tie=False)
    recipe.config["quantization_config"] = stated if banks else stated | {"dynamic": {r"-:.*self_attn.*": {}}}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(recipe.config))
    header: dict[str, Any] = {}
    end = 0
    scales: list[tuple[int, int]] = []
    for name, dtype, shape in [*plain_tensors(), *(bank_tensors(down_bits) if banks else single_tensors())]:
        nbytes = {"F16": 2, "U8": 1, "I32": 4}[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + nbytes]}
        scales += [(end, nbytes)] * name.endswith("scales")
        end += nbytes
    octets = file_bytes(header)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(octets)
        file.truncate(len(octets) + end)
        for at, nbytes in scales:
            file.seek(len(octets) + at)
            file.write(np.full(nbytes // 2, 0.01, np.float16).tobytes())
    return folder


Form = tuple[str, str, list[int]]


def plain_tensors() -> Iterator[Form]:
    layer = "model.layers.0"
    shapes = {
        "model.embed_tokens": [128, HIDDEN], "lm_head": [128, HIDDEN], "model.norm": [HIDDEN],
        f"{layer}.input_layernorm": [HIDDEN], f"{layer}.post_attention_layernorm": [HIDDEN],
        f"{layer}.self_attn.q_proj": [4096, HIDDEN], f"{layer}.self_attn.k_proj": [512, HIDDEN],
        f"{layer}.self_attn.v_proj": [512, HIDDEN], f"{layer}.self_attn.o_proj": [HIDDEN, 4096],
        f"{layer}.self_attn.q_norm": [128], f"{layer}.self_attn.k_norm": [128], f"{layer}.mlp.gate": [EXPERTS, HIDDEN],
    }  # fmt: skip
    for name, shape in shapes.items():
        yield f"{name}.weight", "F16", shape


def bank_tensors(down_bits: int) -> Iterator[Form]:
    for name, rows, columns, bits in (("gate_up", 2 * INNER, HIDDEN, 4), ("down", HIDDEN, INNER, down_bits)):
        groups = columns // 128
        stem = f"model.layers.0.mlp.experts.{name}_proj_"
        yield f"{stem}qweight", "U8", [EXPERTS, rows, columns * bits // 8]
        yield f"{stem}scales", "F16", [EXPERTS, rows, groups]
        yield f"{stem}qzeros", "U8", [EXPERTS, rows, math.ceil(groups * bits / 8)]


def single_tensors() -> Iterator[Form]:
    for expert in range(EXPERTS):
        for name, rows, columns in (("gate", INNER, HIDDEN), ("up", INNER, HIDDEN), ("down", HIDDEN, INNER)):
            stem = f"model.layers.0.mlp.experts.{expert}.{name}_proj."
            yield f"{stem}qweight", "I32", [columns // 8, rows]
            yield f"{stem}scales", "F16", [columns // 128, rows]
            yield f"{stem}qzeros", "I32", [columns // 128, rows // 8]


def test_the_plan_of_a_layer_of_128_experts_says_every_size(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    folder = real_layer(tmp_path / "checkpoint", 8, banks=True)
    arguments = ("plan", folder, "--target", "onnx", "--ep", "cuda", "--dtype", "float16")
    code, out, _ = run(monkeypatch, capsys, *arguments, "--json")
    plan = json.loads(out)
    assert code == 0
    up, down = EXPERTS * 2 * INNER * HIDDEN, EXPERTS * HIDDEN * INNER
    sizes = {row["target"]: row["bytes_read"] for row in plan["bindings"] if "experts" in row["target"]}
    stem = "model.layers.0.mlp.experts."
    assert sizes[f"{stem}gate_up_proj.codes"] == up // 2
    assert sizes[f"{stem}down_proj.codes"] == down
    assert sizes[f"{stem}gate_up_proj.scales"] == up // 128 * 2
    scratch = 2 * (up + down)
    assert scratch == 1.125 * 2**30
    cuda = plan["providers"]["CUDAExecutionProvider"]
    assert cuda == {"runs": True, "scratch_bytes": scratch, "options": {SCRATCH: str(scratch)}}
    text = " ".join(run(monkeypatch, capsys, *arguments)[1].split())
    assert "can run it; unpacks a layer's experts into 1.21 GB of its memory" in text
    assert f"; set {SCRATCH} to {scratch} or more" in text
    assert re.search(r"result +\d+ MB in F16", text)


PROGRAM = """
import os, sys, waybill
os.fsync = lambda _: None  # the disk's speed is not what is measured
waybill.build(sys.argv[1], dtype="float16", ep=sys.argv[3]).save(sys.argv[2])
with open("/proc/self/status") as status:  # what getrusage says includes the parent, before it became this program
    print(next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024)
"""


@pytest.mark.parametrize(("down_bits", "banks", "ep"), [(4, True, "cpu"), (8, True, "cuda"), (4, False, "cpu")])
def test_a_layer_of_128_experts_is_exported_in_400_megabytes(
    down_bits: int, banks: bool, ep: str, tmp_path: Path
) -> None:
    folder = real_layer(tmp_path / "checkpoint", down_bits, banks=banks)
    out = tmp_path / "package"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, folder, out, ep], capture_output=True, text=True, check=False, timeout=240,
        env=os.environ | {"MALLOC_ARENA_MAX": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    data = (out / "model.onnx.data").stat().st_size
    assert data > 340_000_000
    (out / "model.onnx.data").unlink()
    assert int(done.stdout) < 400_000_000
