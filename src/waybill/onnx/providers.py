"""Which execution providers can run a package, and why the others cannot: facts about operators, in one place.

Measured with ONNX Runtime 1.32 on the CPU; what is said of CUDA is read from its operators' type constraints, and of
experts from the limits its kernels state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from waybill.config.composite import Composite, Config
from waybill.config.model import DTYPE_TAGS
from waybill.errors import UnsupportedByRuntime, WaybillError, some
from waybill.plan.parameter import SMALLEST_GROUP, AffinePacking, CodebookPacking, Packing, ParameterSpec

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
DTYPES = ("float16", "bfloat16", "float32")
MOST_POSITIONS = 1 << 22
"""Tables of rotary angles are made in memory, and are part of the package: a gigabyte each at 128 a head."""
MIXED_WIDTHS = {(2, 4), (4, 8), (8, 4)}
"""Bits of an expert's two banks that QMoE has attributes for."""
SCRATCH = "ep.cuda.qmoe_int_dequant_max_scratch_bytes"
SCRATCH_LIMIT = 1 << 30
"""Banks of unequal bits are unpacked, a layer at a time, into 16-bit floats: so many bytes unless it is told more."""


def obstacles(ep: str, config: Config, specs: Sequence[ParameterSpec], dtype: str) -> Iterator[tuple[str, str, str]]:
    """(where, what it can run, what the package would ask of it); nothing when it can run the package."""
    widths: dict[tuple[int, int], str] = {}
    for pair in _banks(specs):
        if len(bits := _widths(*pair)) == 2:
            widths.setdefault((bits[0], bits[1]), pair[0].name)
    blocks = {spec.packing.group: spec.name for spec in reversed(specs) if isinstance(spec.packing, AffinePacking)}
    if blocks and (least := min(blocks)) < SMALLEST_GROUP:
        yield blocks[least], f"blocks of at least {SMALLEST_GROUP} that fill every row", f"blocks of {least}"
    yield from (_on_the_cpu if ep == "cpu" else _on_cuda)(config, widths, dtype)
    if ep == "cuda":
        yield from _unfit_bytes(specs)
        yield from _untried(specs)


def _on_the_cpu(config: Config, widths: Mapping[tuple[int, int], str], dtype: str) -> Iterator[tuple[str, str, str]]:
    if dtype == "BF16":
        yield "dtype", "float32 or float16: its kernels know no bfloat16", "bfloat16"
    for (up, down), name in widths.items():
        if up != down:
            yield name, "experts whose banks have the same number of bits", f"{up} and {down} bits"
    if config.text is not None and config.text.head_dim % 16:
        yield "head_dim", "rotated heads of a multiple of 16", str(config.text.head_dim)


def _on_cuda(config: Config, widths: Mapping[tuple[int, int], str], dtype: str) -> Iterator[tuple[str, str, str]]:
    if dtype == "F32":
        yield "dtype", "float16 or bfloat16: its attention knows no float32", "float32"
    if isinstance(config, Composite) and config.biases_scores:
        yield "attention scores", "attention over a cache that adds nothing to its scores", "relative positions"
    if config.text is not None and config.text.sinks:
        yield "attention sinks", "attention without sinks: its kernels for them were not tried", "a sink for every head"
    for (up, down), name in widths.items():
        if up != down and (up, down) not in MIXED_WIDTHS:
            yield name, "4 and 8 bits, 8 and 4, or 2 and 4", f"{up} and {down} bits"


def _unfit_bytes(specs: Sequence[ParameterSpec]) -> Iterator[tuple[str, str, str]]:
    """Banks of 8 bits that CUDA's kernel for them does not take."""
    for bank in (bank for pair in _banks(specs) if _widths(*pair) == (8, 8) for bank in pair):
        columns, group = bank.parts[0].shape[-1], bank.packing.group if isinstance(bank.packing, AffinePacking) else 0
        if columns % 64 or group % 32:
            found = f"rows of {columns} in blocks of {group}"
            yield bank.name, "for experts of 8 bits, rows of a multiple of 64 in blocks of one of 32", found
            return


def scratch_bytes(specs: Sequence[ParameterSpec]) -> int:
    """Bytes that CUDA unpacks the largest pair of banks of unequal bits into; 0 where all are equal."""
    uneven = (pair for pair in _banks(specs) if len({*_widths(*pair)}) > 1)
    return max((2 * sum(math.prod(bank.local_shape(0, 1)) for bank in pair) for pair in uneven), default=0)


def _untried(specs: Sequence[ParameterSpec]) -> Iterator[tuple[str, str, str]]:
    """8-bit floats, which were measured on the CPU only."""
    coded = next((spec for spec in specs if isinstance(spec.packing, CodebookPacking)), None)
    if coded is not None:
        yield coded.name, "floats, or packed integers: its kernels for 8-bit floats were not tried", str(coded.packing)


def verdicts(config: Config, specs: Sequence[ParameterSpec], dtype: str) -> dict[str, dict[str, Any]]:
    """Whether each execution provider can run such a package, and why not; what it must be told where it can."""
    found: dict[str, dict[str, Any]] = {}
    for ep, provider in PROVIDERS.items():
        why = [f"{where}: needs {can}; found {asked}" for where, can, asked in obstacles(ep, config, specs, dtype)]
        found[provider] = {"runs": not why, **({"because": why} if why else {})}
        if ep == "cuda" and not why and (nbytes := scratch_bytes(specs)):
            found[provider]["scratch_bytes"] = nbytes
            if nbytes > SCRATCH_LIMIT:
                found[provider]["options"] = {SCRATCH: str(nbytes)}
    return found


def _widths(*banks: ParameterSpec) -> tuple[int, ...]:
    """Bits of banks that are packed as integers."""
    return tuple(bank.packing.bits for bank in banks if isinstance(bank.packing, AffinePacking))


def _banks(specs: Sequence[ParameterSpec]) -> Iterator[tuple[ParameterSpec, ParameterSpec]]:
    banks = [spec for spec in specs if spec.kind == "experts"]
    return zip(banks[::2], banks[1::2], strict=True)


def _another(ep: str, config: Config, specs: Sequence[ParameterSpec], dtype: str) -> str:
    """The options of a provider that could run the package, if need be in another dtype; empty when none could."""
    for name in PROVIDERS:
        for label, tag in [("", dtype), *((known, DTYPE_TAGS[known]) for known in DTYPES)]:
            if name != ep and not list(obstacles(name, config, specs, tag)):
                return f"--ep {name}" + (f" --dtype {label}" if label else "")
    return ""


def refusals(ep: str, config: Config, specs: Sequence[ParameterSpec], dtype: str) -> Iterator[WaybillError]:
    """What keeps the chosen provider from running the package, and what no provider could hold."""
    other = _another(ep, config, specs, dtype)
    for where, expected, found in obstacles(ep, config, specs, dtype):
        yield UnsupportedByRuntime(
            f"the {PROVIDERS[ep]} cannot run this package",
            where=where,
            expected=expected,
            found=found,
            fix=f"export with {other}" if other else "use the engine, which runs it as it is",
        )
    for up, down in _banks(specs):
        if (up.packing is None) != (down.packing is None):
            yield UnsupportedByRuntime(
                "experts are packed in one bank and float in the other",
                where=f"{up.name}, {down.name}",
                expected="both packed, or both float",
                found="one of each",
                fix="use the engine, which multiplies each as it is",
            )
    positions = config.text.rotary_config.max_position if config.text is not None else 0
    if positions > MOST_POSITIONS:
        yield UnsupportedByRuntime(
            "the package would hold a table of too many positions",
            where="max_position_embeddings",
            expected=f"at most {MOST_POSITIONS:,}",
            found=f"{positions:,}",
            fix="lower it in config.json to what will be used; it is the length of a table, and a cache is no longer",
        )
    yield from _unheld(specs)
    rounded = [s for s in specs if s.packing is not None and dtype == "BF16" and s.packing.scale_dtype == "F16"]
    if rounded:
        yield UnsupportedByRuntime(
            "bfloat16 cannot hold float16 scales",
            where=rounded[0].name,
            expected="a dtype with at least the 11 significant bits of float16",
            found=f"bfloat16, for the scales of {len(rounded)} packed weights",
            fix="export with --dtype float16 or float32",
        )


def _unheld(specs: Sequence[ParameterSpec]) -> Iterator[WaybillError]:
    """Packed weights that no operator computes from exactly: one problem for each reason."""
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for spec in specs:
        if spec.packing is not None and (reason := _unheld_because(spec, spec.packing)) is not None:
            no_blocks = isinstance(spec.packing, CodebookPacking) and spec.packing.layout.bits == 8
            as_floats = "" if no_blocks else "; --dequantize makes floats of a GGUF file's blocks"
            reasons.setdefault((*reason, as_floats), []).append(spec.name)
    for (expected, found, as_floats), names in reasons.items():
        yield UnsupportedByRuntime(
            "no operator holds a packed weight exactly",
            where=some(names),
            expected=expected,
            found=found,
            fix=f"use the engine, which computes from it as it is{as_floats}",
        )


def _unheld_because(spec: ParameterSpec, packing: Packing) -> tuple[str, str] | None:
    """(what operators hold, what this is), or None where they do."""
    if isinstance(packing, AffinePacking):
        held = "experts with zero points: their operator has no input for minimums"
        return (held, str(packing)) if packing.minimums and spec.kind == "experts" else None
    if packing.layout.bits != 8:
        return (
            "8-bit floats; experts of 4-bit ones have an exact form in 8-bit integers, twice as large: --widen-mxfp4",
            str(packing),
        )
    if packing.layout.divides:
        return "scales that multiply: a product with a reciprocal is another number", str(packing)
    if spec.kind != "linear":
        return "8-bit floats in linear layers only", f"{packing}, in {spec.kind}"
    return None
