"""Waybill: from a Hugging Face checkpoint to a model that runs, with every weight accounted for."""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from waybill.errors import Refused, WaybillError

if TYPE_CHECKING:
    from waybill.api import build, dequantize, load, open, plan, records, verify
    from waybill.comparison import compare

__all__ = ["Refused", "WaybillError", "build", "compare", "dequantize", "load", "open", "plan", "records", "verify"]


def __getattr__(name: str) -> Any:
    """What stands behind a function is imported with its first use: a command first says how it is stopped."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from waybill import api, comparison

    return getattr(comparison if name == "compare" else api, name)


class _Functions(ModuleType):
    """A subpackage that has the name of a function does not take its place."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in __all__ or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Functions
