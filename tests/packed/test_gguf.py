"""GGUF files against the float model of exactly the values they hold: the same logits, the same tokens."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

import ggufs
import waybill
from checkpoints import Array
from packed.meaning import canonical
from parity.tolerances import LOGITS_FLOAT32
from ranks import streamed
from sessions import Package
from waybill.config.gguf import WITH_MINIMUM, reason
from waybill.engine.context import Batch, get_global_ctx
from waybill.engine.generate import generate
from waybill.engine.layers.matrix import PackedMatrix
from waybill.engine.models.decoder import CausalLM
from waybill.errors import InexactScales
from waybill.plan import Plan
from waybill.weights.dtypes import NUMPY_DTYPES

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe")
TYPES = ("F32", "F16", "BF16", "Q4_0", "Q5_0", "Q8_0", "Q6_K", "Q3_K")
PROMPTS = [[3, 17, 90, 4, 56], [8], [20, 7, 7, 31, 64, 2, 90, 11, 45]]
NEW_TOKENS = 16
MIXED = {
    "token_embd__weight": "Q6_K", "output__weight": "Q8_0", "blk__0__attn_v__weight": "Q6_K",
    "blk__0__ffn_down__weight": "Q5_0", "blk__1__attn_k__weight": "F16", "blk__1__ffn_up__weight": "Q3_K",
}  # fmt: skip


@torch.inference_mode()
def logits(model: CausalLM) -> torch.Tensor:
    batch = Batch(torch.tensor([t for p in PROMPTS for t in p]), tuple(map(len, PROMPTS)))
    with get_global_ctx().forward_batch(batch):
        return model.forward()


def assert_equal(model: ggufs.Model, folder: Path, *, variety: int = 5) -> CausalLM:
    """The file computes what the float model of its values does; returns its model."""
    twin = model.write(folder / "model.gguf").write(folder / "dense")
    packed = waybill.load(folder / "model.gguf", dtype="float32")
    dense = waybill.load(twin, dtype="float32")
    torch.testing.assert_close(logits(packed), logits(dense), atol=LOGITS_FLOAT32, rtol=0)
    made = generate(packed, PROMPTS, max_new_tokens=NEW_TOKENS).token_ids
    assert made == generate(dense, PROMPTS, max_new_tokens=NEW_TOKENS).token_ids
    assert len({token for each in made for token in each}) > variety
    return packed


@pytest.mark.parametrize("block_type", TYPES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_file_computes_what_the_float_model_of_its_values_does(
    architecture: str, block_type: str, tmp_path: Path
) -> None:
    model = assert_equal(ggufs.model(architecture, block_type), tmp_path)
    packed = [op for op in model.descendants() if isinstance(op, PackedMatrix)]
    assert bool(packed) == (block_type.startswith("Q"))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_tensors_of_many_types_stay_what_they_are(architecture: str, tmp_path: Path) -> None:
    assert_equal(ggufs.model(architecture, "Q4_0", **MIXED), tmp_path)


@pytest.mark.parametrize("block_type", ["F16", "Q8_0", "Q6_K"])
def test_a_head_that_is_absent_is_the_embedding(block_type: str, tmp_path: Path) -> None:
    assert_equal(ggufs.model("qwen3", block_type, tied=True), tmp_path)


@pytest.mark.parametrize("block_type", TYPES)
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_package_computes_what_the_engine_does(architecture: str, block_type: str, tmp_path: Path) -> None:
    ggufs.model(architecture, block_type, tied=True).write(tmp_path / "model.gguf")
    waybill.build(tmp_path / "model.gguf", exact=True).save(tmp_path / "package")
    wanted = logits(waybill.load(tmp_path / "model.gguf", dtype="float32"))
    package = Package(tmp_path / "package")
    found = np.concatenate([package.prefill([prompt])[0][:, -1] for prompt in PROMPTS])
    np.testing.assert_allclose(found, wanted.numpy(), atol=LOGITS_FLOAT32, rtol=0)
    operators = {"MatMulNBits", "GatherBlockQuantized"}
    assert operators <= set(package.operators) if block_type.startswith("Q") else not operators & set(package.operators)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_package_is_proven_against_its_file(architecture: str, tmp_path: Path) -> None:
    types = {} if architecture == "qwen3moe" else MIXED
    ggufs.model(architecture, "Q4_0", **types).write(tmp_path / "model.gguf")
    waybill.build(tmp_path / "model.gguf").save(tmp_path / "package")
    report = waybill.verify(tmp_path / "package", tmp_path / "model.gguf")
    assert not report.problems
    assert report.weights


@pytest.mark.parametrize("block_type", ["F16", "Q4_0", "Q6_K", "Q3_K"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_rank_holds_its_share_of_the_float_model(architecture: str, block_type: str, tmp_path: Path) -> None:
    twin = ggufs.model(architecture, block_type).write(tmp_path / "model.gguf").write(tmp_path / "dense")
    for rank in range(2):
        own = meaning(waybill.plan(tmp_path / "model.gguf", tp=2, rank=rank, dtype="float32"))
        wanted = meaning(waybill.plan(twin, tp=2, rank=rank, dtype="float32"))
        assert own.keys() == wanted.keys()
        for name, value in wanted.items():
            np.testing.assert_array_equal(own[name], value, name)


def meaning(bill: Plan) -> dict[str, Array]:
    """What one rank's parameters mean, by name."""
    bill.require_clean()
    octets, _ = streamed(bill)
    held = {b.target: octets[b.target].view(NUMPY_DTYPES[b.dtype]).reshape(b.shape) for b in bill.bindings}
    bits = {spec.name.removesuffix(".weight"): spec.packing.bits for spec in bill.specs if spec.packing}
    out = {name.removesuffix(".weight"): value for name, value in held.items() if value.dtype == np.float32}
    for stem, width in bits.items():
        zeros = held.get(f"{stem}.zero_points")
        out[stem] = canonical(held[f"{stem}.codes"], held[f"{stem}.scales"], zeros, width)
    return {name: value for name, value in out.items() if not name.endswith(".scales")}


def test_a_rank_reads_only_the_heads_it_holds(tmp_path: Path) -> None:
    ggufs.model("llama", "F16").write(tmp_path / "model.gguf")
    whole, half = (
        next(b for b in waybill.plan(tmp_path / "model.gguf", tp=tp).bindings if "qkv" in b.target) for tp in (1, 2)
    )
    assert half.bytes_read * 2 == whole.bytes_read


@pytest.mark.parametrize("block_type", ["Q4_1", "Q5_1", "Q4_K", "Q2_K", "Q5_K", "IQ4_NL", "MXFP4"])
def test_a_type_without_an_exact_form_is_refused_with_the_reason(block_type: str, tmp_path: Path) -> None:
    ggufs.model("llama", blk__0__ffn_up__weight=block_type).write(tmp_path / "model.gguf")
    bill = waybill.plan(tmp_path / "model.gguf")
    (problem,) = bill.problems
    assert not bill.notices
    assert problem.code == "unsupported-quantization"
    assert problem.what == f"tensors of type {block_type} have no exact packed form"
    assert problem.where == "blk.0.ffn_up.weight (model.gguf)"
    assert problem.found == f"1 tensors of type {block_type}: {reason(block_type)}"
    assert ("--dequantize" in problem.fix) == (block_type in WITH_MINIMUM)


@pytest.mark.parametrize("block_type", ["Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K"])
def test_floats_in_their_place_compute_the_same_when_they_are_asked_for(block_type: str, tmp_path: Path) -> None:
    twin = ggufs.model("llama", "Q8_0", blk__1__ffn_up__weight=block_type, blk__0__attn_q__weight=block_type).write(
        tmp_path / "model.gguf"
    )
    opened = waybill.open(tmp_path / "model.gguf", dequantize=True)
    bill = waybill.plan(opened)
    assert not bill.problems
    assert f"2 tensors of type {block_type} are read as floats: they have no exact packed form" in bill.notices
    dense = waybill.load(twin.write(tmp_path / "dense"), dtype="float32")
    wanted = logits(dense)
    torch.testing.assert_close(logits(waybill.load(opened)), wanted, atol=LOGITS_FLOAT32, rtol=0)
    waybill.build(opened, exact=True).save(tmp_path / "package")
    assert not waybill.verify(tmp_path / "package", tmp_path / "model.gguf").problems


def test_a_package_of_other_values_is_not_proven(tmp_path: Path) -> None:
    ggufs.model("llama", "Q4_0", blk__0__attn_q__weight="Q6_K", blk__0__ffn_up__weight="Q3_K").write(
        tmp_path / "model.gguf"
    )
    waybill.build(tmp_path / "model.gguf").save(tmp_path / "package")
    octets = bytearray((tmp_path / "model.gguf").read_bytes())
    for name in ("blk.0.attn_q.weight", "blk.0.ffn_up.weight", "blk.1.ffn_down.weight"):
        octets[waybill.open(tmp_path / "model.gguf").tensors[name].offset + 40] ^= 1
    (tmp_path / "model.gguf").write_bytes(octets)
    report = waybill.verify(tmp_path / "package", tmp_path / "model.gguf")
    assert {problem.what for problem in report.problems} == {"an initializer does not hold what the checkpoint does"}
    assert len(report.problems) == 3


def test_float16_that_cannot_hold_a_scale_is_refused(tmp_path: Path) -> None:
    ggufs.model("qwen3", "Q6_K").write(tmp_path / "model.gguf")
    with pytest.raises(InexactScales):
        waybill.build(tmp_path / "model.gguf", dtype="float16").save(tmp_path / "package")


def test_records_are_what_gguf_reads_from_each_tensor(tmp_path: Path) -> None:
    ggufs.model("llama", "Q4_0", **MIXED).write(tmp_path / "model.gguf")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    records = list(waybill.records(tmp_path / "model.gguf"))
    assert {record.source_name for record in records} == tensors.keys()
    for record in records:
        tensor = tensors[record.source_name]
        wanted = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(waybill.dequantize(record), wanted.reshape(record.storage.shape))


def test_a_package_may_refer_to_the_files_own_floats(tmp_path: Path) -> None:
    ggufs.model("qwen3", "F32", blk__0__ffn_up__weight="Q4_0").write(tmp_path / "model.gguf")
    receipt = waybill.build(tmp_path / "model.gguf", link=True).save(tmp_path / "package", link=True)
    assert receipt.linked_bytes > receipt.data_bytes
    assert not waybill.verify(tmp_path / "package", tmp_path / "model.gguf").problems


def test_a_package_carries_what_the_file_says_of_itself(tmp_path: Path) -> None:
    model = ggufs.model("qwen3", "Q8_0", tied=True)
    model.metadata |= {
        "tokenizer.ggml.eos_token_id": ("add_uint32", 7),
        "tokenizer.ggml.model": ("add_string", "llama"),
    }
    model.write(tmp_path / "model.gguf")
    built = waybill.build(tmp_path / "model.gguf")
    built.save(tmp_path / "package")
    config = json.loads((tmp_path / "package" / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["Qwen3ForCausalLM"], "qwen3")
    assert (config["num_hidden_layers"], config["tie_word_embeddings"]) == (ggufs.LAYERS, True)
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert json.loads((tmp_path / "package" / "generation_config.json").read_text()) == {"eos_token_id": 7}
    assert not (tmp_path / "package" / "tokenizer.json").exists()
    said = "the file has no tokenizer that is read, tokenizer.ggml.model 'llama'"
    assert f"{said}: the package can be given tokens, not text" in built.notices
    bill = json.loads((tmp_path / "package" / "waybill.json").read_text())
    assert bill["source"]["name"] == "model.gguf"
