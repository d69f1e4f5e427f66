"""A package on trial: opened in ONNX Runtime, a few tokens, one more token with the cache they left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from waybill.errors import BadPackage, WaybillError
from waybill.onnx import require
from waybill.onnx.providers import PROVIDERS
from waybill.onnx.runtime.decoder import PAST, PAST_CROSS, present_of
from waybill.weights.dtypes import Array

CPU = PROVIDERS["cpu"]
PROMPT = 3
_DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


def provider_for(ep: str, obstacles: Mapping[str, Sequence[str]], available: Sequence[str]) -> str | None:
    """The provider a package was exported for when this machine has it, else the CPU's when that can run it."""
    own = PROVIDERS.get(ep)
    wanted = [own, CPU] if own is not None else [CPU]
    return next((name for name in wanted if name in available and not obstacles.get(name)), None)


def run_steps(graph: Path, provider: str) -> tuple[str, list[WaybillError]]:
    """Open a session and run the graph: once, or two steps of a decoder.

    Returns what ran, in words, and what the runtime says against it, or outputs that are no numbers.
    """
    runtime = require("onnxruntime")
    options = runtime.SessionOptions()
    options.add_session_config_entry("session.disable_prepacking", "1")
    options.log_severity_level = 4
    step = "opening a session"
    try:
        session = runtime.InferenceSession(graph, options, providers=list(dict.fromkeys([provider, CPU])))
        decodes = any(given.name.startswith(PAST) for given in session.get_inputs())
        step = f"a prefill of {PROMPT} tokens" if decodes else "a run"
        outputs = _named(session, _first(session))
        problems = _not_finite(graph, outputs, step)
        ran = f"session opened, {step.removeprefix('a ')}"
        if decodes:
            step = "a decode step"
            problems = problems or _not_finite(graph, _named(session, _second(session, outputs)), step)
            ran += " and one decode step"
    except Exception as error:  # the runtime has a class of its own for every status, and no base
        reason = " ".join(str(error).split())[:400] or type(error).__name__
        return step, [_failed(graph, f"{step} on the {provider}", reason)]
    return f"{ran} on the {provider}, {'logits' if decodes else 'outputs'} finite", problems


def _named(session: Any, feeds: Mapping[str, Array]) -> dict[str, Array]:
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def _first(session: Any) -> dict[str, Array]:
    """Something for every input, of the shape the graph states: lengths are PROMPT, caches empty, masks all ones."""
    feeds: dict[str, Array] = {}
    for given in session.get_inputs():
        shape = [size if isinstance(size, int) else _length(given.name, size) for size in given.shape]
        if given.type != "tensor(int64)":
            feeds[given.name] = np.zeros(shape, _DTYPES[given.type])
        elif given.name.endswith("mask"):
            feeds[given.name] = np.ones(shape, np.int64)
        else:
            feeds[given.name] = np.broadcast_to(np.arange(shape[-1]) % _vocabulary(session), shape).astype(np.int64)
    return feeds


def _length(name: str, axis: str) -> int:
    """How long an axis without a number is: caches are empty; no token stands for a feature, so there is none."""
    if name.startswith((PAST, PAST_CROSS)) and axis != "batch_size":
        return 0
    return 0 if axis.endswith("_features") else PROMPT if axis.endswith("sequence_length") else 1


def _vocabulary(session: Any) -> int:
    """Tokens there are; the first alone where the graph has no logits."""
    shapes = {output.name: output.shape for output in session.get_outputs()}
    return int(shapes["logits"][-1]) if "logits" in shapes else 1


def _second(session: Any, outputs: Mapping[str, Array]) -> dict[str, Array]:
    """One more token, after the caches that the first step returned; another sequence's states are not needed again."""
    token = outputs["logits"][:, -1].argmax(-1).astype(np.int64)
    feeds = _first(session) | {"attention_mask": np.ones((1, PROMPT + 1), np.int64)}
    for name in feeds:
        if name == "input_ids":
            feeds[name] = token[:, None]
        elif name == "inputs_embeds":
            feeds[name] = feeds[name][:, :1]
        elif name == "encoder_hidden_states":
            feeds[name] = feeds[name][:, :0]
        elif name.startswith("past_"):
            feeds[name] = outputs[present_of(name)]
    return feeds


def _not_finite(graph: Path, outputs: Mapping[str, Array], step: str) -> list[WaybillError]:
    """Of a decoder's outputs the logits are looked at, of another graph's all."""
    name = "logits" if "logits" in outputs else next(iter(outputs))
    values = outputs[name]
    bad = int(values.size - np.isfinite(values).sum())
    if not bad:
        return []
    return [
        BadPackage(
            f"the package computes {name if name == 'logits' else 'outputs'} that are not finite",
            where=f"{name} of {step} ({graph.name})",
            expected="finite numbers",
            found=f"NaN or infinity in {bad:,} of {values.size:,}",
            fix="check the weights (load with check_finite), or export with --dtype float32",
        )
    ]


def _failed(graph: Path, step: str, reason: str) -> BadPackage:
    return BadPackage(
        "ONNX Runtime cannot run the package",
        where=str(graph),
        expected=f"{step} that succeeds",
        found=reason,
        fix="update onnxruntime (pip install -U 'waybill[onnx]'), or export the package again",
    )
