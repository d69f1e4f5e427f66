"""MXFP4 (OCP microscaling formats): 4-bit floats, and a power of two for every 32 of them along K.

gpt-oss stores banks of experts so: `_blocks` U8 [E, N, K/32, 16], two codes a byte, the first in the low bits, and
`_scales` U8 [E, N, K/32], 2**(byte - 127). compressed-tensors writes the same numbers without the axis of blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from waybill.checkpoint import TensorHeader
from waybill.codecs.checks import misfit, missing_roles
from waybill.codecs.protocol import Sidecars
from waybill.config.quantization import QuantizationConfig
from waybill.errors import WaybillError
from waybill.weights.codebook import CodebookLayout, CodebookWeight
from waybill.weights.lazy import stored

BLOCK = 32
"""Elements of K a scale covers."""
EXPONENTS = ("U8", "F8_E8M0")


class MXFP4:
    """blocks U8 [..., N, K/32, 16], scales U8 [..., N, K/32]."""

    roles = frozenset({"blocks", "scales"})

    def check(self, name: str, sidecars: Sidecars, config: QuantizationConfig) -> Sequence[WaybillError]:
        """Both parts, their dtypes, and that there is a scale for every block."""
        return list(missing_roles(name, sidecars, "blocks", "scales")) or list(_misfits(name, sidecars, config))

    def normalize(self, name: str, sidecars: Sidecars, config: QuantizationConfig) -> CodebookWeight:
        """The stored bytes, without the axis of blocks."""
        return mxfp4_weight(sidecars["blocks"], sidecars["scales"])


def mxfp4_weight(codes: TensorHeader, scales: TensorHeader) -> CodebookWeight:
    """The record of bytes [..., N, K/2], or [..., N, K/32, 16], and exponents [..., N, K/32]."""
    *rows, blocks = scales.shape
    return CodebookWeight(
        layout=CodebookLayout("E2M1", 1, BLOCK),
        codes=stored(codes._replace(shape=(*rows, blocks * BLOCK // 2))),
        scales=stored(scales._replace(dtype="F8_E8M0")),
    )


def mxfp4_misfits(name: str, sidecars: Sidecars, config: QuantizationConfig) -> Iterator[WaybillError]:
    """What the headers of rows without an axis of blocks break: `weight_packed` and `weight_scale`."""
    codes, scales = sidecars["weight_packed"], sidecars["weight_scale"]
    if codes.dtype != "U8" or len(codes.shape) != 2 or 0 in codes.shape or codes.shape[1] % (BLOCK // 2):
        yield misfit(name, sidecars, "weight_packed", "U8[N, K/2]", config)
    elif scales.dtype not in EXPONENTS or scales.shape != (codes.shape[0], codes.shape[1] * 2 // BLOCK):
        yield misfit(name, sidecars, "weight_scale", f"U8[{codes.shape[0]}, {codes.shape[1] * 2 // BLOCK}]", config)


def _misfits(name: str, sidecars: Sidecars, config: QuantizationConfig) -> Iterator[WaybillError]:
    blocks, scales = sidecars["blocks"], sidecars["scales"]
    if blocks.dtype != "U8" or len(blocks.shape) not in (3, 4) or blocks.shape[-1] != BLOCK // 2 or 0 in blocks.shape:
        yield misfit(name, sidecars, "blocks", f"U8[N, K/{BLOCK}, {BLOCK // 2}]", config)
    elif scales.dtype not in EXPONENTS or scales.shape != blocks.shape[:-1]:
        yield misfit(name, sidecars, "scales", f"U8[{', '.join(map(str, blocks.shape[:-1]))}]", config)
