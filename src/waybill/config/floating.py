"""Metadata of weights that are small floats: FP8 as transformers and GPTQModel write it, and MXFP4."""

from __future__ import annotations

from waybill.config.fields import Fields
from waybill.config.match import Matcher, fp8_exclusions, gptq_dynamic
from waybill.config.quantization import ComponentQuantizationPlan, QuantizationConfig
from waybill.errors import BadConfig, UnsupportedQuantization

KNOWN = {"fmt": ("e4m3", "e5m2"), "expert_dtype": ("fp8",), "scale_fmt": ("float", "ue8m0")}
"""What fields of FP8 metadata may say, if they are there."""
GPTQMODEL = {
    "format": ("float8_e4m3fn", "float8_e5m2"),
    "weight_scale_method": ("tensor", "row", "block"),
    "weight_scale_semantics": ("inverse",),
}
"""What GPTQModel's say, and nobody else's: there scales divide."""
ACTIVATION_TENSORS = {
    "activation_scale": "scales of activations, which are not rounded here; the weights keep their values"
}
"""What lies beside weights for the producer's runtime, and why nothing is made of it."""


def fp8_plan(fields: Fields) -> ComponentQuantizationPlan:
    """`quant_method: fp8`: a scale for each block; where `weight_block_size` is null, for each tensor or row."""
    divides = any(fields.raw.get(key) is not None for key in GPTQMODEL)
    for key, choices in (KNOWN | GPTQMODEL if divides else KNOWN).items():
        stated = fields.raw.get(key)
        if stated not in choices and (stated is not None or key in GPTQMODEL):
            fields.problems.append(
                UnsupportedQuantization(
                    "the form of FP8 is not supported",
                    where=f"{fields.where}.{key}",
                    expected=" | ".join(choices),
                    found=repr(stated)[:120],
                    fix="use another export of this model, or the float checkpoint it was made from",
                )
            )
    whole = (1, -1) if fields.raw.get("weight_scale_method") == "row" else (-1, -1)
    rows, columns = _block_size(fields) or whole
    return ComponentQuantizationPlan(
        layout=QuantizationConfig(
            method="fp8", bits=8, group_size=columns, symmetric=True, scale_rows=rows, divides=divides
        ),
        modules_to_not_convert=_modules(fields, "modules_to_not_convert"),
        overrides=gptq_dynamic([], fields.where),
        within=_modules(fields, "modules_to_convert") if fields.raw.get("modules_to_convert") else None,
        heads={"experts": True},
        activation_tensors=ACTIVATION_TENSORS,
    )


def mxfp4_plan(fields: Fields) -> ComponentQuantizationPlan:
    """`quant_method: mxfp4`: banks of experts, and nothing else."""
    return ComponentQuantizationPlan(
        layout=QuantizationConfig(method="mxfp4", bits=4, group_size=32, symmetric=True),
        modules_to_not_convert=_modules(fields, "modules_to_not_convert"),
        overrides=gptq_dynamic([], fields.where),
        heads={"experts": True, "linear": False},
    )


def _modules(fields: Fields, key: str) -> Matcher:
    """A list of modules, or null."""
    names = [] if fields.raw.get(key) is None else list(fields.strings(key))
    return fp8_exclusions(names, f"{fields.where}.{key}")


def _block_size(fields: Fields) -> tuple[int, int] | None:
    """weight_block_size: rows and columns; None when it is null."""
    stated = fields.raw.get("weight_block_size")
    if stated is None:
        return None
    if isinstance(stated, list) and len(stated) == 2 and all(type(size) is int and size > 0 for size in stated):
        return stated[0], stated[1]
    fields.problems.append(
        BadConfig(
            "the size of blocks cannot be read",
            where=f"{fields.where}.weight_block_size",
            expected="[rows, columns], or null for one scale a tensor",
            found=repr(stated)[:120],
            fix="state it as the producer published it",
        )
    )
    return None
