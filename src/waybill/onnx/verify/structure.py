"""A package's parts against each other: the graph against waybill.json, and both against the files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx
from blake3 import blake3

from waybill.checkpoint.places import homes
from waybill.errors import BadPackage, PackageMismatch, WaybillError
from waybill.onnx.gate import ROWS
from waybill.onnx.graph import TAGS
from waybill.onnx.publish import MARKER
from waybill.onnx.verify.entries import ComponentEntries, Entry

LARGEST_GRAPH = 2 << 30
"""What one protobuf message can hold."""
LARGEST_CONSTANT = 1024
"""Bytes of a constant that may lie inside the graph: axes and shapes, but no weight."""
LARGEST_INDEX = 64 << 10
"""The same of 64-bit integers, which no weight is: which number of a table belongs to which distance."""
DTYPES = {int(dtype): tag for dtype, tag in TAGS.items()}
AGAIN = "export the package again"


MOST_INTEGERS = 8
"""Of an attribute: axes, or padding before and after four of them."""
LONGEST_TEXT = 64
"""Of an attribute, in bytes: the name of a way to compute something."""


@dataclass(frozen=True, slots=True)
class Reference:
    """One external tensor as the graph states it."""

    name: str
    file: str
    offset: int | None
    nbytes: int | None
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        size, at = ("unstated" if n is None else f"{n:,}" for n in (self.nbytes, self.offset))
        return f"{self.dtype}{list(self.shape)}, {size} bytes at {at} of {self.file}"


def examine(root: Path, component: ComponentEntries) -> tuple[list[WaybillError], list[Entry]]:
    """Everything of one component that does not agree, and the entries whose bytes are there to be read."""
    problems: list[WaybillError] = []
    try:
        model = _graph(root, component, problems)
    except BadPackage as error:
        problems.append(error)
    else:
        problems += _compare(model, component)
    return problems, list(_present(root, component.initializers, problems))


def locate(root: Path, file: str) -> Path:
    """A file of the package.

    Raises:
        BadPackage: it is missing, not a regular file, or a link that leads out.
    """
    path = root / file
    try:
        real = path.resolve()
        inside = any(real.is_relative_to(home) for home in homes(root))
    except (OSError, RuntimeError):
        inside = False
    if inside and path.is_file():
        return path
    raise BadPackage(
        "a file of the package is missing" if inside else "a file of the package leads out of it",
        where=str(path),
        expected="a file in the package",
        found=("something else" if path.exists() else "nothing there") if inside else "a link to another place",
        fix="copy the whole folder again, or export the package again",
    )


def mismatch(what: str, entry: Entry, expected: str, found: str, fix: str = AGAIN) -> PackageMismatch:
    """An initializer that is not what it should be."""
    return PackageMismatch(what, where=f"{entry.name} ({entry.file})", expected=expected, found=found, fix=fix)


def _graph(root: Path, component: ComponentEntries, problems: list[WaybillError]) -> onnx.ModelProto:
    path = locate(root, component.file)
    try:
        if path.stat().st_size > LARGEST_GRAPH:
            raise ValueError(f"more than {LARGEST_GRAPH:,} bytes")
        octets = path.read_bytes()
        model = onnx.ModelProto()
        model.ParseFromString(octets)
    except Exception as error:  # the parser's own kind has no types, and comes from a package we do not ask for
        raise BadPackage(
            "the graph cannot be read", where=str(path), expected="an ONNX model", found=str(error)[:200], fix=AGAIN
        ) from error
    digest = blake3(octets).hexdigest()
    if digest != component.digest:
        problems.append(
            PackageMismatch(
                "the graph is not the one that was exported",
                where=component.file,
                expected=f"BLAKE3 {component.digest}",
                found=digest,
                fix=AGAIN,
            )
        )
    return model


def _compare(model: onnx.ModelProto, component: ComponentEntries) -> Iterator[WaybillError]:
    """Every external tensor has its entry, and every entry a tensor."""
    taken: set[str] = set()
    for tensor in model.graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            if tensor.ByteSize() > (LARGEST_INDEX if tensor.data_type == onnx.TensorProto.INT64 else LARGEST_CONSTANT):
                yield _foreign(component, _text(tensor.name), "a tensor inside the graph")
            continue
        reference = _reference(tensor)
        name = reference.name if reference.name in component.initializers else reference.name.removesuffix(ROWS)
        entry = component.initializers.get(name)
        if entry is None:
            yield _foreign(component, reference.name, str(reference))
            continue
        taken.add(name)
        if not _is_same(reference, entry):
            expected = f"{entry.dtype}{list(entry.shape)}, {entry.nbytes:,} bytes at {entry.offset:,} of {entry.file}"
            what = f"the graph and {MARKER} disagree about {reference.name}"
            yield mismatch(what, entry, expected, str(reference))
    for name, entry in component.initializers.items():
        if name not in taken:
            yield mismatch("the graph does not refer to an initializer", entry, f"an initializer {name}", "none")
    for where in _hidden(model):
        yield _foreign(component, where, "a place that can hold weights, and that no export writes")


def _reference(tensor: onnx.TensorProto) -> Reference:
    stated = {_text(entry.key): _text(entry.value) for entry in tensor.external_data}
    offset, nbytes = (int(text) if (text := stated.get(key, "")).isdecimal() else None for key in ("offset", "length"))
    dtype = DTYPES.get(tensor.data_type, f"type {tensor.data_type}")
    return Reference(_text(tensor.name), stated.get("location", ""), offset, nbytes, dtype, tuple(tensor.dims))


def _is_same(reference: Reference, entry: Entry) -> bool:
    """Place, dtype and shape; a packed table's blocks may be flat rows under another name."""
    place = (reference.file, reference.offset, reference.nbytes, reference.dtype)
    if place != (entry.file, entry.offset, entry.nbytes, entry.dtype):
        return False
    flat = (*entry.shape[:-2], entry.shape[-2] * entry.shape[-1]) if len(entry.shape) > 2 else entry.shape
    alias = reference.name != entry.name and entry.role == "codes"
    return reference.shape == entry.shape or (alias and reference.shape == flat)


def _hidden(model: onnx.ModelProto) -> Iterator[str]:
    """Other places a graph can keep weights in, and initializers under one name."""
    yield from _hidden_in(model.graph.node, branches=True)
    yield from (_text(function.name) for function in model.functions)
    if model.graph.sparse_initializer or model.training_info:
        yield "sparse_initializer or training_info"
    counts = Counter(_text(tensor.name) for tensor in model.graph.initializer)
    yield from (name for name, count in counts.items() if count > 1)


def _hidden_in(nodes: Iterable[onnx.NodeProto], *, branches: bool) -> Iterator[str]:
    """Attributes that can hold weights; a branch that holds none, and has no branch of its own, is as it should be."""
    for node in nodes:
        for attribute in node.attribute:
            if branches and node.op_type == "If" and attribute.HasField("g"):
                inner = attribute.g
                yield from _hidden_in(inner.node, branches=False)
                if not inner.initializer and not inner.sparse_initializer:
                    continue
            one = any(attribute.HasField(field) for field in ("t", "g", "sparse_tensor"))
            many = attribute.tensors or attribute.graphs or attribute.sparse_tensors
            values = attribute.floats or attribute.strings or len(attribute.ints) > MOST_INTEGERS
            if one or many or values or len(attribute.s) > LONGEST_TEXT:
                yield f"{node.name}.{attribute.name}"


def _text(value: str | bytes) -> str:
    """A text of the graph; the parser returns bytes for what is not UTF-8."""
    return value if isinstance(value, str) else repr(value)


def _foreign(component: ComponentEntries, name: str, found: str) -> PackageMismatch:
    return PackageMismatch(
        f"the graph holds a weight that {MARKER} does not list",
        where=f"{name} ({component.file})",
        expected=f"an entry in {MARKER}",
        found=found,
        fix=AGAIN,
    )


def _present(root: Path, entries: Mapping[str, Entry], problems: list[WaybillError]) -> Iterator[Entry]:
    """Entries whose range lies inside a file of the package."""
    sizes: dict[str, int | None] = {}
    for entry in entries.values():
        if entry.file not in sizes:
            try:
                sizes[entry.file] = locate(root, entry.file).stat().st_size
            except BadPackage as error:
                problems.append(error)
                sizes[entry.file] = None
        size = sizes[entry.file]
        if size is None:
            continue
        if entry.end > size:
            problems.append(
                mismatch(
                    "an initializer ends after its file does",
                    entry,
                    f"bytes {entry.offset:,} to {entry.end:,}",
                    f"a file of {size:,} bytes",
                    "copy the file again, or export the package again",
                )
            )
            continue
        yield entry


def overlaps(entries: Iterable[Entry]) -> Iterator[WaybillError]:
    """Two initializers may be the same bytes, but not share some of them, in whichever components they are."""
    unique = {(entry.file, entry.offset, entry.end): entry for entry in entries if entry.nbytes}
    furthest: Entry | None = None
    for _, entry in sorted(unique.items()):
        if furthest is not None and furthest.file == entry.file and entry.offset < furthest.end:
            yield mismatch(
                "two initializers overlap",
                entry,
                f"bytes of its own, or all of {furthest.name}'s",
                f"bytes {entry.offset:,} to {entry.end:,}; {furthest.name} ends at {furthest.end:,}",
            )
        if furthest is None or furthest.file != entry.file or entry.end > furthest.end:
            furthest = entry
