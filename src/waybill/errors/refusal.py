"""What a refusal is: five answers and a code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar


class WaybillError(Exception):
    """A broken promise that answers five questions: what, where, expected, found, fix."""

    code: ClassVar[str] = "error"
    """Its name in the catalogue, and in JSON."""
    exit_code: ClassVar[int] = 1
    """How a command that is refused so ends."""
    speaks: bool | None = None
    """Whether this tensor-parallel rank reports it; None is what every rank finds alike, and the first one reports."""

    def __init_subclass__(cls, code: str = "") -> None:
        if code:
            cls.code = code

    def __init__(self, what: str, *, where: str = "", expected: str = "", found: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.expected = expected
        self.found = found
        self.fix = fix

    def __str__(self) -> str:
        rows = (("where", self.where), ("expected", self.expected), ("found", self.found), ("fix", self.fix))
        lines = [f"{self.what} [{self.code}]", *(f"  {k:<9}{v}" for k, v in rows if v)]
        return "\n".join(map(printable, lines))

    def __reduce__(self) -> tuple[object, ...]:
        # Built by keyword, it would otherwise not survive the trip from another process.
        return _rebuild, (type(self), self.what, self.where, self.expected, self.found, self.fix)

    def as_dict(self) -> dict[str, str]:
        """The JSON form: code, what, where, expected, found, fix."""
        return {
            "code": self.code,
            "what": self.what,
            "where": self.where,
            "expected": self.expected,
            "found": self.found,
            "fix": self.fix,
        }


def printable(text: str) -> str:
    """The text with control characters escaped: names come from strangers, and terminals obey what they print."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def some(names: Sequence[str], most: int = 4) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _rebuild(kind: type[WaybillError], what: str, where: str, expected: str, found: str, fix: str) -> WaybillError:
    return kind(what, where=where, expected=expected, found=found, fix=fix)


class Refused(WaybillError, code="refused"):
    """All problems of one checkpoint, found together."""

    def __init__(self, problems: Iterable[WaybillError]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        super().__init__(f"refused: {count} problem{'s' if count != 1 else ''}")

    def __str__(self) -> str:
        return "\n".join([self.what, *(str(problem) for problem in self.problems)])

    def __reduce__(self) -> tuple[object, ...]:
        return Refused, (self.problems,)
