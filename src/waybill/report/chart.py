"""Axes and lines of a chart, as numbers for a template."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

WIDTH, HEIGHT = 400, 260
LEFT, RIGHT, TOP, BOTTOM = 58, 92, 12, 44
"""Room for the labels of the axes, and for what lines are called, beside what is drawn."""


class Tick(NamedTuple):
    """A place on an axis, and what stands there."""

    at: float
    label: str


class Line(NamedTuple):
    """From one end of the chart to the other, and what it is called."""

    start: tuple[float, float]
    end: tuple[float, float]
    label: str
    value: str


class Chart(NamedTuple):
    """Lines from 0 on, and both axes."""

    horizontal: list[Tick]
    vertical: list[Tick]
    lines: list[Line]
    level: Line | None
    """A value to compare with, where it lies neither far beyond the lines nor on the axis."""


def growth(slopes: Sequence[tuple[str, int]], length: int, level: int, size: Callable[[float], str]) -> Chart:
    """How values that grow with a length compare with a constant one; the last slope is the steepest."""
    top = slopes[-1][1] * length
    shows_level = 0.08 * top <= level <= 1.2 * top
    step = _nice(max(top, level if shows_level else 0) / 4)
    ceiling = step * math.ceil(max(top, level if shows_level else 0) / step - 1e-9)

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * value / length

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / ceiling

    quarters = [length * quarter // 4 for quarter in range(5)]
    constant = Line((x(0), y(level)), (x(length), y(level)), "weights", size(level))
    return Chart(
        [Tick(x(value), f"{value // 1024}k" if value and length % 4096 == 0 else f"{value:,}") for value in quarters],
        [Tick(y(step * at), size(step * at) if at else "0") for at in range(round(ceiling / step) + 1)],
        [Line((x(0), y(0)), (x(length), y(slope * length)), label, size(slope * length)) for label, slope in slopes],
        constant if shows_level else None,
    )


def _nice(step: float) -> float:
    """The next of 1, 2, 2.5, 5 times a power of ten."""
    power: float = 10.0 ** math.floor(math.log10(step))
    return next(nice * power for nice in (1, 2, 2.5, 5, 10) if nice * power >= step * (1 - 1e-9))
