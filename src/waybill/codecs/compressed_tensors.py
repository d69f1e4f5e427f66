"""compressed-tensors: codes packed along K in words of a row, or bytes as they are; scales beside them.

Written by llm-compressor and auto-round. Codes and zero points are signed integers raised by half their range, which is
what an unsigned code and its true zero point are. Releases up to 0.8 store zero points unpacked and signed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from waybill.checkpoint import TensorHeader
from waybill.codecs.checks import SCALE_DTYPES, act_order, groups_of, misfit, missing_roles
from waybill.codecs.decoders import Raised, RowBytes, Spread, Witnessed, ZeroPoints
from waybill.codecs.fp8 import float8_misfits, float8_weight
from waybill.codecs.mxfp4 import mxfp4_misfits, mxfp4_weight
from waybill.codecs.protocol import Sidecars
from waybill.config.quantization import FLOATS4, QuantizationConfig
from waybill.errors import PackingMismatch, WaybillError
from waybill.weights.affine import AffineLayout, AffinePackedWeight
from waybill.weights.lazy import Decoded, Decoder, LazyTensor, stored
from waybill.weights.record import PackedStorage


class CompressedTensors:
    """weight_packed I32 [N, K·bits/32], or of 4-bit floats U8 [N, K/2], or weight I8 or F8 [N, K]; weight_scale [N, G];
    weight_zero_point if asymmetric.

    A scale of a whole tensor is a single number, one of blocks [ceil(N/rows), G]. weight_shape, which repeats [N, K],
    and weight_g_idx are looked at when bytes are read.
    """

    roles = frozenset({"weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "g_idx"})

    def check(self, name: str, sidecars: Sidecars, config: QuantizationConfig) -> Sequence[WaybillError]:
        """Roles, dtypes, and that N, K and G agree among all of them."""
        if config.is_floating:
            lost = list(missing_roles(name, sidecars, _codes_of(config), "weight_scale"))
            return lost or list(_floats(name, sidecars, config))
        required = [_codes_of(config), "weight_scale"]
        if not config.symmetric:
            required.append("weight_zero_point")
        problems = list(missing_roles(name, sidecars, *required))
        return problems or list(_shapes(name, sidecars, config))

    def normalize(self, name: str, sidecars: Sidecars, config: QuantizationConfig) -> PackedStorage:
        """Words of a row are the canonical bytes, and floats are; signed bytes are, once their sign is turned."""
        if config.form == FLOATS4:
            return mxfp4_weight(sidecars["weight_packed"], sidecars["weight_scale"])
        if config.is_floating:
            return float8_weight(sidecars["weight"], sidecars["weight_scale"], config.block)
        outputs, in_features = _size(sidecars, config)
        group, groups = groups_of(in_features, config)
        zeros, shape = sidecars.get("weight_zero_point"), (outputs, groups)
        scale = sidecars["weight_scale"]
        scales = _spread(stored(_blocks(scale)), scale, shape, config)
        witnesses = {role: stored(sidecars[role]) for role in ("weight_shape", "g_idx") if role in sidecars}
        if witnesses:
            witnessed = Witnessed(
                scales, witnesses.get("weight_shape"), witnesses.get("g_idx"), (outputs, in_features), group, name
            )
            scales = _decoded(scale, scale.dtype, shape, witnessed)
        return AffinePackedWeight(
            layout=AffineLayout(bits=config.bits, group=group, symmetric=config.symmetric),
            in_features=in_features,
            codes=_codes(sidecars[_codes_of(config)], (*shape, group * config.bits // 8), in_features % group == 0),
            scales=scales,
            zero_points=None if zeros is None else _zero_points(name, zeros, shape, config),
        )


def _codes_of(config: QuantizationConfig) -> str:
    return "weight_packed" if config.form in ("pack-quantized", FLOATS4) else "weight"


def _size(sidecars: Sidecars, config: QuantizationConfig) -> tuple[int, int]:
    """N and K, as the codes have them."""
    outputs, columns = sidecars[_codes_of(config)].shape
    return outputs, columns * 32 // config.bits if config.form == "pack-quantized" else columns


def _decoded(header: TensorHeader, dtype: str, shape: tuple[int, ...], decoder: Decoder) -> LazyTensor:
    return stored(Decoded(header.name, dtype, shape, header.file, header.offset, decoder))


def _codes(header: TensorHeader, shape: tuple[int, ...], is_whole: bool) -> LazyTensor:
    """Rows of bytes as groups of bytes; the last group may have to be filled up."""
    rows = stored(header._replace(dtype="U8", shape=(header.shape[0], header.nbytes // header.shape[0])))
    if header.dtype == "I8":
        return _decoded(header, "U8", shape, RowBytes(rows, shape[-1], flip=0x80))
    if is_whole:
        return stored(header._replace(dtype="U8", shape=shape))
    return _decoded(header, "U8", shape, RowBytes(rows, shape[-1]))


def _zero_points(name: str, header: TensorHeader, shape: tuple[int, int], config: QuantizationConfig) -> LazyTensor:
    midpoint_of = name if config.symmetric else ""
    if header.dtype == "I32":
        packed = stored(header).transpose()
        return _decoded(header, "U8", shape, ZeroPoints(packed, config.bits, True, midpoint_of=midpoint_of))
    blocks = _blocks(header)
    raised = _decoded(header, "U8", blocks.shape, Raised(stored(blocks), config.bits, name, bool(midpoint_of)))
    return _spread(raised, header, shape, config)


def _blocks(header: TensorHeader) -> TensorHeader:
    """A matrix, of one element where one number is for the whole tensor."""
    return header if len(header.shape) == 2 else header._replace(shape=(1, 1))


def _spread(value: LazyTensor, header: TensorHeader, shape: tuple[int, int], config: QuantizationConfig) -> LazyTensor:
    """One row for each output."""
    rows = shape[0] if config.scale_rows == -1 else config.scale_rows
    return value if rows == 1 else _decoded(header, value.dtype, shape, Spread(value, rows))


def _floats(name: str, sidecars: Sidecars, config: QuantizationConfig) -> Iterator[WaybillError]:
    """What breaks small floats: their scales, or a part that belongs to integers."""
    if config.form == FLOATS4:
        yield from mxfp4_misfits(name, sidecars, config)
    else:
        yield from float8_misfits(name, sidecars, "weight_scale", config)
    for role in sidecars.keys() - {_codes_of(config), "weight_scale"}:
        yield misfit(name, sidecars, role, "nothing of that name beside floats", config)


def _shapes(name: str, sidecars: Sidecars, config: QuantizationConfig) -> Iterator[WaybillError]:
    role = _codes_of(config)
    codes, form = sidecars[role], "I32[N, K·bits/32]" if config.form == "pack-quantized" else "I8[N, K]"
    if codes.dtype != form[: form.index("[")] or len(codes.shape) != 2 or 0 in codes.shape:
        yield misfit(name, sidecars, role, form, config)
        return
    outputs, in_features = _size(sidecars, config)
    group, groups = groups_of(in_features, config)
    if group % 16:
        yield PackingMismatch(
            "a packed weight has sizes that cannot be held",
            where=f"{codes.name} ({codes.file})",
            expected="groups of a multiple of 16",
            found=f"group {group}",
            fix="export the checkpoint with a supported group size",
        )
        return
    rows = outputs if config.scale_rows == -1 else config.scale_rows
    blocks = (-(-outputs // rows), groups)
    scale = sidecars["weight_scale"]
    if scale.dtype not in SCALE_DTYPES or not _is_of(scale, blocks, config):
        yield misfit(name, sidecars, "weight_scale", f"BF16{list(blocks)}", config)
    yield from _zero_point_shapes(name, sidecars, blocks, config)
    shape, g_idx = sidecars.get("weight_shape"), sidecars.get("g_idx")
    if shape and (shape.dtype not in ("I64", "I32") or shape.shape != (2,)):
        yield misfit(name, sidecars, "weight_shape", "I64[2]", config)
    if g_idx and (g_idx.dtype != "I32" or g_idx.shape != (in_features,)):
        yield misfit(name, sidecars, "g_idx", f"I32[{in_features}]", config)
    if config.desc_act and groups > 1:
        yield act_order(name, codes, "actorder weight, static or null", "actorder group: the groups are permuted")


def _zero_point_shapes(
    name: str, sidecars: Sidecars, blocks: tuple[int, int], config: QuantizationConfig
) -> Iterator[WaybillError]:
    zeros = sidecars.get("weight_zero_point")
    if zeros is None:
        return
    words = (-(-blocks[0] * config.bits // 32), blocks[1])
    is_packed = config.form == "pack-quantized" and config.scale_rows == 1
    if zeros.dtype == "I32" and is_packed and zeros.shape == words:
        return
    if zeros.dtype != "I8" or not _is_of(zeros, blocks, config):
        expected = f"I32{list(words)} or I8{list(blocks)}" if is_packed else f"I8{list(blocks)}"
        yield misfit(name, sidecars, "weight_zero_point", expected, config)


def _is_of(header: TensorHeader, blocks: tuple[int, int], config: QuantizationConfig) -> bool:
    """Whether there is one number a block; that of a whole tensor may have any rank."""
    return header.shape == blocks or (config.scale_rows == -1 and math.prod(header.shape) == 1)
