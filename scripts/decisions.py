"""A hook of MkDocs: every decision in docs/adr is in the navigation and in the list of its first page, by its title."""

from __future__ import annotations

from pathlib import Path
from typing import Any

INDEX = "adr/index.md"


def decisions(docs: Path) -> list[tuple[str, str]]:
    """Title and path of each, in the order of their numbers."""
    found = sorted((docs / "adr").glob("0*.md"))
    return [(path.read_text("utf-8").partition("\n")[0].removeprefix("# "), f"adr/{path.name}") for path in found]


def on_config(config: Any) -> None:
    """Put them below their index."""
    listed = [{title: path} for title, path in decisions(Path(config.docs_dir))]
    for pages in (pages for entry in config.nav for pages in entry.values() if isinstance(pages, list)):
        for entry in pages:
            if entry.get("Decisions") == INDEX:
                entry["Decisions"] = [INDEX, *listed]


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """List them."""
    if page.file.src_uri != INDEX:
        return markdown
    lines = (f"- [{title}]({path.removeprefix('adr/')})" for title, path in decisions(Path(config.docs_dir)))
    return "\n".join([markdown.rstrip(), "", *lines])
