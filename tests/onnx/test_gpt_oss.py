"""Packages of GPT-OSS: windows and sinks inside the attention operator, biased experts inside theirs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import waybill
from checkpoints import Recipe, gpt_oss, lively, qwen3_moe
from commands import Capture, Patch, run
from floating import float4, pack_mxfp4
from packing import Twins
from parity.tolerances import LOGITS_FLOAT16_ONNX, LOGITS_FLOAT32, ROUNDING_INT8_ACTIVATIONS
from sessions import Package
from waybill.errors import BadOption
from waybill.onnx.folder import read_package
from waybill.onnx.runtime.decoder import OnnxDecoder
from waybill.weights.widened import DoubledCodes, HalvedPowers

STEPS = 8
PROMPT = [3, 17, 99, 4, 56, 23, 8, 61, 90, 12, 77]


def reference(recipe: Recipe, folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(recipe.write(folder), dtype=torch.float32).eval()
    return model


FORMS = [{}, {"sliding_window": 1}, {"swiglu_limit": 0.25, "swiglu_alpha": 0.7}, {"intermediate_size": 32}]


@pytest.mark.parametrize("changes", FORMS, ids=str)
@torch.inference_mode()
def test_a_package_computes_what_transformers_does(changes: dict[str, float], tmp_path: Path) -> None:
    recipe = lively(gpt_oss(np.float32, **changes))
    theirs = reference(recipe, tmp_path / "checkpoint")
    waybill.build(tmp_path / "checkpoint", logits="all").save(tmp_path / "package")
    waybill.verify(tmp_path / "package", tmp_path / "checkpoint").require_clean()
    ours, _ = Package(tmp_path / "package").prefill([PROMPT])
    expected = theirs(torch.tensor([PROMPT])).logits
    torch.testing.assert_close(torch.tensor(ours), expected, atol=LOGITS_FLOAT32, rtol=0)


def said(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """Greedy tokens, every step from the beginning."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(STEPS):
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """A package, and transformers' model of the same weights; its checkpoint lies beside it."""
    root = tmp_path_factory.mktemp("gpt")
    theirs = reference(lively(gpt_oss(np.float32)), root / "checkpoint")
    waybill.build(root / "checkpoint").save(root / "package")
    return root / "package", theirs


def test_steps_over_a_cache_look_through_the_same_windows(both: tuple[Path, PreTrainedModel]) -> None:
    package, theirs = both
    expected = said(theirs, PROMPT)
    assert Package(package).greedy(PROMPT, STEPS) == expected
    assert Package(package).greedy_in_place(PROMPT, STEPS, 32) == expected
    assert len(set(expected)) > 3


def test_prompts_of_unequal_length_are_answered_as_alone(both: tuple[Path, PreTrainedModel]) -> None:
    package, theirs = both
    prompts = [PROMPT, [5], PROMPT[3:8]]
    made = OnnxDecoder(read_package(package)).generate(prompts, max_new_tokens=STEPS)
    assert made.token_ids == [said(theirs, prompt) for prompt in prompts]


SPOILED = ("self_attn.sinks", "self_attn.o_proj.bias", "mlp.router.bias", "mlp.experts.gate_up_proj",
           "mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj", "mlp.experts.down_proj_bias")  # fmt: skip


@pytest.mark.parametrize("name", SPOILED)
def test_verify_names_what_differs_from_the_checkpoint(
    name: str, both: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    recipe = lively(gpt_oss(np.float32))
    recipe.tensors[f"model.layers.1.{name}"][..., -1] += 1
    (problem,) = waybill.verify(both[0], recipe.write(tmp_path)).problems
    assert problem.code == "package-mismatch"
    assert problem.where.startswith(f"model.layers.1.{name.removesuffix('_bias')}")


def test_verify_names_a_bank_with_another_number_of_experts(both: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    recipe = lively(gpt_oss(np.float32, num_local_experts=5))
    found = waybill.verify(both[0], recipe.write(tmp_path)).problems
    assert any("experts.down_proj.weight" in problem.where for problem in found)


def test_half_precision_packages_compute_nearly_the_same(both: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    waybill.build(both[0].parent / "checkpoint", dtype="float16").save(tmp_path / "package")
    ours, _ = Package(tmp_path / "package").prefill([PROMPT])
    with torch.no_grad():
        wanted = both[1](torch.tensor([PROMPT])).logits[:, -1:].numpy()
    np.testing.assert_allclose(ours.astype(np.float32), wanted, atol=LOGITS_FLOAT16_ONNX, rtol=0)


def test_cuda_is_said_to_be_untried(both: tuple[Path, PreTrainedModel]) -> None:
    (problem,) = waybill.plan(both[0].parent / "checkpoint", "onnx", ep="cuda", dtype="float16").problems
    assert (problem.code, problem.where) == ("unsupported-by-runtime", "attention sinks")
    assert problem.fix == "export with --ep cpu"


def test_mxfp4_experts_are_refused(tmp_path: Path) -> None:
    folder = pack_mxfp4(lively(gpt_oss(np.float32))).packed.write(tmp_path)
    (problem,) = waybill.plan(folder, "onnx").problems
    assert problem.code == "unsupported-by-runtime"
    assert "--widen-mxfp4" in problem.expected


# 4-bit floats as integers.


@pytest.fixture(scope="module")
def widened(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Twins]:
    root, twins = tmp_path_factory.mktemp("widened"), pack_mxfp4(lively(gpt_oss(np.float32)))
    waybill.build(twins.packed.write(root / "checkpoint"), logits="all", widen_mxfp4=True).save(root / "package")
    return root / "package", twins


def test_widened_experts_compute_what_the_float_twin_does_in_transformers(
    widened: tuple[Path, Twins], tmp_path: Path
) -> None:
    theirs = reference(widened[1].dense, tmp_path)
    with torch.no_grad():
        wanted = theirs(torch.tensor([PROMPT])).logits.numpy()
    package = Package(widened[0])
    error = package.prefill([PROMPT])[0] - wanted
    assert np.sqrt((error**2).mean()) < ROUNDING_INT8_ACTIVATIONS * np.sqrt((wanted**2).mean())
    assert package.operators.count("QMoE") == 2


def test_widened_experts_are_the_same_numbers(widened: tuple[Path, Twins]) -> None:
    package, twins = widened
    waybill.verify(package, package.parent / "checkpoint").require_clean()
    graph = Package(package).graph
    for bank in ("gate_up_proj", "down_proj"):
        name = f"model.layers.1.mlp.experts.{bank}"
        codes, scales = (graph.initializers[f"{name}.{role}"].const_value for role in ("codes", "scales"))
        assert codes is not None and scales is not None
        centred = codes.numpy().astype(np.float32) - 128
        values = centred.reshape(*scales.numpy().shape, 32) * scales.numpy()[..., None]
        np.testing.assert_array_equal(values.reshape(centred.shape), twins.dense.tensors[name].swapaxes(1, 2))


@pytest.mark.parametrize("part", ["blocks", "scales"])
def test_verify_names_a_changed_nibble_and_a_changed_exponent(
    part: str, widened: tuple[Path, Twins], tmp_path: Path
) -> None:
    recipe = Recipe(widened[1].packed.config, dict(widened[1].packed.tensors))
    name = f"model.layers.1.mlp.experts.down_proj_{part}"
    recipe.tensors[name] = recipe.tensors[name].copy()
    recipe.tensors[name][-1, -1, -1] ^= 1
    (problem,) = waybill.verify(widened[0], recipe.write(tmp_path)).problems
    assert problem.code == "package-mismatch"
    assert problem.where.startswith("model.layers.1.mlp.experts.down_proj")


def test_the_cost_of_widening_is_said_in_bytes(widened: tuple[Path, Twins]) -> None:
    notices = waybill.plan(widened[0].parent / "checkpoint", "onnx", widen_mxfp4=True).notices
    # two layers; E·N·K = 4·128·64 + 4·64·64 values of half a byte and an exponent for 32, then a byte and a float
    values = 2 * (4 * 128 * 64 + 4 * 64 * 64)
    held, made = values // 2 + values // 32, values + 4 * values // 32
    assert (
        f"4 banks of 4-bit floats become 8-bit integers of the same values: {held:,} bytes become {made:,}" in notices
    )


def test_export_widens_when_asked(
    widened: tuple[Path, Twins], tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    folder = widened[0].parent / "checkpoint"
    code, _, err = run(monkeypatch, capsys, "export", folder, tmp_path / "no")
    assert (code, "--widen-mxfp4" in err) == (1, True)
    code, _, err = run(monkeypatch, capsys, "export", folder, tmp_path / "package", "--widen-mxfp4")
    assert code == 0
    assert "bytes become" in " ".join(err.split())


def test_banks_of_other_models_are_widened_too(tmp_path: Path) -> None:
    twins = pack_mxfp4(lively(qwen3_moe(np.float32, banks=True)))
    waybill.build(twins.packed.write(tmp_path / "checkpoint"), widen_mxfp4=True).save(tmp_path / "package")
    waybill.verify(tmp_path / "package", tmp_path / "checkpoint").require_clean()
    theirs = waybill.build(twins.dense.write(tmp_path / "dense"))
    theirs.save(tmp_path / "float")
    ours, wanted = (Package(tmp_path / name).prefill([PROMPT])[0] for name in ("package", "float"))
    assert np.sqrt(((ours - wanted) ** 2).mean()) < ROUNDING_INT8_ACTIVATIONS * np.sqrt((wanted**2).mean())


def test_widening_what_is_not_there_is_said_and_the_engine_widens_nothing(both: tuple[Path, PreTrainedModel]) -> None:
    folder = both[0].parent / "checkpoint"
    assert any("widening changes nothing" in line for line in waybill.plan(folder, "onnx", widen_mxfp4=True).notices)
    with pytest.raises(BadOption, match="widen_mxfp4"):
        waybill.plan(folder, widen_mxfp4=True)


def test_every_exponent_and_code_is_had_exactly() -> None:
    exponents = np.arange(256, dtype=np.uint8).reshape(1, 256)
    halved = HalvedPowers(None).decode([exponents], (0, 0), (1, 256))  # type: ignore[arg-type]
    assert halved.dtype == np.float32
    assert halved[0, :255].astype(np.float64).tolist() == [2.0 ** (s - 128) for s in range(255)]
    assert np.isnan(halved[0, 255])
    octets = np.arange(256, dtype=np.uint8).reshape(1, 256)
    codes = DoubledCodes(None, 32).decode([octets], (0, 0, 0), (1, 16, 32))  # type: ignore[arg-type]
    wanted = [2 * float4(n) + 128 for octet in range(256) for n in (octet & 15, octet >> 4)]
    assert codes.reshape(-1).tolist() == wanted
