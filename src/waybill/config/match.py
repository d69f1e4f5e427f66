"""Which modules a pattern of quantization metadata means: one named matcher for each producer's dialect.

Patterns come from strangers, so regular expressions run on RE2, which cannot backtrack. Literals are looked up in a
dictionary and expressions are tried together, so thousands of rules cost little more than one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, Literal

from waybill.errors import BadPattern

Plain = Literal["exact", "subtree", "ending", "substring", "regex", "either"]
"""What a pattern without a marker means: this name; it and all below it; any path ending in it; any name containing it;
an expression; an expression for a path and all below it, or a text that the name ends in."""
Anchor = Literal["full", "start", "search"]
"""Where an expression must match: the whole name, from its start, anywhere."""

CLASSES: Mapping[str, Sequence[str]] = {
    "linear": ("Linear", "Module"),
    "head": ("Linear", "Module"),
    "embedding": ("Embedding", "Module"),
}
"""Kind of a module to the classes that a rule may name it by, its own and those it inherits from."""

_WIDE = re.compile(r"\\[pPx]")
"""Classes of Unicode, and characters by their number."""
_RUN = re.compile(r"(?:\w|\\\.|\\x\{[0-9a-f]+\})+")
_COUNT = re.compile(r"(?<!\\x)\{(?:\d*,)?(\d+),?\}")
MOST_PATTERNS = 1 << 16
"""Room for a rule of its own for every expert's every projection in the largest models."""
MOST_MEMORY = 256 << 20
"""Bytes that the expressions of one list may be compiled into; several times that is used meanwhile."""
MOST_SIGNS = 500_000
"""Of the expressions of one list, a run of plain letters as one, and `{n}` as n times what it stands in."""


class Matcher:
    """An ordered list of patterns in one dialect."""

    def __init__(
        self,
        patterns: Sequence[str],
        *,
        plain: Plain,
        anchor: Anchor,
        marker: str,
        where: str,
        classes: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        if len(patterns) > MOST_PATTERNS:
            raise _too_large(where, f"{len(patterns):,} patterns")
        self.patterns = tuple(patterns)
        self._classes = classes or {}
        self.field = where.rpartition(".")[2]
        """The metadata's name for the list."""
        self._plain = plain
        self._literals: dict[str, list[int]] = {}
        expressions: list[tuple[int, str]] = []
        substrings: list[tuple[int, str]] = []
        for index, pattern in enumerate(self.patterns):
            if marker and pattern.startswith(marker):
                expressions.append((index, _expression(pattern.removeprefix(marker), where)))
            elif plain == "regex":
                expressions.append((index, _expression(pattern, where)))
            elif plain == "either":
                _expression(pattern, where)
                end = "" if pattern.endswith(".") else r"(?:\.|$)"
                expressions.append((index, f"(?:(?:{pattern}){end}|.*{_escaped(pattern)}$)"))
            elif plain == "substring":
                substrings.append((index, _escaped(pattern)))
            else:
                self._literals.setdefault(pattern, []).append(index)
        self._sets = [
            (_compile(given, how, where), [index for index, _ in given])
            for given, how in ((expressions, anchor), (substrings, "search"))
            if given
        ]

    def matches(self, name: str, kind: str = "") -> list[int]:
        """The positions of every pattern that selects a module of that name and kind, in file order."""
        keys = (*self._keys(name), *self._classes.get(kind, ()))
        found = [index for key in keys for index in self._literals.get(key, ())]
        for together, numbers in self._sets:
            found += [numbers[i] for i in together.Match(name) or ()]
        return sorted(found)

    def first(self, name: str, kind: str = "") -> int | None:
        """The position of the first pattern that selects a module of that name and kind."""
        return min(self.matches(name, kind), default=None)

    def _keys(self, name: str) -> Iterable[str]:
        if not self._literals:
            return ()
        if self._plain == "exact":
            return (name,)
        segments = name.split(".")
        if self._plain == "ending":
            return [".".join(segments[start:]) for start in range(len(segments))]
        return [".".join(segments[:end]) for end in range(1, len(segments) + 1)]


def _expression(pattern: str, where: str) -> str:
    """The same pattern; a few letters that mean every letter there is would take hundreds of kilobytes each."""
    if not pattern.isascii() or _WIDE.search(pattern):
        raise _bad_pattern(pattern, where, "characters, or classes of them, that are not ASCII")
    return pattern


def _bad_pattern(pattern: str, where: str, found: str) -> BadPattern:
    return BadPattern(
        "a pattern cannot be compiled",
        where=f"{where}: {pattern[:120]}",
        expected="a regular expression of ASCII characters, without look-around and back-references",
        found=found[:160],
        fix="write the pattern with plain classes, groups and alternatives",
    )


def _escaped(literal: str) -> str:
    """An expression for exactly this text."""
    return "".join(c if c.isalnum() or c == "_" else f"\\x{{{ord(c):x}}}" for c in literal)


def _compile(expressions: list[tuple[int, str]], anchor: Anchor, where: str) -> Any:
    import re2

    options = re2.Options()
    options.log_errors = False
    options.max_mem = MOST_MEMORY
    signs = sum(map(_signs, (text for _, text in expressions)))
    if signs > MOST_SIGNS:
        raise _too_large(where, f"{len(expressions):,} patterns of {signs:.3g} signs")
    make = {"full": re2.Set.FullMatchSet, "start": re2.Set.MatchSet, "search": re2.Set.SearchSet}[anchor]
    together = make(options)
    for _, expression in expressions:
        try:
            together.Add(expression)
        except (re2.error, UnicodeEncodeError) as error:
            raise _bad_pattern(expression, where, str(error)) from None
    try:
        together.Compile()
    except re2.error:
        raise _too_large(where, f"{len(expressions):,} patterns that do not fit in {MOST_MEMORY >> 20} MiB") from None
    return together


def _signs(expression: str) -> int:
    flagged = "(?" in expression.replace("(?:", "")  # letters of either case are no run
    short = expression if flagged else _RUN.sub("a", expression)
    return len(short) * prod(map(int, _COUNT.findall(expression)))


def _too_large(where: str, found: str) -> BadPattern:
    return BadPattern(
        "the patterns are too large together",
        where=where,
        expected=f"at most {MOST_PATTERNS:,} of {MOST_SIGNS:,} signs, which compile into {MOST_MEMORY >> 20} MiB",
        found=found,
        fix="write fewer and simpler patterns, for example one for all layers in the place of one a layer",
    )


def module_paths(patterns: Sequence[str], where: str) -> Matcher:
    """GPTQ and AWQ exclusions and component plans: a path and all below it; `re:` matches the whole name."""
    return Matcher(patterns, plain="subtree", anchor="full", marker="re:", where=where)


def block_members(patterns: Sequence[str], where: str) -> Matcher:
    """GPTQ's modules_in_block_to_quantize: paths relative to whatever block they stand in."""
    return Matcher(patterns, plain="ending", anchor="full", marker="", where=where)


def olive_exclusions(patterns: Sequence[str], where: str) -> Matcher:
    """Olive's modules_to_not_convert: substrings; `re:` matches the whole name."""
    return Matcher(patterns, plain="substring", anchor="full", marker="re:", where=where)


def olive_overrides(patterns: Sequence[str], where: str) -> Matcher:
    """Olive's overrides: exact names; `re:` matches the whole name; the first in file order wins."""
    return Matcher(patterns, plain="exact", anchor="full", marker="re:", where=where)


def gptq_dynamic(patterns: Sequence[str], where: str) -> Matcher:
    """GPTQModel's dynamic: expressions anchored at the start only; the first in file order wins."""
    return Matcher(patterns, plain="regex", anchor="start", marker="", where=where)


def auto_round_search(patterns: Sequence[str], where: str) -> Matcher:
    """auto-round's extra_config where no module has that exact name: an expression found anywhere."""
    return Matcher(patterns, plain="regex", anchor="search", marker="", where=where)


def compressed_targets(patterns: Sequence[str], where: str) -> Matcher:
    """compressed-tensors' targets and ignore: exact paths or class names; `re:` is anchored at the start only.

    An exact path comes before the expressions, these in the order of their text, and class names come last.
    """
    named = {name for names in CLASSES.values() for name in names}
    ordered = sorted(patterns, key=lambda p: (p in named, p.startswith("re:"), p))
    return Matcher(ordered, plain="exact", anchor="start", marker="re:", where=where, classes=CLASSES)


def fp8_exclusions(patterns: Sequence[str], where: str) -> Matcher:
    """transformers' modules_to_not_convert: an expression for a path and all below it, or an ending of the name."""
    return Matcher(patterns, plain="either", anchor="start", marker="", where=where)
