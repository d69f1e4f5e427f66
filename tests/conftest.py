"""Machines are shared and sometimes slow: no property test fails for the time it takes, and none fights for cores."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

settings.register_profile("waybill", deadline=None)
settings.load_profile("waybill")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Tiny models gain nothing from threads, here or in a process of their own, and lose much waiting for cores that
    other processes use."""
    os.environ["OMP_NUM_THREADS"] = "1"
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
