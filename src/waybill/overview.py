"""What `inspect` reports: a checkpoint in a few lines, from headers and config alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from waybill.api import plan
from waybill.checkpoint import Checkpoint
from waybill.checkpoint.header import DTYPE_BITS
from waybill.codecs.grouping import split_role
from waybill.config import ModelConfig
from waybill.config.composite import Config
from waybill.engine.target import runs
from waybill.errors import PackingMismatch
from waybill.families import family_of
from waybill.manifest.naming import Spelling
from waybill.manifest.quantization import OWN_TYPES, Policy
from waybill.plan import Plan
from waybill.plan.agreement import keeps_groups

Size = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class ComponentLayout:
    """One packed component: the stated layout, modules by effective layout, and how many each pattern matches."""

    stated: str
    groups: dict[str, list[str]]
    patterns: list[tuple[str, str, int]]
    agrees: bool
    has_metadata: bool = True
    """False for files whose tensors have types that say it, so that nothing could disagree."""

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "stated": self.stated,
            "groups": [{"layout": form, "modules": modules} for form, modules in self.groups.items()],
            "patterns": [{"list": w, "pattern": p, "matches": n} for w, p, n in self.patterns],
            "agrees": self.agrees,
        }


class ComponentSize(NamedTuple):
    """One component: what it is for, how much of the file is its own, and its stated layout; None is float."""

    name: str
    role: str
    tensors: int
    nbytes: int
    layout: str | None

    def line(self, size: Size) -> str:
        """For people."""
        plural = "" if self.tensors == 1 else "s"
        return f"{self.tensors} tensor{plural}, {size(self.nbytes)}, {self.layout or 'float'}"

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return self._asdict()


@dataclass(frozen=True, slots=True)
class Report:
    """What headers and config say about a checkpoint."""

    bill: Plan
    tie: str
    components: list[ComponentSize]
    quantization: dict[str, ComponentLayout]
    spellings: dict[Spelling, int]
    """Roots that the file spells otherwise than the running model, and how many tensors do."""

    @property
    def checkpoint(self) -> Checkpoint:
        """What was read."""
        return self.bill.checkpoint

    @property
    def bytes_by_dtype(self) -> dict[str, int]:
        """Stored bytes of each dtype, the most first."""
        total: Counter[str] = Counter()
        for tensor in self.checkpoint.tensors.values():
            total[tensor.dtype] += tensor.nbytes
        return dict(total.most_common())

    @property
    def legal_tp(self) -> list[int]:
        """The numbers of ranks that heads and the groups of packed weights allow; none where no target cuts a model."""
        config, bill = self.bill.config, self.bill
        if not isinstance(config, ModelConfig) or bill.target != "torch":
            return []
        return [size for size in config.legal_tp_sizes() if keeps_groups(bill.specs, size)]

    @property
    def kv_cache_bytes_per_token(self) -> int:
        """Over all layers, before any split across ranks; 0 where there is no language model."""
        text = self.bill.config.text if self.bill.config else None
        return text.kv_cache_bytes_per_token(DTYPE_BITS[self.bill.dtype] // 8) if text else 0

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        config = self.bill.config
        shards = [{"name": s.name, "bytes": s.size, "tensors": s.tensors} for s in self.checkpoint.shards]
        report: dict[str, Any] = {
            "path": str(self.checkpoint.root),
            "architecture": config.architectures[0] if config else None,
            "parameters": self.bill.parameters,
            "bytes": self.checkpoint.nbytes,
            "bytes_by_dtype": self.bytes_by_dtype,
            "tensors": len(self.checkpoint.tensors),
            "shards": shards,
            "tie": self.tie,
        }
        if config:
            report |= {"model_type": config.model_type, "dtype": self.bill.dtype}
        if config and config.text:
            report |= _sizes(config.text) | {"kv_cache_bytes_per_token": self.kv_cache_bytes_per_token}
            report |= {"legal_tp": self.legal_tp} if self.bill.target == "torch" else {}
        report["components"] = [component.as_dict() for component in self.components]
        report["names"] = [spelling._asdict() | {"tensors": count} for spelling, count in self.spellings.items()]
        report["quantization"] = {name: layout.as_dict() for name, layout in self.quantization.items()}
        report["problems"] = [problem.as_dict() for problem in self.bill.problems]
        report["notices"] = list(self.bill.notices)
        return report

    def rows(self, size: Size) -> Iterator[tuple[str, str]]:
        """Label and value, for people."""
        config, stored = self.bill.config, self.checkpoint
        if config:
            layers = f", {config.num_layers} layers" if isinstance(config, ModelConfig) else ""
            yield "architecture", config.architectures[0] + layers
        text = config.text if config else None
        if text:
            yield from _text_rows(text)
        yield (
            "weights",
            f"{self.bill.parameters:,} parameters, {size(stored.nbytes)} in {len(stored.tensors)} tensors",
        )
        yield "dtypes", ", ".join(f"{dtype} {size(n)}" for dtype, n in self.bytes_by_dtype.items()) or "none"
        yield (
            "shards",
            ", ".join(f"{s.name} ({size(s.size)})" for s in stored.shards[:3])
            + (f" and {len(stored.shards) - 3} more" if len(stored.shards) > 3 else ""),
        )
        yield "head", _TIES[self.tie]
        for name, layout in self.quantization.items():
            verdict = f"; disk and metadata {'agree' if layout.agrees else 'disagree'}" if layout.has_metadata else ""
            yield "packed", f"{name}: {layout.stated}{verdict}"
            for form, modules in layout.groups.items():
                yield "", f"{len(modules)} × {form}" + (f": {', '.join(modules)}" if len(modules) <= 3 else "")
            for where, pattern, hits in layout.patterns:
                yield "", f"{where} {pattern!r}: {hits} modules" + ("" if hits else ", is it spelled right?")
        if len(self.components) > 1:
            width = max(len(component.name) for component in self.components)
            for at, component in enumerate(self.components):
                yield "" if at else "components", f"{component.name:<{width}}  {component.line(size)}"
        for at, (spelling, count) in enumerate(self.spellings.items()):
            yield "" if at else "names", f"{spelling}, {count} time{'' if count == 1 else 's'}"
        if text:
            yield "KV cache", f"{self.kv_cache_bytes_per_token:,} bytes a token in {self.bill.dtype}"
        if self.legal_tp:
            yield "legal TP", ", ".join(map(str, self.legal_tp))


def _text_rows(config: ModelConfig) -> Iterator[tuple[str, str]]:
    kv = f"{config.num_kv_heads} key-value heads"
    yield "attention", f"{config.num_qo_heads} query heads, {kv}, head_dim {config.head_dim}"
    sizes = {"hidden": config.hidden_size, "intermediate": config.intermediate_size, "vocab": config.vocab_size}
    yield "sizes", _plain(sizes)
    if config.is_moe:
        inner = config.moe_intermediate_size
        shared = config.shared_expert_intermediate_size
        also = f", and one of {shared} for every token" if shared else ""
        yield "experts", f"{config.num_experts}, {config.num_experts_per_tok} a token, intermediate {inner}{also}"
    rotary = config.rotary_config
    numbers = {k: v for k, v in (rotary.scaling or {}).items() if k != "rope_type"}
    scaling = f", {rotary.rope_type} {_plain(numbers)}" if numbers else ""
    yield "rope", f"base {rotary.base:g}{scaling}, {rotary.max_position} positions"


def _sizes(config: ModelConfig) -> dict[str, Any]:
    """What a language model's config says, by our names."""
    rotary = config.rotary_config
    return {
        "num_layers": config.num_layers,
        "num_qo_heads": config.num_qo_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "moe_intermediate_size": config.moe_intermediate_size,
        "shared_expert_intermediate_size": config.shared_expert_intermediate_size,
        "max_position_embeddings": rotary.max_position,
        "rope": {"base": rotary.base, "type": rotary.rope_type, "scaling": rotary.scaling},
    }


def _plain(numbers: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in numbers.items())


_TIES = {
    "shared": "shared with the embedding",
    "stored": "tied, and stored again: compared with the embedding when loading, shared if equal",
    "distinct": "its own weights",
    "absent": "absent, and the config does not tie it to the embedding",
    "unknown": "unknown",
}


def describe(checkpoint: Checkpoint) -> Report:
    """Everything `inspect` shows; the problems are those of a plan for one rank, for a target that has such models."""
    config = family_of(checkpoint.config).read(checkpoint.config).config
    bill = plan(checkpoint, "torch" if config is None or runs(config) else "onnx")
    components = [
        _component(bill, bill.policy, each.name, each.role) for each in bill.policy.naming.components.components
    ]
    if bill.policy.by_types:
        layouts = {component.name: _types(bill, bill.policy, component.name) for component in components}
    else:
        layouts = {name: _layout(bill, bill.policy, name) for name in bill.policy.quantization.plans}
    spellings = bill.policy.naming.used(bill.checkpoint.tensors)
    return Report(bill, _tie(bill, bill.policy, bill.config), components, layouts, spellings)


def _component(bill: Plan, policy: Policy, name: str, role: str) -> ComponentSize:
    """What of the file one component owns."""
    own = [t for stored, t in bill.checkpoint.tensors.items() if policy.naming.component(stored) == name]
    plan_ = policy.quantization.for_component(name)
    stated = f"by {OWN_TYPES}" if policy.by_types else None if plan_ is None else str(plan_.layout)
    return ComponentSize(name, role, len(own), sum(t.nbytes for t in own), stated)


def _types(bill: Plan, policy: Policy, component: str) -> ComponentLayout:
    """What the tensors of one component are, by their own types."""
    groups: dict[str, list[str]] = {}
    for name, tensor in bill.checkpoint.tensors.items():
        if len(tensor.shape) > 1 and policy.naming.component(name) == component:
            layout = policy.own_types.get(name.removesuffix(".weight")) if policy.own_types else None
            form = f"{tensor.dtype}, {layout.bits}-bit, group {layout.group_size}" if layout else tensor.dtype
            groups.setdefault(form, []).append(name.removesuffix(".weight"))
    return ComponentLayout(f"by {OWN_TYPES}", groups, [], agrees=True, has_metadata=False)


def _layout(bill: Plan, policy: Policy, component: str) -> ComponentLayout:
    """What a packed component is, by what lies on disk, beside what its metadata says."""
    naming = policy.naming
    tensors = {name: t for name, t in bill.checkpoint.tensors.items() if naming.component(name) == component}
    # As stored, so that patterns are counted where the metadata contradicts the disk, and nothing could be planned.
    stored = {split[0].removesuffix(".weight") for name in tensors if (split := split_role(name))}
    matrices = (n.removesuffix(".weight") for n, t in tensors.items() if n.endswith(".weight") and len(t.shape) > 1)
    plain = [module for module in matrices if module not in stored]
    groups: dict[str, list[str]] = {}
    for weight, packing in bill.packings.items():
        if naming.component(weight) == component:
            form = packing.form
            groups.setdefault(form, []).append(weight.removesuffix(".weight"))
    if plain:
        groups["float"] = plain
    plan_ = policy.quantization.plans[component]
    patterns = []
    for where, matcher in plan_.patterns():
        hits = Counter(
            at
            for module in (*stored, *plain)
            for at in {at for n in naming.names(module) for at in matcher.matches(n, naming.kind(module))}
        )
        patterns += [(where, pattern, hits[at]) for at, pattern in enumerate(matcher.patterns)]
    agrees = not any(isinstance(problem, PackingMismatch) for problem in bill.problems)
    return ComponentLayout(str(plan_.layout), groups, patterns, agrees)


def _tie(bill: Plan, policy: Policy, config: Config | None) -> str:
    """How the output head is stored."""
    if config is None:
        return "unknown"
    kinds = {policy.naming.kind(split[0] if (split := split_role(name)) else name.removesuffix(".weight"))
             for name in bill.checkpoint.tensors}  # fmt: skip
    if config.tie_word_embeddings:
        return "stored" if "head" in kinds else "shared"
    return "distinct" if "head" in kinds else "absent"
