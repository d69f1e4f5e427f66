"""Reports, as a program that reads HTML sees them; and checkpoints worth a report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import numpy as np

from checkpoints import qwen3
from packing import Scheme, pack

VOID = {"meta", "input", "br", "rect", "path", "line"}


@dataclass
class Element:
    """A tag, its attributes, and everything inside it."""

    tag: str
    attributes: dict[str, str]
    children: list[Element | str] = field(default_factory=list)

    def all(self, *tags: str) -> Iterator[Element]:
        """Every element below with one of these tags, in document order; all without any."""
        for child in self.children:
            if isinstance(child, Element):
                if not tags or child.tag in tags:
                    yield child
                yield from child.all(*tags)

    def one(self, identity: str) -> Element:
        """The element with an id."""
        (found,) = (element for element in self.all() if element.attributes.get("id") == identity)
        return found

    @property
    def text(self) -> str:
        """All its text, as one line."""
        words = (child.text if isinstance(child, Element) else child for child in self.children)
        return " ".join(" ".join(words).split())

    @property
    def rows(self) -> list[list[str]]:
        """Texts of the cells of all tables below."""
        return [[cell.text for cell in row.all("td", "th")] for row in self.all("tr")]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.root = Element("", {})
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        assert len(element.attributes) == len(attrs), f"an attribute of {tag} twice"
        self.open[-1].children.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def read(page: Path | str) -> Element:
    """A page as a tree; every tag is closed in order."""
    reader = _Reader()
    reader.feed(page.read_text("utf-8") if isinstance(page, Path) else page)
    reader.close()
    assert reader.open == [reader.root]
    return reader.root


def mixed(folder: Path) -> Path:
    """36 layers in 4 and 8 bits, the first and the last with float attention, in three shards; one rule is misspelt."""
    ends = [f"model.layers.{layer}.self_attn.{member}_proj" for layer in (0, 35) for member in "qkvo"]
    wider = {f"model.layers.{layer}.mlp.down_proj": {"bits": 8} for layer in (0, 1, 17, 35)}
    recipe = qwen3(np.float32, num_hidden_layers=36, vocab_size=1024, max_position_embeddings=32768)
    packed = pack(recipe, Scheme("olive"), keep=ends, overrides=wider).packed
    packed.config["quantization_config"]["modules_to_not_convert"].append("lm_haed")
    number = {name: at * 3 // len(packed.tensors) for at, name in enumerate(packed.tensors)}
    return packed.write(folder, shard_of=number.__getitem__)
