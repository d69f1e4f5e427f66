"""Name templates: `{i}` is an integer path segment, `{q|k|v}` one of several members in order.

Matching is whole-name and costs one dictionary lookup: a name's integer segments are lifted out, and what remains is
the key. No regular expression is involved, so no name can make matching slow.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_HOLE = re.compile(r"\{([^{}]+)\}")


def lift(name: str) -> tuple[str, tuple[int, ...]]:
    """A name's key, with `#` for every integer segment, and those integers."""
    indices = []
    segments = name.replace("#", "##").split(".")
    for at, segment in enumerate(segments):
        # "01" is not how any producer writes an index; it stays a literal and matches nothing.
        if segment.isdecimal() and segment.isascii() and len(segment) < 10 and (segment[0] != "0" or segment == "0"):
            indices.append(int(segment))
            segments[at] = "#"
    return ".".join(segments), tuple(indices)


@dataclass(frozen=True, slots=True)
class Template:
    """A parsed template: its index variables in order, its members, and one key for each member."""

    text: str
    variables: tuple[str, ...]
    members: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Template:
        """Read the notation; ValueError when a variable is no whole segment or there are two member groups."""
        holes = _HOLE.findall(text)
        groups = [hole for hole in holes if "|" in hole]
        variables = tuple(hole for hole in holes if "|" not in hole)
        members = tuple(groups[0].split("|")) if groups else ()
        template = cls(text, variables, members)
        if (
            len(groups) > 1
            or len(set(variables)) < len(variables)
            or any(f"{{{v}}}" not in text.split(".") for v in variables)
            or any(c in _HOLE.sub("", text) for c in "{}#")
            or any(lift(form)[1] for form in template.forms())
        ):
            raise ValueError(f"not a template: {text}")
        return template

    def forms(self) -> list[str]:
        """The lifted key of every member, in order; one key when there are no members."""
        key = self.text
        for variable in self.variables:
            key = key.replace(f"{{{variable}}}", "#")
        return [_HOLE.sub(member, key) for member in self.members] or [key]

    def fill(self, indices: dict[str, int], member: int | None = None) -> str:
        """The name with its variables and its member put in."""
        name = self.text
        for variable in self.variables:
            name = name.replace(f"{{{variable}}}", str(indices[variable]))
        return _HOLE.sub(self.members[member], name) if member is not None else name
