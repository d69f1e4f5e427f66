"""The table of producers in docs/formats.md: every cell is a checkpoint that loads, or one that is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import numpy as np
import pytest

import waybill
from checkpoints import BF16, Recipe, lively, llama, qwen3_moe
from floating import Blocks, pack_fp8, pack_mxfp4
from packing import Scheme, compressed_group, pack
from waybill.errors import WaybillError

PAGE = Path(__file__).parents[2] / "docs" / "formats.md"
HEADER = "| written by | read | refused by name | in packages |\n"
DOWN = "model.layers.0.mlp.down_proj"
LISTED = [
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
]
PLACES = {(True, True): "CPU and CUDA", (True, False): "CPU only", (False, False): "engine only"}
Make = Callable[[], Recipe]


def packed(scheme: Scheme, **options: object) -> Make:
    return lambda: pack(lively(llama(np.float32)), scheme, **options).packed  # type: ignore[arg-type]


def stating(make: Make, **changes: object) -> Make:
    """The same checkpoint with other metadata."""

    def changed() -> Recipe:
        recipe = make()
        recipe.config["quantization_config"] |= changes
        return recipe

    return changed


def floating(blocks: Blocks, keep: Collection[str] = ()) -> Make:
    return lambda: pack_fp8(lively(llama(np.float32)), blocks, keep=keep).packed


def mxfp4() -> Recipe:
    return pack_mxfp4(lively(qwen3_moe(np.float32, banks=True))).packed


def without(make: Make, ending: str) -> Make:
    """The same checkpoint without tensors of these names."""

    def left() -> Recipe:
        recipe = make()
        return Recipe(recipe.config, {name: t for name, t in recipe.tensors.items() if not name.endswith(ending)})

    return left


def some_modules_listed() -> Recipe:
    downs = [f"model.layers.{layer}.mlp.down_proj" for layer in range(2)]
    recipe = packed(Scheme("gptq"), keep=downs)()
    recipe.config["quantization_config"] |= {"modules_in_block_to_quantize": [LISTED], "dynamic": {}}
    return recipe


def scales_of_several_rows() -> Recipe:
    """Three of a layer's weights with a scale for each row, for each 16 rows of 32 columns, and for the whole."""
    recipe = pack(lively(llama(np.float32)), Scheme("ct_int", bits=8, group=-1, symmetric=True)).packed
    groups = recipe.config["quantization_config"]["config_groups"]
    for module, changes, shape in (
        (DOWN, {"strategy": "block", "block_structure": [16, 32]}, (4, 3)),
        (DOWN.replace("down", "up"), {"strategy": "tensor"}, (1,)),
    ):
        weights = groups["group_0"]["weights"] | changes
        groups[module] = groups["group_0"] | {"targets": [module], "weights": weights}
        recipe.tensors[f"{module}.weight_scale"] = np.full(shape, 0.01, np.float16)
    return recipe


def scheme_stating(**changes: object) -> Make:
    """The same weights, and other words about them."""
    group = compressed_group(CT, ["Linear"])
    return stating(packed(CT), config_groups={"group_0": group | {"weights": group["weights"] | changes}})


def by_expression() -> dict[str, object]:
    """Everything but one projection, by a name that begins like it."""
    others = r"re:model\.layers\.(1|0\.(self_attn|mlp\.(gate|up)_proj))"
    return {"group_0": compressed_group(CT, [others])}


FP8 = "DeepSeek, Qwen, transformers (FP8)"
GPTQ, AWQ, OLIVE, AUTO_ROUND, CT = (Scheme(form) for form in ("gptq", "awq", "olive", "auto_round", "ct"))
READ: dict[tuple[str, str], Make] = {
    ("GPTQModel, AutoGPTQ", "`gptq`"): packed(GPTQ),
    ("GPTQModel, AutoGPTQ", "`gptq_v2`"): packed(Scheme("gptq_v2")),
    ("GPTQModel, AutoGPTQ", "2 bits"): packed(Scheme("gptq", bits=2)),
    ("GPTQModel, AutoGPTQ", "4 bits"): packed(Scheme("gptq", bits=4)),
    ("GPTQModel, AutoGPTQ", "8 bits"): packed(Scheme("gptq", bits=8)),
    ("GPTQModel, AutoGPTQ", "groups of 16"): packed(Scheme("gptq", group=16)),
    ("GPTQModel, AutoGPTQ", "group −1"): packed(Scheme("gptq", group=-1)),
    ("GPTQModel, AutoGPTQ", "asymmetric"): packed(Scheme("gptq", symmetric=False)),
    ("GPTQModel, AutoGPTQ", "`dynamic` rules"): packed(GPTQ, overrides={DOWN: {"bits": 8}}),
    ("GPTQModel, AutoGPTQ", "`modules_in_block_to_quantize`"): some_modules_listed,
    ("AutoAWQ", "`gemm`"): packed(AWQ),
    ("AutoAWQ", "`modules_to_not_convert`"): packed(AWQ, keep=[DOWN]),
    ("Olive", "`.qweight` names"): packed(Scheme("olive_dotted")),
    ("Olive", "`_qweight` names"): packed(OLIVE),
    ("Olive", "2 bits"): packed(Scheme("olive", bits=2)),
    ("Olive", "4 bits"): packed(Scheme("olive", bits=4)),
    ("Olive", "8 bits"): packed(Scheme("olive", bits=8)),
    ("Olive", "packed embeddings"): packed(OLIVE, table=True),
    ("Olive", "packed heads"): packed(OLIVE, head=True),
    ("Olive", "tied packed tables"): packed(OLIVE, table=True, head=True, tie=True),
    ("Olive", "expert banks"): lambda: pack(lively(qwen3_moe(np.float32, banks=True)), OLIVE).packed,
    ("Olive", "`overrides`"): packed(OLIVE, overrides={DOWN: {"bits": 8}}),
    ("auto-round", "its GPTQ form"): packed(AUTO_ROUND),
    ("auto-round", "its AWQ form"): stating(
        packed(AWQ), quant_method="auto-round", packing_format="auto_round:auto_awq", sym=False
    ),
    ("auto-round", "`extra_config`"): packed(AUTO_ROUND, overrides={DOWN: {"bits": 8}}),
    ("llm-compressor", "`pack-quantized`"): packed(CT),
    ("llm-compressor", "`int-quantized`"): packed(Scheme("ct_int", bits=8)),
    ("llm-compressor", "`float-quantized`"): floating(Blocks(compressed=True)),
    ("llm-compressor", "`mxfp4-pack-quantized`"): lambda: pack_mxfp4(lively(llama(np.float32)), compressed=True).packed,
    ("llm-compressor", "2 bits"): packed(Scheme("ct", bits=2)),
    ("llm-compressor", "4 bits"): packed(Scheme("ct", bits=4)),
    ("llm-compressor", "8 bits"): packed(Scheme("ct", bits=8)),
    ("llm-compressor", "groups of 16"): packed(Scheme("ct", group=16)),
    ("llm-compressor", "one scale a row, block or tensor"): scales_of_several_rows,
    ("llm-compressor", "zero points of release 0.8"): packed(Scheme("ct_old")),
    ("llm-compressor", "packed embeddings"): packed(CT, table=True),
    ("llm-compressor", "packed heads"): packed(CT, head=True),
    ("llm-compressor", "`ignore`"): packed(CT, keep=[DOWN]),
    ("llm-compressor", "`targets`"): stating(packed(CT, keep=[DOWN]), ignore=[], config_groups=by_expression()),
    ("llm-compressor", "several groups"): packed(CT, overrides={DOWN: {"bits": 8}}),
    ("llm-compressor", "presets by name"): stating(
        packed(Scheme("ct", group=128, symmetric=True)), config_groups={"W4A16": ["Linear"]}
    ),
    (FP8, "`weight_block_size`"): floating(Blocks()),
    (FP8, "short last blocks"): floating(Blocks(48, 40)),
    (FP8, "one scale a tensor"): floating(Blocks(-1, -1)),
    (FP8, "bfloat16 scales"): floating(Blocks(scales=BF16)),
    (FP8, "`modules_to_not_convert`"): floating(Blocks(), keep=[DOWN]),
    (FP8, "expert banks"): lambda: pack_fp8(lively(qwen3_moe(np.float32, banks=True)), Blocks(16, 16)).packed,
    ("GPTQModel (FP8)", "`block`"): floating(Blocks(gptqmodel=True)),
    ("GPTQModel (FP8)", "`row`"): floating(Blocks(1, -1, gptqmodel=True)),
    ("GPTQModel (FP8)", "`tensor`"): floating(Blocks(-1, -1, gptqmodel=True)),
    ("gpt-oss (MXFP4)", "expert banks"): mxfp4,
}
REFUSED: dict[tuple[str, str], tuple[Make, str, str]] = {
    ("GPTQModel, AutoGPTQ", "act-order"): (stating(packed(GPTQ), desc_act=True), "act-order", "desc_act"),
    ("GPTQModel, AutoGPTQ", "Marlin"): (
        stating(packed(GPTQ), checkpoint_format="marlin"), "unsupported-quantization", "marlin",
    ),
    ("GPTQModel, AutoGPTQ", "3 bits"): (stating(packed(GPTQ), bits=3), "unsupported-quantization", "3 bits"),
    ("AutoAWQ", "`gemv`"): (stating(packed(AWQ), version="gemv"), "unsupported-quantization", "gemv"),
    ("AutoAWQ", "`gemv_fast`"): (stating(packed(AWQ), version="gemv_fast"), "unsupported-quantization", "gemv_fast"),
    ("AutoAWQ", "llm-awq"): (stating(packed(AWQ), backend="llm-awq"), "unsupported-quantization", "llm-awq"),
    ("Olive", "one scale for a whole tensor"): (stating(packed(OLIVE), group_size=0), "packing-mismatch", "qweight"),
    ("auto-round", "3 bits"): (stating(packed(AUTO_ROUND), bits=3), "unsupported-quantization", "3 bits"),
    ("auto-round", "other packing formats"): (
        stating(packed(AUTO_ROUND), packing_format="auto_round:mlx"), "unsupported-quantization", "auto_round:mlx",
    ),
    ("llm-compressor", "act-order"): (scheme_stating(actorder="group"), "act-order", "actorder"),
    ("llm-compressor", "3 bits"): (scheme_stating(num_bits=3), "unsupported-quantization", "3 bits"),
    **{
        ("llm-compressor", f"`{form}`"): (
            stating(packed(CT), config_groups={"g": compressed_group(CT, ["Linear"]) | {"format": form}}),
            "unsupported-quantization", form,
        )
        for form in ("nvfp4-pack-quantized", "mxfp8-quantized")
    },
    ("llm-compressor", "sparse formats"): (
        stating(packed(CT), sparsity_config={"format": "sparse-bitmask"}), "unsupported-quantization", "sparse-bitmask",
    ),
    ("llm-compressor", "transforms"): (
        stating(packed(CT), transform_config={"config_groups": {"R1": {}}}),
        "unsupported-quantization", "transform_config",
    ),
    (FP8, "4-bit experts"): (stating(floating(Blocks()), expert_dtype="fp4"), "unsupported-quantization", "fp4"),
    (FP8, "8-bit floats without scales"): (without(floating(Blocks()), "_scale_inv"), "incomplete-weight", "scale_inv"),
    ("GPTQModel (FP8)", "other scale semantics"): (
        stating(floating(Blocks(gptqmodel=True)), weight_scale_semantics="direct"), "unsupported-quantization",
        "direct",
    ),
    ("gpt-oss (MXFP4)", "a bank without its scales"): (without(mxfp4, "_scales"), "incomplete-weight", "scales"),
}  # fmt: skip


def rows() -> Iterator[list[list[str]]]:
    table = PAGE.read_text("utf-8").partition(HEADER)[2].partition("\n\n")[0]
    for line in table.splitlines()[1:]:
        yield [re.split(r";\s*", cell.strip()) for cell in line.strip("|").split("|")]


def test_the_table_says_what_is_tested_and_nothing_else() -> None:
    assert [(writer, cell) for [writer], read, _, _ in rows() for cell in read] == list(READ)
    assert [(writer, cell) for [writer], _, refused, _ in rows() for cell in refused] == list(REFUSED)


@pytest.mark.parametrize("cell", READ, ids=" ".join)
def test_what_is_read_loads_and_stays_packed(cell: tuple[str, str], tmp_path: Path) -> None:
    model = waybill.load(READ[cell]().write(tmp_path), dtype="float32")
    assert any(name.endswith(".codes") for name in model.state_dict())


@pytest.mark.parametrize("cell", READ, ids=" ".join)
def test_a_package_is_planned_for_where_the_table_says(cell: tuple[str, str], tmp_path: Path) -> None:
    [usual, *exceptions] = next(where for [writer], _, _, where in rows() if writer == cell[0])
    special = {name: where for where, name in (line.split(": ") for line in exceptions)}
    folder = READ[cell]().write(tmp_path)
    plain, widened = (
        PLACES[
            not waybill.plan(folder, "onnx", widen_mxfp4=widen).problems,
            not waybill.plan(folder, "onnx", ep="cuda", dtype="float16", widen_mxfp4=widen).problems,
        ]
        for widen in (False, True)
    )
    place = plain if plain == widened else f"with `--widen-mxfp4`: {widened}"
    assert place == special.get(cell[1], usual)


@pytest.mark.parametrize("cell", REFUSED, ids=" ".join)
def test_what_is_refused_is_named(cell: tuple[str, str], tmp_path: Path) -> None:
    make, code, word = REFUSED[cell]
    with pytest.raises(WaybillError) as refused:
        waybill.load(make().write(tmp_path))
    assert f"[{code}]" in str(refused.value)
    assert word in str(refused.value)
