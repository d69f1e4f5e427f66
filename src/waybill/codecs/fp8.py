"""FP8: 8-bit floats [N, K], and a scale for each block, each row, or the whole tensor.

Written by DeepSeek, Qwen and transformers' fine-grained FP8 (`weight_scale_inv`, which multiplies, whatever its name
says), and by GPTQModel under the same names with the opposite meaning: there it divides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from waybill.checkpoint import TensorHeader
from waybill.codecs.checks import SCALE_DTYPES, misfit, missing_roles
from waybill.codecs.protocol import Sidecars
from waybill.config.quantization import QuantizationConfig
from waybill.errors import WaybillError
from waybill.weights.codebook import CodebookLayout, CodebookWeight
from waybill.weights.lazy import stored

TABLES = {"F8_E4M3": "E4M3", "F8_E5M2": "E5M2"}
"""What the codes of a safetensors dtype mean."""
GRID_DTYPES = (*SCALE_DTYPES, "F8_E8M0")


class FP8:
    """weight F8 [..., N, K], scale_inv a float [..., ceil(N/r), ceil(K/c)], [N], [1] or []."""

    roles = frozenset({"weight", "scale_inv"})

    def check(self, name: str, sidecars: Sidecars, config: QuantizationConfig) -> Sequence[WaybillError]:
        """Both parts, their dtypes, and that the scales are the grid that the blocks imply."""
        return list(missing_roles(name, sidecars, "weight", "scale_inv")) or list(
            float8_misfits(name, sidecars, "scale_inv", config)
        )

    def normalize(self, name: str, sidecars: Sidecars, config: QuantizationConfig) -> CodebookWeight:
        """The stored bytes are the codes."""
        return float8_weight(sidecars["weight"], sidecars["scale_inv"], config.block, divides=config.divides)


def float8_weight(
    weight: TensorHeader, scales: TensorHeader, block: tuple[int, int], *, divides: bool = False
) -> CodebookWeight:
    """The record of 8-bit floats and their scales; `float8_misfits` has found nothing.

    Args:
        weight: F8_E4M3 or F8_E5M2 [..., N, K].
        scales: one for each block, whatever axes of length 1 it is stored with.
        block: rows and columns a scale covers; -1 is the whole axis.
        divides: whether a value is code / scale instead of code · scale.
    """
    rows, columns = block_of(weight.shape, block)
    return CodebookWeight(
        layout=CodebookLayout(TABLES[weight.dtype], rows, columns, divides),
        codes=stored(weight._replace(dtype="U8")),
        scales=stored(scales._replace(shape=grid_of(weight.shape, (rows, columns)))),
    )


def float8_misfits(name: str, sidecars: Sidecars, role: str, config: QuantizationConfig) -> Iterator[WaybillError]:
    """What the headers of `weight` and its scales, under `role`, break."""
    weight, scales = sidecars["weight"], sidecars[role]
    if weight.dtype not in TABLES or len(weight.shape) not in (2, 3) or 0 in weight.shape:
        yield misfit(name, sidecars, "weight", f"{' or '.join(TABLES)} [N, K]", config)
        return
    grid = grid_of(weight.shape, block_of(weight.shape, config.block))
    if scales.dtype not in GRID_DTYPES or scales.shape not in _spellings(grid):
        yield misfit(name, sidecars, role, f"F32[{', '.join(map(str, grid))}]", config)


def block_of(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of a block in a weight of this shape: no more than there are."""
    rows, columns = (size if each == -1 else min(each, size) for each, size in zip(block, shape[-2:], strict=True))
    return rows, columns


def grid_of(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """The shape of the scales of a weight of this shape."""
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def _spellings(grid: tuple[int, ...]) -> set[tuple[int, ...]]:
    """Shapes that a grid is written with: one column may be left out, and of a single scale everything."""
    out = {grid}
    if grid[-1] == 1:
        out.add(grid[:-1])
    if grid[-2:] == (1, 1):
        out |= {grid[:-2], (*grid[:-2], 1)}
    return out
