"""Typed reading of a JSON object: every wrong field is collected, so that all are reported together."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from waybill.errors import BadConfig, ConfigConflict, WaybillError

LARGEST_SIZE = (1 << 31) - 1
LARGEST_COUNT = 2048
"""No size, and no number of layers, heads or experts, in a real config comes near. Sizes are also compared with stored
shapes; counts make us loop before there is anything to compare them with."""


def positive(value: Any) -> bool:
    """A number above zero that a float can hold."""
    return type(value) in (int, float) and 0 < value <= sys.float_info.max


class Fields:
    """Reads fields of `raw`, falling back to `defaults`; null counts as absent. Problems are appended, not raised."""

    def __init__(
        self, raw: Mapping[str, Any], defaults: Mapping[str, Any], problems: list[WaybillError], where: str
    ) -> None:
        self.raw = raw
        self.defaults = defaults
        self.problems = problems
        self.where = where
        self.wrong: set[str] = set()
        """Fields already refused: what follows from their stand-ins is not worth a word."""

    def stated(self, key: str) -> bool:
        """Whether the file itself gives the field a value."""
        return self.raw.get(key) is not None

    def integer(self, key: str, *, low: int = 1, high: int = LARGEST_SIZE, alias: str | None = None) -> int:
        """An int from `low` to `high`; `alias` is another name for the same fact, refused when the two disagree."""
        value = self._value(key, alias)
        expected = f"an integer from {low} to {high:,}"
        return int(self._check(key, value, lambda v: type(v) is int and low <= v <= high, low, expected))

    def number(self, key: str) -> float:
        """A positive finite float."""
        value = self._check(
            key,
            self._value(key),
            positive,
            1.0,
            "a positive number",
        )
        return float(value)

    def boolean(self, key: str, *, required: bool = False) -> bool:
        """True or false; absent without a default is false, unless it is required."""
        value = self._value(key)
        value = False if value is None and not required else value
        return bool(self._check(key, value, lambda v: type(v) is bool, False, "a boolean"))

    def text(self, key: str) -> str:
        """A string."""
        return str(self._check(key, self._value(key), lambda v: type(v) is str, "", "a string"))

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of layer numbers."""
        value = self._value(key)
        value = self._check(
            key,
            () if value is None else value,
            lambda v: isinstance(v, (list, tuple)) and len(v) <= LARGEST_COUNT and all(type(i) is int for i in v),
            (),
            "a list of layer numbers",
        )
        return tuple(value)

    def strings(self, key: str) -> tuple[str, ...]:
        """A list of strings; absent is empty."""
        value = self._value(key)
        good = lambda v: isinstance(v, list) and all(isinstance(item, str) for item in v)  # noqa: E731
        return tuple(self._check(key, [] if value is None else value, good, [], "a list of strings"))

    def mapping(self, key: str) -> dict[str, Any]:
        """An object; absent is empty."""
        value = self._value(key)
        return dict(self._check(key, {} if value is None else value, lambda v: isinstance(v, Mapping), {}, "an object"))

    def _value(self, key: str, alias: str | None = None) -> Any:
        stated = {k: self.raw[k] for k in (key, alias) if k is not None and self.raw.get(k) is not None}
        if len(stated) == 2 and len({str(v) for v in stated.values()}) == 2:
            self.problems.append(
                ConfigConflict(
                    f"{key} and {alias} disagree",
                    where=self.where,
                    expected="one number",
                    found=", ".join(f"{k}: {v}" for k, v in stated.items()),
                    fix=f"keep the one that matches the weights, remove the other from {self.where}",
                )
            )
        return next(iter(stated.values()), self.defaults.get(key))

    def _check(self, key: str, value: Any, good: Any, fallback: Any, expected: str) -> Any:
        if good(value):
            return value
        self.wrong.add(key)
        absent = value is None
        self.problems.append(
            BadConfig(
                f"{key} is missing" if absent else f"{key} is not {expected}",
                where=f"{self.where}: {key}",
                expected=expected,
                found="no such field" if absent else repr(value)[:120],
                fix=f"state {key} in {self.where} as its producer published it",
            )
        )
        return fallback
