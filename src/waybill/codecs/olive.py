"""Olive: bytes packed along K, the last axis; scales beside them; zero points packed along the groups, or none.

Release 0.13 writes `.qweight`, later ones `_qweight` on the parameter's name. Expert banks carry a leading axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from waybill.checkpoint import TensorHeader
from waybill.codecs.checks import SCALE_DTYPES, groups_of, misfit, missing_roles
from waybill.codecs.decoders import RowBytes, ZeroPoints
from waybill.codecs.protocol import Sidecars
from waybill.config.quantization import QuantizationConfig
from waybill.errors import WaybillError
from waybill.weights.affine import AffineLayout, AffinePackedWeight
from waybill.weights.lazy import Decoded, Decoder, LazyTensor, stored


class Olive:
    """qweight U8 [..., N, ceil(K·bits/8)], scales [..., N, G], qzeros U8 [..., N, ceil(G·bits/8)] when asymmetric."""

    roles = frozenset({"qweight", "scales", "qzeros"})

    def check(self, name: str, sidecars: Sidecars, config: QuantizationConfig) -> Sequence[WaybillError]:
        """Roles, dtypes, and that N, K and G agree among all of them."""
        required = ("qweight", "scales") if config.symmetric else ("qweight", "scales", "qzeros")
        problems = list(missing_roles(name, sidecars, *required))
        return problems or list(_shapes(name, sidecars, config))

    def normalize(self, name: str, sidecars: Sidecars, config: QuantizationConfig) -> AffinePackedWeight:
        """The stored bytes are the canonical ones, seen group by group."""
        qweight, scales, qzeros = sidecars["qweight"], sidecars["scales"], sidecars.get("qzeros")
        in_features = qweight.shape[-1] * 8 // config.bits
        group, _ = groups_of(in_features, config)
        shape = (*scales.shape, group * config.bits // 8)
        if in_features % group == 0:
            codes = stored(qweight._replace(shape=shape))
        else:
            codes = _decoded(name, qweight, shape, RowBytes(stored(qweight), shape[-1]))
        zeros: LazyTensor | None = None
        if qzeros is not None:
            midpoint_of = name if config.symmetric else ""
            decoder = ZeroPoints(stored(qzeros), config.bits, False, midpoint_of=midpoint_of)
            zeros = _decoded(name, qzeros, scales.shape, decoder)
        return AffinePackedWeight(
            layout=AffineLayout(bits=config.bits, group=group, symmetric=config.symmetric),
            in_features=in_features,
            codes=codes,
            scales=stored(scales),
            zero_points=zeros,
        )


def _decoded(name: str, header: TensorHeader, shape: tuple[int, ...], decoder: Decoder) -> LazyTensor:
    return stored(Decoded(name, "U8", shape, header.file, header.offset, decoder))


def _shapes(name: str, sidecars: Sidecars, config: QuantizationConfig) -> Iterator[WaybillError]:
    qweight, scales = sidecars["qweight"], sidecars["scales"]
    if qweight.dtype != "U8" or len(qweight.shape) not in (2, 3):
        yield misfit(name, sidecars, "qweight", "U8[N, K·bits/8]", config)
        return
    *rows, octets = qweight.shape
    in_features = octets * 8 // config.bits
    group = in_features if config.group_size == -1 else config.group_size
    if group < 16 or group % 16:
        yield misfit(name, sidecars, "qweight", "groups of 16, 32, …; not one scale a tensor", config)
        return
    groups = -(-in_features // group)
    if scales.dtype not in SCALE_DTYPES or list(scales.shape) != [*rows, groups]:
        yield misfit(name, sidecars, "scales", f"{[*rows, groups]}", config)
    zeros = sidecars.get("qzeros")
    if zeros and (zeros.dtype != "U8" or list(zeros.shape) != [*rows, -(-groups * config.bits // 8)]):
        yield misfit(name, sidecars, "qzeros", f"U8{[*rows, -(-groups * config.bits // 8)]}", config)
