"""Quantization metadata as producers write it: every form, read into one policy.

Strict: an unknown method, a missing number or two places that disagree are refused, with the key path.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from waybill.config import compressed_tensors
from waybill.config.fields import Fields
from waybill.config.floating import fp8_plan, mxfp4_plan
from waybill.config.match import (
    Matcher,
    auto_round_search,
    block_members,
    gptq_dynamic,
    module_paths,
    olive_exclusions,
    olive_overrides,
)
from waybill.config.quantization import (
    ComponentQuantizationPlan,
    Override,
    QuantizationConfig,
)
from waybill.errors import BadConfig, BadPattern, UnsupportedQuantization, WaybillError

BITS = {"gptq": (2, 4, 8), "awq": (4,), "olive": (2, 4, 8), "compressed-tensors": (2, 4, 8), "fp8": (8,), "mxfp4": (4,)}


def difference(block: Mapping[str, Any], where: str, again: Mapping[str, Any], other: str) -> str | None:
    """What two places state differently about the same weights, in words."""
    first = _stated(block, where)
    second = _stated({"quant_method": _method(block, where), **again}, other)
    for name, a in first.items():
        b = second.get(name)
        if a is not None and b is not None and a != b:
            return f"{name}: {_short(a)} and {_short(b)}"
    return None


def _short(value: Any) -> str:
    """A value as it would be written, its beginning when it is long."""
    text = repr(value)
    return text if len(text) <= 160 else f"{text[:160]}…"


_COMPARED = (
    "bits", "group_size", "zero_point", "desc_act", "lm_head", "embeds", "moe", "dynamic", "overrides", "extra_config",
    "modules_to_not_convert", "modules_in_block_to_quantize", "block_name_to_quantize",
    "config_groups", "ignore", "weight_block_size", "weight_scale_method", "weight_scale_semantics",
)  # fmt: skip
"""What decides how a weight is read, and is spelled one way."""
_SPELLINGS = {
    "bits": ("w_bit", "wbits"),
    "group_size": ("q_group_size",),
    "modules_to_not_convert": ("ignored_layers",),
}
_SWITCHES = {"head": ("lm_head", "quantize_lm_head"), "embedding": ("embeds", "quantize_embeddings")}
"""Which tables are packed: the producers' word for it, and that of component entries."""
_FORMS = {
    "gptq": ("checkpoint_format", ("checkpoint_format", "format"), "gptq"),
    "awq": ("version", ("version", "format"), "gemm"),
    "auto-round": ("packing_format", ("packing_format", "backend"), "auto_round:gptq"),
    "compressed-tensors": ("format", ("format",), ""),
}
"""Where a method states the form of its tensors, and what it means when it does not."""


def _form(block: Mapping[str, Any], method: str) -> str:
    _, keys, default = _FORMS[method]
    return next((str(block[key]) for key in keys if block.get(key)), default).lower()


def _stated(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What a place says, in one spelling."""
    method = _method(block, where)
    out = {key: value for key, value in _aliased(block).items() if key in _COMPARED}
    out["sym"] = block.get("sym", block.get("symmetric"))
    for producers, entries in _SWITCHES.values():
        said = [block[key] for key in (producers, entries) if block.get(key) is not None]
        out[producers] = any(said) if said else None
    if method in _READERS:
        out["quant_method"] = method
    if method in _FORMS:
        out[_FORMS[method][0]] = _form(block, method)
    return out


def read_plan(
    block: Mapping[str, Any], where: str, problems: list[WaybillError], *, by_path: bool = False
) -> ComponentQuantizationPlan | None:
    """What one block of metadata says of one component; problems are appended, not raised.

    `where` is the place it stands in; the name of a side file says the method when the block does not. `by_path`: the
    block is an entry for a component, which no producer writes: its literals are module paths, whatever the method.
    """
    before = len(problems)
    method = _method(block, where)
    reader = _READERS.get(method)
    if reader is None:
        problems.append(
            _unsupported("the quantization method is not supported", where, " | ".join(_READERS), repr(method))
        )
        return None
    fields = Fields(_aliased(block), {}, problems, where)
    try:
        plan = reader(fields)
        plan = _with_paths(plan, fields) if by_path and len(problems) == before else plan
    except BadPattern as error:
        problems.append(error)
    if len(problems) > before:
        return None
    known = BITS[plan.layout.method]
    changes = [value.changes or {} for value in plan.override_values]
    for bits in dict.fromkeys([plan.layout.bits, *(change["bits"] for change in changes if "bits" in change)]):
        if bits not in known:
            expected = " or ".join(map(str, known)) + " bits"
            problems.append(_unsupported("the bit width is not supported", where, expected, f"{bits} bits"))
    return plan if len(problems) == before else None


def _with_paths(plan: ComponentQuantizationPlan, fields: Fields) -> ComponentQuantizationPlan:
    """The same plan, whose literal exclusions and overrides mean a module and everything below it.

    `overrides` are those of entries, whatever the method; a producer's own rules may stand in their place.
    """
    excluded, overrides = plan.modules_to_not_convert, fields.mapping("overrides")
    if plan.layout.method == "olive":  # the others' exclusions are paths already
        plan = replace(plan, modules_to_not_convert=module_paths(excluded.patterns, f"{fields.where}.{excluded.field}"))
    elif overrides and plan.overrides.patterns:
        fields.problems.append(
            BadConfig(
                "two lists of rules change single modules",
                where=fields.where,
                expected=f"overrides or {plan.overrides.field}",
                found="both",
                fix="state all rules in one of them",
            )
        )
    if not overrides:
        return plan
    changes = tuple(Override(changes=_changes(change, fields)) for change in overrides.values())
    return replace(plan, overrides=module_paths(list(overrides), f"{fields.where}.overrides"), override_values=changes)


RULES = (
    "modules_to_not_convert", "overrides", "dynamic", "extra_config", "modules_in_block_to_quantize",
    "block_name_to_quantize", "to_quant_block_names", "ignored_layers", "modules_to_convert",
)  # fmt: skip
"""Fields that speak of single modules."""


def _unsupported(what: str, where: str, expected: str, found: str) -> UnsupportedQuantization:
    fix = "use another export of this model, or the float checkpoint it was made from"
    return UnsupportedQuantization(what, where=where, expected=expected, found=found, fix=fix)


def _method(block: Mapping[str, Any], where: str) -> str:
    stated = block.get("quant_method") or block.get("method")
    if stated is None and where.startswith("quantize_config"):
        return "gptq"  # the file's name says it
    if stated is None and where.startswith("quant_config"):
        return "awq"
    return "auto-round" if isinstance(stated, str) and "auto-round" in stated else str(stated)


def _aliased(block: Mapping[str, Any]) -> dict[str, Any]:
    """One spelling for each number."""
    out = dict(block)
    for name, aliases in _SPELLINGS.items():
        for alias in aliases:
            if out.get(name) is None and out.get(alias) is not None:
                out[name] = out[alias]
    return out


def _layout(fields: Fields, method: str, symmetric: bool, **more: Any) -> QuantizationConfig:
    return QuantizationConfig(
        method=method,
        bits=fields.integer("bits", high=32),
        group_size=fields.integer("group_size", low=-1),
        symmetric=symmetric,
        **more,
    )


def _strings(fields: Fields, key: str) -> list[str]:
    """A list of patterns, a single one, or null."""
    value = fields.raw.get(key)
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    return list(fields.strings(key))


def _tables(fields: Fields) -> dict[str, bool]:
    """Which tables are packed, by the producers' words for it and by those of component entries."""
    return {
        kind: fields.boolean(entries) or fields.boolean(producers) for kind, (producers, entries) in _SWITCHES.items()
    }


def _exclusions(fields: Fields) -> Matcher:
    key = "modules_to_not_convert"
    return module_paths(_strings(fields, key), f"{fields.where}.{key}")


def _gptq(fields: Fields) -> ComponentQuantizationPlan:
    form = _form(fields.raw, "gptq")
    if form not in ("gptq", "gptq_v2") or fields.raw.get("is_marlin_format"):
        form = "marlin" if fields.raw.get("is_marlin_format") else form
        fields.problems.append(
            _unsupported(
                "the checkpoint format is not supported", f"{fields.where}.checkpoint_format", "gptq | gptq_v2", form
            )
        )
    static = fields.raw.get("static_groups")
    meta = fields.raw.get("meta")
    if static is None and isinstance(meta, Mapping):
        static = meta.get("static_groups")
    layout = _layout(
        fields,
        "gptq",
        _gptq_symmetric(fields),
        zero_offset=int(form == "gptq"),
        desc_act=fields.boolean("desc_act") and static is not True,
    )
    dynamic = fields.mapping("dynamic")
    patterns, values = [], []
    for pattern, change in dynamic.items():
        patterns.append(pattern.removeprefix("-:").removeprefix("+:"))
        values.append(Override(changes=None if pattern.startswith("-:") else _changes(change, fields)))
    return ComponentQuantizationPlan(
        layout=layout,
        modules_to_not_convert=_exclusions(fields),
        overrides=gptq_dynamic(patterns, f"{fields.where}.dynamic"),
        override_values=tuple(values),
        within=_block_members(fields),
        heads=_tables(fields),
    )


def _gptq_symmetric(fields: Fields) -> bool:
    """`sym`, or the opposite of `zero_point`, its older name; true when neither is stated."""
    if fields.stated("sym") or not fields.stated("zero_point"):
        return fields.boolean("sym") if fields.stated("sym") else True
    return not fields.boolean("zero_point")


def _block_members(fields: Fields) -> Matcher | None:
    """modules_in_block_to_quantize: lists of paths, in the order they were quantized; modules not listed are float."""
    key = "modules_in_block_to_quantize"
    stated = fields.raw.get(key)
    if stated is None:
        return None
    flat = (
        [name for part in stated for name in (part if isinstance(part, list) else [part])]
        if isinstance(stated, list)
        else [stated]
    )
    if not flat or not all(isinstance(name, str) for name in flat):
        found, fix = repr(stated)[:120], "state the list as the producer wrote it, or remove it when all are packed"
        expected = "a list of lists of module paths"
        fields.problems.append(
            BadConfig(
                "the list of packed modules cannot be read",
                where=f"{fields.where}.{key}",
                expected=expected,
                found=found,
                fix=fix,
            )
        )
        return None
    return block_members(flat, f"{fields.where}.{key}")


def _awq(fields: Fields) -> ComponentQuantizationPlan:
    version = _form(fields.raw, "awq")
    if version != "gemm" or fields.raw.get("backend") == "llm-awq":
        version = "llm-awq" if fields.raw.get("backend") == "llm-awq" else version
        fields.problems.append(
            _unsupported("the AWQ version is not supported", f"{fields.where}.version", "gemm", version)
        )
    zero_point = fields.boolean("zero_point") if fields.stated("zero_point") else True
    return ComponentQuantizationPlan(
        layout=_layout(fields, "awq", not zero_point),
        modules_to_not_convert=_exclusions(fields),
        overrides=gptq_dynamic([], fields.where),
        heads=_tables(fields),
    )


def _olive(fields: Fields) -> ComponentQuantizationPlan:
    overrides = fields.mapping("overrides")
    symmetric = fields.boolean("symmetric", required=True)
    return ComponentQuantizationPlan(
        layout=_layout(fields, "olive", symmetric),
        modules_to_not_convert=olive_exclusions(
            _strings(fields, "modules_to_not_convert"), f"{fields.where}.modules_to_not_convert"
        ),
        overrides=olive_overrides(list(overrides), f"{fields.where}.overrides"),
        override_values=tuple(Override(changes=_changes(change, fields)) for change in overrides.values()),
        heads=_tables(fields) | {"experts": fields.boolean("moe")},
    )


_AUTO_ROUND_FORMS = {
    "auto_round:gptq": ("gptq", 1),
    "auto_round:auto_gptq": ("gptq", 1),
    "auto_round:gptqmodel": ("gptq", 0),
    "auto_round": ("gptq", 0),
    "auto_round:exllamav2": ("gptq", 0),
    "auto_round:auto_awq": ("awq", 0),
    "auto_round:awq": ("awq", 0),
}
"""packing_format to the layout of its tensors and what was subtracted from the zero points."""


def _auto_round(fields: Fields) -> ComponentQuantizationPlan:
    form = str(fields.raw.get("packing_format") or fields.raw.get("backend") or "auto_round:gptq")
    known = _AUTO_ROUND_FORMS.get(form) or _AUTO_ROUND_FORMS.get(":".join(form.split(":")[:2]))
    if known is None:
        expected = " | ".join(_AUTO_ROUND_FORMS)
        fields.problems.append(
            _unsupported("the packing format is not supported", f"{fields.where}.packing_format", expected, form)
        )
        known = ("gptq", 0)
    symmetric = fields.boolean("sym") if fields.stated("sym") else True
    extra = fields.mapping("extra_config")
    changes = [Override(changes=_changes(change, fields)) for change in extra.values()]
    blocks = fields.raw.get("block_name_to_quantize") or fields.raw.get("to_quant_block_names")
    names = blocks.split(",") if isinstance(blocks, str) else blocks
    within = [str(name).strip() for name in names] if isinstance(names, list) else None
    return ComponentQuantizationPlan(
        layout=_layout(fields, known[0], symmetric, zero_offset=known[1]),
        modules_to_not_convert=module_paths([], fields.where),
        overrides=auto_round_search(list(extra), f"{fields.where}.extra_config"),
        override_values=tuple(changes),
        exact_overrides=dict(zip(extra, changes, strict=True)),
        within=module_paths(within, f"{fields.where}.block_name_to_quantize") if within else None,
        heads=_tables(fields),
    )


_READERS = {
    "gptq": _gptq,
    "awq": _awq,
    "olive": _olive,
    "auto-round": _auto_round,
    "compressed-tensors": compressed_tensors.read,
    "fp8": fp8_plan,
    "mxfp4": mxfp4_plan,
}


def _changes(change: Any, fields: Fields) -> Mapping[str, Any] | None:
    """The fields an override states, by our names; None when it makes the module float."""
    if not isinstance(change, Mapping):
        found = repr(change)[:120]
        fix = "state the fields that differ, as the producer published them"
        fields.problems.append(
            BadConfig("a rule is not an object", where=fields.where, expected="an object", found=found, fix=fix)
        )
        return {}
    own = Fields(_aliased(change), {}, fields.problems, fields.where)
    out: dict[str, Any] = {}
    if own.stated("bits"):
        out["bits"] = own.integer("bits", high=32)
        if out["bits"] >= 16:
            return None
    if own.stated("group_size"):
        out["group_size"] = own.integer("group_size", low=-1)
    for key in ("sym", "symmetric"):
        if own.stated(key):
            out["symmetric"] = own.boolean(key)
    if own.stated("desc_act"):
        out["desc_act"] = own.boolean("desc_act")
    return out
