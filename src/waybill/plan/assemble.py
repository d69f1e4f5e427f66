"""From records to bindings: shard each part, merge the parts, stack the merges, and say in words what happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from waybill.checkpoint import Checkpoint
from waybill.plan.bill import SCALE_ROLES, Binding
from waybill.plan.diagnose import Slots
from waybill.plan.parameter import AffinePacking, Packing, ParameterSpec, Part, part_name
from waybill.plan.target import Target
from waybill.weights import LazyTensor, Storage
from waybill.weights.affine import AffinePackedWeight
from waybill.weights.codebook import LARGEST, CodebookWeight
from waybill.weights.lazy import Decoded
from waybill.weights.ranges import bytes_read, shares
from waybill.weights.record import concat_weights, stack_weights
from waybill.weights.widened import widened

LARGEST_FLOATS = {"F16": 65504.0, "BF16": 3.3895313892515355e38, "F32": 3.4028234663852886e38}


def bind(spec: ParameterSpec, slots: Slots, rank: int, tp: int, dtype: str, target: Target) -> Iterator[Binding]:
    """Shard each part, merge the parts, stack the merges; one binding for each tensor the weight is stored as."""
    packing = spec.local_packing(tp)
    layers = []
    for position in range(spec.stack or 1):
        members = [
            _shard(slots[position, member].storage, part, packing, rank, tp) for member, part in enumerate(spec.parts)
        ]
        layers.append(stack_weights(members, 1) if spec.interleave else concat_weights(members, spec.axis))
    weight = stack_weights(layers) if spec.stack else layers[0]
    sources = tuple(dict.fromkeys(name for key in sorted(slots) for name in slots[key].tensors))
    arranged = target.arrange(spec, weight)
    codes = arranged.get("codes")
    for role, value in arranged.items():
        shared = codes is not None and value is not codes and shares(codes, value)
        own = dtype if role == "weight" or (role in SCALE_ROLES and target.casts_scales) else value.dtype
        yield Binding(
            target=part_name(spec.name, role),
            shape=value.shape,
            dtype=own,
            sources=sources,
            operations=_operations(spec, value, rank, tp, own),
            bytes_read=0 if shared else bytes_read(value),
            value=value,
            tied_to=part_name(spec.tied_to, role) if spec.tied_to else None,
            role=role,
            largest=_largest(weight, role, dtype) if role in SCALE_ROLES else None,
            numbers=_numbers(weight) if role == "codes" else None,
            shares=shared,
        )


def _largest(weight: Storage, role: str, dtype: str) -> float | None:
    """The scale or minimum above which a weight may exceed the dtype that is computed in, where one can be that large:
    codes times scales have half the room where minimums are added."""
    if isinstance(weight, CodebookWeight):
        return float(LARGEST_FLOATS[dtype] / LARGEST[weight.layout.table])
    if dtype != "F16" or not isinstance(weight, AffinePackedWeight):
        return None
    room = LARGEST_FLOATS[dtype] / (1 if weight.minimums is None else 2)
    return room if role == "minimums" else room / ((1 << weight.layout.bits) - 1)


def _numbers(weight: Storage) -> str | None:
    """The dtype of codes that are 8-bit floats."""
    if not isinstance(weight, CodebookWeight) or weight.layout.bits != 8:
        return None
    return f"F8_{weight.layout.table}"


def _shard(weight: Storage, part: Part, packing: Packing | None, rank: int, tp: int) -> Storage:
    if isinstance(packing, AffinePacking) and isinstance(weight, CodebookWeight):
        weight = widened(weight)
    if isinstance(packing, AffinePacking) and isinstance(weight, AffinePackedWeight):
        weight = weight.refine(packing.group)
    if part.shard is None:
        return weight
    axis = part.shard.axis
    cut = part.shard.cut(weight.shape[axis], rank, tp)
    narrowed = weight.narrow(axis, cut.start, cut.length)
    return narrowed.pad(axis, cut.padded) if cut.padded > cut.length else narrowed


def _operations(spec: ParameterSpec, value: LazyTensor, rank: int, tp: int, dtype: str) -> tuple[str, ...]:
    """What happens to the bytes, in words."""
    steps = []
    if tp > 1:
        for part in dict.fromkeys(spec.parts):
            if part.shard is None:
                steps.append("replicate")
                continue
            cut = part.shard.cut(part.shape[part.shard.axis], rank, tp)
            steps.append(f"narrow axis {part.shard.axis} {cut.start}:{cut.start + cut.length}")
            if cut.padded > cut.length:
                steps.append(f"pad {cut.padded - cut.length} zeros")
    if len(spec.parts) > 1:
        steps.append(f"{'interleave' if spec.interleave else 'concat'} {len(spec.parts)} on axis {spec.axis}")
    if spec.stack:
        steps.append(f"stack {spec.stack}")
    if any(isinstance(tile.source, Decoded) for tile in value.tiles):
        steps.insert(0, "decode")
    if foreign := sorted({tile.source.dtype for tile in value.tiles} - {dtype}):
        steps.append(f"cast {', '.join(foreign)} to {dtype}")
    if spec.tied_to:
        steps.append(f"compare with {spec.tied_to}, shared when equal")
    return tuple(steps)


def file_order(checkpoint: Checkpoint) -> Callable[[Binding], tuple[int, int]]:
    """Sort key: where the last byte a binding needs lies, so that reading runs forward through the shards."""
    rank_of = {shard.name: position for position, shard in enumerate(checkpoint.shards)}

    def key(binding: Binding) -> tuple[int, int]:
        tiles = (tile.source for tile in binding.value.tiles if tile.source.file in rank_of)  # a constant lies nowhere
        places = ((rank_of[source.file], source.offset) for source in tiles)
        return max(places, default=(-1, 0))

    return key
