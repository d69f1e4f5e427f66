"""What `inspect` reports: a checkpoint in a few lines, from headers and config alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from waybill.api import plan
from waybill.blueprint import HEAD, decoder_parameters
from waybill.checkpoint import Checkpoint
from waybill.checkpoint.header import DTYPE_BITS
from waybill.codecs.grouping import split_role
from waybill.config import ModelConfig
from waybill.errors import PackingMismatch
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

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "stated": self.stated,
            "groups": [{"layout": form, "modules": modules} for form, modules in self.groups.items()],
            "patterns": [{"list": w, "pattern": p, "matches": n} for w, p, n in self.patterns],
            "agrees": self.agrees,
        }


@dataclass(frozen=True, slots=True)
class Report:
    """What headers and config say about a checkpoint."""

    bill: Plan
    tie: str
    quantization: dict[str, ComponentLayout]

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
            rotary = config.rotary_config
            report |= {
                "model_type": config.model_type,
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
                "max_position_embeddings": rotary.max_position,
                "rope": {"base": rotary.base, "type": rotary.rope_type, "scaling": rotary.scaling},
                "dtype": self.bill.dtype,
                "kv_cache_bytes_per_token": config.kv_cache_bytes_per_token(DTYPE_BITS[self.bill.dtype] // 8),
                "legal_tp": _legal_tp(config, self.bill),
            }
        report["quantization"] = {name: layout.as_dict() for name, layout in self.quantization.items()}
        report["problems"] = [problem.as_dict() for problem in self.bill.problems]
        report["notices"] = list(self.bill.notices)
        return report

    def rows(self, size: Size) -> Iterator[tuple[str, str]]:
        """Label and value, for people."""
        config, stored = self.bill.config, self.checkpoint
        if config:
            yield "architecture", f"{config.architectures[0]}, {config.num_layers} layers"
            kv = f"{config.num_kv_heads} key-value heads"
            yield "attention", f"{config.num_qo_heads} query heads, {kv}, head_dim {config.head_dim}"
            sizes = {"hidden": config.hidden_size, "intermediate": config.intermediate_size, "vocab": config.vocab_size}
            yield "sizes", _plain(sizes)
            if config.is_moe:
                inner = config.moe_intermediate_size
                yield "experts", f"{config.num_experts}, {config.num_experts_per_tok} a token, intermediate {inner}"
            rotary = config.rotary_config
            numbers = {k: v for k, v in (rotary.scaling or {}).items() if k != "rope_type"}
            scaling = f", {rotary.rope_type} {_plain(numbers)}" if numbers else ""
            yield "rope", f"base {rotary.base:g}{scaling}, {rotary.max_position} positions"
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
            yield "packed", f"{name}: {layout.stated}; disk and metadata {'agree' if layout.agrees else 'disagree'}"
            for form, modules in layout.groups.items():
                yield "", f"{len(modules)} × {form}" + (f": {', '.join(modules)}" if len(modules) <= 3 else "")
            for where, pattern, hits in layout.patterns:
                yield "", f"{where} {pattern!r}: {hits} modules" + ("" if hits else ", is it spelled right?")
        if config:
            per_token = config.kv_cache_bytes_per_token(DTYPE_BITS[self.bill.dtype] // 8)
            yield "KV cache", f"{per_token:,} bytes a token in {self.bill.dtype}"
            yield "legal TP", ", ".join(map(str, _legal_tp(config, self.bill)))


def _legal_tp(config: ModelConfig, bill: Plan) -> list[int]:
    """The numbers of ranks that heads and the groups of packed weights allow."""
    specs = decoder_parameters(config, bill.packings)
    return [size for size in config.legal_tp_sizes() if keeps_groups(specs, size)]


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
    """Everything `inspect` shows; the problems are those of a plan for one rank."""
    bill = plan(checkpoint)
    return Report(bill, _tie(checkpoint, bill.config), _quantization(bill))


def _quantization(bill: Plan) -> dict[str, ComponentLayout]:
    """What each packed component is, by what lies on disk, beside what its metadata says."""
    layouts = {}
    packed = {name.removesuffix(".weight"): packing for name, packing in bill.packings.items()}
    plain = [
        name.removesuffix(".weight")
        for name, t in bill.checkpoint.tensors.items()
        if name.endswith(".weight") and len(t.shape) > 1
    ]
    # As stored, so that patterns are counted where the metadata contradicts the disk, and nothing could be planned.
    stored = {split[0].removesuffix(".weight") for name in bill.checkpoint.tensors if (split := split_role(name))}
    names = [*stored, *plain]
    for name, plan_ in bill.manifest.plans.items():
        groups: dict[str, list[str]] = {}
        for module, packing in packed.items():
            groups.setdefault(f"{packing.bits}-bit, group {packing.group}", []).append(module)
        if plain:
            groups["float"] = plain
        patterns = []
        for where, matcher in plan_.patterns():
            hits = Counter(at for module in names for at in matcher.matches(module))
            patterns += [(where, pattern, hits[at]) for at, pattern in enumerate(matcher.patterns)]
        agrees = not any(isinstance(problem, PackingMismatch) for problem in bill.problems)
        layouts[name] = ComponentLayout(str(plan_.layout), groups, patterns, agrees)
    return layouts


def _tie(checkpoint: Checkpoint, config: ModelConfig | None) -> str:
    if config is None:
        return "unknown"
    stem = HEAD.removesuffix("weight")
    stored = any(name.startswith(stem) for name in checkpoint.tensors)
    if config.tie_word_embeddings:
        return "stored" if stored else "shared"
    return "distinct" if stored else "absent"
