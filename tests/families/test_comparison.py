"""Packages of several components beside the checkpoints they were made from: the same weights, by value."""

from __future__ import annotations

from pathlib import Path

import pytest

import waybill
from zoo import LAYOUTS, ZOO, Layout, Tiny, pack


@pytest.mark.parametrize(
    "layout",
    [each for each in LAYOUTS if each.title in ("float", "an override", "AWQ and GPTQ")],
    ids=lambda each: each.title,
)
@pytest.mark.parametrize("model", ZOO, ids=lambda model: model.title)
def test_a_package_of_components_is_the_checkpoint_it_was_made_from(
    model: Tiny, layout: Layout, tmp_path: Path
) -> None:
    packed, *_ = pack(model, model.make(True, tmp_path / "made"), layout)
    folder = packed.write(tmp_path / "checkpoint")
    waybill.build(folder).save(tmp_path / "package")
    comparison = waybill.compare(folder, tmp_path / "package")
    assert comparison.same, comparison.as_dict()
    assert comparison.weights_compared > 20
