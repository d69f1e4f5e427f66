"""Families × layouts: packages built, opened, run, and equal to transformers on the same weights.

The table in docs/components.md is written from the tests here that passed: `make families`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import waybill
from drivers import Driver
from families.conftest import BEGIN, END, PAGE
from waybill.onnx.folder import read_package
from waybill.onnx.runtime.model import open_model
from zoo import LAYOUTS, STEPS, ZOO, Layout, Tiny, pack, reference, request

CASES = [(tiny, layout, tied) for tiny in ZOO for layout in LAYOUTS for tied in tiny.ties]


def label(case: tuple[Tiny, Layout, bool]) -> str:
    tiny, layout, tied = case
    return f"{tiny.title}: {layout.title}, {'tied' if tied else 'untied'}"


@pytest.mark.parametrize("case", CASES, ids=map(label, CASES))
def test_a_package_is_packed_as_asked_and_equals_transformers(
    case: tuple[Tiny, Layout, bool], tmp_path: Path, record_property: pytest.RecordProperty
) -> None:
    tiny, layout, tied = case
    record_property("family", tiny.title)
    record_property("layout", layout.title)
    packed, dense, forms = pack(tiny, tiny.make(tied, tmp_path / "whole"), layout)
    expected, tokens = reference(tiny.load(dense, tmp_path / "dense"), tiny)
    built = waybill.build(packed.write(tmp_path / "packed"), exact=True)
    built.save(tmp_path / "package")
    driver = Driver(tmp_path / "package")
    inputs = {name: values.numpy() for name, values in tiny.inputs.items()}
    logits, made = driver.steps(inputs, inputs[tiny.grows], STEPS, tiny.first, tiny.never)

    assert np.abs(logits - expected).max() < 2e-4 * max(np.abs(expected).max(), 1)
    np.testing.assert_array_equal(made, tokens)
    answer = open_model(read_package(tmp_path / "package")).generate(request(tiny), max_new_tokens=STEPS)
    assert answer.token_ids == tokens.tolist()
    found = {module: form for modules in driver.packed().values() for module, form in modules.items()}
    assert found == {tiny.runtime(module): form for module, form in forms.items()}
    owners = {tiny.runtime(module): tiny.owner(module) for module in forms}
    assert all(owners[module] == graph for graph, modules in driver.packed().items() for module in modules)
    assert waybill.verify(tmp_path / "package", tmp_path / "packed").problems == []


def test_the_table_in_the_documentation_is_of_these_tests() -> None:
    table = PAGE.read_text("utf-8").split(BEGIN)[1].split(END)[0]
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines())
    assert head[1:] == [layout.title for layout in LAYOUTS]
    assert rows == [[tiny.title, *["✓"] * len(LAYOUTS)] for tiny in ZOO]
