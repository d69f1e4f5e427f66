"""Packed checkpoints: producer layout to canonical layout, loading, decoding, and what one of two ranks reads."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import checkpoints, decode, load, startup
from benchmarks.measure import MIB, THREADS, Row, Runs, Sample, child, in_turn, report, warm

NAMES = {"gptq": "GPTQ 4-bit", "awq": "AWQ 4-bit", "olive": "Olive 4-bit"}
RATES = {"gptq": 1.2e9, "awq": 0.7e9} | dict.fromkeys(checkpoints.GGUF_SCALES, 0.5e9)
"""Packed bytes a second that must be reached; Olive's bytes only move, so its reach is the machine's."""
COPY_SHARE = 0.5
DECODE_REACH = 1.2
CODEBOOKS = {"E4M3": (128, 128), "E2M1": (1, 32)}
"""Tables, and rows and columns of a scale's block: block FP8, and MXFP4."""
LOOKUP_REACH = 0.5
"""GB of codes a second."""
LIMITS = {
    "gptq": "transposing words, one result row of a cache line each; then reading and placing",
    "awq": "exchanging nibbles in three rounds of six passes, then transposing words; fresh scratch memory",
    "olive": "the kernel, copying out of the page cache; then looking at scales and unpacking zero points",
}


def rows(runs: int, machine: Runs) -> Iterator[Row]:
    """Every part, on checkpoints that are in the page cache."""
    for method, name in NAMES.items():
        folder = checkpoints.packed_wide(method)
        warm(checkpoints.weights(folder))
        yield _canonical(method, folder, runs, machine)
        yield load.half(f"Qwen3-1.7B {name}", folder)
    for block_type in checkpoints.GGUF_SCALES:
        file = checkpoints.gguf_wide(block_type)
        warm(file)
        yield _canonical(block_type, file, runs, machine)
    for table, block in CODEBOOKS.items():
        yield _lookup(table, block, runs)
    for label, folder, limit in (
        (
            "Qwen3-0.6B GPTQ 4-bit",
            checkpoints.packed_dense(),
            "one layer at a time being rearranged for PyTorch's kernel",
        ),
        ("3 of gpt-oss-20b's layers, MXFP4", checkpoints.gpt_oss(), "what is in flight"),
    ):
        yield _load(label, folder, limit, runs)
    yield _decode(runs, machine)


def _canonical(method: str, folder: Path, runs: int, machine: Runs) -> Row:
    ways = {way: partial(child, "packed", str(folder), way) for way in ("used", "fresh")}
    taken = in_turn({**ways, "floor": partial(child, "load", "floor", str(folder))}, runs)
    used, fresh = taken["used"], taken["fresh"]
    rate, copy = used.median("rate") * 1e9, machine.median("copy")
    reach = RATES.get(method, COPY_SHARE * copy)
    floor = checkpoints.weights(folder).stat().st_size / taken["floor"].median() / 1e9
    return Row(
        f"{NAMES.get(method, f'GGUF {method}')} to canonical, {used.samples[0]['bytes'] / 1e6:.0f} MB packed, "
        "streamed from a plan",
        used.text("GB/s", "rate"),
        f"into fresh memory {fresh.text('GB/s', 'rate')}, where the floor is {floor:.2f} GB/s",
        f"{rate / copy:.2f} × copy",
        f"≥ {reach / 1e9:.1f} GB/s" + ("" if method in RATES else f" ({COPY_SHARE:g} × copy)"),
        rate >= reach,
        LIMITS.get(method, "taking blocks apart in numpy, a pass over each field"),
    )


def _lookup(table: str, block: tuple[int, int], runs: int) -> Row:
    taken = in_turn({"waybill": partial(child, "packed", table, "lookup")}, runs)["waybill"]
    rate = taken.median("rate")
    return Row(
        f"{table} codes in blocks of {block[0]} × {block[1]} to float32, 32 MB of codes, {THREADS} threads",
        taken.text("GB/s", "rate"),
        "–",
        "–",
        f"≥ {LOOKUP_REACH:g} GB/s",
        rate >= LOOKUP_REACH,
        "one lookup of a byte and one product a value, by PyTorch, over blocks of rows",
    )


def _load(label: str, folder: Path, limit: str, runs: int) -> Row:
    file = checkpoints.weights(folder)
    warm(file)
    ours = in_turn({"waybill": partial(child, "load", "waybill", str(folder))}, runs)["waybill"]
    result, step = (ours.samples[0][name] for name in ("result", "step"))
    reach, peak = result + step + 64 * MIB, ours.median("peak")
    return Row(
        f"load, {label}, {file.stat().st_size / 1e9:.2f} GB, peak beyond the interpreter",
        f"{peak / MIB:.0f} MiB = result + {(peak - result) / MIB:.0f} MiB, in {ours.text()}",
        "–",
        f"{peak / result:.2f} × result",
        f"≤ {reach / MIB:.0f} MiB (result {result / MIB:.0f} + step {step / MIB:.0f} + 64)",
        peak <= reach,
        f"the result itself, blocks being decoded, and {limit}",
    )


def _decode(runs: int, machine: Runs) -> Row:
    source = startup.model()
    folders = {"packed": checkpoints.packed_smol(source), "float": source}
    taken = in_turn(
        {name: partial(child, "decode", "waybill", str(folder), "bfloat16") for name, folder in folders.items()}, runs
    )
    ours, theirs = taken["packed"], taken["float"]
    ratio = ours.median("speed") / theirs.median("speed")
    nbytes = ours.samples[0]["bytes"]
    bound = machine.median("sum") / nbytes
    return Row(
        f"decode, SmolLM2-135M Olive 4-bit in bfloat16, {decode.NEW_TOKENS} tokens, {THREADS} threads",
        ours.text("tokens/s", "speed", 1),
        f"the same in bfloat16 {theirs.text('tokens/s', 'speed', 1)}",
        f"{ratio:.2f} × bfloat16",
        f"≥ {DECODE_REACH:g} ×",
        ratio >= DECODE_REACH,
        f"weights {nbytes / 1e6:.0f} MB a token over {machine.median('sum') / 1e9:.1f} GB/s bound it at {bound:.0f} "
        f"tokens/s: {ours.median('speed') / bound:.0%} reached; half of them are the head, which stays float",
    )


def _measure_canonical(folder: Path, way: str) -> Sample:
    """What `waybill.load` does between plan and layers, for the packed bindings: streamed, all results kept.

    `fresh` allocates as a load does, so the kernel zeroes every page meanwhile; `used` fills memory that has been
    written before, as the machine's copy speed is measured.
    """
    import numpy as np

    import waybill
    from waybill.checkpoint import RangeReader
    from waybill.plan import Binding
    from waybill.plan.stream import stream

    plan = waybill.plan(folder)
    plan.require_clean()
    bindings = tuple(binding for binding in plan.bindings if binding.role != "weight")
    memory = {binding.target: np.zeros(binding.nbytes, np.uint8) for binding in bindings} if way == "used" else {}
    for array in memory.values():
        array.fill(1)

    def allocate(binding: Binding) -> Any:
        return memory[binding.target] if memory else np.empty(binding.nbytes, np.uint8)

    with RangeReader(plan.checkpoint) as reader:
        start = time.perf_counter()
        kept = list(stream(bindings, reader, allocate, in_flight=plan.result_bytes))
        seconds = time.perf_counter() - start
    nbytes = sum(binding.bytes_read for binding in bindings)
    return {"seconds": seconds, "bytes": nbytes, "rate": nbytes / seconds / 1e9, "kept": len(kept)}


def _measure_lookup(table: str) -> Sample:
    """What the engine does for a product with a codebook matrix, but for the product: a few rows at a time."""
    import torch

    from waybill.engine.layers.lookup import looked_up
    from waybill.weights.codebook import CodebookLayout

    torch.set_num_threads(THREADS)
    rows, octets = 8192, 4096
    layout = CodebookLayout(table, *CODEBOOKS[table])
    columns = octets * 8 // layout.bits
    codes = torch.randint(0, 126, (rows, octets), dtype=torch.uint8)
    scales = torch.ones(-(-rows // layout.rows), -(-columns // layout.columns))
    each = 128
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for at in range(0, rows, each):
            looked_up(codes[at : at + each], scales, layout, torch.arange(at, at + each), torch.float32)
        best = min(best, time.perf_counter() - start)
    return {"seconds": best, "rate": codes.numel() / best / 1e9}


def main(subject: str, way: str) -> None:
    """One measurement, in a process of its own."""
    report(_measure_lookup(subject) if way == "lookup" else _measure_canonical(Path(subject), way))


if __name__ == "__main__":
    main(*sys.argv[1:])
