"""The command, as `waybill`, `python -m waybill` and `torchrun -m waybill` start it, and what a signal does to it."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

STOPS = (signal.SIGINT, signal.SIGTERM)
_stopped = 0


def _stop(number: int, _: FrameType | None) -> None:
    """Unwind: what was begun is cleaned up on the way, and no second signal disturbs that."""
    global _stopped  # noqa: PLW0603 - a process is stopped once
    _stopped = number
    for each in STOPS:
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)


def main() -> None:
    """Run a command. Ctrl-C ends it with 130 and SIGTERM with 143; nothing is left behind, and there is no traceback.

    While modules are imported there is nothing to clean up, and the operating system ends the process. It does so too
    to a rank that `torchrun` terminates, which may be waiting for one that will never answer.
    """
    wanted = [each for each in STOPS if signal.getsignal(each) is not signal.SIG_IGN]  # nohup, or a job in background
    for each in wanted:
        signal.signal(each, signal.SIG_DFL)
    from waybill.cli.app import main as run

    for each in wanted:
        if each == signal.SIGINT or os.environ.get("WORLD_SIZE", "1") == "1":
            signal.signal(each, _stop)
    try:
        run()
    except BaseException:
        if _stopped:
            sys.exit(128 + _stopped)  # whatever an import made of being stopped
        raise
    finally:
        for each in () if _stopped else wanted:
            signal.signal(each, signal.SIG_DFL)  # there is nothing left to clean up


if __name__ == "__main__":
    main()
