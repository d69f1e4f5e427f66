"""From headers to a plan: route every stored tensor, assemble every parameter, and say what does not add up."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from waybill.checkpoint import Checkpoint
from waybill.codecs.grouping import group_records
from waybill.config.composite import Config
from waybill.config.gguf import AS_FLOATS
from waybill.errors import (
    BadConfig,
    ClaimedTwice,
    IllegalParallelism,
    ShapeMismatch,
    UnsupportedFeature,
    UnsupportedRope,
    WaybillError,
)
from waybill.manifest.quantization import Policy, unused_rules
from waybill.plan import agreement, diagnose
from waybill.plan.assemble import bind, file_order
from waybill.plan.bill import Binding, Plan
from waybill.plan.family import Family
from waybill.plan.parameter import Packing, ParameterSpec, packing_of
from waybill.plan.target import Target
from waybill.rules import Place, RuleTable
from waybill.rules.table import Split
from waybill.weights import FloatWeight, WeightBundle, WeightRecord
from waybill.weights.pairs import halves_apart
from waybill.weights.record import bundled

Slots = dict[tuple[int, int], WeightRecord]
"""The records that make one target, by (position in the stack, member of the concat)."""


@dataclass(slots=True)
class Routing:
    """Where everything went: records by module weight name, what was dropped, and what could not be taken apart."""

    records: dict[str, WeightRecord] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    twice: set[str] = field(default_factory=set)
    problems: list[WaybillError] = field(default_factory=list)

    def packings(self) -> dict[str, Packing]:
        """How each packed weight lies on disk, by module weight name."""
        return {
            name: found for name, record in self.records.items() if (found := packing_of(record.storage)) is not None
        }

    def wanted_packings(self, rules: RuleTable) -> dict[str, Packing]:
        """The same, and for a merge's member that is not stored at all that of the others: absent is not float."""
        found = self.packings()
        absent: dict[str, Packing] = {}
        for name, packing in found.items():
            to = rules.route(name)
            if isinstance(to, Place) and to.member is not None and to.stack is None:
                lost = (member for member in rules.sources_of(to.target) if member not in self.records)
                absent |= dict.fromkeys(lost, packing)
        return found | absent


def make_plan(
    checkpoint: Checkpoint,
    *,
    target: Target,
    family: Family,
    tp: int = 1,
    rank: int = 0,
    dtype: str | None = None,
) -> Plan:
    """Plan one rank's load without reading a weight byte. Never raises for a bad checkpoint: see `Plan.problems`.

    Args:
        target: what the weights are for.
        family: how the checkpoint's architectures store their weights.
        tp: tensor-parallel ranks.
        rank: which of them this plan is for.
        dtype: safetensors tag to deliver; by default the config's, and without one the file's most common.
    """
    problems, notices = list(checkpoint.problems), list(checkpoint.notices)
    config, policy, records = describe(checkpoint, family, problems, notices)
    dtype = dtype or (config and config.dtype) or common_dtype(checkpoint)
    # Unsupported arithmetic does not change shapes; anything else wrong would only cause echoes of itself.
    clean = all(isinstance(problem, (UnsupportedFeature, UnsupportedRope)) for problem in problems)
    routing, bindings = Routing(), list[Binding]()
    specs: Sequence[ParameterSpec] = ()
    if config and clean:
        routing = route(bundled(records), family.rules(config), policy.naming.runtime)
        wanted = routing.wanted_packings(family.merges)
        specs = target.adjust(family.parameters(config, wanted, target.merges))
        if obstacles := config.parallel_obstacles(tp):
            problems.append(_illegal(config, specs, tp, obstacles))
        slots, strangers = place(routing, specs, family.merges)
        problems += routing.problems
        problems += diagnose.everything(checkpoint, family, specs, slots, strangers, policy.naming.runtime)
        problems += agreement.everything(specs, slots, policy, config.legal_tp_sizes(), tp)
        problems += [*target.refusals(config, specs, dtype), *_unusable(config, checkpoint)]
        notices += agreement.notices(specs, policy.unneeded(checkpoint.tensors), None if target.casts_scales else dtype)
        if not problems:
            bound = (spec for spec in specs if spec.name in slots)
            bindings = [b for spec in bound for b in bind(spec, slots[spec.name], rank, tp, dtype, target)]
            bindings.sort(key=file_order(checkpoint))
    return Plan(
        checkpoint=checkpoint,
        config=config,
        target=target.name,
        tp=tp,
        rank=rank,
        dtype=dtype,
        bindings=tuple(bindings),
        ignored=routing.ignored | policy.unneeded(checkpoint.tensors),
        problems=tuple(problems),
        notices=tuple(notices),
        packings=routing.packings(),
        family=family.name,
        policy=policy,
        specs=tuple(specs),
        holds_result=target.holds_result,
        parameters=sum(math.prod(record.storage.shape) for record in records),
    )


def describe(
    checkpoint: Checkpoint, family: Family, problems: list[WaybillError], notices: list[str]
) -> tuple[Config | None, Policy, list[WeightRecord]]:
    """What the config says, what the metadata says, and the weights that headers show, with rows as at run time.

    Problems and notices are appended; there are no weights where metadata or files are broken.
    """
    config = None
    if checkpoint.config or not problems:
        config, found, notes = family.read(checkpoint.config)
        problems += found
        notices += notes
    before = len(problems)
    policy = family.policy(checkpoint, problems)
    notices += dict.fromkeys(line for plan in policy.quantization.plans.values() for line in plan.notices)
    if rules := unused_rules(checkpoint.config, policy.naming.components):
        notices.append(
            f"quantization_config states {', '.join(rules)} for the whole model; of several components each needs its "
            "own entry in component_quantization, and only the layout is followed"
        )
    if checkpoint.problems or len(problems) > before:
        return config, policy, []
    records = group_records(checkpoint, policy, problems)
    if checkpoint.dequantize and (widened := [t for t in checkpoint.tensors.values() if t.dtype in AS_FLOATS]):
        types = ", ".join(sorted({t.dtype for t in widened}))
        notices.append(f"{len(widened)} tensors of type {types} are read as floats, as --dequantize asks")
    if config is None or policy.naming.translate is None:  # rows lie as they do at run time
        return config, policy, records
    paired = family.paired_rows(checkpoint.config, config)
    return config, policy, [_in_order(record, paired(policy.naming.runtime(record.source_name))) for record in records]


def _in_order(record: WeightRecord, head_dim: int) -> WeightRecord:
    """A record whose rows have the order they have at run time."""
    return replace(record, storage=halves_apart(record.storage, head_dim)) if head_dim else record


def _unusable(config: Config, checkpoint: Checkpoint) -> list[WaybillError]:
    """What running the model takes, where it is stated in a way that means nothing."""
    try:
        config.run_facts(checkpoint.config, checkpoint.generation_config)
    except BadConfig as error:
        return [error]
    return []


def common_dtype(checkpoint: Checkpoint) -> str:
    """The float dtype that holds most bytes of the checkpoint."""
    weight: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        if tensor.dtype in ("F32", "F16", "BF16"):
            weight[tensor.dtype] += tensor.nbytes
    return weight.most_common(1)[0][0] if weight else "F32"


def route(bundles: Iterable[WeightBundle], source: RuleTable, runtime: Callable[[str], str]) -> Routing:
    """Bring every record to its module name: renamed, taken apart, or dropped by a named rule."""
    routing = Routing()
    for bundle in bundles:
        _adapt(bundle, source, runtime, routing)
    return routing


def _adapt(bundle: WeightBundle, source: RuleTable, runtime: Callable[[str], str], routing: Routing) -> None:
    """The rules see the records of one component at a time."""
    for record in bundle.records:
        name = runtime(record.source_name)
        why = source.dropped(name)
        if why is not None:
            routing.ignored |= dict.fromkeys(record.tensors, why)
            continue
        destination = source.route(name)
        pieces = (
            _split(record, destination, routing.problems)
            if isinstance(destination, Split)
            else [(destination.target, _turned(record) if destination.turned else record)]
        )
        for name, piece in pieces:
            if (first := routing.records.get(name)) is not None and piece.source_name not in routing.twice:
                routing.twice |= {first.source_name, piece.source_name}  # a bank beside its experts is one problem
                routing.problems.append(_twice(name, first, piece))
            routing.records[name] = piece


def _turned(record: WeightRecord) -> WeightRecord:
    """Float matrices with their two axes swapped; packed ones lie as everybody's do."""
    weight = record.storage
    return replace(record, storage=weight.transpose()) if isinstance(weight, FloatWeight) else record


def place(
    routing: Routing, specs: Sequence[ParameterSpec], rules: RuleTable
) -> tuple[dict[str, Slots], list[WeightRecord]]:
    """Records to the slots of the target's parameters; a merge the target does not declare is left apart.

    Records under names that only the target makes come second: nothing may arrive under those.
    """
    declared = {spec.name for spec in specs}
    slots: dict[str, Slots] = {}
    strangers: list[WeightRecord] = []
    for name, record in routing.records.items():
        to = rules.route(name)
        if isinstance(to, Split):
            raise TypeError(f"a target's rules merge, and {to.template.text} would split {name}")
        if rules.is_made(name):
            strangers.append(record)
            continue
        if to.target not in declared and name in declared:
            to = Place(name)
        slots.setdefault(to.target, {})[to.stack or 0, to.member or 0] = record
    return slots, strangers


def _split(record: WeightRecord, split: Split, problems: list[WaybillError]) -> list[tuple[str, WeightRecord]]:
    """The pieces a split rule makes of one record, and their names."""
    weight = record.storage
    members = split.template.members or (None,)
    rank = len(weight.shape) - (split.variable is not None)
    length = weight.shape[split.axis - rank] if rank > split.axis else 0
    if 0 in weight.shape or length == 0 or length % len(members):
        expected = f"a stack of matrices whose axis {split.axis} divides into {len(members)}"
        problems.append(_indivisible(record, expected, f"shape {list(weight.shape)}"))
        return []
    pieces = []
    width = length // len(members)
    try:
        for index in range(weight.shape[0]) if split.variable else (0,):
            one = weight.select(0, index) if split.variable else weight
            indices = split.indices | ({split.variable: index} if split.variable else {})
            for m, member in enumerate(members):
                name = split.template.fill(indices, None if member is None else m)
                pieces.append((name, replace(record, storage=one.narrow(split.axis, m * width, width))))
    except ValueError as error:  # a block of scales would be split, or there is no such axis
        problems.append(_indivisible(record, f"matrices whose members of {width} are whole blocks", str(error)))
        return []
    return pieces


def _indivisible(record: WeightRecord, expected: str, found: str) -> ShapeMismatch:
    return ShapeMismatch(
        "a bank cannot be taken apart",
        where=f"{record.source_name} ({record.file})",
        expected=expected,
        found=found,
        fix="check that the file belongs to this config",
    )


def _twice(name: str, first: WeightRecord, second: WeightRecord) -> ClaimedTwice:
    return ClaimedTwice(
        "two tensors want the same place",
        where=name,
        expected="one source",
        found=f"{first.source_name} ({first.file}) and {second.source_name} ({second.file})",
        fix="remove one of them from the checkpoint",
    )


def _illegal(config: Config, specs: Sequence[ParameterSpec], tp: int, obstacles: list[str]) -> IllegalParallelism:
    legal = (size for size in config.legal_tp_sizes() if agreement.keeps_groups(specs, size))
    return IllegalParallelism(
        f"the model cannot be cut into {tp} ranks",
        where="--tp",
        expected="one of " + ", ".join(map(str, legal)),
        found="; ".join(obstacles),
        fix="choose a listed size",
    )
