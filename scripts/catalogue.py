"""The error catalogue, docs/errors.md: what each error means comes from its class, what it looks like stays as written.

python scripts/catalogue.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from waybill import errors

CATALOGUE = Path(__file__).parents[1] / "docs" / "errors.md"
ENTRY = re.compile(r"^#+ ([a-z-]+)$", re.MULTILINE)
FIRST_EXAMPLE = re.compile(r"^```text$", re.MULTILINE)


def paragraphs(kind: type[errors.WaybillError]) -> str:
    """A docstring as Markdown."""
    return "\n".join(line.strip() for line in (kind.__doc__ or "").strip().splitlines())


def coded(kind: type[errors.WaybillError]) -> Iterator[type[errors.WaybillError]]:
    """The class and those below it, as far as they have a code of their own."""
    if "code" in vars(kind) and kind is not errors.Refused:
        yield kind
    for child in kind.__subclasses__():
        yield from coded(child)


def catalogue(present: str) -> str:
    """The catalogue of all classes, with the examples that the present one has.

    Raises:
        ValueError: an entry has no class, or a class no example.
    """
    first = ENTRY.search(present)
    introduction = present[: present.index("\n## ") + 1]
    pieces = ENTRY.split(present)[1:] if first else []
    examples = {}
    for code, text in zip(pieces[::2], pieces[1::2], strict=True):
        start = FIRST_EXAMPLE.search(text)
        examples[code] = re.split(r"^#", text[start.start() :], flags=re.MULTILINE)[0].strip() if start else ""
    parts = [introduction.strip()]
    for group in errors.WaybillError.__subclasses__():
        if found := list(coded(group)):
            parts.append(f"## {paragraphs(group).removesuffix('.')}")
        for kind in found:
            about = f"`{kind.__name__}`, exit code {kind.exit_code}"
            parts += [f"### {kind.code}", about, paragraphs(kind), examples.pop(kind.code, "")]
            if not parts[-1]:
                raise ValueError(f"docs/errors.md has no example of {kind.code}: write one below its heading")
    if examples:
        raise ValueError(f"docs/errors.md has entries of no class: {', '.join(examples)}")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    CATALOGUE.write_text(catalogue(CATALOGUE.read_text("utf-8")), "utf-8")
