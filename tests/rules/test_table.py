"""Rule tables: every name goes to one place, and a merge read backwards is the split."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import product
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waybill.families.decoder import DECODER_MERGES
from waybill.rules import Drop, DropUnder, Move, Place, RuleTable
from waybill.rules.table import Split

QKV = Move("layers.{i}.{q|k|v}_proj.weight", "layers.{i}.qkv.weight")
BANK = Move("layers.{i}.experts.{e}.{gate|up}.weight", "layers.{i}.bank")
UNBANK = Move("layers.{i}.bank", "layers.{i}.experts.{e}.{gate|up}.weight")


def dict_lookups(action: Callable[[], object]) -> int:
    """How many times `action` calls `dict.get`."""
    count = 0

    def watch(frame: FrameType, event: str, callee: Any) -> None:
        nonlocal count
        count += event == "c_call" and callee.__qualname__ == "dict.get"

    sys.setprofile(watch)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


def test_members_are_concatenated_in_the_order_of_the_rule() -> None:
    table = RuleTable([QKV])
    places = [table.route(f"layers.7.{member}_proj.weight") for member in "qkv"]
    assert places == [Place("layers.7.qkv.weight", None, member) for member in range(3)]


def test_an_index_that_the_target_lacks_is_the_position_in_the_stack() -> None:
    assert RuleTable([BANK]).route("layers.3.experts.12.up.weight") == Place("layers.3.bank", 12, 1)


def test_an_index_and_members_that_the_source_lacks_are_split() -> None:
    split = RuleTable([UNBANK]).route("layers.3.bank")
    assert isinstance(split, Split)
    assert (split.template.members, split.indices, split.variable) == (("gate", "up"), {"i": 3}, "e")


def test_members_on_both_sides_are_renamed_one_by_one() -> None:
    table = RuleTable([Move("layers.{i}.{wq|wk}", "model.{i}.{q|k}.weight")])
    assert table.route("layers.2.wk") == Place("model.2.k.weight", None, None)


def test_a_variable_may_move() -> None:
    table = RuleTable([Move("a.{i}.b.{j}", "c.{j}.d.{i}")])
    assert table.route("a.1.b.2") == Place("c.2.d.1")


@given(st.integers(0, 99), st.integers(0, 99), st.sampled_from([0, 1]))
def test_splitting_a_bank_and_stacking_it_again_comes_back_to_the_bank(layer: int, expert: int, member: int) -> None:
    split = RuleTable([UNBANK]).route(f"layers.{layer}.bank")
    assert isinstance(split, Split)
    piece = split.template.fill(split.indices | {"e": expert}, member)
    assert RuleTable([BANK]).route(piece) == Place(f"layers.{layer}.bank", expert, member)


@given(st.integers(0, 999), st.integers(0, 999))
def test_the_sources_of_a_target_are_the_names_that_route_to_it(layer: int, expert: int) -> None:
    attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
    for target in (f"{attention}.qkv_proj.bias", f"{mlp}.gate_up_proj.weight", f"{mlp}.experts.gate_up_proj"):
        stack = expert if "experts" in target else 0
        for member, source in enumerate(DECODER_MERGES.sources_of(target, stack)):
            place = DECODER_MERGES.route(source)
            assert isinstance(place, Place)
            assert (place.target, place.stack or 0, place.member) == (target, stack, member)


@pytest.mark.parametrize(
    "name", ["", ".", "a..b", "x.y", "layers.1.qkv", "layers.1.q_proj.weight.more", "q_proj.weight"]
)
def test_a_name_no_rule_mentions_keeps_its_name(name: str) -> None:
    table = RuleTable([QKV, BANK, Drop("layers.{i}.inv_freq", "recomputed")])
    assert table.route(name) == Place(name)
    assert table.sources_of(name) == [name]
    assert table.dropped(name) is None


@pytest.mark.parametrize("segment", ["#", "01", "-1", "²", "١", "", "1" * 10, "1" * 5000], ids=lambda s: repr(s)[:12])
@pytest.mark.parametrize("rest", ["q_proj.weight", "bank", "experts.0.up.weight", "inv_freq"])
def test_a_segment_that_is_no_index_matches_no_rule(segment: str, rest: str) -> None:
    table = RuleTable(
        [QKV, UNBANK, Drop("layers.{i}.inv_freq", "recomputed"), Move("layers.{i}.experts.{e}.up.weight", "x.{i}")]
    )
    name = f"layers.{segment}.{rest}"
    assert table.route(name) == Place(name)
    assert table.dropped(name) is None


def test_a_dropped_name_gives_the_reason_of_its_rule() -> None:
    table = RuleTable([Drop("layers.{i}.inv_freq", "recomputed"), DropUnder("mtp", "another head")])
    assert table.dropped("layers.11.inv_freq") == "recomputed"
    assert table.dropped("mtp.layers.0.weight") == "another head"


@pytest.mark.parametrize("name", ["mtp", "mtpx.weight", "a.mtp.weight", "layers.10.weight", "layers.1"])
def test_dropping_a_path_drops_only_what_lies_below_it(name: str) -> None:
    table = RuleTable([DropUnder("mtp", "another head"), DropUnder("layers.1", "another head")])
    assert table.dropped(name) is None
    assert table.dropped("layers.1.weight") == "another head"


@pytest.mark.parametrize(
    "rules",
    [
        [QKV, QKV],
        [QKV, Drop("layers.{j}.k_proj.weight", "twice")],
        [Drop("layers.{i}.x", "once"), Drop("layers.{n}.x", "twice")],
        [Move("layers.{i}.x", "a.{i}"), Move("layers.{j}.x", "b.{j}")],
        [Move("a.{q|q}", "b")],
    ],
    ids=["move-move", "move-drop", "drop-drop", "variables", "members"],
)
def test_two_rules_for_one_name_are_refused(rules: list[Move | Drop]) -> None:
    with pytest.raises(ValueError, match="two rules claim"):
        RuleTable(rules)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("a.{i}.{j}", "b"),  # two indices stacked
        ("a", "b.{i}.{j}"),  # two indices split
        ("a.{q|k}", "b.{i}"),  # merged and split
        ("a.{i}", "b.{q|k}"),
        ("a.{i}.{q|k}", "b.{j}.{x|y}"),
        ("a.{q|k|v}", "b.{x|y}"),  # a member too many
        ("a.{q|k}", "b.{x|y|z}"),
    ],
)
def test_a_rule_that_does_not_say_where_a_piece_goes_is_refused(source: str, target: str) -> None:
    with pytest.raises(ValueError, match="a rule"):
        RuleTable([Move(source, target)])


@pytest.mark.parametrize("rows", [10, 3_000])
def test_forty_thousand_names_cost_one_lookup_each_whatever_the_number_of_rules(rows: int) -> None:
    table = RuleTable([Move(f"layers.{{i}}.part{n}.weight", f"model.{{i}}.part{n}.weight") for n in range(rows)])
    names = [f"layers.{i}.part{n}.weight" for i, n in product(range(400), range(100))]
    places: list[Place | Split] = []
    assert dict_lookups(lambda: places.extend(map(table.route, names))) == len(names) == 40_000
    assert places[10 * 100 + 7] == Place("model.10.part7.weight")


@pytest.mark.parametrize("name", ["layers.9999.self_attn.q_proj.weight", "a." * 10_000 + "b"], ids=["usual", "endless"])
def test_asking_whether_a_name_is_dropped_costs_what_the_rules_are_deep(name: str) -> None:
    table = RuleTable([*(DropUnder(f"layers.{n}", "surplus") for n in range(3_000)), Drop("a.{i}.b", "no use")])
    assert dict_lookups(lambda: table.dropped(name)) <= 3
    assert dict_lookups(lambda: RuleTable([QKV]).dropped(name)) == 1
