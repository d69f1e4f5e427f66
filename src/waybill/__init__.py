"""Waybill: from a Hugging Face checkpoint to a model that runs, with every weight accounted for."""

from waybill.api import build, dequantize, load, open, plan, records, verify
from waybill.comparison import compare
from waybill.errors import Refused, WaybillError

__all__ = ["Refused", "WaybillError", "build", "compare", "dequantize", "load", "open", "plan", "records", "verify"]
