"""A key that occurs twice is found wherever it stands: counting colons only says where nobody need look."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waybill.checkpoint.jsonfile import parse_object

KEYS = st.sampled_from(["a", "b", "c", ":", "a:b", '"', "\\", "é"])


class Pairs(list[tuple[str, Any]]):
    """An object as it is written, which may have a key twice."""

    def __str__(self) -> str:
        return "{" + ", ".join(f"{json.dumps(key)}: {written(value)}" for key, value in self) + "}"

    @property
    def repeats(self) -> bool:
        inner = [value.repeats for _, value in self if isinstance(value, Pairs)]
        return len(dict(self)) < len(self) or any(inner)


def written(value: Any) -> str:
    return str(value) if isinstance(value, Pairs) else json.dumps(value)


def objects(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Pairs]:
    return st.lists(st.tuples(KEYS, values), max_size=3).map(Pairs)


documents = objects(st.recursive(st.none() | st.integers() | KEYS | st.lists(KEYS, max_size=2), objects, max_leaves=6))


@given(documents)
def test_a_key_that_occurs_twice_is_refused_and_everything_else_is_read(document: Pairs) -> None:
    text = str(document)
    if document.repeats:
        with pytest.raises(ValueError, match="occurs twice"):
            parse_object(text.encode())
    else:
        assert parse_object(text.encode()) == json.loads(text)
