"""Commands as the console script runs them, inside the test's process."""

from __future__ import annotations

import os
import sys

import pytest

from waybill.cli.app import main

Run = tuple[int, str, str]
Patch = pytest.MonkeyPatch
Capture = pytest.CaptureFixture[str]


def run(patch: Patch, capsys: Capture, *arguments: object) -> Run:
    """Exit code, stdout, stderr."""
    patch.setattr(sys, "argv", ["waybill", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    code = ended.value.code
    assert isinstance(code, int)
    assert "Traceback" not in out + err
    return code, out, err


def run_unread(patch: Patch, capsys: Capture, *arguments: object) -> Run:
    """The same with every weight out of reach."""

    def unread(*_: object) -> int:
        raise AssertionError("a weight was read")

    patch.setattr(os, "preadv", unread)
    return run(patch, capsys, *arguments)
