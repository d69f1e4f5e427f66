"""What a comparison found: all of it data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class Layout(NamedTuple):
    """How one module is packed: by whose format, bits a code, and what a scale covers, of N and of K."""

    format: str
    bits: int
    rows: int
    group: int
    symmetric: bool

    def holds(self, finer: Layout) -> bool:
        """Whether the other says the same with a scale for less."""
        whole = self.rows % finer.rows == 0 and self.group % finer.group == 0
        return whole and self == finer._replace(rows=self.rows, group=self.group)

    def __str__(self) -> str:
        rows = "" if self.rows == 1 else f"{self.rows}x"
        sign = "symmetric" if self.symmetric else "asymmetric"
        return f"{self.format} {self.bits}-bit, group {rows}{self.group}, {sign}"


class Stored(NamedTuple):
    """One stored tensor; the digest of its bytes is empty where dtype or shape differ already."""

    dtype: str
    shape: list[int]
    digest: str = ""

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]" + (f" {self.digest[:12]}…" if self.digest else "")


class Difference(NamedTuple):
    """What `a` and `b` say under one name; a side that says nothing is absent from `sides`."""

    name: str
    sides: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        plain = {k: v._asdict() if isinstance(v, (Layout, Stored)) else v for k, v in self.sides.items()}
        return {"name": self.name, **plain}


class ValueDifference(NamedTuple):
    """The largest absolute difference between a weight's values; infinite where only one side has a number."""

    weight: str
    largest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Everything that differs; all of it empty for two that are the same.

    `weights` and `values` are None where values were not compared. Those of `weights` are on one side only, or of
    another shape; `values` begins with the worst.
    """

    a: str
    b: str
    config: list[Difference]
    components: list[Difference]
    layouts: list[Difference]
    tensors: list[Difference]
    weights: list[Difference] | None = None
    values: list[ValueDifference] | None = None
    tensors_compared: int = 0
    weights_compared: int = 0

    @property
    def same(self) -> bool:
        """Whether nothing differs in what was compared."""
        return not (self.config or self.components or self.layouts or self.tensors or self.weights or self.values)

    def as_dict(self) -> dict[str, Any]:
        """The JSON form; a difference that is no number is null."""
        sections = ("config", "components", "layouts", "tensors")
        report: dict[str, Any] = {"a": self.a, "b": self.b, "same": self.same}
        report |= {section: [each.as_dict() for each in getattr(self, section)] for section in sections}
        report["tensors_compared"] = self.tensors_compared
        if self.values is None or self.weights is None:
            return report | {"values": None}
        worst = [{"weight": v.weight, "max_abs": v.largest if math.isfinite(v.largest) else None} for v in self.values]
        weights = [each.as_dict() for each in self.weights]
        return report | {"values": {"compared": self.weights_compared, "weights": weights, "differ": worst}}
