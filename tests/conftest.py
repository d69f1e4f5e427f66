"""Machines are shared and sometimes slow: no property test fails for the time it takes."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("waybill", deadline=None)
settings.load_profile("waybill")
