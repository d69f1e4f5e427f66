"""GPTQ: int32 words packed along K, one column an output; zero points packed along N, one row a group.

Written by AutoGPTQ, GPTQModel and auto-round. Version 1 stores zero points minus one, subtracted from the whole word.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from waybill.codecs.checks import SCALE_DTYPES, act_order, groups_of, misfit, missing_roles
from waybill.codecs.decoders import ColumnWords, ZeroPoints
from waybill.codecs.protocol import Sidecars
from waybill.config.quantization import QuantizationConfig
from waybill.errors import PackingMismatch, WaybillError
from waybill.weights.affine import AffineLayout, AffinePackedWeight
from waybill.weights.lazy import Decoded, stored

_REPEATED_ONE = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}


class GPTQ:
    """qweight I32 [K·bits/32, N], qzeros I32 [G, N·bits/32], scales [G, N], g_idx I32 [K] or none."""

    roles = frozenset({"qweight", "scales", "qzeros", "g_idx"})

    def check(self, name: str, sidecars: Sidecars, config: QuantizationConfig) -> Sequence[WaybillError]:
        """Roles, dtypes, and that N, K and G agree among all of them."""
        problems = list(missing_roles(name, sidecars, "qweight", "scales", "qzeros"))
        return problems or list(_shapes(name, sidecars, config))

    def normalize(self, name: str, sidecars: Sidecars, config: QuantizationConfig) -> AffinePackedWeight:
        """Words transpose into the canonical bytes; scales and zero points transpose."""
        qweight, g_idx = sidecars["qweight"], sidecars.get("g_idx")
        outputs, in_features = qweight.shape[1], qweight.shape[0] * 32 // config.bits
        group, groups = groups_of(in_features, config)
        codes = ColumnWords(stored(qweight), config.bits, group, stored(g_idx) if g_idx else None, name)
        plus = config.zero_offset * _REPEATED_ONE[config.bits]
        midpoint_of = name if config.symmetric else ""
        zeros = ZeroPoints(stored(sidecars["qzeros"]), config.bits, True, plus, midpoint_of=midpoint_of)
        code_shape = (outputs, groups, group * config.bits // 8)
        at = (qweight.file, qweight.offset)
        return AffinePackedWeight(
            layout=AffineLayout(bits=config.bits, group=group, symmetric=config.symmetric),
            in_features=in_features,
            codes=stored(Decoded(name, "U8", code_shape, *at, codes)),
            scales=stored(sidecars["scales"]).transpose(),
            zero_points=stored(Decoded(name, "U8", (outputs, groups), *at, zeros)),
        )


def _shapes(name: str, sidecars: Sidecars, config: QuantizationConfig) -> Iterator[WaybillError]:
    qweight, scales, qzeros = sidecars["qweight"], sidecars["scales"], sidecars["qzeros"]
    if qweight.dtype != "I32" or len(qweight.shape) != 2:
        yield misfit(name, sidecars, "qweight", "I32[K·bits/32, N]", config)
        return
    outputs, in_features = qweight.shape[1], qweight.shape[0] * 32 // config.bits
    if config.group_size == 0:
        yield misfit(name, sidecars, "scales", "a group size", config)
        return
    group, groups = groups_of(in_features, config)
    if group % 16 or outputs * config.bits % 32:
        yield PackingMismatch(
            "a packed weight has sizes its format cannot hold",
            where=f"{qweight.name} ({qweight.file})",
            expected=f"groups of a multiple of 16, outputs a multiple of {32 // config.bits}",
            found=f"group {group}, {outputs} outputs",
            fix="export the checkpoint with a supported group size",
        )
        return
    if scales.dtype not in SCALE_DTYPES or scales.shape != (groups, outputs):
        yield misfit(name, sidecars, "scales", f"F16[{groups}, {outputs}]", config)
    if qzeros.dtype != "I32" or qzeros.shape != (groups, outputs * config.bits // 32):
        yield misfit(name, sidecars, "qzeros", f"I32[{groups}, {outputs * config.bits // 32}]", config)
    g_idx = sidecars.get("g_idx")
    if g_idx and (g_idx.dtype != "I32" or g_idx.shape != (in_features,)):
        yield misfit(name, sidecars, "g_idx", f"I32[{in_features}]", config)
    if config.desc_act and groups > 1:
        expected = "desc_act false, or static_groups true"
        yield act_order(name, qweight, expected, "desc_act true: the groups are permuted")
