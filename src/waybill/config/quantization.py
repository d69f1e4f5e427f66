"""Quantization metadata: every place and form it is stated in, as one policy that answers for one module.

Strict: an unknown method, a missing number or two places that disagree are refused, with the key path. What a module is
packed as is decided by the first of: an exclusion, an override, the layout of its component.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from waybill.config.match import Matcher

FLOATING = ("fp8", "mxfp4")
"""Methods whose codes are small floats."""
FLOATS, FLOATS4 = "float-quantized", "mxfp4-pack-quantized"
"""The forms of them, of 8 and of 4 bits, in a method that has others."""
MODEL_WIDE = "the model-wide layout"
"""What decides where no rule does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationConfig:
    """How one module is packed. group_size -1 is one group over all of K.

    `zero_offset` is what the producer subtracted from every stored zero point (GPTQ v1: 1). `form` is the layout of the
    tensors, where a method has several. `scale_rows` outputs share a scale; -1 is all of them. A scale of codes that
    are floats multiplies, or `divides`.
    """

    method: str
    bits: int
    group_size: int
    symmetric: bool
    zero_offset: int = 0
    desc_act: bool = False
    form: str = ""
    scale_rows: int = 1
    divides: bool = False

    @property
    def is_floating(self) -> bool:
        """Whether codes are small floats, and not integers."""
        return self.method in FLOATING or self.form in (FLOATS, FLOATS4)

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns that share a scale; -1 is the whole axis."""
        return self.scale_rows, self.group_size

    def __str__(self) -> str:
        if self.is_floating:
            rows, columns = ("all" if size == -1 else str(size) for size in self.block)
            return f"{self.method}, blocks of {rows}x{columns}{', divided by their scales' if self.divides else ''}"
        sign = "symmetric" if self.symmetric else "asymmetric"
        rows = "" if self.scale_rows == 1 else f" of {self.scale_rows} rows"
        return f"{self.method} {self.bits}-bit, group {self.group_size}{rows}, {sign}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """What a rule changes: None makes a module float, otherwise the stated fields replace the component's."""

    changes: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentQuantizationPlan:
    """What one component's modules are, module by module. Names are Hugging Face module paths as stored."""

    layout: QuantizationConfig
    modules_to_not_convert: Matcher
    overrides: Matcher
    override_values: tuple[Override, ...] = ()
    exact_overrides: Mapping[str, Override] = field(default_factory=dict)
    within: Matcher | None = None
    """Only modules under these paths are packed, when the producer says so."""
    heads: Mapping[str, bool] = field(default_factory=dict)
    """Kinds of tables (`head`, `embedding`) the producer states to be packed or not."""
    is_targeted: bool = False
    """Whether only modules that an override selects are packed."""
    activation_tensors: Mapping[str, str] = field(default_factory=dict)
    """Last segment of the names of stored tensors that say how activations are rounded, and why nothing needs them."""
    notices: tuple[str, ...] = ()
    """What is stated of running the model, which no weight shows."""

    def for_module(self, name: str | Sequence[str], kind: str = "linear") -> QuantizationConfig | None:
        """The effective layout, or None for float. A module that has several names is meant by a rule for any."""
        names = _names(name)
        override = next((self.exact_overrides[n] for n in names if n in self.exact_overrides), None)
        if override is None and (first := _first(self.overrides, names, kind)) is not None:
            override = self.override_values[first]
        if override is not None and override.changes is None:
            return None
        if _first(self.modules_to_not_convert, names, kind) is not None:
            return None
        stated = override is not None
        if not stated and (self.is_targeted or not self.heads.get(kind, kind == "linear")):
            return None
        if not stated and self.within is not None and kind == "linear" and _first(self.within, names, kind) is None:
            return None
        return replace(self.layout, **override.changes) if override and override.changes else self.layout

    def reason(self, name: str | Sequence[str], kind: str = "linear") -> str:
        """Which part of the metadata decides, in words."""
        names = _names(name)
        for one in names:
            if one in self.exact_overrides:
                return f"the entry {one!r}"
        rule, exclusion = (_first(rules, names, kind) for rules in (self.overrides, self.modules_to_not_convert))
        if rule is not None and (exclusion is None or self.override_values[rule].changes is None):
            return f"the rule {self.overrides.patterns[rule]!r}"
        if exclusion is not None:
            return f"the exclusion {self.modules_to_not_convert.patterns[exclusion]!r}"
        if self.is_targeted:
            return f"{self.overrides.field}, none of which selects it"
        if kind != "linear":
            return f"the default for an {kind}" if kind == "embedding" else f"the default for a {kind}"
        return MODEL_WIDE

    def patterns(self) -> list[tuple[str, Matcher]]:
        """Every list of patterns with the metadata's name for it, for counting hits."""
        lists = (self.modules_to_not_convert, self.overrides, self.within)
        return [(matcher.field, matcher) for matcher in lists if matcher is not None]


def _names(name: str | Sequence[str]) -> Sequence[str]:
    return (name,) if isinstance(name, str) else name


def _first(matcher: Matcher, names: Sequence[str], kind: str) -> int | None:
    """The position of the first pattern that selects a module by any of its names, or by its kind."""
    if not matcher.patterns:
        return None
    return min((at for name in names if (at := matcher.first(name, kind)) is not None), default=None)


@dataclass(frozen=True, slots=True)
class ComponentQuantizationManifest:
    """One plan for each component that is packed; a component without an entry is float."""

    plans: Mapping[str, ComponentQuantizationPlan] = field(default_factory=dict)

    def for_component(self, name: str) -> ComponentQuantizationPlan | None:
        """The component's plan, or None: float."""
        return self.plans.get(name)
