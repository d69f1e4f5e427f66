"""Decoders whose layers have inputs of their own: their logits, and the parts of them that stay float among 4 bits.

The reference runs transformers' own layers; what is added to each is compared with transformers' Gemma 4 text model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextDecoderLayer, Gemma4TextModel

import waybill
from checkpoints import Array, Recipe, lively, llama, per_layer, qwen2, qwen3, qwen3_moe
from packing import Scheme, Twins, pack
from parity.tolerances import LOGITS_FLOAT16_ONNX, LOGITS_FLOAT32
from per_layer import GATE, MODEL_PROJECTION, PROJECTION, Inputs, Model
from sessions import Package
from waybill.config import read_model_config
from waybill.errors import Refused
from waybill.onnx.graphs.decoder import build_decoder
from waybill.onnx.graphs.workbench import Workbench
from waybill.onnx.options import Options

PROMPTS = [[3, 17, 99, 4, 56], [8], [120, 7, 7, 31, 64, 2, 90, 11, 45]]
Block = dict[str, Any]


@torch.inference_mode()
def reference(recipe: Recipe) -> list[Array]:
    """Logits of every position of each prompt, [S, vocabulary]."""
    model = Model(recipe)
    return [model(input_ids=torch.tensor([prompt])).logits[0].numpy() for prompt in PROMPTS]


def export(checkpoint: Path, folder: Path, **options: Any) -> Package:
    waybill.build(checkpoint, exact=True, **options).save(folder)
    return Package(folder)


def assert_speaks(package: Package, expected: list[Array], atol: float = LOGITS_FLOAT32) -> None:
    """Every position's logits, of all prompts at once."""
    logits, _ = package.prefill(PROMPTS)
    for row, wanted in zip(logits, expected, strict=True):
        np.testing.assert_allclose(row[: len(wanted)].astype(np.float32), wanted, atol=atol, rtol=0)


# The formula.


@torch.inference_mode()
def test_the_reference_makes_and_uses_inputs_as_the_model_does_that_they_come_from() -> None:
    layers, size, hidden, vocab = 3, 8, 32, 20
    config = Gemma4TextConfig(
        vocab_size=vocab, vocab_size_per_layer_input=vocab, hidden_size=hidden, hidden_size_per_layer_input=size,
        num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=1, head_dim=16, global_head_dim=16,
        intermediate_size=16, hidden_activation="silu", rms_norm_eps=1e-2, num_kv_shared_layers=0,
        layer_types=["full_attention"] * layers,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Gemma4TextModel(config).eval()
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape))
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    inputs = Inputs(tensors, config.to_dict())
    ids = torch.tensor([[3, 0, 19, 7]])
    embedded = tensors["model.embed_tokens.weight"][ids]
    own = inputs.make(ids)
    theirs = model.project_per_layer_inputs(embedded, model.get_per_layer_inputs(ids, embedded))
    torch.testing.assert_close(own, theirs)
    layer, h = model.layers[1], torch.randn(1, 4, hidden)
    assert isinstance(layer, Gemma4TextDecoderLayer)
    for silent in (layer.self_attn.o_proj, layer.mlp.down_proj):
        silent.weight.zero_()  # what is left of the layer is the block
    angles = model.rotary_emb(h, torch.arange(4)[None], "full_attention")
    out = layer(h.clone(), own[:, :, 1], shared_kv_states={}, position_embeddings=angles)
    torch.testing.assert_close(out, h + inputs.added(1, h, own[:, :, 1]))


# Float.

MODELS: dict[str, Callable[[], Recipe]] = {
    "llama": lambda: lively(per_layer(llama(np.float32))),
    "llama-more-rows-than-tokens": lambda: lively(per_layer(llama(np.float32), size=24, rows=150)),
    "llama-large-epsilon": lambda: lively(per_layer(llama(np.float32, rms_norm_eps=0.1))),
    "qwen2": lambda: lively(per_layer(qwen2(np.float32)), 1),
    "qwen3-tied": lambda: lively(per_layer(qwen3(np.float32)), 2),
    "qwen3-moe": lambda: lively(per_layer(qwen3_moe(np.float32, banks=True)), 3),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_float_package_speaks_as_the_reference_does(kind: str, tmp_path: Path) -> None:
    recipe = MODELS[kind]()
    checkpoint, expected = recipe.write(tmp_path / "checkpoint"), reference(recipe)
    assert_speaks(export(checkpoint, tmp_path / "all", logits="all"), expected)
    half = export(checkpoint, tmp_path / "half", logits="all", dtype="float16")
    assert_speaks(half, expected, LOGITS_FLOAT16_ONNX)
    last = export(checkpoint, tmp_path / "last")
    assert_speaks(last, [logits[-1:] for logits in expected])


def test_the_inputs_matter_in_every_layer() -> None:
    recipe = MODELS["llama"]()
    before = reference(recipe)
    for layer in range(recipe.config["num_hidden_layers"]):
        changed = Recipe(recipe.config, dict(recipe.tensors))
        name = f"model.layers.{layer}.{PROJECTION}.weight"
        changed.tensors[name] = recipe.tensors[name][::-1].copy()
        assert np.abs(reference(changed)[0] - before[0]).max() > 1000 * LOGITS_FLOAT32


@pytest.mark.parametrize("kind", ["llama", "qwen3-tied"])
def test_steps_with_a_cache_give_the_logits_of_every_position(kind: str, tmp_path: Path) -> None:
    recipe = MODELS[kind]()
    package, prompt = export(recipe.write(tmp_path / "checkpoint"), tmp_path / "package"), PROMPTS[-1]
    expected = reference(recipe)[-1]
    logits, cache = package.prefill([prompt[:4]])
    np.testing.assert_allclose(logits[0, 0], expected[3], atol=LOGITS_FLOAT32, rtol=0)
    for at in range(4, len(prompt)):
        logits, cache = package.step(np.array([[prompt[at]]]), np.ones((1, at + 1), np.int64), cache)
        np.testing.assert_allclose(logits[0, 0], expected[at], atol=LOGITS_FLOAT32, rtol=0)


def test_a_graph_that_is_given_embeddings_cannot_look_them_up() -> None:
    config, _, _ = read_model_config(MODELS["llama"]().config)
    assert config is not None
    with pytest.raises(ValueError, match="looked up by tokens"):
        build_decoder(config, Workbench({}, {}, "F32", Options()), embeds=True)


# Float among 4 bits.

FORMS = {"olive": Scheme("olive"), "gptq": Scheme("gptq"), "awq": Scheme("awq")}


def gates(recipe: Recipe, *layers: int) -> list[str]:
    """The modules of the block, of some layers or all."""
    chosen = layers or range(recipe.config["num_hidden_layers"])
    return [f"model.layers.{layer}.{name}" for layer in chosen for name in (GATE, PROJECTION)]


def everything_of(recipe: Recipe, *layers: int) -> list[str]:
    """All matrices of some layers."""
    paths = tuple(f"model.layers.{layer}." for layer in layers)
    return [
        name.removesuffix(".weight")
        for name, tensor in recipe.tensors.items()
        if name.startswith(paths) and tensor.ndim == 2
    ]


def stated(twins: Twins, form: str, change: Mapping[str, Any], *, entry: bool) -> Recipe:
    """The packed recipe, whose metadata says what is excluded by `change`: of the model, or of its decoder."""
    config = twins.packed.config
    block: Block = {**config.pop("quantization_config"), "modules_to_not_convert": None}
    block = {**block, **({"dynamic": {}} if form == "gptq" else {}), **change}
    config["component_quantization" if entry else "quantization_config"] = {"decoder": block} if entry else block
    return twins.packed


def kinds(package: Package) -> dict[str, str]:
    """Module to its product's operator and bits."""
    found = {}
    for node in package.graph:
        if node.op_type in ("FusedMatMul", "MatMulNBits"):
            bits = f"-{node.attributes['bits'].as_int()}" if "bits" in node.attributes else ""
            found[str(node.outputs[0].name)] = node.op_type + bits
    return found


def assert_kept(package: Package, recipe: Recipe, keep: list[str]) -> None:
    """The kept modules are float products, the head too, and all others have 4 bits; the tables are float."""
    dense = {"lm_head", *keep}
    found = {("lm_head" if name == "logits" else name): kind for name, kind in kinds(package).items()}
    assert dense <= found.keys()
    assert found == {name: "FusedMatMul" if name in dense else "MatMulNBits-4" for name in found}
    for layer in range(recipe.config["num_hidden_layers"]):
        path = f"model.layers.{layer}"
        assert {f"{path}.mlp.{name}_proj" for name in ("gate", "up", "down")} | {f"{path}.self_attn.o_proj"} <= set(
            found
        )
    assert MODEL_PROJECTION in found
    assert "GatherBlockQuantized" not in package.operators


EVERY = r"re:.*per_layer_(input_gate|projection)"
EXCLUSIONS: dict[str, tuple[str, bool, Callable[[list[str]], Block]]] = {
    "entry-olive-paths": ("olive", True, lambda keep: {"modules_to_not_convert": keep}),
    "entry-olive-regex": ("olive", True, lambda _: {"modules_to_not_convert": [EVERY]}),
    "entry-gptq-paths": ("gptq", True, lambda keep: {"modules_to_not_convert": keep}),
    "entry-gptq-regex": ("gptq", True, lambda _: {"modules_to_not_convert": [EVERY]}),
    "entry-gptq-dynamic": ("gptq", True, lambda _: {"dynamic": {r"-:.*\.per_layer_(input_gate|projection)$": {}}}),
    "entry-awq-paths": ("awq", True, lambda keep: {"modules_to_not_convert": keep}),
    "entry-awq-regex": ("awq", True, lambda _: {"modules_to_not_convert": [EVERY]}),
    "model-olive-substrings": ("olive", False, lambda _: {"modules_to_not_convert": [GATE, PROJECTION]}),
    "model-olive-regex": ("olive", False, lambda _: {"modules_to_not_convert": [EVERY]}),
    "model-gptq-paths": ("gptq", False, lambda keep: {"modules_to_not_convert": keep}),
    "model-gptq-dynamic": (
        "gptq", False, lambda keep: {"dynamic": {f"-:{re.escape(module)}$": {} for module in keep}}
    ),
    "model-gptq-dynamic-of-all": ("gptq", False, lambda _: {"dynamic": {r"-:.*per_layer_(input_gate|projection)": {}}}),
    "model-awq-paths": ("awq", False, lambda keep: {"modules_to_not_convert": keep}),
    "model-awq-regex": ("awq", False, lambda _: {"modules_to_not_convert": [EVERY]}),
}  # fmt: skip


@pytest.mark.parametrize("case", EXCLUSIONS)
def test_gate_and_projection_stay_float_among_4_bits(case: str, tmp_path: Path) -> None:
    form, entry, excluded = EXCLUSIONS[case]
    recipe = MODELS["llama"]()
    keep = gates(recipe)
    twins = pack(recipe, FORMS[form], keep=keep)
    checkpoint = stated(twins, form, excluded(keep), entry=entry).write(tmp_path / "checkpoint")
    package = export(checkpoint, tmp_path / "package", logits="all")
    assert_kept(package, recipe, keep)
    assert_speaks(package, reference(twins.dense))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_everything_may_be_packed_the_table_of_inputs_too(bits: int, tmp_path: Path) -> None:
    twins = pack(MODELS["llama-more-rows-than-tokens"](), Scheme("olive", bits=bits, group=16), table=True)
    package = export(twins.packed.write(tmp_path / "checkpoint"), tmp_path / "package", logits="all")
    assert package.operators.count("GatherBlockQuantized") == 2
    assert set(kinds(package).values()) == {"FusedMatMul", f"MatMulNBits-{bits}"}  # the head is float
    assert_speaks(package, reference(twins.dense))


# A path means itself and what is below it.


def deep() -> Recipe:
    return lively(per_layer(llama(np.float32, num_hidden_layers=12)))


PATHS: dict[str, tuple[str, bool, tuple[int, ...], Block]] = {
    "entry-olive": ("olive", True, (1,), {"modules_to_not_convert": ["model.layers.1"]}),
    "entry-gptq": ("gptq", True, (1,), {"modules_to_not_convert": ["model.layers.1"]}),
    "entry-awq": ("awq", True, (1,), {"modules_to_not_convert": ["model.layers.1"]}),
    "model-awq": ("awq", False, (1,), {"modules_to_not_convert": ["model.layers.1"]}),
    "model-gptq": ("gptq", False, (1,), {"dynamic": {r"-:model\.layers\.1\.": {}}}),
    "model-olive-means-any-name-with-it": ("olive", False, (1, 10, 11), {"modules_to_not_convert": ["model.layers.1"]}),
}


@pytest.mark.parametrize("case", PATHS)
def test_layer_1_is_not_layer_10(case: str, tmp_path: Path) -> None:
    form, entry, layers, excluded = PATHS[case]
    recipe = deep()
    keep = everything_of(recipe, *layers)
    twins = pack(recipe, FORMS[form], keep=keep)
    checkpoint = stated(twins, form, excluded, entry=entry).write(tmp_path / "checkpoint")
    package = export(checkpoint, tmp_path / "package", logits="all")
    found = kinds(package)
    for layer in range(12):
        operator = "FusedMatMul" if layer in layers else "MatMulNBits-4"
        assert {found[name] for name in (*gates(recipe, layer), f"model.layers.{layer}.mlp.down_proj")} == {operator}
    assert_speaks(package, reference(twins.dense), 10 * LOGITS_FLOAT32)


# Metadata and disk disagree.


def refusal(recipe: Recipe, folder: Path) -> Any:
    with pytest.raises(Refused) as refused:
        waybill.build(recipe.write(folder), exact=True)
    (found, *_) = refused.value.problems
    assert {problem.code for problem in refused.value.problems} == {"packing-mismatch"}
    return found


@pytest.mark.parametrize(
    ("form", "entry", "change", "pattern"),
    [
        ("olive", True, {"modules_to_not_convert": [f"model.layers.1.{GATE}"]}, f"model.layers.1.{GATE}"),
        ("olive", True, {"modules_to_not_convert": [rf"re:.*\.1\.{GATE}"]}, rf"re:.*\.1\.{GATE}"),
        ("olive", False, {"modules_to_not_convert": [f"1.{GATE}"]}, f"1.{GATE}"),
        ("awq", False, {"modules_to_not_convert": [f"model.layers.1.{GATE}"]}, f"model.layers.1.{GATE}"),
        ("gptq", False, {"dynamic": {f"-:.*1.{GATE}": {}}}, f".*1.{GATE}"),
    ],
)
def test_what_is_excluded_and_packed_on_disk_is_refused_by_pattern_and_module(
    form: str, entry: bool, change: Block, pattern: str, tmp_path: Path
) -> None:
    recipe = stated(pack(MODELS["llama"](), FORMS[form]), form, change, entry=entry)
    found = refusal(recipe, tmp_path)
    assert found.what == "a weight is packed on disk, and float by the metadata"
    assert found.where.startswith(f"model.layers.1.{GATE}.weight (")
    assert found.expected.startswith("a float weight, by the ")
    assert found.expected.endswith(repr(pattern))


@pytest.mark.parametrize(
    ("form", "entry", "change", "reason"),
    [
        ("olive", True, {"modules_to_not_convert": ["model.layers.0"]}, "the model-wide layout"),
        ("olive", True, {"overrides": {rf"re:.*\.1\.{GATE}": {"bits": 4}}}, rf"the rule 're:.*\\.1\\.{GATE}'"),
        ("olive", True, {"overrides": {f"model.layers.1.{GATE}": {"bits": 4}}}, f"the rule 'model.layers.1.{GATE}'"),
        ("gptq", False, {"dynamic": {f"+:.*1.{GATE}": {"bits": 4}}}, f"the rule '.*1.{GATE}'"),
        ("awq", False, {"modules_to_not_convert": [f"model.layers.0.{GATE}"]}, "the model-wide layout"),
    ],
)
def test_what_is_packed_by_the_metadata_and_float_on_disk_is_refused_by_rule_and_module(
    form: str, entry: bool, change: Block, reason: str, tmp_path: Path
) -> None:
    recipe = MODELS["llama"]()
    keep = [f"model.layers.1.{GATE}"]
    if change.get("modules_to_not_convert") == ["model.layers.0"]:
        keep += everything_of(recipe, 0)
    elif "modules_to_not_convert" in change:
        keep += [f"model.layers.0.{GATE}"]
    found = refusal(stated(pack(recipe, FORMS[form], keep=keep), form, change, entry=entry), tmp_path)
    assert found.what == "weights are float on disk, and packed by the metadata"
    assert found.where.startswith(f"model.layers.1.{GATE}.weight (")
    assert found.expected.endswith(f"by {reason}")
