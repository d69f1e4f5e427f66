"""ONNX packages: a decoder as a graph, its weights beside it, and everything a runtime needs to run it. No torch."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from waybill.errors import MissingRuntime


def require(*modules: str) -> Any:
    """The first of these modules, after all were found: what only `waybill[onnx]` installs is asked for here.

    Raises:
        MissingRuntime: one is not installed.
    """
    try:
        found = [import_module(module) for module in modules]
    except ImportError as error:
        raise MissingRuntime(
            "ONNX Runtime is not installed",
            expected="the packages onnxruntime, onnx-ir and blake3",
            found=str(error),
            fix="pip install 'waybill[onnx]'",
        ) from None
    return found[0]
