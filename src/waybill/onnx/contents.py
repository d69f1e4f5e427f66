"""What a package holds, as a checkpoint's weights: initializers taken apart again into the weights they were made of.

The reverse of an export, and as lazy: banks fall apart into experts, merged rows into their members. Names and shapes
are those of the package's config.json, which is the checkpoint's.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from waybill.checkpoint import Checkpoint, TensorHeader
from waybill.checkpoint.folder import Shard
from waybill.checkpoint.jsonfile import read_object
from waybill.codecs.decoders import ZeroPoints
from waybill.config.quantization import QuantizationConfig
from waybill.errors import Refused, WaybillError
from waybill.families import family_of
from waybill.onnx.folder import CONFIG_NAME
from waybill.onnx.verify.entries import ComponentEntries, Entry, read_entries
from waybill.onnx.verify.structure import examine, locate, mismatch, overlaps
from waybill.plan.family import Family
from waybill.plan.parameter import Merges, ParameterSpec
from waybill.weights import FloatWeight, LazyTensor, Storage, WeightRecord, stored
from waybill.weights.affine import AffineLayout, AffinePackedWeight
from waybill.weights.codebook import CodebookLayout, CodebookWeight
from waybill.weights.lazy import Decoded

AS_EXPORTED = Merges(normed_qkv=False, gate_up=False, interleave=True)


@dataclass(frozen=True, slots=True)
class Contents:
    """A package as a checkpoint whose tensors are initializers, and its weights by runtime name."""

    checkpoint: Checkpoint
    components: Mapping[str, ComponentEntries]
    weights: Mapping[str, WeightRecord]
    run: Mapping[str, Any]
    """genai_config.json."""


def read_contents(folder: str | Path) -> Contents:
    """Read a package's bill, graphs and settings; no weight byte is read.

    Raises:
        BadPackage, BadJson: there is no package, or a file of it is malformed.
        Refused: with everything in it that does not agree.
    """
    package = read_entries(folder)
    problems, entries = list[WaybillError](), list[Entry]()
    for component in package.components.values():
        found, sound = examine(package.root, component)
        problems += found
        entries += sound
    if problems := problems + list(overlaps(entries)):
        raise Refused(problems)
    checkpoint = _as_checkpoint(package.root, entries)
    family = family_of(checkpoint.config)
    config, problems, _ = family.read(checkpoint.config)
    if config is None or problems:
        raise Refused(problems)
    specs = _specs(family.parameters(config, {}, AS_EXPORTED), family)
    weights: dict[str, WeightRecord] = {}
    for name, component in package.components.items():
        weights |= _weights(name, component, checkpoint, specs, family)
    return Contents(checkpoint, package.components, weights, read_object(package.root / CONFIG_NAME))


def _as_checkpoint(root: Path, entries: list[Entry]) -> Checkpoint:
    tensors = {e.name: TensorHeader(e.name, e.dtype, e.shape, e.file, e.offset, e.nbytes) for e in entries}
    held, shards = Counter(tensor.file for tensor in tensors.values()), []
    for file in sorted({entry.file for entry in entries}):
        stat = locate(root, file).stat()
        shards.append(Shard(file, stat.st_size, stat.st_mtime_ns, stat.st_ino, held[file]))
    generation = root / "generation_config.json"
    generation_config = read_object(generation) if generation.exists() else {}
    return Checkpoint(root, read_object(root / "config.json"), generation_config, tensors, tuple(shards))


def _members(spec: ParameterSpec, family: Family) -> Iterator[tuple[str, int, int]]:
    """Name, place in the stack and place in the merge of every weight a parameter is made of."""
    for layer in range(spec.stack or 1):
        for at, name in enumerate(family.merges.sources_of(spec.name, layer)):
            yield name, layer, at


def _specs(specs: list[ParameterSpec], family: Family) -> dict[str, ParameterSpec]:
    """Parameters as exports merge them, and each member by itself, for it may have been kept apart."""
    apart = {
        name: replace(spec, name=name, parts=(spec.parts[at],), stack=0, interleave=False)
        for spec in specs
        for name, _, at in _members(spec, family)
    }
    return apart | {spec.name: spec for spec in specs}


def _weights(
    component: str,
    held: ComponentEntries,
    checkpoint: Checkpoint,
    specs: Mapping[str, ParameterSpec],
    family: Family,
) -> dict[str, WeightRecord]:
    """What one component holds; a weight that it leaves out because another is the same is that other."""
    parts: dict[str, dict[str, Entry]] = defaultdict(dict)
    for entry in held.initializers.values():
        if entry.role != "table":
            parts[_weight_of(entry.name, entry.role, specs)][entry.role] = entry
    made: dict[str, WeightRecord] = {}
    for weight, entries in parts.items():
        first = next(iter(entries.values()))
        if (spec := specs.get(weight)) is None:
            what = "the package holds a weight that its config.json does not know"
            raise mismatch(what, first, "a weight of the model", weight)
        try:
            whole = _storage(spec, entries, held.layout)
        except (ValueError, KeyError) as error:
            what = "an initializer is not what config.json says of its weight"
            raise mismatch(what, first, f"a weight of {list(spec.local_shape(0, 1))}", f"{first}: {error}") from error
        for name, layer, at in _members(spec, family):
            one = _member(whole, spec, layer, at)
            made[name] = WeightRecord(name, component, one, tuple(e.name for e in entries.values()), checkpoint)
    for check in held.checked:
        twin = _weight_of(check.same_as, "", specs) if check.same_as is not None else ""
        if twin in made:
            made[_weight_of(check.name, "", specs)] = made[twin]
    return made


def _weight_of(name: str, role: str, specs: Mapping[str, ParameterSpec]) -> str:
    """The weight that an initializer is a part of; banks have no `.weight`."""
    if role == "weight" or name in specs:
        return name
    stem = name.rpartition(".")[0]
    return stem if stem in specs else f"{stem}.weight"


def _storage(spec: ParameterSpec, entries: Mapping[str, Entry], stated: QuantizationConfig | None) -> Storage:
    """The initializers of one parameter as a weight [stack, rows, parts, K], of which some axes may be missing."""
    shape = spec.local_shape(0, 1)
    if spec.interleave:
        shape = (*shape[:-2], shape[-2] // len(spec.parts), len(spec.parts), shape[-1])
    if "weight" in entries:
        return FloatWeight(_viewed(entries["weight"], shape))
    *rows, columns = shape
    entry, scales = entries["codes"], entries["scales"]
    groups = -(-columns // entry.block)
    if entry.table:
        layout = CodebookLayout(entry.table, 1, entry.block)
        codes = _viewed(replace(entry, dtype="U8"), shape)
        return CodebookWeight(layout=layout, codes=codes, scales=_viewed(scales, (*rows, groups)))
    zeros: LazyTensor | None = None
    minimums = _viewed(entries["minimums"], (*rows, groups)) if "minimums" in entries else None
    if minimums is None and (packed := entries.get("zero_points")) is not None:  # else the centre of the codes
        octets = _viewed(packed, (*rows, -(-groups * entry.bits // 8)))
        decoder = ZeroPoints(octets, entry.bits, False)
        zeros = stored(Decoded(packed.name, "U8", (*rows, groups), packed.file, packed.offset, decoder))
    # Tables have their midpoint written out.
    symmetric = (zeros is None and minimums is None) or (
        spec.kind == "embedding" and stated is not None and stated.symmetric
    )
    return AffinePackedWeight(
        layout=AffineLayout(bits=entry.bits, group=entry.block, symmetric=symmetric),
        in_features=columns,
        codes=_viewed(entry, (*rows, groups, entry.block * entry.bits // 8)),
        scales=_viewed(scales, (*rows, groups)),
        zero_points=zeros,
        minimums=minimums,
    )


def _viewed(entry: Entry, shape: tuple[int, ...]) -> LazyTensor:
    """The bytes of an initializer in another shape."""
    if math.prod(shape) != math.prod(entry.shape):
        raise ValueError(f"not {math.prod(shape):,} elements")
    return stored(TensorHeader(entry.name, entry.dtype, shape, entry.file, entry.offset, entry.nbytes))


def _member(whole: Storage, spec: ParameterSpec, layer: int, at: int) -> Storage:
    """One weight of a parameter."""
    one = whole.select(0, layer) if spec.stack else whole
    if len(spec.parts) == 1:
        return one
    if spec.interleave:
        return one.select(1, at)
    start = sum(part.shape[spec.axis] for part in spec.parts[:at])
    return one.narrow(spec.axis, start, spec.parts[at].shape[spec.axis])
