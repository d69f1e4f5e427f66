"""Waybill: from a Hugging Face checkpoint to a model that runs, with every weight accounted for."""

from waybill.api import load, open, plan
from waybill.errors import Refused, WaybillError

__all__ = ["Refused", "WaybillError", "load", "open", "plan"]
