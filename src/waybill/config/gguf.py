"""GGUF's block types as layouts: which are an exact affine form, and why the others are not.

A type is its own metadata: bits of the container, elements a scale, and the zero point are the same in every file.
"""

from __future__ import annotations

from waybill.config.quantization import QuantizationConfig

METHOD = "gguf"


def _layout(bits: int, group: int, symmetric: bool) -> QuantizationConfig:
    return QuantizationConfig(method=METHOD, bits=bits, group_size=group, symmetric=symmetric)


LAYOUTS = {
    "Q4_0": _layout(4, 32, True),
    "Q8_0": _layout(8, 32, True),
    "Q5_0": _layout(8, 32, False),  # 5 bits, whose midpoint is 16
    "Q6_K": _layout(8, 16, False),  # 6 bits, 32
    "Q3_K": _layout(4, 16, False),  # 3 bits, 4
}
"""The types whose values are (code - zero) · scale, and the smallest container that holds their codes as they are."""

WITH_MINIMUM = ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K")
"""The types that mean code · scale + minimum: floats, when that is asked for."""
_CODEBOOK = "codes are places in a table of values, which are not evenly spaced"
REASONS = {
    **dict.fromkeys(WITH_MINIMUM, "code · scale + minimum; the minimum is no whole number of scales"),
    **dict.fromkeys(("Q8_1", "Q8_K"), "a form of activations, not of weights"),
    **dict.fromkeys(("TQ1_0", "TQ2_0", "Q1_0"), "ternary and binary codes, which no kernel here has"),
    **dict.fromkeys(("MXFP4", "NVFP4"), "codes are 4-bit floats, which are not evenly spaced"),
}


def reason(block_type: str) -> str:
    """Why a type has no exact affine form, in words."""
    return REASONS.get(block_type, _CODEBOOK)
