"""Bills in a few lines: bindings that differ only in their layer become one row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from waybill.plan.bill import Binding
from waybill.rules.template import lift

Size = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a bill: one binding, or the same binding of several layers."""

    bindings: tuple[Binding, ...]
    name: str

    @property
    def bytes_read(self) -> int:
        """Bytes all of them ask the file system for."""
        return sum(binding.bytes_read for binding in self.bindings)

    def cells(self, size: Size) -> tuple[str, ...]:
        """The columns: parameter, shape, dtype, sources, operations, bytes read."""
        b, count = self.bindings[0], len(self.bindings)
        times = f"{count} × " if count > 1 else ""
        shape = "×".join(map(str, b.shape))
        return (
            self.name,
            shape,
            b.dtype,
            f"{times}{len(b.sources)}",
            "; ".join(b.operations),
            size(self.bytes_read),
        )


def fold(bindings: Iterable[Binding], full: bool) -> list[Row]:
    """Rows in streaming order; bindings that differ only in their layer become one, unless `full`."""
    groups: dict[object, list[Binding]] = {}
    for binding in bindings:
        form = (*apart_from_layer(binding.target), binding.shape, binding.operations, len(binding.sources))
        groups.setdefault(binding.target if full else form, []).append(binding)
    return [Row(tuple(group), folded_name([binding.target for binding in group])) for group in groups.values()]


def apart_from_layer(name: str) -> tuple[str, ...]:
    """What names have in common that differ only in their layer."""
    key, numbers = lift(name)
    return (key, *map(str, numbers[1:])) if numbers else (name,)


def folded_name(group: Sequence[str]) -> str:
    """The name with a range in place of the layer, which is its first number; the others are alike."""
    if len(group) == 1:
        return group[0]
    key, (_, *inner) = lift(group[0])
    numbers = sorted(lift(name)[1][0] for name in group)
    span = f"{numbers[0]}–{numbers[-1]}" if numbers[-1] - numbers[0] + 1 == len(numbers) else f"{len(numbers)} layers"
    name = key.replace("#", f"{{{span}}}", 1)
    for number in inner:
        name = name.replace("#", str(number), 1)
    return name
