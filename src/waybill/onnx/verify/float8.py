"""8-bit floats of a package against those of a checkpoint: codes byte by byte, scales as numbers, row by row.

Written from the formats' descriptions, and sharing nothing with the codec that exports go through: a scale covers a
block of rows and columns, and the package repeats it for each of the rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from waybill.config.quantization import QuantizationConfig
from waybill.onnx.verify.compare import Held, chunks, compare_values, numbers
from waybill.onnx.verify.decoding import SCALES_BESIDE
from waybill.onnx.verify.origin import Member, Origin
from waybill.weights.dtypes import NUMPY_DTYPES, Array


def compare_floats8(held: Mapping[str, Held], member: Member, origin: Origin) -> None:
    """Every code and every scale of one weight that is stored as 8-bit floats."""
    codes, scales = held["codes"], held["scales"]
    header = origin.stored.headers.get(member.weight)
    names = origin.stored.sidecars(member.weight)
    config = origin.policy(member.weight)
    beside = next((names[role] for role in SCALES_BESIDE if role in names), None)
    if header is None or beside is None or config is None or config.divides:
        codes.refuse("8-bit floats with scales that multiply", f"{header or 'no such tensor'}, {config or 'float'}")
        return
    rows, columns = header.shape[-2:]
    grid = _grid(origin.stored.whole(beside), rows, columns, config)
    block = columns if config.block[1] == -1 else min(config.block[1], columns)
    forms = (header.dtype, header.shape[-1], block, -(-columns // block))
    found = (codes.entry.dtype, codes.entry.shape[-1], codes.entry.block, scales.entry.shape[-1])
    if forms != found or grid is None or f"F8_{codes.entry.table}" != header.dtype:
        codes.refuse(f"{header} in blocks of {block} columns", f"{codes.entry} in blocks of {codes.entry.block}")
        return
    each = rows if config.block[0] == -1 else config.block[0]
    for start, stop in chunks(member.count, columns):
        first, last = member.first + start, member.first + stop
        wanted = origin.stored.read(member.weight, first, last).view(np.uint8)
        compare_values(codes, member, start, wanted, codes.read(member, start, stop))
        made = scales.read(member, start, stop).copy().view(NUMPY_DTYPES[scales.entry.dtype])
        compare_values(scales, member, start, numbers(grid[np.arange(first, last) // each]), numbers(made))


def _grid(scales: Array, rows: int, columns: int, config: QuantizationConfig) -> Array | None:
    """Stored scales as one for each block of rows and of columns; None when there are not that many."""
    sizes = (size if size != -1 else whole for size, whole in zip(config.block, (rows, columns), strict=True))
    shape = tuple(-(-whole // min(size, whole)) for size, whole in zip(sizes, (rows, columns), strict=True))
    return scales.reshape(shape) if scales.size == shape[0] * shape[1] else None
