"""Garbage collection, paused where many small objects are made and none becomes garbage in a cycle."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """No cycles are looked for inside: one look at all that torch has imported takes longer than ten plans."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
