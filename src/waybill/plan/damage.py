"""What only the bytes reveal: values that are damaged, or that the dtype they are wanted in cannot hold."""

from __future__ import annotations

import numpy as np

from waybill.errors import BadScales, CastOverflow, InexactScales, NonFiniteWeight
from waybill.plan.bill import Binding
from waybill.weights.dtypes import NUMPY_DTYPES, Array, all_finite
from waybill.weights.lazy import Tile


def overflow(tile: Tile, binding: Binding) -> CastOverflow:
    """A finite value that the binding's dtype makes infinite."""
    return CastOverflow(
        f"a value does not fit {binding.dtype}",
        where=f"{tile.source.name} ({tile.source.file})",
        expected=f"finite values within the range of {binding.dtype}",
        found=f"a finite {tile.source.dtype} value that becomes infinite",
        fix="load in bfloat16 or float32",
    )


def bad_scales(values: Array, binding: Binding) -> BadScales | CastOverflow | None:
    """Scales are few, so they are always looked at: NaN, infinity, a group that is zero for every output, one scale of
    zero for everything, a divisor of zero, or weights too large for the dtype they will be computed in. Minimums may be
    zero."""
    divided, are_minimums = binding.role == "divisors", binding.role == "minimums"
    numbers = "minimums" if are_minimums else "scales"
    whole = values.reshape(binding.shape)
    for tile in binding.value.tiles:
        member = whole[tuple(slice(o, o + n) for o, n in zip(tile.offset, tile.shape, strict=True))]
        where = f"{tile.source.name} ({tile.source.file}), for {binding.target}"
        if not all_finite(np.ascontiguousarray(member)):
            found = "NaN or infinity"
        elif divided and not member.all():
            found = "a divisor of zero"
        elif not are_minimums and (member.shape[-2] > 1 or member.size == 1) and not _nonzero(member).all():
            found = "a group whose scales are all zero"
        elif binding.largest is not None and (most := _most(member, divided)) > binding.largest:
            return CastOverflow(
                "a packed weight does not fit the dtype it is computed in",
                where=where,
                expected=f"{numbers} up to {binding.largest:g}",
                found=f"a {numbers.removesuffix('s')} of {most:g}",
                fix="load in bfloat16 or float32",
            )
        else:
            continue
        return BadScales(
            f"the {numbers} of a packed weight are damaged",
            where=where,
            expected=f"finite {numbers}" + ("" if are_minimums else ", some of them not zero in every group"),
            found=found,
            fix="download the file again; if it stays so, the published weights are damaged",
        )
    return None


def _nonzero(values: Array) -> Array:
    """Where a column of the last two axes is not all zero. By bits: numpy converts half floats one by one."""
    if values.dtype == NUMPY_DTYPES["F8_E8M0"]:
        return np.ones(1, np.bool_)  # powers of two only
    bits: Array = np.bitwise_or.reduce(values.view(f"u{values.itemsize}"), axis=-2)
    found: Array = bits << 1 != 0  # without the sign
    return found


def _most(values: Array, divided: bool) -> float:
    """The largest factor among scales or divisors."""
    if divided:
        return float(1 / np.abs(values.astype(np.float64)).min(initial=np.inf))
    if values.dtype == NUMPY_DTYPES["F8_E8M0"]:
        values = values.astype(np.float32)
    return float(np.abs(values).max(initial=0))


def non_finite(binding: Binding) -> NonFiniteWeight:
    """NaN or infinity among a parameter's values."""
    return NonFiniteWeight(
        "a weight holds NaN or infinity",
        where=f"{binding.target}, made from {', '.join(binding.sources[:4])} "
        f"({', '.join(sorted({tile.source.file for tile in binding.value.tiles})[:4])})",
        expected="finite values",
        found="NaN or infinity in the stored bytes",
        fix="download the file again; if it stays so, the published weights are damaged",
    )


def inexact_scales(stored: Array, made: Array, tile: Tile, binding: Binding) -> InexactScales | None:
    """Packed weights keep their values: a scale that is cast must come out the same number."""
    before = stored.astype(np.float64)
    changed = (made.astype(np.float64) != before) & ~np.isnan(before)  # NaN is another problem
    if not changed.any():
        return None
    value = float(stored[changed].flat[0])
    return InexactScales(
        f"a {binding.role.removesuffix('s')} of a packed weight is not a {binding.dtype} number",
        where=f"{tile.source.name} ({tile.source.file}), for {binding.target}",
        expected=f"{binding.role} that {binding.dtype} holds exactly",
        found=f"{value:g}, one of {int(changed.sum()):,} that would change",
        fix="use --dtype float32, which holds every scale",
    )
