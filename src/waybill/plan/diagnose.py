"""Everything that does not add up between what is stored and what the target needs, in words one can act on.

Problems of one form are one problem: a layer count that is off by one is a sentence, not ninety.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import groupby

from waybill.checkpoint import Checkpoint, TensorHeader
from waybill.errors import (
    DtypeMismatch,
    ExpertMismatch,
    IncompleteMerge,
    MissingHead,
    MissingWeight,
    PackingMismatch,
    PrefixDrift,
    ShapeMismatch,
    UnclaimedWeight,
    VocabMismatch,
    WaybillError,
    some,
)
from waybill.plan.family import Family
from waybill.plan.parameter import Packing, ParameterSpec, Part, packing_of
from waybill.rules import RuleTable
from waybill.rules.template import lift
from waybill.weights import FloatWeight, WeightRecord

FLOAT_DTYPES = ("F32", "F16", "BF16", "F64")

Slots = Mapping[tuple[int, int], WeightRecord]


def everything(
    checkpoint: Checkpoint,
    family: Family,
    specs: Sequence[ParameterSpec],
    slots: Mapping[str, Slots],
    strangers: list[WeightRecord],
    runtime: Callable[[str], str],
) -> list[WaybillError]:
    """Compare what is stored with what is needed; an empty list means every binding can be made.

    `runtime` gives a stored name as the family's parameters have it.
    """
    rules = family.merges
    known = {spec.name: spec for spec in specs}
    left_over = strangers + [slot for name, place in slots.items() if name not in known for slot in place.values()]
    missing = [spec for spec in specs if spec.name not in slots and spec.tied_to is None]
    if left_over and missing and (drift := _drift(left_over, specs, slots, rules)):
        return [drift]
    problems: list[WaybillError] = list(_missing(missing, specs, family))
    for spec in specs:
        if spec.name in slots:
            problems += _members(spec, slots[spec.name], checkpoint, rules)
            problems += _pieces(spec, slots[spec.name], checkpoint)
    problems += _experts([spec for spec in specs if spec.stack and spec.name in slots], slots, checkpoint)
    problems += _unclaimed(left_over, specs, family, runtime)
    return problems


def _drift(
    left_over: list[WeightRecord], specs: Sequence[ParameterSpec], slots: Mapping[str, Slots], rules: RuleTable
) -> WaybillError | None:
    """Whether one prefix, added or removed, would make every left-over name known."""
    wanted = {source for spec in specs for at in range(spec.stack or 1) for source in rules.sources_of(spec.name, at)}
    stored = {record.source_name for place in slots.values() for record in place.values()}
    known = {lift(source)[0] for source in wanted - stored}
    names = [record.source_name for record in left_over]
    first = lift(names[0])[0]
    segments = first.split(".")
    firsts = [key.partition(".")[0] + "." for key in known]
    roots = {"", *(first for first in firsts if firsts.count(first) > 1)}
    for count in range(1, min(len(segments), 4)):
        prefix = ".".join(segments[:count]) + "."
        for root in sorted(roots):
            if all(root + lift(name)[0].removeprefix(prefix) in known for name in names):
                return _prefix(f"every name starts with {prefix!r}", names[0], root + names[0].removeprefix(prefix))
    for key in known:
        if key.endswith("." + first):
            prefix = key.removesuffix(first)
            if all(prefix + lift(name)[0] in known for name in names):
                return _prefix(f"every name lacks {prefix!r}", names[0], prefix + names[0])
    return None


def _prefix(found: str, example: str, name: str) -> PrefixDrift:
    return PrefixDrift(
        "the tensor names do not fit the architecture",
        where=example,
        expected=name,
        found=found,
        fix="rename the tensors, or use the checkpoint of the architecture the config names",
    )


def _layer_of(name: str) -> tuple[str, int] | None:
    """`model.layers.7.mlp…` -> ("model.layers", 7)."""
    segments = name.split(".")
    for at, segment in enumerate(segments):
        if segment.isascii() and segment.isdecimal() and len(segment) < 10:
            return ".".join(segments[:at]), int(segment)
    return None


def _layers(specs: Sequence[ParameterSpec], family: Family) -> dict[str, tuple[int, str]]:
    """For each run of layers, by its path, how many there are and the config field that says so."""
    numbers: dict[str, int] = {}
    for spec in specs:
        if (layer := _layer_of(spec.name)) is not None:
            numbers[layer[0]] = max(numbers.get(layer[0], 0), layer[1] + 1)
    return {path: (count, family.layer_fields.get(path, "its layer count")) for path, count in numbers.items()}


def _missing(missing: list[ParameterSpec], specs: Sequence[ParameterSpec], family: Family) -> Iterator[WaybillError]:
    """Whole layers first, then parameters by form."""
    lost, held = (Counter(_layer_of(spec.name) for spec in some) for some in (missing, specs))
    whole = {layer for layer, count in lost.items() if layer and count == held[layer] and count > 4}
    runs = _layers(specs, family)
    for path, layers in groupby(sorted(whole), key=lambda layer: layer[0]):
        numbers = [number for _, number in layers]
        count, field = runs[path]
        yield MissingWeight(
            f"{len(numbers)} layer{'s have' if len(numbers) > 1 else ' has'} no weights",
            where=some([f"{path}.{number}" for number in numbers]),
            expected=f"layers 0 to {count - 1}: {field} is {count}",
            found="no tensor of that layer in any shard",
            fix=f"correct {field}, or download the shards that hold the layer",
        )
    forms: dict[str, list[ParameterSpec]] = defaultdict(list)
    for spec in missing:
        if _layer_of(spec.name) not in whole:
            forms[lift(spec.name)[0]].append(spec)
    embedded = all(spec.kind != "embedding" for spec in missing)
    for group in forms.values():
        yield _missing_form(group, family.merges, embedded)


def _missing_form(group: list[ParameterSpec], rules: RuleTable, embedded: bool) -> WaybillError:
    spec = group[0]
    shape = " + ".join(f"[{', '.join(map(str, part.shape))}]" for part in spec.parts)
    if spec.kind == "head":
        return MissingHead(
            "the config says untied, and the file has no output head",
            where=spec.name,
            expected=f"{spec.name} {shape}, or tie_word_embeddings: true",
            found="an input embedding and no head" if embedded else "neither a head nor an input embedding",
            fix="set tie_word_embeddings to true if the published model ties them; else download the missing shard",
        )
    sources = [source for s in group for source in rules.sources_of(s.name)]
    return MissingWeight(
        "a weight is missing" if len(group) == 1 else f"{len(group)} weights of one form are missing",
        where=some(sources),
        expected=f"{shape} ({spec.parts[0].basis})",
        found=f"no expert {_numbers(range(spec.stack))} in any shard" if spec.stack else "no such tensor in any shard",
        fix="download the checkpoint again, or correct the config field that asks for this weight",
    )


def _members(spec: ParameterSpec, slots: Slots, checkpoint: Checkpoint, rules: RuleTable) -> Iterator[WaybillError]:
    """Merges of which some members are there, not all. Whole experts are `_experts`' matter."""
    for stack, held in groupby(sorted(slots), key=lambda slot: slot[0]):
        have = {member for _, member in held}
        lost = [m for m in range(len(spec.parts)) if m not in have]
        if not lost:
            continue
        names = rules.sources_of(spec.name, stack)
        present = [f"{names[m]} in {slots[stack, m].file}" for m in sorted(have)]
        yield IncompleteMerge(
            f"{spec.name} is merged from {len(spec.parts)} weights, and {len(lost)} of them "
            f"{'is' if len(lost) == 1 else 'are'} missing",
            where=", ".join(names[m] for m in lost),
            expected=" + ".join(names),
            found="; ".join(present),
            fix="download the shard that holds the missing weight",
        )


def _pieces(spec: ParameterSpec, slots: Slots, checkpoint: Checkpoint) -> Iterator[WaybillError]:
    """Each member's shape, storage and dtype. Experts of one bank share one answer."""
    seen: set[tuple[object, ...]] = set()
    for (_, member), record in slots.items():
        if member >= len(spec.parts):
            continue
        part, weight = spec.parts[member], record.storage
        header = checkpoint.tensors[record.tensors[0]]
        packing = packing_of(weight)
        finding = (member, weight.shape, packing or header.dtype)
        if finding in seen:
            continue
        seen.add(finding)
        if weight.shape != part.shape:
            yield _shape(spec, part, weight.shape, header)
        if not _fits(packing, spec.packing):
            if spec.stack:
                yield _uneven(spec, slots, checkpoint)
                return
            yield PackingMismatch(
                "the parts of one parameter are packed differently",
                where=f"{record.source_name} ({header.file}), for {spec.name}",
                expected=describe_packing(spec.packing),
                found=_form(record, checkpoint) if packing else f"float, {header}",
                fix="use an export that packs all members of this parameter alike",
            )
        elif isinstance(weight, FloatWeight) and weight.value.dtype not in FLOAT_DTYPES:
            yield DtypeMismatch(
                "a float weight is stored as something else",
                where=f"{header.name} ({header.file})",
                expected=" | ".join(FLOAT_DTYPES),
                found=str(header),
                fix="use a float checkpoint; integers and 8-bit floats mean nothing without their scales",
            )


def _uneven(spec: ParameterSpec, slots: Slots, checkpoint: Checkpoint) -> WaybillError:
    """A bank some of whose experts are packed otherwise than most; those are named."""
    forms: dict[str, list[tuple[int, WeightRecord]]] = defaultdict(list)
    for (expert, member), record in sorted(slots.items()):
        if member < len(spec.parts):
            forms[_form(record, checkpoint)].append((expert, record))
    usual, *others = sorted(forms, key=lambda form: -len(forms[form]))
    odd = [record for form in others for _, record in forms[form]]
    names, files = ([*dict.fromkeys(values)] for values in ([r.source_name for r in odd], [r.file for r in odd]))
    return PackingMismatch(
        "experts of one bank are packed differently",
        where=f"{some(names)} ({some(files)}), for {spec.name}",
        expected=f"{usual}, as most of them" if others else describe_packing(spec.packing),
        found="; ".join(f"expert {_numbers({e for e, _ in forms[form]})}: {form}" for form in others) or usual,
        fix="use an export whose rules pack every expert of a layer alike: one operator computes them all",
    )


def _form(record: WeightRecord, checkpoint: Checkpoint) -> str:
    """How a weight is stored, in words."""
    packing = packing_of(record.storage)
    return describe_packing(packing) if packing else f"float, {checkpoint.tensors[record.tensors[0]].dtype}"


def _fits(found: Packing | None, wanted: Packing | None) -> bool:
    return found is wanted if found is None or wanted is None else found.serves(wanted)


def describe_packing(packing: Packing | None) -> str:
    """A packing in words."""
    return "a float weight" if packing is None else str(packing)


def _shape(spec: ParameterSpec, part: Part, found: tuple[int, ...], header: TensorHeader) -> WaybillError:
    where = f"{header.name} ({header.file})"
    expected = f"[{', '.join(map(str, part.shape))}] ({part.basis})"
    shape = f"[{', '.join(map(str, found))}]"
    if spec.kind in ("embedding", "head") and found[1:] == part.shape[1:]:
        field = part.basis.partition(" ")[0]
        return VocabMismatch(
            "the vocabulary in the file is not the one in the config",
            where=where,
            expected=expected,
            found=f"{shape}: {found[0]} rows, {field} says {part.shape[0]}",
            fix=f"set {field} to {found[0]} if the tokenizer has that many tokens; nothing is padded or cropped",
        )
    return ShapeMismatch(
        "a weight has another shape than the config implies",
        where=where,
        expected=expected,
        found=shape,
        fix="correct the config fields named above, or use the weights this config belongs to",
    )


def _experts(
    banks: Sequence[ParameterSpec], slots: Mapping[str, Slots], checkpoint: Checkpoint
) -> Iterator[WaybillError]:
    """Missing and surplus experts, one problem a layer."""
    for layer, specs in groupby(banks, key=lambda spec: spec.name.rpartition(".")[0]):
        lost: set[int] = set()
        surplus: set[int] = set()
        count = 0
        files: set[str] = set()
        for spec in specs:
            have = {stack for stack, _ in slots[spec.name]}
            files |= {record.file for record in slots[spec.name].values()}
            count = spec.stack
            lost |= set(range(count)) - have
            surplus |= have - set(range(count))
        if lost:
            yield ExpertMismatch(
                f"experts are missing: {len(lost)} of {count}",
                where=layer,
                expected=f"experts 0 to {count - 1}: num_experts is {count}",
                found=f"no expert {_numbers(lost)}; the others are in {some(sorted(files))}",
                fix="download the shard that holds them, or correct num_experts",
            )
        if surplus:
            yield ExpertMismatch(
                "there are more experts than the config says",
                where=layer,
                expected=f"experts 0 to {count - 1}: num_experts is {count}",
                found=f"also expert {_numbers(surplus)} in {some(sorted(files))}",
                fix=f"set num_experts to {max(surplus) + 1} if the model was published with that many",
            )


def _numbers(values: Iterable[int]) -> str:
    """0, 1, 2, 5 -> "0–2, 5"."""
    runs: list[list[int]] = []
    for value in sorted(values):
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def _unclaimed(
    left_over: list[WeightRecord],
    specs: Sequence[ParameterSpec],
    family: Family,
    runtime: Callable[[str], str],
) -> Iterator[WaybillError]:
    """Stored weights without a place, by form, with the nearest names that do have one."""
    forms: dict[str, dict[str, str]] = defaultdict(dict)
    for record in left_over:
        forms[lift(runtime(record.source_name))[0]][record.source_name] = record.file
    known = {lift(source)[0] for spec in specs for source in family.merges.sources_of(spec.name)} if forms else set()
    runs = _layers(specs, family)
    for form, files in forms.items():
        names = list(files)
        layer = _layer_of(runtime(names[-1]))
        count, field = runs.get(layer[0], (0, "")) if layer else (0, "")
        if form in known and layer and layer[1] >= count:
            found = f"layer {layer[1]}; {field} is {count}"
            fix = f"correct {field}, or remove the tensors of the surplus layers"
        elif names[0].endswith(".bias"):
            found = "a bias this model has no slot for"
            fix = "check attention_bias and mlp_bias in config.json against the published model"
        else:
            found = "no rule takes or drops it"
            fix = "check that config.json belongs to these weights"
        near = get_close_matches(form, known, n=5, cutoff=0.5)
        yield UnclaimedWeight(
            "a tensor has no place in the model"
            if len(names) == 1
            else f"{len(names)} tensors of one form have no place in the model",
            where=f"{some(names)} ({some(sorted(set(files.values())))})",
            expected="a name of the architecture; nearest: " + (", ".join(near).replace("#", "{i}") or "none"),
            found=found,
            fix=fix,
        )
