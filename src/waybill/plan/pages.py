"""Fresh memory, made present in one call instead of one fault a page."""

from __future__ import annotations

import ctypes
import mmap
import sys

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
