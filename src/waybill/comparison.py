"""Two checkpoints, or packages, or one of each: what differs in settings, components, layouts, tensors and values.

Stored tensors are compared by digest, under their stored names. Weights are compared by value, under the names of the
running model: however they are spelled, merged or packed. Of either, a few megabytes are in memory at a time.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from waybill.api import open as open_checkpoint
from waybill.checkpoint import Checkpoint, RangeReader, TensorHeader
from waybill.checkpoint.files import Progress
from waybill.differences import Comparison, Difference, Layout, Stored, ValueDifference
from waybill.errors import Refused, UnsupportedFeature, UnsupportedRope, WaybillError
from waybill.families import family_of
from waybill.manifest.quantization import OWN_TYPES
from waybill.plan.bill import CHUNK
from waybill.plan.parameter import AffinePacking, packing_of
from waybill.plan.planner import describe, route
from waybill.weights import Storage, WeightRecord
from waybill.weights.codebook import CodebookWeight
from waybill.weights.record import bundled

if TYPE_CHECKING:
    from waybill.onnx.contents import Contents

_CONFIG = "config.json"
VALUES = 1 << 21
"""Values of a weight that are compared together."""
THREADS = 2


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two: its settings by file, what its components are, and its weights by runtime name."""

    path: str
    is_package: bool
    checkpoint: Checkpoint
    documents: Mapping[str, Mapping[str, Any]]
    components: Mapping[str, Mapping[str, Any]]
    weights: Mapping[str, WeightRecord]
    layouts: Mapping[str, Layout]

    @property
    def files(self) -> set[str]:
        """The names of its weight files."""
        return self.checkpoint.files

    def fetched(self, progress: Progress = lambda _: None) -> Side:
        """The same with its weight files on this disk, brought from the hub if they lie there."""
        return replace(self, checkpoint=self.checkpoint.fetched(self.files, progress))


def compare(
    a: str | Path,
    b: str | Path,
    *,
    values: bool = False,
    dequantize: bool = False,
    progress: Progress = lambda _: None,
) -> Comparison:
    """Compare two checkpoints, two packages, or one with the other.

    Args:
        a: a package, or what `open` takes.
        b: the other one.
        values: compare what packed weights mean, too. Of a checkpoint and a package, which share no tensors, values
            are always compared, and tensors never.
        dequantize: as of `open`.
        progress: told of stored bytes that are done with.

    Raises:
        WaybillError: one of them cannot be read, as `open` and `verify` say it.
        MissingRuntime: one is a package, and what `waybill[onnx]` installs is not there.
    """
    one, other = read_side(a, dequantize), read_side(b, dequantize)
    return compare_sides(one.fetched(), other.fetched(), values=values, progress=progress)


def read_side(path: str | Path, dequantize: bool = False) -> Side:
    """Describe a checkpoint or a package; no weight byte is read."""
    from waybill.onnx.folder import is_package

    if not is_package(Path(path)):
        return _checkpoint_side(str(path), open_checkpoint(path, dequantize=dequantize))
    from waybill.onnx import require

    require("onnx_ir", "blake3")
    from waybill.onnx.contents import read_contents

    return _package_side(str(path), read_contents(path))


def compare_sides(a: Side, b: Side, *, values: bool, progress: Progress = lambda _: None) -> Comparison:
    """The same of what was described already, and lies on this disk."""
    alike = a.is_package == b.is_package
    both = a.documents.keys() & b.documents.keys()  # of a checkpoint and a package: what is copied
    names = [n for n in {**a.documents, **b.documents} if alike or n in both]
    config = [
        Difference(f"{name}: {each.name}", each.sides)
        for name in names
        for each in _differ(a.documents.get(name, {}), b.documents.get(name, {}))
    ]
    components = list(_differ(a.components, b.components))
    layouts = list(_differ(a.layouts, b.layouts if alike else _as_packaged(a.layouts, b.layouts)))
    with RangeReader(a.checkpoint) as of_a, RangeReader(b.checkpoint) as of_b:
        tensors = list(_tensors(a.checkpoint, b.checkpoint, of_a, of_b, progress)) if alike else []
        found = Comparison(
            a=a.path, b=b.path, config=config, components=components, layouts=layouts,
            tensors=tensors, tensors_compared=len(a.checkpoint.tensors.keys() & b.checkpoint.tensors.keys()) * alike,
        )  # fmt: skip
        if not values and alike:
            return found
        return _values(found, a, b, of_a, of_b, progress)


def _checkpoint_side(path: str, checkpoint: Checkpoint) -> Side:
    family, problems = family_of(checkpoint.config), list[WaybillError]()
    config, policy, records = describe(checkpoint, family, problems, [])
    # What cannot be run can be compared.
    if config is None or any(not isinstance(each, (UnsupportedFeature, UnsupportedRope)) for each in problems):
        raise Refused(problems)
    routing = route(bundled(records), family.rules(config), policy.naming.runtime)
    if routing.problems:
        raise Refused(routing.problems)
    layouts = {}
    for name, record in routing.records.items():
        stated = policy.of(record.source_name.removesuffix(".weight"))
        if stated is not None and (layout := _layout(stated.method, record.storage)) is not None:
            layouts[name] = layout
    plans = {name: plan.layout for name, plan in policy.quantization.plans.items()}
    components = {
        each.name: _component(each.role, each.source_paths, OWN_TYPES if policy.by_types else plans.get(each.name))
        for each in policy.naming.components.components
    }
    documents = {_CONFIG: checkpoint.config, "generation_config.json": checkpoint.generation_config}
    if checkpoint.metadata is not None:
        documents = {f"{checkpoint.name}, metadata": checkpoint.config}
    return Side(path, False, checkpoint, {**documents, **checkpoint.side_files}, components, routing.records, layouts)


def _package_side(path: str, contents: Contents) -> Side:
    methods = {name: each.layout.method for name, each in contents.components.items() if each.layout is not None}
    layouts = {
        name: layout
        for name, record in contents.weights.items()
        if (layout := _layout(methods.get(record.component, "unstated"), record.storage)) is not None
    }
    components = {
        name: _component(each.descriptor.role, each.descriptor.source_paths, each.layout)
        for name, each in contents.components.items()
    }
    checkpoint = contents.checkpoint
    documents = {
        _CONFIG: checkpoint.config,
        "generation_config.json": checkpoint.generation_config,
        "genai_config.json": contents.run,
        **{each.file: {"blake3": each.digest} for each in contents.components.values()},
    }
    return Side(path, True, checkpoint, documents, components, contents.weights, layouts)


def _component(role: str, sources: Iterable[str], layout: object) -> dict[str, Any]:
    return {"role": role, "sources": list(sources), "layout": "float" if layout is None else str(layout)}


def _layout(method: str, weight: Storage) -> Layout | None:
    packing = packing_of(weight)
    if packing is None:
        return None
    if isinstance(packing, AffinePacking):
        return Layout(method, packing.bits, 1, packing.group, packing.symmetric)
    return Layout(f"{method} {packing.layout.table}", packing.layout.bits, *packing.layout[1:3], True)


def _as_packaged(a: Mapping[str, Layout], b: Mapping[str, Layout]) -> dict[str, Layout]:
    """`b`, with what an export refined, so that its operators take it, as the other side has it."""
    pairs = ((name, a.get(name, layout), layout) for name, layout in b.items())
    return {name: one if one.holds(layout) or layout.holds(one) else layout for name, one, layout in pairs}


def _differ(a: Mapping[str, Any], b: Mapping[str, Any], at: str = "") -> Iterator[Difference]:
    """Field by field, into nested objects; a list is one value."""
    for key in dict.fromkeys((*a, *b)):
        sides = {side: held[key] for side, held in (("a", a), ("b", b)) if key in held}
        one, *other = sides.values()
        if other and isinstance(one, Mapping) and isinstance(other[0], Mapping):
            yield from _differ(one, other[0], f"{at}{key}.")
        elif not other or one != other[0] or isinstance(one, bool) != isinstance(other[0], bool):
            yield Difference(f"{at}{key}", sides)


def _tensors(
    a: Checkpoint, b: Checkpoint, of_a: RangeReader, of_b: RangeReader, progress: Progress
) -> Iterator[Difference]:
    """Added, missing, of another dtype or shape, or of other bytes; each side is read in the order of its files."""
    alike = {n for n, t in a.tensors.items() if n in b.tensors and t[1:3] == b.tensors[n][1:3]}
    progress(sum(t.nbytes for side in (a, b) for n, t in side.tensors.items() if n not in alike))

    def digests(checkpoint: Checkpoint, reader: RangeReader) -> dict[str, Stored]:
        return {
            name: Stored(tensor.dtype, list(tensor.shape), _digest(tensor, reader, progress) if name in alike else "")
            for name, tensor in checkpoint.tensors.items()
        }

    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), "waybill-compare") as pool:
        one, other = pool.map(digests, (a, b), (of_a, of_b))
    yield from _differ(one, other)


def _digest(tensor: TensorHeader, reader: RangeReader, progress: Progress) -> str:
    """BLAKE3 where it is installed, as in waybill.json, or else BLAKE2b of as many bits."""
    try:
        from blake3 import blake3

        hasher: Any = blake3()
    except ImportError:
        from hashlib import blake2b

        hasher = blake2b(digest_size=32)
    scratch = memoryview(bytearray(min(CHUNK, tensor.nbytes)))
    for at in range(0, tensor.nbytes, CHUNK):
        part = scratch[: min(CHUNK, tensor.nbytes - at)]
        reader.read_into(tensor.file, [(tensor.offset + at, part)])
        hasher.update(part)
        progress(len(part))
    return str(hasher.hexdigest())


def _values(
    found: Comparison, a: Side, b: Side, of_a: RangeReader, of_b: RangeReader, progress: Progress
) -> Comparison:
    """The same with every weight's values compared; what digests have shown to be equal already is not read again."""
    one, other = ({name: list(record.storage.shape) for name, record in side.weights.items()} for side in (a, b))
    weights = list(_differ(one, other))
    common = a.weights.keys() & b.weights.keys() - {each.name for each in weights}
    settled = found.tensors_compared > 0 and not (found.config or found.components or found.layouts)
    changed = {each.name for each in found.tensors}

    def largest(name: str) -> ValueDifference:
        one, other = a.weights[name], b.weights[name]
        equal = settled and changed.isdisjoint((*one.tensors, *other.tensors))
        gap = 0.0 if equal else _largest(one.storage, other.storage, of_a, of_b)
        progress(_nbytes(one) + _nbytes(other))
        return ValueDifference(name, gap)

    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), "waybill-compare") as pool:
        gaps = [each for each in pool.map(largest, (name for name in a.weights if name in common)) if each.largest]
    gaps.sort(key=lambda each: -each.largest)
    return replace(found, weights=weights, values=gaps, weights_compared=len(common))


def _largest(a: Storage, b: Storage, of_a: RangeReader, of_b: RangeReader) -> float:
    """The largest absolute difference, a block of rows after the other; two that are no numbers are equal."""
    import numpy as np

    from waybill.plan.boxes import dequantized

    sides = [(each.row_by_row() if isinstance(each, CodebookWeight) else each, r) for each, r in ((a, of_a), (b, of_b))]
    rows, step = (a.shape or (1,))[0], max(VALUES // max(math.prod(a.shape[1:]), 1), 1)
    worst = 0.0
    for start in range(0, rows, step):
        count = min(step, rows - start)
        one, other = (dequantized(each.narrow(0, start, count) if a.shape else each, r) for each, r in sides)
        with np.errstate(invalid="ignore", over="ignore"):
            gaps = np.abs(one - other)
        gaps[(one == other) | (np.isnan(one) & np.isnan(other))] = 0
        worst = max(worst, float(np.where(np.isnan(gaps), np.inf, gaps).max(initial=0)))
    return worst


def _nbytes(record: WeightRecord) -> int:
    return sum(part.nbytes for part in record.storage.parts.values())


def work(a: Side, b: Side, *, values: bool) -> int:
    """Bytes that `compare_sides` will tell of."""
    alike = a.is_package == b.is_package
    stored = (a.checkpoint.nbytes + b.checkpoint.nbytes) * alike
    common = a.weights.keys() & b.weights.keys() if values or not alike else ()
    return stored + sum(_nbytes(side.weights[name]) for side in (a, b) for name in common)
