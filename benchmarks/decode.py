"""Decode speed: tokens a second of one request, greedy, against transformers and against memory bandwidth."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks import startup
from benchmarks.measure import THREADS, Row, Runs, Sample, child, in_turn, report

NEW_TOKENS = 96
PROMPT = "The history of the shipping container begins with"
REACH = {"float32": 2.0, "bfloat16": 1.3}


def rows(runs: int, machine: Runs) -> Iterator[Row]:
    """One row a dtype."""
    folder = str(startup.model())
    for dtype, reach in REACH.items():
        taken = in_turn(
            {name: partial(child, "decode", name, folder, dtype) for name in ("waybill", "transformers")},
            runs,
        )
        ours, theirs = taken["waybill"], taken["transformers"]
        ratio = ours.median("speed") / theirs.median("speed")
        bound = machine.median("sum") / ours.samples[0]["bytes"]
        yield Row(
            f"decode, SmolLM2-135M {dtype}, {NEW_TOKENS} tokens, {THREADS} threads",
            ours.text("tokens/s", "speed", 1),
            f"transformers {theirs.text('tokens/s', 'speed', 1)}",
            f"{ratio:.2f} × transformers",
            f"≥ {reach:g} ×",
            ratio >= reach,
            f"weights {ours.samples[0]['bytes'] / 1e6:.0f} MB a token over {machine.median('sum') / 1e9:.1f} GB/s "
            f"bound it at {bound:.0f} tokens/s: {ours.median('speed') / bound:.0%} reached",
        )


def _waybill(folder: Path, dtype: str) -> Sample:
    import waybill
    from waybill.engine.generate import generate
    from waybill.text.tokenizer import read_tokenizer

    model = waybill.load(folder, dtype=dtype)
    prompt = read_tokenizer(folder).encode(PROMPT).ids
    generate(model, [prompt], max_new_tokens=8)
    result = generate(model, [prompt], max_new_tokens=NEW_TOKENS)
    nbytes = waybill.plan(folder, dtype=dtype).result_bytes
    return {"speed": result.decode_steps / result.decode_seconds, "bytes": nbytes, "tokens": result.token_ids[0]}


def transformers(folder: Path, dtype: str, prompt: list[int] | None = None) -> Sample:
    """Greedy decoding by transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.generation.streamers import BaseStreamer

    class Clock(BaseStreamer):
        """Notes when the prompt and each token came by."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: object) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            pass

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt or AutoTokenizer.from_pretrained(folder)(PROMPT)["input_ids"]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    model.generate(**inputs, max_new_tokens=8, do_sample=False)
    clock = Clock()
    out = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, streamer=clock)
    made = out[0, ids.shape[1] :].tolist()
    if len(made) != NEW_TOKENS or len(clock.times) != NEW_TOKENS + 1:  # the prompt is put first
        raise RuntimeError(f"{len(made)} tokens were made, {len(clock.times)} heard of")
    return {"speed": (NEW_TOKENS - 1) / (clock.times[-1] - clock.times[1]), "tokens": made}


def main(name: str, folder: str, dtype: str) -> None:
    """One measurement, in a process of its own."""
    report({"waybill": _waybill, "transformers": transformers}[name](Path(folder), dtype))


if __name__ == "__main__":
    main(*sys.argv[1:])
