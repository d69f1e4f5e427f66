"""Fresh memory, made present in one call instead of one fault a page, or not asked for at all."""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading

import numpy as np

from waybill.plan.bill import CHUNK
from waybill.weights.dtypes import Array

MADV_POPULATE_WRITE = 23
"""Linux 5.14 and newer."""
SMALLEST = 64 << 10
"""Bytes below which a call costs more than the faults it saves."""

_madvise = ctypes.CDLL(None).madvise if sys.platform == "linux" else None


def populate(view: memoryview) -> None:
    """Make the whole pages under a writable view present. A kernel that cannot leaves them to be faulted in."""
    if _madvise is None or len(view) < SMALLEST:
        return
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (address + len(view)) // mmap.PAGESIZE * mmap.PAGESIZE
    _madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), MADV_POPULATE_WRITE)


class Scratch:
    """A thread's own memory, written over and over: fresh pages would cost the kernel more than what is put there.

    More than CHUNK bytes, which a single row may be, are fresh all the same.
    """

    def __init__(self) -> None:
        self._held = threading.local()

    def __call__(self, nbytes: int) -> Array:
        """Uninitialised uint8, valid until this thread asks again."""
        if nbytes > CHUNK:
            return np.empty(nbytes, np.uint8)
        if not hasattr(self._held, "room"):
            self._held.room = np.empty(CHUNK, np.uint8)
        room: Array = self._held.room[:nbytes]
        return room
