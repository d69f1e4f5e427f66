"""A process of its own for what would end this one. Imports nothing of weight: imports are counted."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


def forked(act: Callable[[], object]) -> int:
    """The number of a child that acts, and exits as a command would; with 99 where it does not exit by itself."""
    number = os.fork()
    if number == 0:
        try:
            act()
        except SystemExit as ended:
            sys.stdout.flush()
            os._exit(int(ended.code or 0))
        finally:
            os._exit(99)
    return number
