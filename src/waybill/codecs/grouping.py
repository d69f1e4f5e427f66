"""Stored tensors to typed records, as soon as headers are read: sidecars are grouped, or refused as partial."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from waybill.checkpoint import Checkpoint, TensorHeader
from waybill.checkpoint.gguf import BLOCK_TYPES
from waybill.config.gguf import AS_FLOATS, LAYOUTS, reason
from waybill.config.quantization import QuantizationConfig
from waybill.errors import ClaimedTwice, PackingMismatch, UnsupportedQuantization, WaybillError, some
from waybill.manifest.quantization import Policy
from waybill.weights import FloatWeight, Storage, WeightRecord, stored
from waybill.weights.record import PackedStorage

ROLES = ("qweight", "scales", "qzeros", "g_idx", "scale_inv", "blocks")
WEIGHT_ROLES = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape")
"""Roles that begin with the parameter's own name."""
_LEAVES = frozenset({*ROLES, *WEIGHT_ROLES})
_ENDINGS = tuple(f"_{role}" for role in ROLES)
FOREIGN_ROLES = ("absmax", "quant_map")
"""Endings of packed formats that no codec reads yet: named, instead of reported as unknown tensors."""
CODES = frozenset({"qweight", "weight_packed", "blocks"})
"""Roles of codes that stand under a name of their own, where the parameter's own name is another weight."""


def split_role(name: str) -> tuple[str, str] | None:
    """`…q_proj.qweight` or `…q_proj.weight_qweight` -> (`…q_proj.weight`, `qweight`); None for a plain tensor."""
    module, _, leaf = name.rpartition(".")
    if module and leaf in _LEAVES:
        return f"{module}.weight", leaf
    if name.endswith(_ENDINGS):
        role = next(role for role in ROLES if name.endswith(f"_{role}"))
        return name.removesuffix(f"_{role}"), role
    return None


def group_records(checkpoint: Checkpoint, policy: Policy, problems: list[WaybillError]) -> list[WeightRecord]:
    """Every logical weight of the checkpoint; problems are appended, and a weight that has one yields no record."""
    if checkpoint.metadata is not None:
        return _by_types(checkpoint, policy, problems)
    naming, tensors = policy.naming, checkpoint.tensors
    unneeded = policy.unneeded(tensors)
    packed: dict[str, dict[str, TensorHeader]] = defaultdict(dict)
    records: list[WeightRecord] = []
    for name, header in tensors.items():
        if name in unneeded:
            continue
        if (split := split_role(name) or _as_part(header, tensors, policy)) is not None:
            if (first := packed[split[0]].setdefault(split[1], header)) is not header:
                problems.append(_both(split[0], {split[1]: first}, header))
        else:
            records.append(WeightRecord(name, naming.component(name), FloatWeight(stored(header)), (name,), checkpoint))
    if foreign := [name for name in checkpoint.tensors if name.endswith(FOREIGN_ROLES)]:
        problems.append(_foreign([checkpoint.tensors[name] for name in foreign]))
        return []
    unstated: dict[str, dict[str, dict[str, TensorHeader]]] = defaultdict(dict)
    found: list[WaybillError] = []
    for name, sidecars in packed.items():
        component = naming.component(name)
        if policy.quantization.for_component(component) is None:
            unstated[component][name] = sidecars
        elif name in tensors and (sidecars.keys() & CODES or "weight" not in sidecars):
            found.append(_both(name, sidecars, tensors[name]))
        elif (storage := _packed(name, sidecars, policy, found)) is not None:
            sources = tuple(header.name for header in sidecars.values())
            records.append(WeightRecord(name, component, storage, sources, checkpoint))
    problems += [
        _no_metadata(component, weights, naming.components.only is not None) for component, weights in unstated.items()
    ]
    problems += _folded(found)
    return [] if unstated else records


def _as_part(header: TensorHeader, tensors: Mapping[str, TensorHeader], policy: Policy) -> tuple[str, str] | None:
    """Codes that stand under the parameter's own name: signed bytes, whatever has scales beside it, and 8-bit floats
    where the metadata says that they have scales."""
    name, module = header.name, header.name.removesuffix(".weight")
    is_part = (
        (name != module and (header.dtype == "I8" or f"{name}_scale" in tensors))
        or (f"{name}_scale_inv" in tensors and policy.plan_of(module) is not None)
        or (header.dtype.startswith("F8_") and policy.of(module) is not None)
    )
    return (name, "weight") if is_part else None


def _by_types(checkpoint: Checkpoint, policy: Policy, problems: list[WaybillError]) -> list[WeightRecord]:
    """A record for every tensor of a file whose tensors say themselves how they are packed."""
    headers = checkpoint.tensors.values()
    closed: dict[str, list[TensorHeader]] = defaultdict(list)
    for header in headers:
        if header.dtype in BLOCK_TYPES and header.dtype not in LAYOUTS:
            closed[header.dtype].append(header)
    problems += [_not_read(block_type, alike) for block_type, alike in closed.items()]
    if closed:
        return []
    component = policy.naming.component
    as_floats = AS_FLOATS if checkpoint.dequantize else frozenset()
    return [WeightRecord(h.name, component(h.name), _typed(h, as_floats), (h.name,), checkpoint) for h in headers]


def _typed(header: TensorHeader, as_floats: Collection[str]) -> Storage:
    if header.dtype not in BLOCK_TYPES:
        return FloatWeight(stored(header))
    from waybill.codecs import gguf  # numpy comes with it

    return FloatWeight(gguf.numbers(header)) if header.dtype in as_floats else gguf.packed(header)


def _not_read(block_type: str, headers: list[TensorHeader]) -> WaybillError:
    return UnsupportedQuantization(
        f"tensors of type {block_type} are not read",
        where=_places(headers),
        expected=" | ".join(["F32", "F16", "BF16", *LAYOUTS]),
        found=f"{len(headers)} tensors of type {block_type}: {reason(block_type)}",
        fix="use a file of the expected types, such as Q8_0",
    )


def _folded(problems: Sequence[WaybillError]) -> list[WaybillError]:
    """The same problem of the same tensor in many layers is one problem."""
    forms: dict[tuple[str, ...], list[WaybillError]] = {}
    for problem in problems:
        form = re.sub(r"[0-9]+", "#", problem.where)
        forms.setdefault((problem.code, problem.what, problem.expected, form), []).append(problem)
    for alike in forms.values():
        if len(alike) > 1:
            alike[0].where += f" and {len(alike) - 1} more of this form"
    return [alike[0] for alike in forms.values()]


def _packed(
    name: str, sidecars: Mapping[str, TensorHeader], policy: Policy, problems: list[WaybillError]
) -> PackedStorage | None:
    from waybill.codecs.registry import CODECS  # numpy comes with it; a float checkpoint is planned without

    module = name.removesuffix(".weight")
    config = policy.of(module)
    if config is None:
        problems.append(_float_by_policy(name, sidecars, policy))
        return None
    codec = CODECS[config.method]
    if strange := {role: header for role, header in sidecars.items() if role not in codec.roles}:
        problems.append(_strange(policy.naming.place(name), strange, config))
        return None
    if found := codec.check(name, sidecars, config):
        problems.extend(found)
        return None
    return codec.normalize(name, sidecars, config)


def _strange(place: str, sidecars: Mapping[str, TensorHeader], config: QuantizationConfig) -> WaybillError:
    return PackingMismatch(
        "a packed weight has a part that its method does not write",
        where=f"{place} ({next(iter(sidecars.values())).file})",
        expected=f"the parts of {config}",
        found=_names(sidecars),
        fix="correct the quantization metadata, or use the weights it belongs to",
    )


def _names(sidecars: Mapping[str, TensorHeader]) -> str:
    return ", ".join(f"{header.name} {header}" for header in sidecars.values())


def _foreign(headers: list[TensorHeader]) -> WaybillError:
    return UnsupportedQuantization(
        "the checkpoint is packed in a format that is not read",
        where=_places(headers),
        expected="sidecars of GPTQ, AWQ, Olive, compressed-tensors, FP8 or MXFP4, or float weights",
        found=f"{len(headers)} tensors of another packed format",
        fix="use an export in one of these formats, or the float checkpoint",
    )


def _no_metadata(component: str, packed: Mapping[str, Mapping[str, TensorHeader]], whole: bool) -> WaybillError:
    headers = [header for sidecars in packed.values() for header in sidecars.values()]
    return UnsupportedQuantization(
        "the checkpoint holds packed weights, and no metadata says how they are packed",
        where=_places(headers) if whole else f"{component or 'no component'}: {_places(headers)}",
        expected="quantization_config in config.json, or quantize_config.json beside it"
        if whole
        else "an entry for this component in component_quantization",
        found=f"{len(headers)} tensors of packed weights, no quantization metadata",
        fix="download the metadata file; packed integers are never read as float weights",
    )


def _places(headers: Sequence[TensorHeader]) -> str:
    return f"{some([h.name for h in headers])} ({some(sorted({h.file for h in headers}))})"


def _both(name: str, sidecars: Mapping[str, TensorHeader], plain: TensorHeader) -> WaybillError:
    return ClaimedTwice(
        "a weight is stored twice",
        where=f"{name} ({plain.file})",
        expected="one of them",
        found=f"{plain.name} {plain} and {_names(sidecars)}",
        fix="remove the one that does not belong to this checkpoint",
    )


def _float_by_policy(name: str, sidecars: Mapping[str, TensorHeader], policy: Policy) -> WaybillError:
    module = name.removesuffix(".weight")
    always = policy.keeps_float(module)
    return PackingMismatch(
        f"a weight is packed on disk, and float by the {'model' if always else 'metadata'}",
        where=f"{policy.naming.place(name)} ({next(iter(sidecars.values())).file})",
        expected=f"a float weight, by {policy.reason(module)}",
        found=_names(sidecars),
        fix="use an export that leaves this module float; no metadata makes it a packed one"
        if always
        else "correct the quantization metadata, or use the weights it belongs to",
    )
