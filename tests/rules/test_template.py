"""Templates: parse, lift and fill are inverse, and no name, however odd, is taken for another."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from waybill.rules.template import Template, lift

INDEX = st.integers(0, 10**9 - 1)
LITERAL = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
ODD_SEGMENTS = (
    "",
    "#",
    "##",
    "01",
    "00",
    "-1",
    "+1",
    "1_0",
    " 1",
    "1 ",
    "²",
    "١",
    "１",
    "1" * 10,
    "1" * 5000,
    "{i}",
    "e",
)
ODD_NAME = st.lists(st.one_of(st.sampled_from(ODD_SEGMENTS), INDEX.map(str), LITERAL), max_size=5).map(".".join)


@st.composite
def templates(draw: st.DrawFn) -> Template:
    """Literal segments, index variables, and perhaps one member group inside a segment."""
    segments = draw(st.lists(LITERAL, min_size=1, max_size=4))
    for number in range(draw(st.integers(0, 3))):
        segments.insert(draw(st.integers(0, len(segments))), f"{{v{number}}}")
    if draw(st.booleans()):
        members = draw(st.lists(LITERAL, min_size=2, max_size=4, unique=True))
        segments.insert(draw(st.integers(0, len(segments))), f"{{{'|'.join(members)}}}_proj")
    return Template.parse(".".join(segments))


@given(templates(), st.data())
def test_lifting_a_filled_template_gives_its_form_and_its_indices(template: Template, data: st.DataObject) -> None:
    indices = {variable: data.draw(INDEX) for variable in template.variables}
    member = data.draw(st.sampled_from(range(len(template.members)))) if template.members else None
    key, numbers = lift(template.fill(indices, member))
    assert key == template.forms()[member or 0]
    assert dict(zip(template.variables, numbers, strict=True)) == indices


@given(templates())
def test_a_template_has_one_form_a_member(template: Template) -> None:
    assert len(set(template.forms())) == len(template.members or (None,))


@given(st.lists(LITERAL | INDEX, min_size=1))
def test_exactly_the_integer_segments_are_lifted(segments: list[str | int]) -> None:
    key, numbers = lift(".".join(map(str, segments)))
    assert key == ".".join("#" if isinstance(segment, int) else segment for segment in segments)
    assert list(numbers) == [segment for segment in segments if isinstance(segment, int)]


@given(ODD_NAME, ODD_NAME)
@example("#.1", "1.#")
@example("layers.#", "layers.1")
@example("#", "##")
def test_two_names_never_lift_to_the_same(one: str, other: str) -> None:
    assert (lift(one) == lift(other)) == (one == other)


@given(ODD_NAME)
@example("model.layers.#.mlp.experts.0.up_proj.weight")
def test_a_key_alone_says_how_many_indices_there_are(name: str) -> None:
    key, numbers = lift(name)
    assert key.split(".").count("#") == len(numbers)


@pytest.mark.parametrize("segment", [s for s in ODD_SEGMENTS if s not in ("{i}", "e")], ids=lambda s: repr(s)[:12])
def test_what_no_producer_writes_as_an_index_is_none(segment: str) -> None:
    assert lift(f"layers.{segment}.weight")[1] == ()


@pytest.mark.parametrize("number", [0, 1, 10, 999_999_999])
def test_an_index_has_up_to_nine_digits(number: int) -> None:
    assert lift(f"layers.{number}.weight") == ("layers.#.weight", (number,))


def test_members_keep_their_order() -> None:
    template = Template.parse("a.{i}.{gate|up}_proj.{e}")
    assert template.members == ("gate", "up")
    assert template.variables == ("i", "e")
    assert [template.fill({"i": 3, "e": 0}, member) for member in (0, 1)] == ["a.3.gate_proj.0", "a.3.up_proj.0"]


@pytest.mark.parametrize(
    "text",
    [
        "layers.x{i}.weight",  # a variable is a whole segment
        "{q|k}.{a|b}",  # one group of members
        "layers.{i}.{i}.weight",  # one place a variable
        "layers.{i.weight",  # braces come in pairs
        "layers.i}.weight",
        "layers.{}.weight",
        "layers.0.weight",  # a name's 0 is lifted, so this would never match
        "layers.#.weight",
        "mlp.{0|1}.weight",
    ],
)
def test_a_template_that_could_never_match_as_meant_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a template"):
        Template.parse(text)
