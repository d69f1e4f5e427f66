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
from waybill.checkpoint import RangeReader
from waybill.config.gguf import AS_FLOATS, LAYOUTS, WITH_MINIMUM, reason
from waybill.engine.context import Batch, get_global_ctx
from waybill.engine.generate import generate
from waybill.engine.layers.matrix import CodebookMatrix, PackedMatrix
from waybill.engine.models.decoder import CausalLM
from waybill.errors import BadScales, InexactScales
from waybill.plan import Plan
from waybill.plan.parameter import CodebookPacking
from waybill.weights.dequantize import dequantize_codes
from waybill.weights.dtypes import NUMPY_DTYPES

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe")
UNEVEN = ("MXFP4", "IQ4_NL", "IQ4_XS")
EXPORTED = ("F32", "F16", "BF16", "Q4_0", "Q5_0", "Q8_0", "Q6_K", "Q3_K", *sorted(WITH_MINIMUM))
TYPES = (*EXPORTED, *UNEVEN)
PROMPTS = [[3, 17, 90, 4, 56], [8], [20, 7, 7, 31, 64, 2, 90, 11, 45]]
NEW_TOKENS = 16
MIXED = {
    "token_embd__weight": "Q6_K", "output__weight": "Q8_0", "blk__0__attn_v__weight": "Q6_K",
    "blk__0__ffn_down__weight": "Q5_0", "blk__1__attn_k__weight": "F16", "blk__1__ffn_up__weight": "Q3_K",
    "blk__0__attn_output__weight": "Q4_K", "blk__1__attn_q__weight": "Q4_1", "blk__1__ffn_gate__weight": "Q2_K",
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
    packed = [op for op in model.descendants() if isinstance(op, (PackedMatrix, CodebookMatrix))]
    assert bool(packed) == (block_type in LAYOUTS)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_tensors_of_many_types_stay_what_they_are(architecture: str, tmp_path: Path) -> None:
    assert_equal(ggufs.model(architecture, "Q4_0", **MIXED), tmp_path)


@pytest.mark.parametrize("block_type", ["Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q8_0"])
@torch.inference_mode()
def test_a_kernel_rounds_scales_and_offsets_and_nothing_larger(block_type: str, tmp_path: Path) -> None:
    ggufs.model("llama", block_type).write(tmp_path / "model.gguf")
    exact, kernel = (waybill.load(tmp_path / "model.gguf", dtype=dtype) for dtype in ("float32", "bfloat16"))
    random, prepared = torch.Generator().manual_seed(1), 0
    for ours, theirs in zip(kernel.descendants(), exact.descendants(), strict=True):
        if not isinstance(ours, PackedMatrix) or not isinstance(theirs, PackedMatrix):
            continue
        prepared += not hasattr(ours, "codes")
        scales = theirs.scales.float()
        x = torch.randn(5, 32 * scales.shape[1], generator=random).to(torch.bfloat16)
        want = theirs.product(x.float())
        # (code - centre) · scale + offset: 8 significant bits of a scale and an offset, and of each group's sum.
        centre = {"4": 8, "5": 16, "8": 128}[block_type[1]]
        offset = theirs.minimums.float() + centre * scales if hasattr(theirs, "minimums") else 0 * scales
        most = (3 * centre * scales.abs() + offset.abs()).repeat_interleave(32, 1)
        assert ((ours.product(x).float() - want).abs() <= (x.float().abs() @ most.T + want.abs()) / 256).all()
    assert prepared == 9


@pytest.mark.parametrize("block_type", ["F16", "Q8_0", "Q6_K", "Q4_K"])
def test_a_head_that_is_absent_is_the_embedding(block_type: str, tmp_path: Path) -> None:
    assert_equal(ggufs.model("qwen3", block_type, tied=True), tmp_path)


@pytest.mark.parametrize("block_type", EXPORTED)
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


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_a_package_of_many_types_computes_what_the_engine_does(architecture: str, tmp_path: Path) -> None:
    ggufs.model(architecture, "Q5_K", **MIXED).write(tmp_path / "model.gguf")
    waybill.build(tmp_path / "model.gguf", exact=True).save(tmp_path / "package")
    assert not waybill.verify(tmp_path / "package", tmp_path / "model.gguf").problems
    engine, package = waybill.load(tmp_path / "model.gguf", dtype="float32"), Package(tmp_path / "package")
    found = np.concatenate([package.prefill([prompt])[0][:, -1] for prompt in PROMPTS])
    np.testing.assert_allclose(found, logits(engine).numpy(), atol=LOGITS_FLOAT32, rtol=0)
    made = generate(engine, PROMPTS, max_new_tokens=NEW_TOKENS).token_ids
    assert [package.greedy(prompt, NEW_TOKENS) for prompt in PROMPTS] == made


def test_what_a_package_holds_of_minimums_is_priced_and_stored_as_it_is(tmp_path: Path) -> None:
    ggufs.model("qwen3", "Q4_1", tied=True).write(tmp_path / "model.gguf")
    bill = waybill.plan(tmp_path / "model.gguf", target="onnx")
    sizes = {b.role: b.nbytes for b in bill.bindings if b.target.startswith("model.embed_tokens.")}
    rows, blocks = ggufs.VOCAB, ggufs.HIDDEN // 32
    assert sizes == {"codes": rows * blocks * 16, "scales": rows * blocks * 4, "minimums": rows * blocks * 4,
                     "zero_points": rows * blocks // 2}  # fmt: skip
    waybill.build(tmp_path / "model.gguf").save(tmp_path / "package")
    stated = json.loads((tmp_path / "package" / "waybill.json").read_text())["components"]["decoder"]["initializers"]
    assert stated["model.embed_tokens.minimums"]["role"] == "minimums"
    assert stated["model.embed_tokens.minimums"]["packing"] == {"bits": 4, "block_size": 32}
    place = stated["model.embed_tokens.minimums"]
    octets = (tmp_path / "package" / place["file"]).read_bytes()[place["offset"] :][: place["bytes"]]
    raw = gguf.GGUFReader(tmp_path / "model.gguf").tensors[0].data.reshape(rows, blocks, 20)
    wanted = raw[..., 2:4].copy().view(np.float16)[..., 0].astype(np.float32)
    assert np.array_equal(np.frombuffer(octets, np.float32).reshape(rows, blocks), wanted)
    assert not any(name.endswith(".zero_points") for name in stated if "embed" not in name)


@pytest.mark.parametrize("block_type", ["Q4_1", "Q4_K"])
def test_experts_with_minimums_are_refused_for_onnx_unless_they_may_be_floats(block_type: str, tmp_path: Path) -> None:
    ggufs.model("qwen3moe", block_type).write(tmp_path / "model.gguf")
    (problem,) = waybill.plan(tmp_path / "model.gguf", target="onnx").problems
    scales = {"Q4_1": "F16", "Q4_K": "F32"}[block_type]
    assert (problem.code, problem.what) == ("unsupported-by-runtime", "no operator holds a packed weight exactly")
    assert problem.where.startswith("model.layers.0.mlp.experts.gate_up_proj, ")
    assert problem.expected == "experts with zero points: their operator has no input for minimums"
    assert problem.found == f"4 bits, group 32, {scales}, with minimums"
    assert problem.fix == (
        "use the engine, which computes from it as it is; --dequantize makes floats of a GGUF file's blocks"
    )
    opened = waybill.open(tmp_path / "model.gguf", dequantize=True)
    waybill.build(opened, exact=True).save(tmp_path / "package")
    assert not waybill.verify(tmp_path / "package", tmp_path / "model.gguf").problems


def test_mxfp4_experts_may_be_widened_for_onnx(tmp_path: Path) -> None:
    types = dict.fromkeys(("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), "MXFP4")
    types = {f"blk__{layer}__{name}__weight": kind for layer in range(ggufs.LAYERS) for name, kind in types.items()}
    model = ggufs.model("qwen3moe", "Q8_0", **{name.removesuffix("__weight"): kind for name, kind in types.items()})
    model.write(tmp_path / "model.gguf")
    waybill.build(tmp_path / "model.gguf", widen_mxfp4=True).save(tmp_path / "package")
    assert "QMoE" in Package(tmp_path / "package").operators
    report = waybill.verify(tmp_path / "package", tmp_path / "model.gguf")
    assert not report.problems


@pytest.mark.parametrize("block_type", UNEVEN)
def test_codes_of_a_table_are_refused_for_onnx_unless_they_may_be_floats(block_type: str, tmp_path: Path) -> None:
    ggufs.model("llama", "Q8_0", blk__0__ffn_up__weight=block_type).write(tmp_path / "model.gguf")
    (problem,) = waybill.plan(tmp_path / "model.gguf", target="onnx").problems
    assert (problem.code, problem.where) == ("unsupported-by-runtime", "model.layers.0.mlp.up_proj.weight")
    assert problem.fix.endswith("--dequantize makes floats of a GGUF file's blocks")


@pytest.mark.parametrize("block_type", ["F16", "Q4_0", "Q6_K", "Q3_K", "Q4_1", "Q2_K", "Q5_K", "MXFP4", "IQ4_XS"])
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
    packings = {spec.name.removesuffix(".weight"): spec.packing for spec in bill.specs if spec.packing}
    out = {name.removesuffix(".weight"): value for name, value in held.items() if value.dtype == np.float32}
    for stem, packing in packings.items():
        codes, scales, zeros = (held.get(f"{stem}.{role}") for role in ("codes", "scales", "zero_points"))
        minimums = held.get(f"{stem}.minimums")
        if isinstance(packing, CodebookPacking):
            out[stem] = dequantize_codes(codes, scales, packing.layout)
        elif minimums is None:
            out[stem] = canonical(codes, scales, zeros, packing.bits)
        else:
            products = canonical(codes, scales, np.zeros(scales.shape, np.uint8), packing.bits)
            each = products.shape[-1] // minimums.shape[-1]
            out[stem] = products + minimums.astype(np.float32).repeat(each, axis=-1)
    return {name: value for name, value in out.items() if not name.endswith((".scales", ".minimums"))}


def test_a_rank_reads_only_the_heads_it_holds(tmp_path: Path) -> None:
    ggufs.model("llama", "F16").write(tmp_path / "model.gguf")
    whole, half = (
        next(b for b in waybill.plan(tmp_path / "model.gguf", tp=tp).bindings if "qkv" in b.target) for tp in (1, 2)
    )
    assert half.bytes_read * 2 == whole.bytes_read


@pytest.mark.parametrize("block_type", sorted(LAYOUTS))
def test_codes_scales_and_minimums_of_a_block_are_made_of_one_reading(block_type: str, tmp_path: Path) -> None:
    ggufs.model("qwen3moe", block_type).write(tmp_path / "experts.gguf")
    ggufs.model("llama", block_type).write(tmp_path / "model.gguf")
    for name in ("experts", "model"):
        bill = waybill.plan(tmp_path / f"{name}.gguf")
        assert streamed(bill)[1] == bill.bytes_read == bill.checkpoint.nbytes


def test_an_export_reads_blocks_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ggufs.model("llama", "Q4_K").write(tmp_path / "model.gguf")
    readers = []
    monkeypatch.setattr(RangeReader, "__enter__", lambda reader: readers.append(reader) or reader)
    waybill.build(tmp_path / "model.gguf").save(tmp_path / "package")
    stored = waybill.open(tmp_path / "model.gguf").nbytes
    assert sum(reader.bytes_read for reader in readers) == waybill.plan(tmp_path / "model.gguf", "onnx").bytes_read
    assert stored == waybill.plan(tmp_path / "model.gguf", "onnx").bytes_read


@pytest.mark.parametrize("block_type", ["IQ3_S", "IQ2_XXS", "TQ1_0"])
def test_a_type_that_is_not_read_is_refused_with_the_reason(block_type: str, tmp_path: Path) -> None:
    ggufs.model("llama", blk__0__ffn_up__weight=block_type).write(tmp_path / "model.gguf")
    bill = waybill.plan(tmp_path / "model.gguf")
    (problem,) = bill.problems
    assert not bill.notices
    assert problem.code == "unsupported-quantization"
    assert problem.what == f"tensors of type {block_type} are not read"
    assert problem.where == "blk.0.ffn_up.weight (model.gguf)"
    assert problem.found == f"1 tensors of type {block_type}: {reason(block_type)}"
    assert problem.expected == " | ".join(["F32", "F16", "BF16", *LAYOUTS])
    assert problem.fix == "use a file of the expected types, such as Q8_0"


@pytest.mark.parametrize("block_type", sorted(AS_FLOATS))
def test_floats_in_their_place_compute_the_same_when_they_are_asked_for(block_type: str, tmp_path: Path) -> None:
    twin = ggufs.model("llama", "Q8_0", blk__1__ffn_up__weight=block_type, blk__0__attn_q__weight=block_type).write(
        tmp_path / "model.gguf"
    )
    opened = waybill.open(tmp_path / "model.gguf", dequantize=True)
    bill = waybill.plan(opened)
    assert not bill.problems
    assert f"2 tensors of type {block_type} are read as floats, as --dequantize asks" in bill.notices
    dense = waybill.load(twin.write(tmp_path / "dense"), dtype="float32")
    wanted = logits(dense)
    torch.testing.assert_close(logits(waybill.load(opened)), wanted, atol=LOGITS_FLOAT32, rtol=0)
    waybill.build(opened, exact=True).save(tmp_path / "package")
    assert not waybill.verify(tmp_path / "package", tmp_path / "model.gguf").problems


def test_a_package_of_other_values_is_not_proven(tmp_path: Path) -> None:
    ggufs.model("llama", "Q4_0", blk__0__attn_q__weight="Q6_K", blk__0__ffn_up__weight="Q3_K",
                blk__1__ffn_up__weight="Q4_1", blk__1__attn_output__weight="Q4_K").write(
        tmp_path / "model.gguf"
    )  # fmt: skip
    waybill.build(tmp_path / "model.gguf").save(tmp_path / "package")
    octets = bytearray((tmp_path / "model.gguf").read_bytes())
    for name, at in (
        ("blk.0.attn_q.weight", 40), ("blk.0.ffn_up.weight", 40), ("blk.1.ffn_down.weight", 40),
        ("blk.1.ffn_up.weight", 2), ("blk.1.attn_output.weight", 8),
    ):  # fmt: skip
        octets[waybill.open(tmp_path / "model.gguf").tensors[name].offset + at] ^= 1
    (tmp_path / "model.gguf").write_bytes(octets)
    report = waybill.verify(tmp_path / "package", tmp_path / "model.gguf")
    assert {problem.what for problem in report.problems} == {"an initializer does not hold what the checkpoint does"}
    assert len(report.problems) == 5
    minimums = {problem.where.split()[0] for problem in report.problems if ".minimums" in problem.where}
    assert minimums == {"model.layers.1.mlp.up_proj.minimums", "model.layers.1.self_attn.o_proj.minimums"}


@pytest.mark.parametrize("dequantize", [False, True])
def test_a_package_is_not_proven_against_scales_that_are_no_numbers(dequantize: bool, tmp_path: Path) -> None:
    ggufs.model("llama", "Q4_K").write(tmp_path / "model.gguf")
    waybill.build(waybill.open(tmp_path / "model.gguf", dequantize=dequantize)).save(tmp_path / "package")
    octets = bytearray((tmp_path / "model.gguf").read_bytes())
    start = waybill.open(tmp_path / "model.gguf").tensors["blk.0.ffn_up.weight"].offset
    octets[start : start + 16] = np.array([np.inf, np.inf], np.float16).tobytes() + bytes(12)
    (tmp_path / "model.gguf").write_bytes(octets)
    found = waybill.verify(tmp_path / "package", tmp_path / "model.gguf").problems
    assert len(found) == (1 if dequantize else 2)
    assert all(problem.where.startswith("model.layers.0.mlp.up_proj.") for problem in found)


def test_float16_that_cannot_hold_a_scale_is_refused(tmp_path: Path) -> None:
    ggufs.model("qwen3", "Q6_K").write(tmp_path / "model.gguf")
    with pytest.raises(InexactScales):
        waybill.build(tmp_path / "model.gguf", dtype="float16").save(tmp_path / "package")


def test_float16_that_cannot_hold_a_minimum_is_refused(tmp_path: Path) -> None:
    ggufs.model("qwen3", "Q4_0", blk__0__ffn_up__weight="Q4_K").write(tmp_path / "model.gguf")
    octets = bytearray((tmp_path / "model.gguf").read_bytes())
    tensor = waybill.open(tmp_path / "model.gguf").tensors["blk.0.ffn_up.weight"]
    blocks = np.frombuffer(octets, np.uint8)[tensor.offset : tensor.offset + tensor.nbytes].reshape(-1, 144)
    blocks[:, 0:2] = np.array([1.0], np.float16).view(np.uint8)  # scales of whole numbers
    (tmp_path / "model.gguf").write_bytes(octets)
    with pytest.raises(InexactScales) as refused:
        waybill.build(tmp_path / "model.gguf", dtype="float16").save(tmp_path / "package")
    assert refused.value.what == "a minimum of a packed weight is not a F16 number"
    assert refused.value.expected == "minimums that F16 holds exactly"


@pytest.mark.parametrize(
    ("block_type", "at", "octets", "numbers"),
    [("Q4_1", 2, np.array([np.nan], np.float16).tobytes(), "minimums"),
     ("Q4_K", 0, np.array([np.inf, 1], np.float16).tobytes() + bytes(12), "scales"),
     ("Q4_K", 2, np.array([np.inf], np.float16).tobytes() + bytes(12), "minimums")],
    ids=["a minimum", "an infinite scale, no times", "an infinite minimum, no times"],
)  # fmt: skip
def test_scales_and_minimums_that_are_no_numbers_are_refused(
    block_type: str, at: int, octets: bytes, numbers: str, tmp_path: Path
) -> None:
    ggufs.model("qwen3", block_type).write(tmp_path / "model.gguf")
    held = bytearray((tmp_path / "model.gguf").read_bytes())
    start = waybill.open(tmp_path / "model.gguf").tensors["blk.0.ffn_up.weight"].offset + at
    held[start : start + len(octets)] = octets
    (tmp_path / "model.gguf").write_bytes(held)
    for read in (waybill.load, lambda path: waybill.build(path).save(tmp_path / "package")):
        with pytest.raises(BadScales) as refused:
            read(tmp_path / "model.gguf")
        assert refused.value.what == f"the {numbers} of a packed weight are damaged"
        assert refused.value.expected.startswith(f"finite {numbers}")
        assert refused.value.found == "NaN or infinity"


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
