"""Quantization metadata of a package: every place it is stated in, given to the component it is about."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from waybill.config.producers import difference, read_plan
from waybill.config.quantization import ComponentQuantizationManifest, ComponentQuantizationPlan
from waybill.errors import BadConfig, ConfigConflict, WaybillError
from waybill.manifest.component import ComponentManifest

NESTED = {"text_config": "decoder", "vision_config": "vision_encoder", "audio_config": "audio_encoder"}
"""Nested configs that may state the quantization of the component with that role."""

Block = Mapping[str, Any]


def read_quantization(
    config: Mapping[str, Any],
    side_files: Mapping[str, Mapping[str, Any]],
    components: ComponentManifest,
    problems: list[WaybillError],
) -> ComponentQuantizationManifest:
    """One plan for each component that some place calls packed; problems are appended, not raised."""
    stated: dict[str, dict[str, Block]] = {}
    for component, where, block in _statements(config, side_files, components, problems):
        stated.setdefault(component, {})[where] = block
    plans = {name: plan for name, places in stated.items() if (plan := _agreed(places, problems)) is not None}
    return ComponentQuantizationManifest(plans)


def _agreed(places: Mapping[str, Block], problems: list[WaybillError]) -> ComponentQuantizationPlan | None:
    """The plan of the first place, which the others must repeat."""
    (where, block), *others = places.items()
    for other, again in others:
        if (found := difference(block, where, again, other)) is not None:
            problems.append(
                ConfigConflict(
                    "two places state the quantization differently",
                    where=f"{where} and {other}",
                    expected="one statement",
                    found=found,
                    fix="remove the one that does not describe these weights",
                )
            )
    return read_plan(block, where, problems)


def _statements(
    config: Mapping[str, Any],
    side_files: Mapping[str, Mapping[str, Any]],
    components: ComponentManifest,
    problems: list[WaybillError],
) -> Iterator[tuple[str, str, Block]]:
    """(component, place, block): the authoritative places first. What is model-wide is the only component's."""
    block = config.get("quantization_config")
    inner = block.get("components") if isinstance(block, Mapping) else None
    for where, entries in (
        ("config.json: component_quantization", config.get("component_quantization")),
        ("config.json: quantization_config.components", inner),
    ):
        if isinstance(entries, Mapping):
            yield from _by_name(where, entries, components, problems)
    by_role = {component.role: component.name for component in components.components}
    only = components.only
    if only is not None and not isinstance(inner, Mapping) and isinstance(block, Mapping) and block:
        yield only.name, "config.json: quantization_config", block
    for key, role in NESTED.items():
        nested = config.get(key)
        entry = nested.get("quantization_config") if isinstance(nested, Mapping) else None
        if isinstance(entry, Mapping) and entry and role in by_role:
            yield by_role[role], f"config.json: {key}.quantization_config", entry
    if only is not None:
        for file, content in side_files.items():
            if content:
                yield only.name, file, content


def _by_name(
    where: str, entries: Mapping[str, Any], components: ComponentManifest, problems: list[WaybillError]
) -> Iterator[tuple[str, str, Block]]:
    known = [component.name for component in components.components]
    for name, entry in entries.items():
        if entry is None or entry == {}:
            continue  # float, as a component without an entry is
        if name in known and isinstance(entry, Mapping):
            yield name, f"{where}.{name}", entry
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
