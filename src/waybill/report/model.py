"""What a report shows of a checkpoint: each stored weight, how it is stored, and where in the model it stands."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice

from waybill.checkpoint import TensorHeader
from waybill.checkpoint.gguf import BLOCK_TYPES
from waybill.checkpoint.header import DTYPE_BITS
from waybill.codecs.grouping import split_role
from waybill.config.quantization import QuantizationConfig
from waybill.plan import Plan
from waybill.report.precision import Precision, packed_as, stored_as
from waybill.report.treemap import Item
from waybill.rules.template import lift

MOST_NAMES, MOST_LAYERS, MOST_CELLS = 60, 256, 20_000
"""Of one strip, and of all: names come from strangers, and may be as many as a header holds."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One logical weight as it lies in the files, scales and zero points included."""

    module: str
    component: str
    precision: Precision
    layout: str
    nbytes: int
    is_matrix: bool

    @property
    def place(self) -> tuple[str, int | None, str]:
        """Where it stands: the stack of layers it is in, which layer, and what it is called in any of them.

        Experts have one name together: "model.layers", 3, "mlp.experts.*.up". Outside all stacks: "", None, its name.
        """
        key, indices = lift(self.module)
        if not indices:
            return "", None, self.module
        segments = key.split(".")
        at = segments.index("#")
        return ".".join(segments[:at]), indices[0], ".".join(segments[at + 1 :]).replace("#", "*")


@dataclass(frozen=True, slots=True)
class Cell:
    """One name in one layer: the precision that holds most bytes of it, and all that it is stored as, in words."""

    precision: Precision
    words: str
    is_mixed: bool


@dataclass(frozen=True, slots=True)
class Strip:
    """How the matrices of a stack of layers are stored: a row for each name, a cell for each layer.

    `size` is how many layers and names there are, of which the first are shown.
    """

    component: str
    stack: str
    layers: list[int]
    rows: dict[str, list[Cell | None]]
    size: tuple[int, int]

    def words(self, name: str) -> str:
        """A row in words: "layers 0–26 4-bit, group 128; layer 27 BF16"."""
        runs = []
        cells = zip(self.layers, self.rows[name], strict=True)
        for words, run in groupby(cells, lambda cell: cell[1].words if cell[1] else "not there"):
            layers = [layer for layer, _ in run]
            span = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]}–{layers[-1]}"
            runs.append(f"{span} {words}")
        return "; ".join(runs)


def stored_weights(bill: Plan) -> list[Stored]:
    """Every weight of the files: by its packing where the plan found one, else by its metadata, else by its
    dtype."""
    parts: dict[str, list[TensorHeader]] = defaultdict(list)
    packed = set()
    for name, tensor in bill.checkpoint.tensors.items():
        split = split_role(name)
        parts[split[0] if split else name].append(tensor)
        packed |= {split[0]} if split else set()
    return [_stored(bill, name, tensors, is_packed=name in packed) for name, tensors in parts.items()]


def _stored(bill: Plan, name: str, tensors: Sequence[TensorHeader], *, is_packed: bool) -> Stored:
    naming, module = bill.policy.naming, name.removesuffix(".weight")
    runtime = naming.runtime(name)
    main = max(tensors, key=lambda tensor: tensor.nbytes)
    found = None
    if main.dtype not in BLOCK_TYPES:  # those say it themselves, and may become something wider
        found = bill.packings.get(runtime) or (bill.policy.of(module) if is_packed else None)
    precision = stored_as(main.dtype) if found is None else packed_as(found)
    return Stored(
        module=runtime.removesuffix(".weight"),
        component=naming.component(name),
        precision=precision,
        layout=precision.name if found is None else str(found) if isinstance(found, QuantizationConfig) else found.form,
        nbytes=sum(tensor.nbytes for tensor in tensors),
        is_matrix=any(len(tensor.shape) > 1 for tensor in tensors),
    )


def items(weights: Iterable[Stored]) -> Iterator[tuple[str, list[Item]]]:
    """For each component, what a treemap shows: weights of one name in any layer, of one precision."""
    groups: dict[str, dict[tuple[str, str, Precision], list[Stored]]] = defaultdict(lambda: defaultdict(list))
    for weight in weights:
        stack, _, name = weight.place
        groups[weight.component][stack, name, weight.precision].append(weight)
    for component, named in groups.items():
        yield (
            component,
            [
                Item(name or stack, precision, group[0].layout, sum(weight.nbytes for weight in group), len(group))
                for (stack, name, precision), group in named.items()
            ],
        )


def strips(weights: Iterable[Stored]) -> tuple[list[Strip], int, list[Stored]]:
    """The matrices of stacks of layers, how many stacks there was no room for, and the matrices outside of any.

    Vectors are left out.
    """
    stacks: dict[tuple[str, str], dict[str, dict[int, list[Stored]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    outside = []
    for weight in weights:
        stack, layer, name = weight.place
        if weight.is_matrix and layer is None:
            outside.append(weight)
        elif weight.is_matrix and layer is not None:
            stacks[weight.component, stack][name][layer].append(weight)
    found, room = list[Strip](), MOST_CELLS
    for (component, stack), named in stacks.items():
        layers = sorted({layer for row in named.values() for layer in row})
        shown = layers[:MOST_LAYERS]
        rows = {
            name: [_cell(row[layer]) if layer in row else None for layer in shown]
            for name, row in islice(named.items(), min(MOST_NAMES, room // len(shown)))
        }
        room -= len(rows) * len(shown)
        if rows:
            found.append(Strip(component, stack, shown, rows, (len(layers), len(named))))
    return found, len(stacks) - len(found), outside


def _cell(weights: Sequence[Stored]) -> Cell:
    total: dict[tuple[Precision, str], list[int]] = defaultdict(list)
    for weight in weights:
        total[weight.precision, weight.layout].append(weight.nbytes)
    ordered = sorted(total.items(), key=lambda item: -sum(item[1]))
    several = len(weights) > 1
    words = ", ".join(f"{len(sizes)} × {layout}" if several else layout for (_, layout), sizes in ordered)
    return Cell(ordered[0][0][0], words, len({precision for precision, _ in total}) > 1)


def rank_bytes(bill: Plan, tp: int) -> int:
    """Bytes of the parameters one of `tp` ranks holds, by what the target declares; a tied head counts once."""
    held = (form for spec in bill.specs if spec.tied_to is None for form in spec.tensors(0, tp).values())
    return sum(math.prod(shape) * DTYPE_BITS[dtype or bill.dtype] // 8 for shape, dtype in held)
