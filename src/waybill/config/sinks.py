"""What configs of decoders with attention sinks say beside the common fields: windows by layer, a clamped SwiGLU."""

from __future__ import annotations

from typing import NamedTuple

from waybill.config.fields import Fields
from waybill.errors import BadConfig, UnsupportedFeature, WaybillError

SLIDING, FULL = "sliding_attention", "full_attention"


class ClampedSwiGLU(NamedTuple):
    """gate · σ(alpha · gate) · (up + 1), after gate ≤ limit and |up| ≤ limit."""

    alpha: float
    limit: float


def read_swiglu(fields: Fields) -> ClampedSwiGLU:
    """Its two numbers."""
    return ClampedSwiGLU(fields.number("swiglu_alpha"), fields.number("swiglu_limit"))


def read_windows(fields: Fields, layers: int) -> tuple[int, ...]:
    """Positions each of `layers` layers attends to, 0 for all; every second one, from the first, where none are named.

    Problems are appended: kinds that are not known, not one for each layer, or a window that is null.
    """
    kinds: tuple[str, ...] = tuple(SLIDING if layer % 2 == 0 else FULL for layer in range(layers))
    if fields.stated("layer_types"):
        kinds = fields.strings("layer_types")
        if "layer_types" in fields.wrong or not _fits(fields, kinds, layers):
            return ()
    if SLIDING not in kinds:
        return ()
    if fields.raw.get("sliding_window", 0) is None:
        fields.problems.append(
            _problem(BadConfig, fields, "sliding_window", "a number: some layers attend to a window", "null")
        )
        return ()
    window = fields.integer("sliding_window")
    return tuple(window if kind == SLIDING else 0 for kind in kinds)


def _fits(fields: Fields, kinds: tuple[str, ...], layers: int) -> bool:
    strange = [kind for kind in kinds if kind not in (SLIDING, FULL)]
    if strange:
        found = ", ".join(dict.fromkeys(map(repr, strange)))[:120]
        fields.problems.append(_problem(UnsupportedFeature, fields, "layer_types", f"{SLIDING} | {FULL}", found))
    elif len(kinds) != layers and "num_hidden_layers" not in fields.wrong:
        expected = f"one kind for each of {layers} layers: num_hidden_layers"
        fields.problems.append(_problem(BadConfig, fields, "layer_types", expected, str(len(kinds))))
    else:
        return True
    return False


def _problem(kind: type[WaybillError], fields: Fields, key: str, expected: str, found: str) -> WaybillError:
    return kind(
        f"{key} cannot be used",
        where=f"{fields.where}: {key}",
        expected=expected,
        found=found,
        fix=f"state {key} in {fields.where} as its producer published it",
    )
