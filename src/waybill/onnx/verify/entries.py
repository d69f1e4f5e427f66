"""waybill.json as a package states it, read as untrusted input: typed, bounded, and no path that leads out."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from waybill.checkpoint.header import DTYPE_BITS
from waybill.checkpoint.jsonfile import parse_document
from waybill.checkpoint.places import require_inside
from waybill.config.producers import BITS
from waybill.config.quantization import QuantizationConfig
from waybill.errors import BadPackage
from waybill.manifest import ComponentDescriptor
from waybill.onnx.publish import MARKER

FORMATS = (2,)
MAX_BILL_BYTES = 256 << 20
"""Room for every expert of the largest models to be named several times."""
DTYPES = ("F32", "F16", "BF16", "U8", "F8_E4M3", "F8_E5M2")
ROLES = ("weight", "codes", "scales", "zero_points", "minimums", "table")
WIDTHS = (2, 4, 8)
TABLES = ("E4M3", "E5M2")


@dataclass(frozen=True, slots=True)
class Entry:
    """One initializer: where its bytes lie, what they are, and the stored tensors they were made from.

    `bits` and `block` are 0 for what is not part of a packed weight; `table` is what codes that are floats mean.
    """

    name: str
    file: str
    offset: int
    nbytes: int
    digest: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    sources: tuple[str, ...]
    bits: int = 0
    block: int = 0
    table: str = ""

    @property
    def place(self) -> tuple[str, int]:
        """What is the same of an initializer that several components use."""
        return self.file, self.offset

    @property
    def end(self) -> int:
        """The first byte after it."""
        return self.offset + self.nbytes

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


class Check(NamedTuple):
    """A weight that was read and not written: all midpoints, or the same as another (`same_as`)."""

    name: str
    sources: tuple[str, ...]
    same_as: str | None


@dataclass(frozen=True, slots=True)
class ComponentEntries:
    """What one component is, its graph, and everything the graph refers to."""

    file: str
    digest: str
    descriptor: ComponentDescriptor
    layout: QuantizationConfig | None
    """How the metadata stated it to be packed; None is float."""
    initializers: Mapping[str, Entry]
    checked: tuple[Check, ...]

    @property
    def made_from(self) -> set[str]:
        """Every stored tensor an initializer was made from."""
        return {source for entry in self.initializers.values() for source in entry.sources}

    @property
    def sources(self) -> set[str]:
        """The same, and those that were only compared."""
        return self.made_from | {source for check in self.checked for source in check.sources}


@dataclass(frozen=True, slots=True)
class PackageEntries:
    """The whole document. `obstacles`: for each provider why it cannot run the package, nothing when it can."""

    root: Path
    ep: str
    obstacles: Mapping[str, tuple[str, ...]]
    components: Mapping[str, ComponentEntries]
    dropped: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        """Bytes of all initializers; one that several components use counts once."""
        every = (entry for component in self.components.values() for entry in component.initializers.values())
        return sum({entry.place: entry.nbytes for entry in every}.values())


class _Node(NamedTuple):
    """A JSON value and the path to it, for messages."""

    where: str
    value: Any

    def get(self, key: str) -> _Node:
        found = self.object()
        if key not in found:
            raise self._broken(f"the key {key!r}", "no such key")
        return _Node(f"{self.where}.{key}" if self.where else key, found[key])

    def find(self, key: str) -> _Node | None:
        return self.get(key) if key in self.object() else None

    def object(self) -> dict[str, Any]:
        if not isinstance(self.value, dict):
            raise self._broken("an object", repr(self.value)[:80])
        return self.value

    def members(self) -> Iterator[tuple[str, _Node]]:
        return ((key, _Node(f"{self.where}.{key}", value)) for key, value in self.object().items())

    def items(self) -> Iterator[_Node]:
        if not isinstance(self.value, list):
            raise self._broken("a list", repr(self.value)[:80])
        return (_Node(f"{self.where}[{at}]", value) for at, value in enumerate(self.value))

    def text(self, *choices: str) -> str:
        if not isinstance(self.value, str) or (choices and self.value not in choices):
            raise self._broken(" | ".join(choices) or "a text", repr(self.value)[:80])
        return self.value

    def texts(self) -> tuple[str, ...]:
        return tuple(item.text() for item in self.items())

    def size(self, *choices: int) -> int:
        fits = type(self.value) is int and 0 <= self.value < 1 << 63
        if not fits or (choices and self.value not in choices):
            raise self._broken(" | ".join(map(str, choices)) or "a size", repr(self.value)[:80])
        return int(self.value)

    def number(self) -> int:
        """A size, or -1: all there is."""
        return -1 if type(self.value) is int and self.value == -1 else self.size()

    def flag(self) -> bool:
        if not isinstance(self.value, bool):
            raise self._broken("true or false", repr(self.value)[:80])
        return self.value

    def digest(self) -> str:
        if not re.fullmatch("[0-9a-f]{64}", self.text()):
            raise self._broken("a BLAKE3 digest in hexadecimal", self.text()[:80])
        return self.text()

    def file(self) -> str:
        """A name inside the package, in the one spelling that means it."""
        text = self.text()
        path = PurePosixPath(text)
        plain = text.isprintable() and "\\" not in text and str(path) == text and text != "."
        if not plain or path.is_absolute() or ".." in path.parts:
            raise self._broken("a file of the package", repr(text)[:120])
        return text

    def _broken(self, expected: str, found: str) -> BadPackage:
        return malformed(f"{MARKER}: {self.where}" if self.where else MARKER, expected, found)


def malformed(where: str, expected: str, found: str) -> BadPackage:
    """A waybill.json that breaks its promises."""
    return BadPackage(
        f"{MARKER} is malformed", where=where, expected=expected, found=found, fix="export the package again"
    )


def read_entries(folder: str | Path) -> PackageEntries:
    """Read a package's waybill.json; no weight is read.

    Raises:
        BadPackage: it is missing, unreadable, of an unknown format, or breaks one of its promises.
        PathEscape: it is a link out of the folder.
    """
    root = Path(folder)
    top = _Node("", _document(root))
    number = top.get("format").value
    if type(number) is not int or number not in FORMATS:
        raise BadPackage(
            "the package has a format this version does not know",
            where=f"{root / MARKER}: format",
            expected=" | ".join(map(str, FORMATS)),
            found=repr(number)[:80],
            fix="use the version of waybill that wrote it, or export it again",
        )
    components = {name: _component(name, node) for name, node in top.get("components").members()}
    if not components:
        raise malformed(f"{MARKER}: components", "at least one component", "none")
    files = [component.file for component in components.values()]
    if len(set(files)) < len(files):
        raise malformed(f"{MARKER}: components", "a graph of its own for each", ", ".join(files)[:160])
    return PackageEntries(
        root,
        top.get("options").get("ep").text(),
        {name: _obstacles(node) for name, node in top.get("providers").members()},
        components,
        {node.get("name").text(): node.get("reason").text() for node in top.get("dropped").items()},
    )


def _document(root: Path) -> dict[str, Any]:
    path = root / MARKER
    try:
        if not path.is_file():
            raise _not_a_package(root)
        require_inside(path)
        if path.stat().st_size > MAX_BILL_BYTES:
            raise ValueError(f"more than {MAX_BILL_BYTES:,} bytes")
        return parse_document(path.read_bytes())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise malformed(str(path), "one JSON object, UTF-8, every key once", reason) from error


def _not_a_package(root: Path) -> BadPackage:
    found = f"a folder without {MARKER}" if root.is_dir() else "a file" if root.exists() else "nothing there"
    return BadPackage(
        "not a package",
        where=str(root),
        expected=f"a folder with {MARKER}, written by waybill export",
        found=found,
        fix="point at the folder that waybill export wrote",
    )


def _obstacles(node: _Node) -> tuple[str, ...]:
    if node.get("runs").flag():
        return ()
    because = node.find("because")
    return (because.texts() if because else ()) or ("the package does not say why",)


def _component(name: str, node: _Node) -> ComponentEntries:
    entries = {name: _entry(name, entry) for name, entry in node.get("initializers").members()}
    file = node.get("file").file()
    if not entries:
        raise BadPackage(
            "the package holds a graph without weights",
            where=f"{MARKER}: {node.where}",
            expected="initializers with bytes",
            found="a skeleton, saved with allow_unbound",
            fix="build it with weights and save it again",
        )
    checked = node.find("checked")
    checks = tuple(_check(item) for item in checked.items()) if checked else ()
    return ComponentEntries(
        file, node.get("blake3").digest(), _descriptor(name, node), _layout(node.get("layout")), entries, checks
    )


def _descriptor(name: str, node: _Node) -> ComponentDescriptor:
    excluded = node.get("excluded_methods").members()
    return ComponentDescriptor(
        name=name,
        module_attribute_path=node.get("module").text(),
        role=node.get("role").text(),
        source_paths=node.get("source_paths").texts(),
        aliases={local: path.text() for local, path in node.get("aliases").members()},
        excluded_methods={path: frozenset(methods.texts()) for path, methods in excluded},
    )


def _layout(node: _Node) -> QuantizationConfig | None:
    """Every field of a layout, by its type; how wide and by which method is bounded."""
    if node.value is None:
        return None
    read: dict[str, Callable[[_Node], Any]] = {"int": _Node.number, "bool": _Node.flag, "str": _Node.text}
    stated = {each.name: read[str(each.type)](node.get(each.name)) for each in fields(QuantizationConfig)}
    node.get("method").text(*BITS)
    node.get("bits").size(*WIDTHS)
    return QuantizationConfig(**stated)


def _entry(name: str, node: _Node) -> Entry:
    packing = node.find("packing")
    role = node.get("role").text(*ROLES)
    if packing is None and role not in ("weight", "table"):
        raise malformed(f"{MARKER}: {node.where}", "packing, for a part of a packed weight", "none")
    shape = tuple(item.size() for item in node.get("shape").items())
    table = packing.find("table") if packing else None
    sizes = () if table else tuple(1 << n for n in range(4, 21))
    entry = Entry(
        name=name,
        file=node.get("file").file(),
        offset=node.get("offset").size(),
        nbytes=node.get("bytes").size(),
        digest=node.get("blake3").digest(),
        dtype=node.get("dtype").text(*DTYPES),
        shape=shape,
        role=role,
        sources=node.get("sources").texts(),
        bits=packing.get("bits").size(*WIDTHS) if packing else 0,
        block=packing.get("block_size").size(*sizes) if packing else 0,
        table=table.text(*TABLES) if table else "",
    )
    need = math.prod(shape) * DTYPE_BITS[entry.dtype] // 8
    if not 1 <= len(shape) <= 4 or 0 in shape or entry.nbytes != need:
        raise malformed(f"{MARKER}: {node.where}", f"{need:,} bytes for {entry}"[:200], f"{entry.nbytes:,} bytes")
    return entry


def _check(node: _Node) -> Check:
    same = node.find("same_as")
    return Check(node.get("name").text(), node.get("sources").texts(), same.text() if same else None)
