"""Strict JSON from strangers: bounded in size and depth, no duplicate keys, no NaN."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from waybill.checkpoint.places import require_inside
from waybill.errors import BadJson

MAX_CONFIG_BYTES = 16 << 20
"""Far above any real config.json or tokenizer_config.json."""
MAX_INDEX_BYTES = 32 << 20
"""An index takes about 95 bytes a tensor; packed experts of the largest models are 280,000."""
MAX_DEPTH = 64
"""Objects and lists inside each other: several times any real file, and far from what Python can show of them."""


class _Broken(ValueError):
    """A promise of strict JSON that the standard parser would let pass."""


def _keys(value: Any) -> int:
    """Keys of an object and of those in it."""
    if not isinstance(value, dict):
        return 0
    return len(value) + sum(len(inner) for inner in value.values() if type(inner) is dict)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _Broken(f"the key {twice[:80]!r} occurs twice")
    return unique


def _no_constant(name: str) -> None:
    raise _Broken(f"{name} is not JSON")


def parse_object(text: bytes) -> dict[str, Any]:
    """Parse a JSON object; ValueError says in words what is wrong with anything else."""
    try:
        # Decoded here: the parser would also take UTF-16 and UTF-32.
        value = json.loads(text.decode(), parse_constant=_no_constant)
        # A key has a colon. Where there are more than keys, in a text or a third level, each object is looked at.
        if text.count(b":") != _keys(value):
            value = json.loads(text.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text") from None
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__}, not an object")
    return value


def parse_document(text: bytes) -> dict[str, Any]:
    """The same of an object that will be gone through: one that is not nested too deeply."""
    value = parse_object(text)
    inner: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        values = (item.values() if type(item) is dict else item for item in inner)
        inner = [item for some in values for item in some if type(item) in (dict, list)]
        if not inner:
            return value
    raise ValueError("nested too deeply")


def read_object(path: Path, most: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Read a JSON file of at most so many bytes that must hold an object.

    Raises:
        BadJson: unreadable, too large, not strict JSON, or not an object.
        PathEscape: it is a link out of its folder.
    """
    try:
        require_inside(path)
        if path.exists() and not path.is_file():  # opening a pipe would wait for ever
            raise ValueError("a directory, device or pipe")
        with path.open("rb") as file:
            text = file.read(most + 1)
        if len(text) > most:
            raise ValueError(f"more than {most:,} bytes")
        return parse_document(text)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise BadJson(
            f"{path.name} is not a readable JSON object",
            where=str(path),
            expected="one JSON object, UTF-8, every key once",
            found=reason,
            fix=f"download {path.name} again, or repair it with a JSON-aware editor",
        ) from error
