"""AWQ, version gemm: 4-bit words packed along N in the order 0 2 4 6 1 3 5 7, rows are K; zero points the same.

Written by AutoAWQ and auto-round. Zero points are stored as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from waybill.codecs.checks import SCALE_DTYPES, groups_of, misfit, missing_roles
from waybill.codecs.decoders import RowNibbles, ZeroPoints
from waybill.codecs.protocol import Sidecars
from waybill.codecs.words import AWQ_ORDER
from waybill.config.quantization import QuantizationConfig
from waybill.errors import WaybillError
from waybill.weights.affine import AffineLayout, AffinePackedWeight
from waybill.weights.lazy import Decoded, stored


class AWQ:
    """qweight I32 [K, N/8], qzeros I32 [G, N/8], scales [G, N]."""

    roles = frozenset({"qweight", "scales", "qzeros", "g_idx"})

    def check(self, name: str, sidecars: Sidecars, config: QuantizationConfig) -> Sequence[WaybillError]:
        """Roles, dtypes, and that N, K and G agree among all of them."""
        problems = list(missing_roles(name, sidecars, "qweight", "scales", "qzeros"))
        return problems or list(_shapes(name, sidecars, config))

    def normalize(self, name: str, sidecars: Sidecars, config: QuantizationConfig) -> AffinePackedWeight:
        """Nibbles transpose within 8 × 8 blocks, then words."""
        qweight = sidecars["qweight"]
        in_features, outputs = qweight.shape[0], qweight.shape[1] * 8
        group, groups = groups_of(in_features, config)
        at = (qweight.file, qweight.offset)
        midpoint_of = name if config.symmetric else ""
        zeros = ZeroPoints(stored(sidecars["qzeros"]), 4, True, order=AWQ_ORDER, midpoint_of=midpoint_of)
        codes = Decoded(name, "U8", (outputs, groups, group // 2), *at, RowNibbles(stored(qweight), group))
        return AffinePackedWeight(
            layout=AffineLayout(bits=4, group=group, symmetric=config.symmetric),
            in_features=in_features,
            codes=stored(codes),
            scales=stored(sidecars["scales"]).transpose(),
            zero_points=stored(Decoded(name, "U8", (outputs, groups), *at, zeros)),
        )


def _shapes(name: str, sidecars: Sidecars, config: QuantizationConfig) -> Iterator[WaybillError]:
    qweight, scales, qzeros = sidecars["qweight"], sidecars["scales"], sidecars["qzeros"]
    if qweight.dtype != "I32" or len(qweight.shape) != 2 or "g_idx" in sidecars:
        yield misfit(name, sidecars, "qweight", "I32[K, N/8] and no g_idx", config)
        return
    in_features, words = qweight.shape
    if config.group_size == 0:
        yield misfit(name, sidecars, "scales", "a group size", config)
        return
    group, groups = groups_of(in_features, config)
    if in_features % group or group % 16:
        yield misfit(name, sidecars, "qweight", f"a K that groups of {group} (a multiple of 16) divide", config)
        return
    if scales.dtype not in SCALE_DTYPES or scales.shape != (groups, words * 8):
        yield misfit(name, sidecars, "scales", f"F16[{groups}, {words * 8}]", config)
    if qzeros.dtype != "I32" or qzeros.shape != (groups, words):
        yield misfit(name, sidecars, "qzeros", f"I32[{groups}, {words}]", config)
