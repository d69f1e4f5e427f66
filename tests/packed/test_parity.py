"""Packed checkpoints against the same weights as floats, here and in transformers: the same logits, the same tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

import waybill
from checkpoints import Recipe, lively, llama, qwen2, qwen2_moe, qwen3, qwen3_moe
from packing import HEAD, Scheme, Twins, pack, unpack
from parity.tolerances import LOGITS_FLOAT32
from waybill.engine.context import Batch, get_global_ctx
from waybill.engine.generate import generate
from waybill.engine.layers.matrix import PackedMatrix
from waybill.engine.models.decoder import CausalLM

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoints"
NEW_TOKENS = 24
PROMPTS = [[3, 17, 99, 4, 56], [8], [120, 7, 7, 31, 64, 2, 90, 11, 45]]

MODELS: dict[str, Callable[[], Recipe]] = {
    "llama": lambda: lively(llama(np.float32)),
    "qwen2": lambda: lively(qwen2(np.float32), 1),
    "qwen3": lambda: lively(qwen3(np.float32), 2),
    "qwen2-moe": lambda: lively(qwen2_moe(np.float32, shared_expert_intermediate_size=64), 8),
    "qwen3-moe": lambda: lively(qwen3_moe(np.float32), 3),
}
SCHEMES = [
    Scheme("gptq"),
    Scheme("gptq", group=16, symmetric=True),
    Scheme("gptq", bits=8, group=-1),
    Scheme("gptq_v2", bits=2, group=16),
    Scheme("gptq_v2", group=-1, symmetric=True),
    Scheme("gptq_v2", bits=8, group=32, scales=np.float32),
    Scheme("auto_round"),
    Scheme("awq"),
    Scheme("awq", group=16, symmetric=True),
    Scheme("awq", group=-1),
    Scheme("olive"),
    Scheme("olive", bits=2, group=16),
    Scheme("olive", bits=8, group=-1, symmetric=True),
    Scheme("olive_dotted", group=16, symmetric=True),
    Scheme("olive_dotted", bits=8),
    Scheme("olive_dotted", bits=2, group=32, scales=np.float32),
    Scheme("ct"),
    Scheme("ct", bits=2, group=16, symmetric=True),
    Scheme("ct", bits=8, group=-1),
    Scheme("ct_old", group=16),
    Scheme("ct_int", bits=8, group=-1, symmetric=True),
    Scheme("ct_int", bits=8, scales=np.float32),
]


@torch.inference_mode()
def logits(model: CausalLM) -> torch.Tensor:
    batch = Batch(torch.tensor([t for p in PROMPTS for t in p]), tuple(map(len, PROMPTS)))
    with get_global_ctx().forward_batch(batch):
        return model.forward()


def tokens(model: CausalLM) -> list[list[int]]:
    return generate(model, PROMPTS, max_new_tokens=NEW_TOKENS).token_ids


def assert_equal(twins: Twins, folder: Path, variety: int = 5) -> CausalLM:
    """The packed checkpoint computes what its float twin does; returns its model."""
    packed = waybill.load(twins.packed.write(folder / "packed"), dtype="float32")
    dense = waybill.load(twins.dense.write(folder / "dense"), dtype="float32")
    assert any(isinstance(op, PackedMatrix) for op in packed.descendants())
    assert not any(isinstance(op, PackedMatrix) for op in dense.descendants())
    torch.testing.assert_close(logits(packed), logits(dense), atol=LOGITS_FLOAT32, rtol=0)
    made = tokens(packed)
    assert made == tokens(dense)
    assert len({token for each in made for token in each}) > variety
    return packed


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_a_packed_model_computes_what_its_float_twin_does(kind: str, scheme: Scheme, tmp_path: Path) -> None:
    assert_equal(pack(MODELS[kind](), scheme), tmp_path)


@pytest.mark.parametrize("form", ["gptq", "gptq_v2", "olive", "olive_dotted", "ct"])
def test_a_last_group_that_k_does_not_fill_is_read(form: str, tmp_path: Path) -> None:
    assert_equal(pack(MODELS["llama"](), Scheme(form, group=64)), tmp_path)  # K is 96 in down_proj


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_packed_expert_banks_compute_what_float_banks_do(bits: int, symmetric: bool, tmp_path: Path) -> None:
    recipe = lively(qwen3_moe(np.float32, banks=True))
    assert_equal(pack(recipe, Scheme("olive", bits=bits, group=16, symmetric=symmetric)), tmp_path)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@torch.inference_mode()
def test_transformers_computes_the_same_from_the_float_twin(kind: str, tmp_path: Path) -> None:
    twins = pack(MODELS[kind](), Scheme("awq" if kind == "qwen2" else "gptq"))
    ours = waybill.load(twins.packed.write(tmp_path / "packed"), dtype="float32")
    folder = twins.dense.write(tmp_path / "dense")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    made = tokens(ours)
    for prompt, row, continued in zip(PROMPTS, logits(ours), made, strict=True):
        whole = theirs(torch.tensor([prompt + continued])).logits[0, len(prompt) - 1 : -1]
        torch.testing.assert_close(row, whole[0], atol=LOGITS_FLOAT32, rtol=0)
        assert continued == whole.argmax(-1).tolist()


BITS_OF = {
    "ar_auto_gptq_w4_sym": {"model.layers.1.mlp.down_proj": 8},
    "ar_auto_round_w4_sym": {"model.layers.1.mlp.down_proj": 8},
    "ar_auto_round_w4_asym": {},
    "ol_dense_v013": {"model.layers.0.mlp.down_proj": 8},
    "ol_dense_main": {"model.layers.0.mlp.down_proj": 8},
    "ol_tied_v013": {"model.layers.0.mlp.down_proj": 8},
    "ol_moe_main": {},
    "ar_llm_compressor_w4_sym": {},
}


@pytest.mark.parametrize("name", BITS_OF)
def test_what_producers_wrote_computes_what_its_float_twin_does(name: str, tmp_path: Path) -> None:
    config = json.loads((GOLDEN / name / "config.json").read_text())
    (file,) = (GOLDEN / name).glob("*.safetensors")
    recipe = Recipe(config, load_file(file))
    stated = config["quantization_config"]
    overridden = {key.strip("+:.*").replace("\\", "") for key in stated.get("overrides") or stated.get("dynamic") or ()}
    assert overridden <= BITS_OF[name].keys()
    bits, group = stated.get("bits", 4), stated.get("group_size", 32)
    dense = unpack(recipe, bits, group, BITS_OF[name])
    dense.config["tie_word_embeddings"] = name == "ol_tied_v013"
    assert_equal(Twins(recipe, dense), tmp_path, variety=2)


# Mixed precision: what is packed alike is merged, the rest is kept apart.

LAYER = "model.layers.0"
V, K, GATE, UP = (f"{LAYER}.{name}_proj" for name in ("self_attn.v", "self_attn.k", "mlp.gate", "mlp.up"))
WHOLE_LAYER = [
    *(f"model.layers.1.self_attn.{member}_proj" for member in "qkvo"),
    *(f"model.layers.1.mlp.{member}_proj" for member in ("gate", "up", "down")),
]
MIXED: dict[str, tuple[Scheme, dict[str, Any], str]] = {
    "gptq-float-v": (Scheme("gptq"), {"keep": [V]}, "qkv"),
    "awq-float-v": (Scheme("awq"), {"keep": [V]}, "qkv"),
    "olive-float-v": (Scheme("olive"), {"keep": [V]}, "qkv"),
    "auto-round-float-v": (Scheme("auto_round"), {"keep": [V]}, "qkv"),
    "gptq-8-bit-up": (Scheme("gptq"), {"overrides": {UP: {"bits": 8}}}, "gate_up"),
    "olive-8-bit-up": (Scheme("olive_dotted"), {"overrides": {UP: {"bits": 8}}}, "gate_up"),
    "compressed-tensors-float-v": (Scheme("ct"), {"keep": [V]}, "qkv"),
    "compressed-tensors-8-bit-up": (Scheme("ct"), {"overrides": {UP: {"bits": 8, "form": "ct_int"}}}, "gate_up"),
    "auto-round-2-bit-gate": (Scheme("auto_round"), {"overrides": {GATE: {"bits": 2}}}, "gate_up"),
    "gptq-other-group-k": (Scheme("gptq_v2"), {"overrides": {K: {"group": 16}}}, "qkv"),
    "olive-other-group-k": (Scheme("olive"), {"overrides": {K: {"group": 64}}}, "qkv"),
}


@pytest.mark.parametrize("case", MIXED)
def test_projections_packed_differently_are_kept_apart_and_said_to_be(case: str, tmp_path: Path) -> None:
    scheme, options, merged = MIXED[case]
    twins = pack(MODELS["qwen2"](), scheme, **options)
    model = assert_equal(twins, tmp_path)
    path = f"{LAYER}.self_attn" if merged == "qkv" else f"{LAYER}.mlp"
    members = [f"{path}.{member}_proj.weight" for member in ("qkv" if merged == "qkv" else ("gate", "up"))]
    (notice,) = (line for line in waybill.plan(tmp_path / "packed").notices if "apart" in line)
    assert all(member in notice for member in members)
    assert "model.layers.1" not in notice
    names = {name.rpartition(".")[0] for name in model.state_dict()}
    assert {member.removesuffix(".weight") for member in members} <= names
    assert f"{path}.{merged}_proj" not in names
    assert f"{path.replace('.0.', '.1.')}.{merged}_proj" in names


@pytest.mark.parametrize("form", ["gptq", "awq", "olive", "auto_round", "ct"])
def test_a_layer_excluded_by_the_metadata_is_float_and_merged(form: str, tmp_path: Path) -> None:
    model = assert_equal(pack(MODELS["llama"](), Scheme(form), keep=WHOLE_LAYER), tmp_path)
    state = model.state_dict()
    assert state["model.layers.1.self_attn.qkv_proj.weight"].is_floating_point()
    assert "model.layers.0.self_attn.qkv_proj.codes" in state
    assert not [line for line in waybill.plan(tmp_path / "packed").notices if "apart" in line]


def test_a_symmetric_member_is_merged_with_asymmetric_ones(tmp_path: Path) -> None:
    twins = pack(MODELS["llama"](), Scheme("olive"), overrides={K: {"symmetric": True}})
    state = assert_equal(twins, tmp_path).state_dict()
    zeros = state[f"{LAYER}.self_attn.qkv_proj.zero_points"]
    assert (zeros[64:96] == 8).all()
    assert (zeros[:64] != 8).any()


# Tables.


def test_a_tied_packed_table_is_one_table_with_two_users(tmp_path: Path) -> None:
    recipe = lively(qwen3(np.float32, tie_word_embeddings=False))
    twins = pack(recipe, Scheme("olive_dotted", group=16), table=True, head=True, tie=True)
    model = assert_equal(twins, tmp_path)
    assert model.lm_head.is_tied
    assert not [name for name in model.state_dict() if name.startswith("lm_head")]


@pytest.mark.parametrize(
    "scheme", [Scheme("olive"), Scheme("olive", bits=8, symmetric=True), Scheme("olive", bits=2), Scheme("ct")]
)
@pytest.mark.parametrize(("table", "head"), [(True, False), (False, True), (True, True)])
def test_tables_are_packed_one_by_one(scheme: Scheme, table: bool, head: bool, tmp_path: Path) -> None:
    state = assert_equal(pack(MODELS["llama"](), scheme, table=table, head=head), tmp_path).state_dict()
    assert ("model.embed_tokens.codes" in state, "lm_head.codes" in state) == (table, head)


@pytest.mark.parametrize("form", ["gptq", "ct"])
def test_a_packed_head_is_read_when_the_metadata_says_so(form: str, tmp_path: Path) -> None:
    assert "lm_head.codes" in assert_equal(pack(MODELS["qwen2"](), Scheme(form), head=True), tmp_path).state_dict()


def test_a_tied_packed_table_may_be_stored_again_as_the_head(tmp_path: Path) -> None:
    twins = pack(lively(qwen3(np.float32)), Scheme("olive"), table=True)
    for role in ("qweight", "scales", "qzeros"):
        twins.packed.tensors[f"{HEAD}_{role}"] = twins.packed.tensors[f"model.embed_tokens.weight_{role}"]
    twins.packed.config["quantization_config"]["lm_head"] = True
    assert assert_equal(twins, tmp_path).lm_head.is_tied


@pytest.mark.filterwarnings("ignore:config.json ties the head")
def test_a_different_packed_head_beside_a_tied_table_is_honoured(tmp_path: Path) -> None:
    recipe = lively(qwen3(np.float32))
    recipe.tensors[HEAD] = -2 * recipe.tensors["model.embed_tokens.weight"]
    assert not assert_equal(pack(recipe, Scheme("olive"), table=True, head=True), tmp_path).lm_head.is_tied


# Memory, and the 4-bit kernel.


def wide() -> Recipe:
    """A model whose every K is a multiple of 64."""
    recipe = llama(np.float32, intermediate_size=128)
    for name, tensor in recipe.tensors.items():
        if ".mlp." in name:
            recipe.tensors[name] = np.empty([128 if n == 96 else n for n in tensor.shape], np.float32)
    return lively(recipe)


def resident(model: CausalLM) -> dict[int, torch.Tensor]:
    """Every tensor a layer holds, private ones included, by place in memory."""
    found: dict[int, torch.Tensor] = {}

    def look(value: object) -> None:
        if isinstance(value, torch.Tensor):
            found[value.data_ptr()] = value
        elif isinstance(value, (tuple, list)):
            for item in value:
                look(item)

    for op in [model, *model.descendants()]:
        look(list(vars(op).values()))
    return found


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("scheme", [Scheme("gptq"), Scheme("awq", group=64), Scheme("olive", bits=8)], ids=str)
def test_no_float_copy_of_a_packed_weight_stays_resident(dtype: str, scheme: Scheme, tmp_path: Path) -> None:
    folder = pack(wide(), scheme, table=scheme.is_olive, head=scheme.is_olive).packed.write(tmp_path)
    bill = waybill.plan(folder, dtype=dtype)
    model = waybill.load(folder, dtype=dtype)
    assert len(tokens(model)[0]) == NEW_TOKENS  # whatever a product might keep has been kept by now
    held = resident(model).values()
    groups = sum(b.value.shape[0] * b.value.shape[1] for b in bill.bindings if b.role == "scales")
    assert sum(t.nbytes for t in held) <= bill.result_bytes + 4 * groups  # the kernel keeps bfloat16 pairs
    floats = {b.shape for b in bill.bindings if b.role == "weight"}
    assert {tuple(t.shape) for t in held if t.is_floating_point() and t.numel() > 4096} <= floats


KERNELS = [
    Scheme("gptq"),
    Scheme("awq", group=64),
    Scheme("olive", symmetric=True),
    Scheme("olive", bits=8),
    Scheme("gptq_v2", bits=8, group=-1, symmetric=True),
]


@pytest.mark.parametrize("scheme", KERNELS, ids=str)
@torch.inference_mode()
def test_a_kernel_rounds_no_more_than_bfloat16_does(scheme: Scheme, tmp_path: Path) -> None:
    twins = pack(wide(), scheme)
    twins.packed.write(tmp_path / "packed")
    exact = waybill.load(tmp_path / "packed", dtype="float32")
    kernel = waybill.load(tmp_path / "packed", dtype="bfloat16")
    random = torch.Generator().manual_seed(1)
    prepared = 0
    for ours, theirs in zip(kernel.descendants(), exact.descendants(), strict=True):
        if not isinstance(ours, PackedMatrix) or not isinstance(theirs, PackedMatrix):
            continue
        prepared += not hasattr(ours, "codes")
        columns = theirs.codes.shape[1] * theirs._packing.group
        x = torch.randn(5, columns, generator=random).to(torch.bfloat16)
        want = theirs.product(x.float())
        scales = theirs.scales.float().repeat_interleave(theirs._packing.group, 1)
        # (code - middle) · scale + offset: scale and offset are rounded to 8 significant bits each, the weight or a
        # group's sum at most once more, and the product once. Codes and zero points are at most `middle` from it.
        middle = 1 << (scheme.bits - 1)
        bound = (x.float().abs() @ (3 * middle * scales).T + want.abs()) / 256
        assert ((ours.product(x).float() - want).abs() <= bound).all()
    assert prepared == 8


def test_the_4_bit_kernel_is_as_close_as_the_float_twin_in_bfloat16(tmp_path: Path) -> None:
    twins = pack(wide(), Scheme("gptq"))
    packed, dense = twins.packed.write(tmp_path / "packed"), twins.dense.write(tmp_path / "dense")
    exact = logits(waybill.load(dense, dtype="float32"))
    rounded = (logits(waybill.load(dense, dtype="bfloat16")).float() - exact).square().mean().sqrt()
    kernel = (logits(waybill.load(packed, dtype="bfloat16")).float() - exact).square().mean().sqrt()
    assert 0 < kernel < 3 * rounded  # the twin rounds each weight once; the kernel a scale, an offset and a sum
    assert kernel < 0.1 * exact.square().mean().sqrt()
