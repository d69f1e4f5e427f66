"""GGUF's block types as layouts: which are read, and why the others are not.

A type is its own metadata: bits of the container and elements a scale are the same in every file.
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
    "Q4_1": _layout(4, 32, False),
    "Q5_1": _layout(8, 32, False),
    "Q2_K": _layout(2, 16, False),
    "Q4_K": _layout(4, 32, False),
    "Q5_K": _layout(8, 32, False),
    "MXFP4": _layout(4, 32, True),
    "IQ4_NL": _layout(4, 32, True),
    "IQ4_XS": _layout(4, 32, True),
}
"""The types that are read, and the smallest container that holds their codes as they are."""
WITH_MINIMUM = frozenset({"Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K"})
"""Those that mean code · scale + minimum."""
CODEBOOKS = {"MXFP4": "E2M1", "IQ4_NL": "IQ4", "IQ4_XS": "IQ4"}
"""Those whose codes are places in a table of values, and its name. The others mean (code - zero) · scale."""
AS_FLOATS = WITH_MINIMUM | CODEBOOKS.keys()
"""Those that are floats when that is asked for."""

_REASONS = {
    **dict.fromkeys(("Q8_1", "Q8_K"), "a form of activations, not of weights"),
    **dict.fromkeys(("TQ1_0", "TQ2_0", "Q1_0"), "ternary and binary codes, which no kernel here has"),
    "NVFP4": "4-bit floats with scales that have scales",
}


def reason(block_type: str) -> str:
    """Why a type is not read, in words."""
    return _REASONS.get(block_type, "codes are places in a table of vectors of values")
