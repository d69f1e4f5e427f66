"""Treemaps: areas are bytes, nothing overlaps, nothing is left out."""

from __future__ import annotations

import itertools

import pytest

from waybill.report.chart import growth
from waybill.report.precision import FLOATS, MIXED
from waybill.report.treemap import Box, Item, merged, squarified, treemap


def item(nbytes: int, name: str = "w") -> Item:
    return Item(name, FLOATS["F32"], "float32", nbytes, 1)


@pytest.mark.parametrize("sizes", [[1], [5, 3, 1, 1], [1000, 1], list(range(24, 0, -1))])
@pytest.mark.parametrize("whole", [Box(0, 0, 960, 400), Box(10, 5, 100, 700)])
def test_areas_are_sizes_and_no_two_overlap(sizes: list[int], whole: Box) -> None:
    boxes = squarified(sizes, whole)
    scale = whole.width * whole.height / sum(sizes)
    assert [box.width * box.height for box in boxes] == pytest.approx([size * scale for size in sizes])
    for box in boxes:
        assert box.x >= whole.x - 1e-6 and box.x + box.width <= whole.x + whole.width + 1e-6
        assert box.y >= whole.y - 1e-6 and box.y + box.height <= whole.y + whole.height + 1e-6
    for one, other in itertools.combinations(boxes, 2):
        wide = min(one.x + one.width, other.x + other.width) - max(one.x, other.x)
        high = min(one.y + one.height, other.y + other.height) - max(one.y, other.y)
        assert min(wide, high) < 1e-6


def test_equal_sizes_become_squares_rather_than_stripes() -> None:
    assert {(round(box.width), round(box.height)) for box in squarified([1] * 4, Box(0, 0, 200, 200))} == {(100, 100)}


def test_what_is_too_small_to_see_shares_a_tile_and_nothing_is_lost() -> None:
    items = [item(10_000), *(item(1, f"w{n}") for n in range(900))]
    shown = merged(items)
    assert [one.name for one in shown] == ["w", "900 smaller kinds"]
    assert sum(one.nbytes for one in shown) == 10_900 and sum(one.weights for one in shown) == 901
    several = merged([item(10_000), item(1), item(1)._replace(precision=FLOATS["F16"])])
    assert several[-1].precision == MIXED


def test_components_have_frames_and_those_without_bytes_none() -> None:
    groups = treemap([("small", [item(1)]), ("large", [item(3), item(2)]), ("none", []), ("zero", [item(0)])], 960, 400)
    assert [(group.name, group.nbytes, len(group.tiles)) for group in groups] == [("large", 5, 2), ("small", 1, 1)]
    assert treemap([], 960, 400) == []


def test_axes_have_round_numbers_and_units() -> None:
    chart = growth([("1 request", 1000), ("8 requests", 8000)], 4096, 0, lambda value: f"{value / 1e6:g} MB")
    assert [tick.label for tick in chart.vertical] == ["0", "10 MB", "20 MB", "30 MB", "40 MB"]
    assert [tick.label for tick in chart.horizontal] == ["0", "1k", "2k", "3k", "4k"]
    assert [(line.label, line.value) for line in chart.lines] == [
        ("1 request", "4.096 MB"),
        ("8 requests", "32.768 MB"),
    ]


@pytest.mark.parametrize(("level", "shown"), [(0, False), (1, False), (20_000_000, True), (90_000_000, False)])
def test_a_level_to_compare_with_is_drawn_where_it_can_be_seen(level: int, shown: bool) -> None:
    assert (growth([("8 requests", 8000)], 4096, level, str).level is not None) == shown
