"""Quantization metadata of a package: every place it is stated in, given to the component it is about."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from waybill.config.producers import RULES, difference, read_plan
from waybill.config.quantization import (
    MODEL_WIDE,
    ComponentQuantizationManifest,
    ComponentQuantizationPlan,
    QuantizationConfig,
)
from waybill.errors import BadConfig, ConfigConflict, WaybillError
from waybill.manifest.component import ComponentManifest
from waybill.manifest.naming import Naming

NESTED = {
    "text_config": ("decoder", "embedding"),
    "vision_config": ("vision_encoder",),
    "audio_config": ("audio_encoder",),
}
"""Nested configs that may state the quantization of the component with that role, and of others if they are packed."""
WHOLE = "config.json: quantization_config"
OWN_TYPES = "the file's own types"
"""What decides in a file whose tensors have types that say how they are packed."""

Block = Mapping[str, Any]


class Statement(NamedTuple):
    """What one place says of one component. `by_path`: it is an entry for the component, not a producer's block."""

    component: str
    where: str
    block: Block
    by_path: bool = False


@dataclass(frozen=True, slots=True)
class Policy:
    """What each module of a checkpoint is packed as, by its metadata: the one object that everybody asks."""

    naming: Naming
    quantization: ComponentQuantizationManifest
    own_types: Mapping[str, QuantizationConfig | None] | None = None
    """For files whose tensors say themselves how they are packed: every stored module's layout, None for float."""

    @property
    def by_types(self) -> bool:
        """Whether the file's own types say how its tensors are packed, and some are."""
        return self.own_types is not None and any(self.own_types.values())

    def plan_of(self, module: str) -> ComponentQuantizationPlan | None:
        """What is said of the component that owns a stored module; None when that component is float."""
        return self.quantization.for_component(self.naming.component(module))

    def of(self, module: str) -> QuantizationConfig | None:
        """A stored module's effective layout, or None for float."""
        if self.own_types is not None:
            return self.own_types.get(module)
        plan = self.plan_of(module)
        if plan is None:
            return None
        config = plan.for_module(self.naming.names(module), self.naming.kind(module))
        return None if config is not None and self._excluded(module, config.method) else config

    def reason(self, module: str) -> str:
        """What decides it, in words."""
        if self.own_types is not None:
            return OWN_TYPES
        plan = self.plan_of(module)
        if plan is None:
            return f"the metadata, which has no entry for {self.naming.component(module) or 'it'}"
        if self._excluded(module, plan.layout.method):
            return f"the model, which keeps it float under {plan.layout.method}"
        reason = plan.reason(self.naming.names(module), self.naming.kind(module))
        whole = reason != MODEL_WIDE or self.naming.components.only is not None
        return reason if whole else f"the layout of {self.naming.component(module)}"

    def keeps_float(self, module: str) -> bool:
        """Whether the model itself keeps a stored module float, under the method its component is packed by."""
        plan = self.plan_of(module)
        return plan is not None and self._excluded(module, plan.layout.method)

    def unneeded(self, tensors: Iterable[str]) -> dict[str, str]:
        """The stored tensors that only say how activations are rounded, and why nothing needs them."""
        known = {ending for plan in self.quantization.plans.values() for ending in plan.activation_tensors}
        named = ((name, name.rpartition(".")[2]) for name in tensors) if known else ()
        plans = ((name, ending, self.plan_of(name)) for name, ending in named if ending in known)
        return {
            name: plan.activation_tensors[ending]
            for name, ending, plan in plans
            if plan is not None and ending in plan.activation_tensors
        }

    def _excluded(self, module: str, method: str) -> bool:
        owner = self.naming.components.owner_of(self.naming.runtime(module))
        return owner is not None and owner.excludes(self.naming.runtime(module), method)


def read_quantization(
    config: Mapping[str, Any],
    side_files: Mapping[str, Mapping[str, Any]],
    components: ComponentManifest,
    problems: list[WaybillError],
    packed: Collection[str] = (),
) -> ComponentQuantizationManifest:
    """One plan for each component that some place calls packed; problems are appended, not raised.

    Args:
        config: the parsed config.json.
        side_files: metadata files beside it, by name.
        components: whose parts are spoken of.
        problems: where problems go.
        packed: the components of which something is packed on disk. What is said of a whole model of several
            components is said of those, except for its rules about single modules: it was not written for the parts.
    """
    stated: dict[str, list[Statement]] = {}
    for statement in _statements(config, side_files, components, packed, problems):
        stated.setdefault(statement.component, []).append(statement)
    plans = {name: plan for name, places in stated.items() if (plan := _agreed(places, problems)) is not None}
    return ComponentQuantizationManifest(plans)


def _agreed(places: list[Statement], problems: list[WaybillError]) -> ComponentQuantizationPlan | None:
    """The plan of the first place, which the others must repeat."""
    first, *others = places
    for other in others:
        if (found := difference(first.block, first.where, other.block, other.where)) is not None:
            problems.append(
                ConfigConflict(
                    "two places state the quantization differently",
                    where=f"{first.where} and {other.where}",
                    expected="one statement",
                    found=found,
                    fix="remove the one that does not describe these weights",
                )
            )
    return read_plan(first.block, first.where, problems, by_path=first.by_path)


def _statements(
    config: Mapping[str, Any],
    side_files: Mapping[str, Mapping[str, Any]],
    components: ComponentManifest,
    packed: Collection[str],
    problems: list[WaybillError],
) -> Iterator[Statement]:
    """The authoritative places first; what is said of the whole model last."""
    block = config.get("quantization_config")
    block = block if isinstance(block, Mapping) else {}
    entries = {
        "config.json: component_quantization": config.get("component_quantization"),
        f"{WHOLE}.components": block.get("components"),
    }
    for where, named in entries.items():
        if isinstance(named, Mapping):
            yield from _by_name(where, named, components, problems)
    by_role = {component.role: component.name for component in components.components}
    nested = [
        Statement(by_role[role], f"config.json: {key}.quantization_config", entry)
        for key, roles in NESTED.items()
        if isinstance(entry := _nested(config, key), Mapping) and entry
        for role in roles
        if role in by_role and (role == roles[0] or by_role[role] in packed)
    ]
    only = components.only
    if only is not None and not isinstance(block.get("components"), Mapping) and block:
        yield Statement(only.name, WHOLE, block)
    yield from nested
    if only is not None:
        yield from (Statement(only.name, file, content) for file, content in side_files.items() if content)
        return
    if components.is_whole:
        own = {statement.component for statement in nested}
        explicit = any(isinstance(named, Mapping) for named in entries.values())
        # A component with a statement of its own is an exception; but the text model's must be the whole model's.
        meant = set() if explicit else {*packed} - own
        meant |= {by_role["decoder"]} if "decoder" in by_role and (own or explicit) else set()
        for where, content in {WHOLE: block, **side_files}.items():
            layout = {key: value for key, value in content.items() if key not in (*RULES, "components")}
            yield from (Statement(name, where, layout) for name in sorted(meant) if layout)


def _nested(config: Mapping[str, Any], key: str) -> Any:
    inner = config.get(key)
    return inner.get("quantization_config") if isinstance(inner, Mapping) else None


def unused_rules(config: Mapping[str, Any], components: ComponentManifest) -> list[str]:
    """Rules about single modules that a statement about a whole model of several components makes, and nobody reads."""
    block = config.get("quantization_config")
    if components.only is not None or not isinstance(block, Mapping) or isinstance(block.get("components"), Mapping):
        return []
    return [key for key in RULES if block.get(key)]


def _by_name(
    where: str, entries: Mapping[str, Any], components: ComponentManifest, problems: list[WaybillError]
) -> Iterator[Statement]:
    known = [component.name for component in components.components]
    for name, entry in entries.items():
        if entry is None or entry == {}:
            continue  # float, as a component without an entry is
        if name in known and isinstance(entry, Mapping):
            yield Statement(name, f"{where}.{name}", entry, by_path=True)
            continue
        problems.append(
            BadConfig(
                "the quantization of a component cannot be used",
                where=f"{where}.{name}",
                expected=f"an object or null, for one of {', '.join(known)}",
                found=f"a component the model does not have: {name!r}" if name not in known else repr(entry)[:120],
                fix="correct the component's entry; a component without one is float",
            )
        )
