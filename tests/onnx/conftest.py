"""Packages are flushed before they appear. Tests look at what appears; waiting for the disk proves nothing here."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def unflushed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
