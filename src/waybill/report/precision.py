"""What numbers a weight is stored as: the one thing that every picture of a report is coloured by."""

from __future__ import annotations

import re
from typing import NamedTuple

from waybill.config.quantization import QuantizationConfig
from waybill.plan.parameter import AffinePacking, Packing


class Precision(NamedTuple):
    """A kind of number: the style it is drawn in, what it is called in a cell, and in full."""

    style: str
    short: str
    name: str


FLOATS = {
    "F32": Precision("f32", "f32", "float32"),
    "BF16": Precision("bf16", "b16", "bfloat16"),
    "F16": Precision("f16", "f16", "float16"),
    "F8_E4M3": Precision("f8", "f8", "FP8"),
    "F8_E5M2": Precision("f8", "f8", "FP8"),
    "I8": Precision("i8", "i8", "8-bit"),
}
"""By the dtype of what is stored plainly."""
MXFP4 = Precision("f4", "mx4", "MXFP4")
MIXED = Precision("other", "…", "several")
WIDTHS = (2, 4, 8)
"""Bits of integers that have a style of their own; others take that of the next wider."""


def stored_as(dtype: str) -> Precision:
    """What is stored plainly in a dtype, or in blocks of integers that are named by their bits: Q4_K."""
    if (blocks := re.fullmatch(r"I?Q(\d)_\w+", dtype)) is not None:
        return _codes(int(blocks[1]), floating=False)._replace(short=f"q{blocks[1]}", name=dtype)
    return FLOATS.get(dtype) or Precision("other", dtype.lower()[:4], dtype)


def packed_as(how: Packing | QuantizationConfig) -> Precision:
    """What a packing says of its codes, or metadata where the disk could not be understood."""
    if isinstance(how, QuantizationConfig):
        return _codes(how.bits, floating=how.is_floating)
    if isinstance(how, AffinePacking):
        return _codes(how.bits, floating=False)
    return _codes(how.layout.bits, floating=True)


def _codes(bits: int, *, floating: bool) -> Precision:
    if floating:
        return MXFP4 if bits == 4 else FLOATS["F8_E4M3"]
    width = next((width for width in WIDTHS if width >= bits), WIDTHS[-1])
    return Precision(f"i{width}", f"i{bits}", f"{bits}-bit")
