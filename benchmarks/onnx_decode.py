"""Running ONNX packages, ours and the peers', by one loop: ONNX Runtime on the CPU, greedy, one request.

Keys and values stay in buffers that are past and present at once, bound by the names the session tells; so are token
ids, mask and logits.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import checkpoints, decode, onnx_export, startup
from benchmarks.measure import THREADS, Failed, Row, Runs, Sample, child, in_turn_or_why, process, report, warm

PROMPT_TOKENS = 128
NEW_TOKENS = 96
ROOM = PROMPT_TOKENS + NEW_TOKENS
WARM_UP = 8
PREFILLS = 5
"""Prefills a process measures; it tells their median."""
TEXT = (
    "The history of the shipping container begins with a trucker who was tired of waiting. Ships lay in port for a "
    "week while men carried sacks, barrels and crates up and down the gangway, one by one. Goods were lost, broken and "
    "stolen, and nobody could say where. He thought that a whole trailer might be lifted on board, without its wheels, "
    "and stacked. It took twenty years, a war and a committee to agree on the size of the box and the shape of its "
    "corners; after that the cost of moving a ton of freight fell from six dollars to sixteen cents, harbours moved to "
    "where there was room for cranes, and a waybill was enough to know what came from where and where it belongs."
)
OWN_HEAD = "genai builder, head rounded to 4 bits"
"""What the builder does unless told: another model, which is shown and not compared."""
TRANSFORMERS = "transformers"
PREFILL_REACH = 1.3
FIRST_TOKEN_REACH = 1.2
LIMITS = {
    0: "reading 538 MB of float weights a token",
    4: "reading the float head, 113 of 176 MB a token",
    8: "reading the float head, 113 of 229 MB a token",
}


def rows(runs: int) -> Iterator[Row]:
    """Decoding at three widths, prefill and the first token of the 4-bit package."""
    smol = startup.model()
    for bits in (0, 4, 8):
        checkpoint = checkpoints.gptq_smol(smol, bits) if bits else smol
        with onnx_export.scratch() as folder:
            packages, failed = _exported(checkpoint, bits, folder)
            if onnx_export.OURS not in packages:
                yield _not_run(f"decode in ONNX Runtime, {_label(bits)}", failed[onnx_export.OURS])
                continue
            contestants = {
                name: partial(child, "onnx_decode", "run", str(out), str(smol)) for name, out in packages.items()
            }
            if not bits:
                contestants[TRANSFORMERS] = partial(child, "onnx_decode", TRANSFORMERS, str(smol))
            taken, broken = in_turn_or_why(contestants, runs)
            yield _decode(bits, dict(taken), failed | broken)
            if bits == 4:
                yield _prefill(dict(taken))
                yield _first_token(packages[onnx_export.OURS], runs)


def _exported(checkpoint: Path, bits: int, folder: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """A package of every exporter that can make one, and why the others cannot."""
    packages: dict[str, Path] = {}
    failed = onnx_export.missing()
    wanted = [name for name in (onnx_export.OURS, *onnx_export.DISTRIBUTIONS) if name not in failed]
    if bits and "genai builder" in wanted:
        wanted.append(OWN_HEAD)
    for name in wanted:
        out = folder / str(len(packages))
        try:
            exporter, own_head = ("genai builder", True) if name == OWN_HEAD else (name, False)
            onnx_export.export(exporter, checkpoint, out, bits, own_head=own_head)
            packages[name] = out
        except Failed as error:
            failed[name] = str(error).rpartition(": ")[2]
    for out in packages.values():
        for file in out.iterdir():
            warm(file)
    return packages, failed


def _label(bits: int) -> str:
    return f"SmolLM2-135M GPTQ {bits}-bit, float head" if bits else "SmolLM2-135M float32"


def _not_run(measure: str, why: str) -> Row:
    return Row(measure, "–", "–", "–", "–", False, why)


def _best(taken: dict[str, Runs], name: str) -> float | None:
    """The fastest peer package that holds the same weights."""
    return max((r.median(name) for n, r in taken.items() if n not in (OWN_HEAD, TRANSFORMERS)), default=None)


def _decode(bits: int, taken: dict[str, Runs], failed: dict[str, str]) -> Row:
    measure = f"decode in ONNX Runtime, {_label(bits)}, {NEW_TOKENS} tokens after {PROMPT_TOKENS}, {THREADS} threads"
    ours = taken.pop(onnx_export.OURS, None)
    if ours is None:
        return _not_run(measure, failed[onnx_export.OURS])
    best = _best(taken, "speed")
    theirs = [f"{name} {runs.text('tokens/s', 'speed', 1)}{_same(ours, runs)}" for name, runs in taken.items()]
    return Row(
        measure,
        ours.text("tokens/s", "speed", 1),
        "; ".join([*theirs, *(f"{name}: {why}" for name, why in failed.items())]) or "–",
        f"{ours.median('speed') / best:.2f} × the best peer package" if best else "–",
        "≥ 1 × the best peer package",
        ours.median("speed") >= best if best else None,
        LIMITS[bits],
    )


def _same(ours: Runs, theirs: Runs) -> str:
    """How long both say the same."""
    mine, others = (runs.samples[0]["tokens"] for runs in (ours, theirs))
    equal = next((at for at, pair in enumerate(zip(mine, others, strict=True)) if pair[0] != pair[1]), len(mine))
    return ", same tokens" if equal == len(mine) else f", same first {equal} tokens"


def _prefill(taken: dict[str, Runs]) -> Row:
    measure = f"prefill in ONNX Runtime, {_label(4)}, {PROMPT_TOKENS} tokens, to the last one's logits"
    ours = taken.pop(onnx_export.OURS, None)
    if ours is None:
        return _not_run(measure, "see above")
    best = _best(taken, "prefill")
    return Row(
        measure,
        ours.text("tokens/s", "prefill", 0),
        "; ".join(f"{name} {runs.text('tokens/s', 'prefill', 0)}" for name, runs in taken.items()) or "–",
        f"{ours.median('prefill') / best:.2f} × the best peer package" if best else "–",
        f"≥ {PREFILL_REACH:g} × the best peer package",
        ours.median("prefill") >= PREFILL_REACH * best if best else None,
        "products of 128 rows with 8-bit activations, the peers' too; saved is the head of 127 positions, which the "
        "builder saves as well when asked (prune_lm_head)",
    )


def _first_token(package: Path, runs: int) -> Row:
    measure = f"time to first token of a package, {_label(4)}, whole process"
    prompt = startup.PROMPT
    taken, failed = in_turn_or_why(
        {
            onnx_export.OURS: partial(
                process, "-m", "waybill", "generate", str(package), "--prompt", prompt, "-n", "1"
            ),
            "onnxruntime-genai": partial(process, "-m", "benchmarks.onnx_decode", "genai", str(package)),
        },
        runs,
    )
    theirs = "; ".join(
        [f"{n} {r.text()}" for n, r in taken.items() if n != onnx_export.OURS]
        + [f"{n}: {why}" for n, why in failed.items() if n != onnx_export.OURS]
    )
    ours = taken.get(onnx_export.OURS)
    return Row(
        measure,
        ours.text() if ours else f"not run: {failed[onnx_export.OURS]}",
        theirs,
        "–",
        f"≤ {FIRST_TOKEN_REACH:g} s",
        ours is not None and ours.median() <= FIRST_TOKEN_REACH,
        "importing onnxruntime, rearranging packed weights for its kernels, the tokenizer",
    )


def _prompt(folder: Path) -> list[int]:
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT).ids
    if len(ids) < PROMPT_TOKENS:
        raise RuntimeError(f"the text has {len(ids)} tokens")
    return ids[:PROMPT_TOKENS]


class Runner:
    """A session of one package, and the buffers bound to it."""

    def __init__(self, file: Path, head_dim: int) -> None:
        import numpy as np
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = THREADS
        self._session = ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        self._binding = self._session.io_binding()
        self._ids = np.zeros((1, PROMPT_TOKENS), np.int64)
        self._positions = np.arange(ROOM, dtype=np.int64)[None]
        self._mask = np.ones((1, ROOM), np.int64)
        self._inputs: list[str] = []
        self._caches: list[Any] = []  # the binding holds addresses only
        for value in self._session.get_inputs():
            if not value.name.startswith("past"):
                self._inputs.append(value.name)
                continue
            # `past_key_values.3.key` and `present.3.key` are one buffer, as the operator allows.
            memory = np.zeros((1, value.shape[1], ROOM, head_dim), np.float32)
            self._caches.append(memory)
            self._bind(self._binding.bind_input, value.name, memory, memory.shape)
            self._bind(self._binding.bind_output, "present." + value.name.partition(".")[2], memory, memory.shape)
        self._output = next(value for value in self._session.get_outputs() if value.name == "logits")
        _, positions, vocabulary = self._output.shape
        self._logits = np.zeros((1, positions if isinstance(positions, int) else PROMPT_TOKENS, vocabulary), np.float32)

    def step(self, ids: list[int], past: int) -> int:
        """The most likely token after these, at these positions."""
        count = len(ids)
        self._ids[0, :count] = ids
        for name in self._inputs:
            if name == "attention_mask":
                array, shape = self._mask, (1, past + count)
            elif name == "position_ids":
                array, shape = self._positions[:, past:], (1, count)
            else:
                array, shape = self._ids, (1, count)
            self._bind(self._binding.bind_input, name, array, shape)
        made = min(count, self._logits.shape[1])
        self._bind(self._binding.bind_output, self._output.name, self._logits, (1, made, self._logits.shape[2]))
        self._session.run_with_iobinding(self._binding)
        return int(self._logits[0, made - 1].argmax())

    @staticmethod
    def _bind(bind: Callable[..., None], name: str, array: Any, shape: tuple[int, ...]) -> None:
        bind(name, "cpu", 0, array.dtype.type, shape, array.ctypes.data)


def _run(package: Path, checkpoint: Path) -> Sample:
    """Prefills, then one decode."""
    prompt = _prompt(checkpoint)
    config = json.loads((checkpoint / "config.json").read_text("utf-8"))
    runner = Runner(package / "model.onnx", config["hidden_size"] // config["num_attention_heads"])
    token = runner.step(prompt, 0)
    for at in range(WARM_UP):
        token = runner.step([token], PROMPT_TOKENS + at)
    seconds = []
    for _ in range(PREFILLS):
        start = time.perf_counter()
        token = runner.step(prompt, 0)
        seconds.append(time.perf_counter() - start)
    tokens = [token]
    start = time.perf_counter()
    for at in range(NEW_TOKENS - 1):
        tokens.append(runner.step([tokens[-1]], PROMPT_TOKENS + at))
    speed = (NEW_TOKENS - 1) / (time.perf_counter() - start)
    return {"speed": speed, "prefill": PROMPT_TOKENS / statistics.median(seconds), "tokens": tokens}


def _transformers(folder: Path) -> Sample:
    return decode.transformers(folder, "float32", _prompt(folder))


def _genai(package: Path) -> None:
    """What one writes with the generation library."""
    import onnxruntime_genai as og

    model = og.Model(str(package))
    tokenizer = og.Tokenizer(model)
    params = og.GeneratorParams(model)
    ids = tokenizer.encode(startup.PROMPT)
    params.set_search_options(max_length=len(ids) + 1, do_sample=False)
    generator = og.Generator(model, params)
    generator.append_tokens(ids)
    generator.generate_next_token()
    print(tokenizer.decode(generator.get_sequence(0)[-1:]))


def main(name: str, *folders: str) -> None:
    """One measurement, in a process of its own."""
    paths = map(Path, folders)
    if name == "genai":
        _genai(*paths)
    else:
        report(_run(*paths) if name == "run" else _transformers(*paths))


if __name__ == "__main__":
    main(*sys.argv[1:])
