"""compressed-tensors' metadata, as llm-compressor and auto-round write it: groups of targets, each with a scheme.

A module is packed when a target selects it and nothing in `ignore` does. What is stated about activations and about the
cache is for whoever runs the model: it changes no weight, and becomes a notice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from waybill.config.fields import Fields
from waybill.config.match import compressed_targets
from waybill.config.quantization import FLOATS, FLOATS4, ComponentQuantizationPlan, Override, QuantizationConfig
from waybill.errors import BadConfig, UnsupportedQuantization

METHOD = "compressed-tensors"
PACKED, INTEGERS = "pack-quantized", "int-quantized"
_FORMATS = {PACKED: PACKED, INTEGERS: INTEGERS, "naive-quantized": INTEGERS}
"""`format` of integer weights to the layout of their tensors."""
_CODEBOOKS = {FLOATS: 8, "naive-quantized": 8, FLOATS4: 4}
"""`format` of small floats to their bits."""
_KNOWN = " | ".join(dict.fromkeys([*_FORMATS, *_CODEBOOKS]))
_WHY_NOT = {"nvfp4-pack-quantized": "its scales are divided by another scale, and such a quotient is rounded"}
"""Formats that are refused for a reason of their own."""
_SCHEME = {"num_bits": 8, "type": "int", "symmetric": True}
"""What a scheme means where it says nothing."""
_INT_PRESET = re.compile(r"W([2-8])A(4|8|16|FP8)")
_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "W4A16_ASYM": {"num_bits": 4, "strategy": "group", "group_size": 128, "symmetric": False},
    "W8A8": {"num_bits": 8, "strategy": "channel"},
    "INT8": {"num_bits": 8, "strategy": "channel"},
    "FP8": {"type": "float", "strategy": "tensor"},
    "FP8_DYNAMIC": {"type": "float", "strategy": "channel"},
    "FP8_BLOCK": {"type": "float", "strategy": "block", "block_structure": [128, 128]},
    **{name: {"type": "float", "num_bits": 4, "strategy": "group", "group_size": 32} for name in ("MXFP4", "MXFP4A16")},
}
"""Preset name to a scheme; _INT_PRESET names the rest, which are symmetric in groups of 128."""
_WHY = "it says how activations are rounded when the model runs; ours are not"
ACTIVATION_TENSORS = dict.fromkeys(
    (
        f"{of}_{number}"
        for of in ("input", "output", "q", "k", "v")
        for number in ("scale", "zero_point", "global_scale")
    ),
    _WHY,
)
"""Last segments of the names of tensors that calibration leaves beside the weights."""


def read(fields: Fields) -> ComponentQuantizationPlan:
    """The whole block; whatever cannot be read is appended to the fields' problems."""
    _whole_model(fields)
    values: dict[str, Override] = {}
    notices: list[str] = []
    for name, group in fields.mapping("config_groups").items():
        targets, override = _group(fields, name, group, notices)
        values |= dict.fromkeys(targets, override)  # of two groups with one target, the later counts
    layouts = [override.changes for override in values.values() if override.changes is not None]
    if not layouts and not fields.problems:
        _refuse(fields, "config_groups", "a group that states weights", f"{len(values)} targets, and no scheme")
    if fields.raw.get("kv_cache_scheme"):
        notices.append(f"{fields.where}.kv_cache_scheme is for running the model; the cache keeps its dtype here")
    overrides = compressed_targets(list(values), f"{fields.where}.targets")
    return ComponentQuantizationPlan(
        layout=QuantizationConfig(**layouts[0]) if layouts else _NOTHING,
        modules_to_not_convert=compressed_targets(fields.strings("ignore"), f"{fields.where}.ignore"),
        overrides=overrides,
        override_values=tuple(values[target] for target in overrides.patterns),
        is_targeted=True,
        activation_tensors=ACTIVATION_TENSORS,
        notices=tuple(dict.fromkeys(notices)),
    )


_NOTHING = QuantizationConfig(method=METHOD, bits=8, group_size=-1, symmetric=True)
"""Stands where there are problems."""


def _refuse(fields: Fields, key: str, expected: str, found: str) -> None:
    fields.problems.append(
        UnsupportedQuantization(
            f"the {METHOD} metadata asks for something that is not supported",
            where=f"{fields.where}.{key}",
            expected=expected,
            found=found,
            fix="use another export of this model, or the float checkpoint it was made from",
        )
    )


def _whole_model(fields: Fields) -> None:
    """What is said once, and decides whether the tensors are what the groups describe."""
    status = fields.raw.get("quantization_status")
    if status not in (None, "compressed"):
        _refuse(fields, "quantization_status", "compressed", repr(status))
    for key in ("sparsity_config", "moe_sparsity_config", "transform_config"):
        block = fields.mapping(key)
        if form := block.get("format"):
            if form != "dense":
                _refuse(fields, f"{key}.format", "dense", repr(form))
        elif block:
            _refuse(fields, key, "nothing", f"{', '.join(map(str, block))}"[:120])


def _group(fields: Fields, name: str, group: Any, notices: list[str]) -> tuple[list[str], Override]:
    """The targets of one group, and what it makes of them."""
    where = f"{fields.where}.config_groups.{name}"
    if isinstance(group, list):  # the name of a preset, and its targets
        group = {"targets": group, "weights": _preset(fields, name)}
    if not isinstance(group, Mapping):
        expected, fix = "an object, or a list of targets", "state the group as its producer published it"
        fields.problems.append(
            BadConfig("a group is not an object", where=where, expected=expected, found=repr(group)[:120], fix=fix)
        )
        return [], Override(changes=None)
    own = Fields(group, {"format": fields.raw.get("format")}, fields.problems, where)
    notices += _activations(own)
    targets = list(own.strings("targets"))
    weights = own.mapping("weights")
    if not weights:
        return targets, Override(changes=None)
    layout = _layout(own, Fields(weights, _SCHEME, fields.problems, f"{where}.weights"))
    return targets, Override(changes=asdict(layout or _NOTHING))


def _preset(fields: Fields, name: str) -> Mapping[str, Any]:
    """The scheme of the weights that a preset's name stands for."""
    known = name.upper()
    if known in _PRESETS:
        return _PRESETS[known]
    if (found := _INT_PRESET.fullmatch(known)) is not None:
        return {"num_bits": int(found[1]), "strategy": "group", "group_size": 128}
    if known != "UNQUANTIZED":
        expected = f"{' | '.join(_PRESETS)} | W4A16 and its like"
        _refuse(fields, f"config_groups.{name}", expected, f"the preset {name!r}")
    return {}


def _activations(group: Fields) -> Iterator[str]:
    for key in ("input_activations", "output_activations"):
        if scheme := group.mapping(key):
            form = f"{scheme.get('num_bits', 8)}-bit {scheme.get('type', 'int')}"
            yield f"{group.where}.{key} is for running the model; activations are not rounded to {form} here"


def _layout(group: Fields, weights: Fields) -> QuantizationConfig | None:
    """How the weights of one group lie, or None when they cannot be read."""
    form, kind = str(group.raw.get("format") or group.defaults["format"] or "no format"), weights.text("type")
    place = group if group.stated("format") else _parent(group)
    if form in _CODEBOOKS and (kind == "float" or form not in _FORMATS):
        return _codebook(form, weights)
    if form not in _FORMATS:
        _refuse(place, "format", _KNOWN, f"{form}: {_WHY_NOT[form]}" if form in _WHY_NOT else form)
        return None
    if kind != "int":
        _refuse(weights, "type", "int", kind)
        return None
    bits = weights.integer("num_bits", high=32)
    if _FORMATS[form] == INTEGERS and bits != 8:
        _refuse(weights, "num_bits", f"8, in {form}", f"{bits} bits")
        return None
    group_size, scale_rows = _blocks(weights)
    return QuantizationConfig(
        method=METHOD,
        bits=bits,
        group_size=group_size,
        symmetric=weights.boolean("symmetric"),
        desc_act=_is_permuted(weights),
        form=_FORMATS[form],
        scale_rows=scale_rows,
    )


def _codebook(form: str, weights: Fields) -> QuantizationConfig | None:
    """Weights whose codes stand for floats."""
    bits = _CODEBOOKS[form]
    stated = (weights.text("type"), weights.integer("num_bits", high=32), weights.boolean("symmetric"))
    if stated != ("float", bits, True):
        found = f"{stated[0]}, {stated[1]} bits, {'symmetric' if stated[2] else 'asymmetric'}"
        _refuse(weights, "type", f"float, {bits} bits, symmetric: {form}", found)
        return None
    columns, rows = _blocks(weights)
    if form == FLOATS4 and (rows, columns) != (1, 32):
        _refuse(weights, "group_size", "32", f"blocks of {rows}x{columns}")
        return None
    own = FLOATS4 if form == FLOATS4 else FLOATS
    return QuantizationConfig(method=METHOD, bits=bits, group_size=columns, symmetric=True, form=own, scale_rows=rows)


def _parent(group: Fields) -> Fields:
    return Fields(group.defaults, {}, group.problems, group.where.partition(".config_groups.")[0])


def _blocks(weights: Fields) -> tuple[int, int]:
    """Elements of K, and rows of N, that share a scale; -1 is all of them."""
    size = weights.raw.get("group_size")
    implied = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = weights.raw.get("strategy") or implied
    if strategy == "group":
        return weights.integer("group_size"), 1
    if strategy in ("channel", "tensor"):
        return -1, 1 if strategy == "channel" else -1
    if strategy == "block":
        stated = weights.raw.get("block_structure")
        block = stated.split("x") if isinstance(stated, str) else stated
        if isinstance(block, list) and len(block) == 2 and all(re.fullmatch("[1-9][0-9]{0,6}", str(n)) for n in block):
            return int(block[1]), int(block[0])
        _refuse(weights, "block_structure", "[rows, columns]", repr(stated)[:120])
    else:
        _refuse(weights, "strategy", "tensor | channel | group | block", repr(strategy)[:120])
    return -1, 1


def _is_permuted(weights: Fields) -> bool:
    """Whether the groups are not runs of K: `actorder` group, once called dynamic, or true."""
    order = weights.raw.get("actorder")
    if order not in (None, False, True, "group", "dynamic", "weight", "static"):
        _refuse(weights, "actorder", "weight | static | null", repr(order)[:120])
    return order in (True, "group", "dynamic")
