"""The plan itself: one binding per target parameter, totals, what was dropped, and what is wrong. All of it data."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from waybill.checkpoint import Checkpoint
from waybill.checkpoint.files import Progress
from waybill.checkpoint.header import DTYPE_BITS
from waybill.config.composite import Config
from waybill.errors import Refused, WaybillError
from waybill.manifest.quantization import Policy
from waybill.plan.parameter import Packing, ParameterSpec
from waybill.weights import LazyTensor
from waybill.weights.ranges import is_direct

CHUNK = 8 << 20
"""Bytes one reader thread handles at a time."""
THREADS = 4
"""Reader threads at most: two saturate memory on small machines, a few more hide latency on cold disks."""


SCALE_ROLES = ("scales", "divisors", "minimums")
"""Parts that are few, and always looked at."""


@dataclass(frozen=True, slots=True)
class Binding:
    """One target parameter: its local shape and dtype, and how its bytes come about."""

    target: str
    shape: tuple[int, ...]
    dtype: str
    sources: tuple[str, ...]
    operations: tuple[str, ...]
    bytes_read: int
    value: LazyTensor
    tied_to: str | None = None
    role: str = "weight"
    """`weight` for floats; `codes`, `scales` or `divisors`, `zero_points` or `minimums` for the parts of a packed
    weight; `midpoint` for zero points that are read and checked, and not delivered."""
    largest: float | None = None
    """The largest scale, or minimum, that the dtype that is computed in has room for."""
    numbers: str | None = None
    """The dtype that U8 codes are numbers of, where each is one."""
    shares: bool = False
    """Whether it is made of the bytes that the codes before it are made of, and of no others: they are read once."""

    @property
    def is_direct(self) -> bool:
        """Whether nothing has to be computed: bytes go from the file to their place."""
        return all(is_direct(tile, self.shape, self.dtype) for tile in self.value.tiles)

    @property
    def nbytes(self) -> int:
        """Bytes of the finished parameter."""
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


def bundles(bindings: Iterable[Binding]) -> Iterator[tuple[Binding, ...]]:
    """Bindings that are made together: each, and those after it that share its bytes."""
    bundle: list[Binding] = []
    for binding in bindings:
        if bundle and not binding.shares:
            yield tuple(bundle)
            bundle = []
        bundle.append(binding)
    if bundle:
        yield tuple(bundle)


@dataclass(frozen=True)
class Plan:
    """The waybill of one rank. `bindings` are in the order they will be streamed."""

    checkpoint: Checkpoint
    config: Config | None
    target: str
    tp: int
    rank: int
    dtype: str
    bindings: tuple[Binding, ...]
    ignored: Mapping[str, str]
    problems: tuple[WaybillError, ...]
    notices: tuple[str, ...]
    policy: Policy
    """Whose each module is, and what the metadata says about it."""
    packings: Mapping[str, Packing] = field(default_factory=dict)
    """How each packed weight lies in the checkpoint, by module name: what the target's layers are built from."""
    specs: tuple[ParameterSpec, ...] = ()
    """What the target declared for this checkpoint; nothing where the config could not be read."""
    holds_result: bool = True
    """Whether the target keeps what it is given in memory, or writes it to a file."""
    parameters: int = 0
    """Elements of all logical weights, packed ones counted unpacked."""
    family: str = "decoder"
    """The family of the architecture, which says what a target builds."""

    @cached_property
    def bytes_read(self) -> int:
        """Bytes this rank asks the file system for."""
        return sum(binding.bytes_read for binding in self.bindings)

    @cached_property
    def result_bytes(self) -> int:
        """Bytes of the loaded parameters; a tied head that is stored again counts once, with its embedding."""
        return sum(binding.nbytes for binding in self.bindings if binding.tied_to is None)

    @cached_property
    def peak_bytes(self) -> int:
        """The most host memory a load holds at once: the result, a stored head should it differ, and scratch."""
        if not self.holds_result:
            return 4 * THREADS * CHUNK
        heads = sum(binding.nbytes for binding in self.bindings if binding.tied_to is not None)
        staged = heads or any(not b.is_direct for b in self.bindings)
        return self.result_bytes + heads + (2 * THREADS * CHUNK if staged else 0)

    @cached_property
    def consumed(self) -> int:
        """Stored tensors that at least one parameter is made from."""
        return len({source for binding in self.bindings for source in binding.sources})

    @cached_property
    def files(self) -> frozenset[str]:
        """The files this rank reads from."""
        return frozenset(self.checkpoint.tensors[source].file for b in self.bindings for source in b.sources)

    def fetched(self, progress: Progress = lambda _: None, *, files: Collection[str] | None = None) -> Plan:
        """The same plan over files on this disk: those it reads, or these, are brought from the hub if they lie there.

        Raises:
            HubError, CannotWrite, FileChanged: they cannot be.
        """
        return replace(self, checkpoint=self.checkpoint.fetched(self.files if files is None else files, progress))

    def require_clean(self) -> Config:
        """Raise Refused with every problem, if there is any; else the config, which a plan without problems has."""
        if self.problems:
            raise Refused(self.problems)
        if self.config is None:
            raise TypeError("a clean plan without a config")
        return self.config

    def summary(self) -> str:
        """The last line of every load."""
        total = len(self.checkpoint.tensors)
        used = {source for binding in self.bindings for source in binding.sources}
        stored = self.checkpoint.nbytes or 1
        part = sum(t.nbytes for name, t in self.checkpoint.tensors.items() if name in used) / stored
        dropped = f", {len(self.ignored)} dropped by rule" if self.ignored else ""
        unbound = total - len(used) - len(self.ignored)
        return f"consumed {len(used)} of {total} tensors ({part:.1%} of bytes){dropped}, {unbound} unbound"

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "target": self.target,
            "tp": self.tp,
            "rank": self.rank,
            "dtype": self.dtype,
            "bindings": [
                {
                    "target": b.target,
                    "shape": list(b.shape),
                    "dtype": b.dtype,
                    "sources": list(b.sources),
                    "operations": list(b.operations),
                    "bytes_read": b.bytes_read,
                }
                for b in self.bindings
            ],
            "ignored": [{"name": name, "reason": reason} for name, reason in self.ignored.items()],
            "totals": {
                "bytes_read": self.bytes_read,
                "result_bytes": self.result_bytes,
                "peak_bytes": self.peak_bytes,
                "tensors": len(self.checkpoint.tensors),
                "consumed": self.consumed,
            },
            "problems": [problem.as_dict() for problem in self.problems],
            "notices": list(self.notices),
            "summary": self.summary(),
        }
