"""What all codecs ask of headers."""

from __future__ import annotations

from collections.abc import Iterator

from waybill.checkpoint import TensorHeader
from waybill.codecs.protocol import Sidecars
from waybill.config.quantization import QuantizationConfig
from waybill.errors import ActOrder, IncompleteWeight, PackingMismatch, WaybillError

SCALE_DTYPES = ("F16", "BF16", "F32")


def missing_roles(name: str, sidecars: Sidecars, *required: str) -> Iterator[WaybillError]:
    """A packed weight moves whole: a part without the others is no weight."""
    lost = [role for role in required if role not in sidecars]
    if lost:
        found = ", ".join(f"{header.name} {header}" for header in sidecars.values())
        first = next(iter(sidecars.values()))
        yield IncompleteWeight(
            f"a packed weight has no {' and no '.join(lost)}",
            where=f"{name} ({first.file})",
            expected=" + ".join(required),
            found=found,
            fix="download the shard that holds the rest; if it was never written, export the checkpoint again",
        )


def misfit(name: str, sidecars: Sidecars, role: str, expected: str, config: QuantizationConfig) -> WaybillError:
    """A sidecar whose dtype or shape contradicts the metadata or the other sidecars."""
    header = sidecars[role]
    return PackingMismatch(
        f"the {role} of a packed weight do not fit",
        where=f"{header.name} ({header.file})",
        expected=f"{expected}: {config}",
        found=str(header),
        fix=f"correct the quantization metadata for {name}, or use the weights it belongs to",
    )


def act_order(name: str, header: TensorHeader, expected: str, found: str) -> WaybillError:
    """Groups that are permuted by the metadata."""
    return ActOrder(
        "act-order weights are not supported",
        where=f"{name} ({header.file})",
        expected=expected,
        found=found,
        fix="use an export without act-order",
    )


def groups_of(in_features: int, config: QuantizationConfig) -> tuple[int, int]:
    """Group size and number of groups along K; -1 is one group."""
    group = in_features if config.group_size == -1 else config.group_size
    return group, -(-in_features // group)
