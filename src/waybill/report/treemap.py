"""Areas for sizes: squarified treemaps (Bruls, Huizing, van Wijk, 2000), and what fits into them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from waybill.report.precision import MIXED, Precision

HEADING = 20
"""Units of height for the name of a group."""
LINE = 15
"""Units of height for a line of text."""
CHARACTER = 8.0
"""Units of width for a character, at most on average."""
MOST = 24
"""Tiles of a group; the smaller ones share one."""


class Box(NamedTuple):
    """A rectangle."""

    x: float
    y: float
    width: float
    height: float

    def inset(self, by: float, top: float = 0) -> Box:
        """Smaller on all sides, and at the top by more."""
        width, height = max(self.width - 2 * by, 0), max(self.height - 2 * by - top, 0)
        return Box(self.x + by, self.y + by + top, width, height)


class Item(NamedTuple):
    """What has a size: a name, how it is stored, in words too, bytes, and the number of weights it stands for."""

    name: str
    precision: Precision
    layout: str
    nbytes: int
    weights: int


class Tile(NamedTuple):
    """An item in its place, and the lines of text that fit."""

    box: Box
    item: Item
    room: tuple[int, int]
    """Characters of a line, and lines."""


class Group(NamedTuple):
    """Items that belong together, in their frame; `room` is 0 where no heading fits."""

    box: Box
    name: str
    nbytes: int
    tiles: list[Tile]
    room: int


def treemap(groups: Iterable[tuple[str, Sequence[Item]]], width: float, height: float) -> list[Group]:
    """Groups as areas by bytes, and in each its items, from the largest to the smallest."""
    filled = [(name, merged(items), sum(item.nbytes for item in items)) for name, items in groups]
    ordered = sorted((group for group in filled if group[2]), key=lambda group: -group[2])
    boxes = squarified([nbytes for *_, nbytes in ordered], Box(0, 0, width, height))
    drawn = []
    for (name, items, nbytes), box in zip(ordered, boxes, strict=True):
        room = int((box.width - 12) / CHARACTER) if len(ordered) > 1 and box.height > 2 * HEADING else 0
        inner = box.inset(2, HEADING) if room >= 5 else box.inset(2 if len(ordered) > 1 else 0)
        places = squarified([item.nbytes for item in items], inner)
        tiles = [
            Tile(place.inset(1), item, (int((place.width - 12) / CHARACTER), int((place.height - 10) / LINE)))
            for item, place in zip(items, places, strict=True)
        ]
        drawn.append(Group(box, name, nbytes, tiles, room if room >= 5 else 0))
    return drawn


def merged(items: Sequence[Item]) -> list[Item]:
    """The largest first; what would be too small to see becomes one item."""
    ordered = sorted((item for item in items if item.nbytes), key=lambda item: -item.nbytes)
    least = sum(item.nbytes for item in ordered) / 500
    shown = [item for item in ordered[:MOST] if item.nbytes >= least]
    rest = ordered[len(shown) :]
    if len(rest) < 2:
        return ordered
    kinds = {item.precision for item in rest}
    precision = kinds.pop() if len(kinds) == 1 else MIXED
    small = Item(f"{len(rest)} smaller kinds", precision, precision.name, sum(i.nbytes for i in rest),
                 sum(i.weights for i in rest))  # fmt: skip
    return sorted([*shown, small], key=lambda item: -item.nbytes)


def squarified(sizes: Sequence[float], box: Box) -> list[Box]:
    """A box for each size, largest first, with areas in proportion and sides as equal as a greedy choice makes them."""
    whole = sum(sizes)
    areas = [size / whole * box.width * box.height for size in sizes]
    boxes: list[Box] = []
    while len(boxes) < len(areas):
        side = min(box.width, box.height)
        row = areas[len(boxes) : len(boxes) + 1]
        for area in areas[len(boxes) + 1 :]:
            if _worst([*row, area], side) > _worst(row, side):
                break
            row.append(area)
        depth = sum(row) / side if side else 0
        boxes += _laid(row, depth, box)
        across = box.width >= box.height
        box = (
            Box(box.x + depth, box.y, max(box.width - depth, 0), box.height)
            if across
            else Box(box.x, box.y + depth, box.width, max(box.height - depth, 0))
        )
    return boxes


def _laid(row: Sequence[float], depth: float, box: Box) -> Iterator[Box]:
    """A row along the shorter side of a box."""
    at, across = 0.0, box.width >= box.height
    for area in row:
        length = area / depth if depth else 0
        yield Box(box.x, box.y + at, depth, length) if across else Box(box.x + at, box.y, length, depth)
        at += length


def _worst(row: Sequence[float], side: float) -> float:
    """How far the least square of a row is from one."""
    total = sum(row)
    if not total or not side or not min(row):
        return float("inf")
    return max(side**2 * max(row) / total**2, total**2 / (side**2 * min(row)))
