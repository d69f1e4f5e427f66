"""From headers to a plan: route every stored tensor, assemble every parameter, and say what does not add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from waybill.checkpoint import Checkpoint
from waybill.config import ModelConfig, read_model_config
from waybill.errors import (
    ClaimedTwice,
    IllegalParallelism,
    ShapeMismatch,
    UnsupportedFeature,
    UnsupportedRope,
    WaybillError,
)
from waybill.plan import diagnose
from waybill.plan.bill import Binding, Plan
from waybill.plan.parameter import ParameterSpec, Part
from waybill.rules import Place, RuleTable
from waybill.rules.table import Split
from waybill.weights import FloatWeight, LazyTensor, WeightRecord, concat, stack, stored
from waybill.weights.ranges import bytes_read


class Target(NamedTuple):
    """A sink for weights: its name, the rules from module names to its own, and the parameters it needs."""

    name: str
    rules: RuleTable
    parameters: Callable[[ModelConfig], Sequence[ParameterSpec]]


Slots = dict[tuple[int, int], WeightRecord]
"""The records that make one target, by (position in the stack, member of the concat)."""


@dataclass(slots=True)
class Routing:
    """Where everything went."""

    slots: dict[str, Slots] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    strangers: list[WeightRecord] = field(default_factory=list)
    twice: set[str] = field(default_factory=set)
    problems: list[WaybillError] = field(default_factory=list)


def make_plan(
    checkpoint: Checkpoint,
    *,
    target: Target,
    source_rules: Callable[[ModelConfig], RuleTable],
    tp: int = 1,
    rank: int = 0,
    dtype: str | None = None,
) -> Plan:
    """Plan one rank's load. Never raises for a bad checkpoint: `Plan.problems` holds everything found.

    Args:
        checkpoint: headers and config; not one weight byte is read.
        target: what the weights are for.
        source_rules: names on disk to module names, for the checkpoint's family.
        tp: number of tensor-parallel ranks.
        rank: the rank planned for, below `tp`.
        dtype: safetensors tag to deliver; by default the config's, and without one the file's most common.
    """
    problems = list(checkpoint.problems)
    config, config_problems, config_notices = (
        read_model_config(checkpoint.config) if checkpoint.config or not problems else (None, [], [])
    )
    problems += config_problems
    notices = [*checkpoint.notices, *config_notices]
    dtype = dtype or (config and config.dtype) or common_dtype(checkpoint)
    bindings: list[Binding] = []
    ignored: dict[str, str] = {}
    # Unsupported arithmetic does not change shapes; anything else wrong would only cause echoes of itself.
    if config and all(isinstance(problem, (UnsupportedFeature, UnsupportedRope)) for problem in problems):
        if obstacles := config.parallel_obstacles(tp):
            problems.append(_illegal(config, tp, obstacles))
        routing = route(checkpoint, source_rules(config), target.rules)
        specs = target.parameters(config)
        problems += routing.problems
        problems += diagnose.everything(checkpoint, config, specs, routing.slots, routing.strangers, target.rules)
        ignored = routing.ignored
        if not problems:
            bindings = [
                _bind(spec, routing.slots[spec.name], rank, tp, dtype) for spec in specs if spec.name in routing.slots
            ]
            bindings.sort(key=_file_order(checkpoint))
    return Plan(
        checkpoint,
        config,
        target.name,
        tp,
        rank,
        dtype,
        tuple(bindings),
        ignored,
        tuple(problems),
        tuple(notices),
    )


def common_dtype(checkpoint: Checkpoint) -> str:
    """The float dtype that holds most bytes of the checkpoint."""
    weight: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        if tensor.dtype in ("F32", "F16", "BF16"):
            weight[tensor.dtype] += tensor.nbytes
    return weight.most_common(1)[0][0] if weight else "F32"


def route(checkpoint: Checkpoint, source: RuleTable, target: RuleTable) -> Routing:
    """Send every stored tensor through both tables: dropped by a named rule, or in the slots of a target."""
    routing = Routing()
    for name, header in checkpoint.tensors.items():
        why = source.dropped(name)
        if why is not None:
            routing.ignored[name] = why
            continue
        whole = stored(header)
        destination = source.route(name)
        if isinstance(destination, Split):
            pieces = _split(name, header.file, whole, destination, routing.problems)
        else:
            pieces = [(destination.target, whole)]
        for module_name, value in pieces:
            place = target.route(module_name)
            record = WeightRecord(name, "decoder", FloatWeight(value))
            if isinstance(place, Split):
                raise TypeError(f"a target's rules merge, and {place.template.text} would split {module_name}")
            if target.is_made(module_name):
                routing.strangers.append(record)
            else:
                _put(routing, place, record, checkpoint)
    return routing


def _split(
    name: str, file: str, value: LazyTensor, split: Split, problems: list[WaybillError]
) -> list[tuple[str, LazyTensor]]:
    """The pieces a split rule makes of one stored tensor, and their names."""
    members = split.template.members or (None,)
    rank = len(value.shape) - (split.variable is not None)
    length = value.shape[split.axis - rank] if rank > split.axis else 0
    if 0 in value.shape or length == 0 or length % len(members):
        problems.append(
            ShapeMismatch(
                "a bank cannot be taken apart",
                where=f"{name} ({file})",
                expected=f"a stack of matrices whose axis {split.axis} divides into {len(members)}",
                found=f"{value.dtype}{list(value.shape)}",
                fix="check that the file belongs to this config",
            )
        )
        return []
    pieces = []
    width = length // len(members)
    for index in range(value.shape[0]) if split.variable else (0,):
        one = value.select(0, index) if split.variable else value
        indices = split.indices | ({split.variable: index} if split.variable else {})
        for m, member in enumerate(members):
            pieces.append(
                (
                    split.template.fill(indices, None if member is None else m),
                    one.narrow(split.axis, m * width, width),
                )
            )
    return pieces


def _put(routing: Routing, place: Place, record: WeightRecord, checkpoint: Checkpoint) -> None:
    slots = routing.slots.setdefault(place.target, {})
    slot = (place.stack or 0, place.member or 0)
    if slot in slots and place.target not in routing.twice:
        routing.twice.add(place.target)
        routing.problems.append(
            ClaimedTwice(
                "two tensors want the same place",
                where=place.target,
                expected="one source",
                found=" and ".join(
                    f"{name} ({checkpoint.tensors[name].file})"
                    for name in (slots[slot].source_name, record.source_name)
                ),
                fix="remove one of them from the checkpoint",
            )
        )
    slots[slot] = record


def _bind(spec: ParameterSpec, slots: Slots, rank: int, tp: int, dtype: str) -> Binding:
    """Shard each part, merge the parts, stack the merges."""
    layers = []
    for position in range(spec.stack or 1):
        parts = [
            _shard(slots[position, member].storage.value, part, rank, tp) for member, part in enumerate(spec.parts)
        ]
        layers.append(concat(parts, spec.axis))
    value = stack(layers) if spec.stack else layers[0]
    return Binding(
        target=spec.name,
        shape=value.shape,
        dtype=dtype,
        sources=tuple(dict.fromkeys(slots[key].source_name for key in sorted(slots))),
        operations=_operations(spec, value, rank, tp, dtype),
        bytes_read=bytes_read(value),
        value=value,
        tied_to=spec.tied_to,
    )


def _shard(value: LazyTensor, part: Part, rank: int, tp: int) -> LazyTensor:
    if part.shard is None:
        return value
    axis = part.shard.axis
    cut = part.shard.cut(value.shape[axis], rank, tp)
    return value.narrow(axis, cut.start, cut.length).pad(axis, cut.padded)


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
        steps.append(f"concat {len(spec.parts)} on axis {spec.axis}")
    if spec.stack:
        steps.append(f"stack {spec.stack}")
    if foreign := sorted({tile.source.dtype for tile in value.tiles} - {dtype}):
        steps.append(f"cast {', '.join(foreign)} to {dtype}")
    if spec.tied_to:
        steps.append(f"compare with {spec.tied_to}, shared when equal")
    return tuple(steps)


def _file_order(checkpoint: Checkpoint) -> Callable[[Binding], tuple[int, int]]:
    """Sort key: where the last byte a binding needs lies, so that reading runs forward through the shards."""
    rank_of = {shard.name: position for position, shard in enumerate(checkpoint.shards)}

    def key(binding: Binding) -> tuple[int, int]:
        places = ((rank_of[tile.source.file], tile.source.offset) for tile in binding.value.tiles)
        return max(places, default=(-1, 0))

    return key


def _illegal(config: ModelConfig, tp: int, obstacles: list[str]) -> IllegalParallelism:
    return IllegalParallelism(
        f"the model cannot be cut into {tp} ranks",
        where="--tp",
        expected="one of " + ", ".join(map(str, config.legal_tp_sizes())),
        found="; ".join(obstacles),
        fix="choose a listed size",
    )
