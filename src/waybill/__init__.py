"""Waybill: from a Hugging Face checkpoint to a model that runs, with every weight accounted for."""

from waybill.api import build, dequantize, load, open, plan, records, verify
from waybill.errors import Refused, WaybillError

__all__ = ["Refused", "WaybillError", "build", "dequantize", "load", "open", "plan", "records", "verify"]
