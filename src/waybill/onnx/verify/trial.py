"""A package on trial: opened in ONNX Runtime, a few tokens, one more token with the cache they left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from waybill.errors import BadPackage, WaybillError
from waybill.onnx import require
from waybill.onnx.providers import PROVIDERS
from waybill.weights.dtypes import Array

CPU = PROVIDERS["cpu"]
PROMPT = 3
_DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


def provider_for(ep: str, obstacles: Mapping[str, Sequence[str]], available: Sequence[str]) -> str | None:
    """The provider a package was exported for when this machine has it, else the CPU's when that can run it."""
    own = PROVIDERS.get(ep)
    wanted = [own, CPU] if own is not None else [CPU]
    return next((name for name in wanted if name in available and not obstacles.get(name)), None)


def run_steps(graph: Path, provider: str) -> list[WaybillError]:
    """Open a session and run two steps; what the runtime says against it, or logits that are no numbers."""
    runtime = require("onnxruntime")
    options = runtime.SessionOptions()
    options.add_session_config_entry("session.disable_prepacking", "1")
    options.log_severity_level = 4
    step = "opening a session"
    try:
        session = runtime.InferenceSession(graph, options, providers=list(dict.fromkeys([provider, CPU])))
        step = f"a prefill of {PROMPT} tokens"
        feeds = _prefill(session)
        outputs = _named(session, feeds)
        problems = _not_finite(graph, outputs["logits"], step)
        step = "a decode step"
        outputs = _named(session, _decode(session, outputs))
        return problems or _not_finite(graph, outputs["logits"], step)
    except Exception as error:  # the runtime has a class of its own for every status, and no base
        reason = " ".join(str(error).split())[:400] or type(error).__name__
        return [_failed(graph, f"{step} on the {provider}", reason)]


def _named(session: Any, feeds: Mapping[str, Array]) -> dict[str, Array]:
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def _prefill(session: Any) -> dict[str, Array]:
    """The first tokens of the vocabulary, and an empty cache of the shapes the graph states."""
    shapes = {output.name: output.shape for output in session.get_outputs()}
    ids = np.arange(PROMPT, dtype=np.int64) % shapes["logits"][-1]
    feeds: dict[str, Array] = {"input_ids": ids[None], "attention_mask": np.ones((1, PROMPT), np.int64)}
    for given in session.get_inputs():
        if given.name not in feeds:
            _, heads, _, width = given.shape
            feeds[given.name] = np.zeros((1, heads, 0, width), _DTYPES[given.type])
    return feeds


def _decode(session: Any, outputs: Mapping[str, Array]) -> dict[str, Array]:
    """One more token, after the cache the first step returned."""
    token = outputs["logits"][:, -1].argmax(-1).astype(np.int64)
    feeds: dict[str, Array] = {"input_ids": token[:, None], "attention_mask": np.ones((1, PROMPT + 1), np.int64)}
    for given in session.get_inputs():
        if given.name not in feeds:
            feeds[given.name] = outputs[given.name.replace("past_key_values.", "present.", 1)]
    return feeds


def _not_finite(graph: Path, logits: Array, step: str) -> list[WaybillError]:
    bad = int(logits.size - np.isfinite(logits).sum())
    if not bad:
        return []
    return [
        BadPackage(
            "the package computes logits that are not finite",
            where=f"logits of {step} ({graph.name})",
            expected="finite numbers",
            found=f"NaN or infinity in {bad:,} of {logits.size:,}",
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
