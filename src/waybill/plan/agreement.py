"""Whether disk, metadata and target agree about packing. Disk is evidence, config is policy."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from waybill.errors import IllegalParallelism, PackingMismatch, WaybillError, some
from waybill.manifest.quantization import Policy
from waybill.plan.bill import Plan
from waybill.plan.diagnose import Slots, describe_packing
from waybill.plan.parameter import FLOAT_KINDS, SMALLEST_GROUP, AffinePacking, CodebookPacking, ParameterSpec
from waybill.weights import FloatWeight
from waybill.weights.lazy import Decoded, Tile
from waybill.weights.widened import DoubledCodes, HalvedPowers


def everything(
    specs: Sequence[ParameterSpec],
    slots: Mapping[str, Slots],
    policy: Policy,
    legal: Sequence[int],
    tp: int,
) -> Iterator[WaybillError]:
    """Every disagreement that grouping could not see."""
    yield from floats(specs, slots, policy)
    yield from ties(specs, slots)
    yield from packed_cuts(specs, legal, tp)


def floats(specs: Sequence[ParameterSpec], slots: Mapping[str, Slots], policy: Policy) -> Iterator[WaybillError]:
    """Weights that are float on disk and packed by the metadata. (Grouping has refused the reverse.)"""
    if not policy.quantization.plans:
        return
    forms: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    stored = (r for spec in specs if spec.kind not in FLOAT_KINDS for r in slots.get(spec.name, {}).values())
    for record in stored:
        if not isinstance(record.storage, FloatWeight):
            continue
        module = record.source_name.removesuffix(".weight")
        if (config := policy.of(module)) is not None:
            place = policy.naming.place(record.source_name)
            forms[policy.reason(module), str(config)][place] = record.file
    for (reason, stated), files in forms.items():
        yield PackingMismatch(
            "weights are float on disk, and packed by the metadata",
            where=f"{some(list(files))} ({some(sorted(set(files.values())))})",
            expected=f"{stated}, by {reason}",
            found=f"{len(files)} float weights",
            fix="list these modules in the metadata's exclusions, or use the weights it belongs to",
        )


def ties(specs: Sequence[ParameterSpec], slots: Mapping[str, Slots]) -> Iterator[WaybillError]:
    """A tied parameter that is stored again must be stored as what it is tied to."""
    by_name = {spec.name: spec for spec in specs}
    for spec in specs:
        if spec.tied_to is None or spec.name not in slots or spec.tied_to not in slots:
            continue
        table = by_name[spec.tied_to]
        if (spec.packing is None) != (table.packing is None):
            record = next(iter(slots[spec.name].values()))
            yield PackingMismatch(
                "a tied weight is packed and what it is tied to is not, or the reverse",
                where=f"{record.source_name} ({record.file})",
                expected=f"{describe_packing(table.packing)}, as {table.name}",
                found=describe_packing(spec.packing),
                fix="set tie_word_embeddings to false if the two are meant to differ",
            )


def packed_cuts(specs: Sequence[ParameterSpec], legal: Sequence[int], tp: int) -> Iterator[WaybillError]:
    """Cuts that would leave groups too small to compute with, or split a block; `legal` are the sizes the config
    allows."""
    if tp == 1 or tp not in legal:
        return
    split = next((spec for spec in specs if not spec.keeps_blocks(tp)), None)
    if split is None or split.packing is None:
        return
    sizes = [n for n in legal if keeps_groups(specs, n)]
    if isinstance(split.packing, AffinePacking):
        best = max((n for n in sizes if n <= tp), default=1)
        expected = f"at most {best} ranks, so that groups stay whole or can be refined to {SMALLEST_GROUP} or more"
        found = f"K {split.parts[0].shape[-1]}, group {split.packing.group}, {tp} ranks"
    else:
        best, layout = max(sizes, default=1), split.packing.layout
        shapes = " + ".join("x".join(map(str, part.local_shape(0, tp)[-2:])) for part in split.parts)
        expected = f"{' or '.join(map(str, sizes))} ranks: whole blocks of {layout.rows}x{layout.columns} each"
        found = f"{shapes} for each of {tp} ranks"
    yield IllegalParallelism(
        "a packed weight cannot be cut into that many ranks",
        where=split.name,
        expected=expected,
        found=found,
        fix=f"use --tp {best}",
    )


def keeps_groups(specs: Sequence[ParameterSpec], tp: int) -> bool:
    """Whether a cut into that many ranks leaves every packed weight one that can be computed with."""
    return all(spec.keeps_blocks(tp) for spec in specs)


def widening(bill: Plan) -> Iterator[str]:
    """What it costs that packed weights are delivered as wider ones of the same values."""
    wide = [b for b in bill.bindings if b.role in ("codes", "scales") and any(map(_is_widened, b.value.tiles))]
    if bill.problems:
        return
    if not wide:
        yield "widening changes nothing: the checkpoint has no experts of 4-bit floats"
        return
    held, made = sum(b.bytes_read for b in wide), sum(b.nbytes for b in wide)
    count = sum(b.role == "codes" for b in wide)
    yield f"{count} banks of 4-bit floats become 8-bit integers of the same values: {held:,} bytes become {made:,}"


def _is_widened(tile: Tile) -> bool:
    return isinstance(tile.source, Decoded) and isinstance(tile.source.decoder, (DoubledCodes, HalvedPowers))


def notices(specs: Sequence[ParameterSpec], unneeded: Mapping[str, str], dtype: str | None) -> Iterator[str]:
    """Lines for tensors that only the producer's runtime needs, for projections kept apart that are usually merged, and
    for scales that computing in `dtype` rounds."""
    for reason, count in Counter(unneeded.values()).items():
        yield f"{count} tensors are not used: {reason}"
    apart = [spec.name for spec in specs if spec.apart]
    if apart:
        yield f"kept apart, because packed differently: {some(apart)}"
    scales = Counter(spec.packing.scale_dtype for spec in specs if isinstance(spec.packing, AffinePacking))
    for stored, count in scales.items():
        if dtype == "BF16" and stored != "BF16":
            yield f"bfloat16 rounds the {stored} scales of {count} packed weights when it computes; float32 keeps them"
    coded = sum(isinstance(spec.packing, CodebookPacking) and not spec.packing.is_exact_in(dtype) for spec in specs)
    if coded and dtype is not None:
        yield f"{dtype} rounds the values of {coded} packed weights when it computes; float32 keeps them"
