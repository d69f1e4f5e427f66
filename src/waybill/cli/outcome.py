"""How a command ends: 0 done, 1 refused, 2 wrong usage, 3 two things compared differ."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import typer

from waybill.cli.render import write_json
from waybill.errors import Refused, WaybillError


def in_json(command: Callable[..., None]) -> Callable[..., None]:
    """The same command, which, asked for JSON, answers with a document when it is refused as well."""

    @wraps(command)
    def answering(**options: Any) -> None:
        try:
            command(**options)
        except WaybillError as error:
            if not options["as_json"] or os.environ.get("RANK", "0") != "0":
                raise
            problems = error.problems if isinstance(error, Refused) else [error]
            write_json("refusal", {"problems": [problem.as_dict() for problem in problems]})
            raise typer.Exit(error.exit_code) from None

    return answering
