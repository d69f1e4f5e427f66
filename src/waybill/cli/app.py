"""The commands, and what becomes of what they raise."""

from __future__ import annotations

import gc
import io
import os
import sys
from contextlib import suppress
from importlib.metadata import version
from typing import Annotated

import typer

from waybill.cli import compare, export, generate, inspect, plan, verify
from waybill.cli.outcome import in_json
from waybill.errors import WaybillError

app = typer.Typer(
    name="waybill",
    help="From a Hugging Face checkpoint to a model that runs, with every weight accounted for.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (inspect.inspect, plan.plan, export.export, verify.verify, compare.compare, generate.generate):
    app.command(command.__name__)(in_json(command))


def _version(wanted: bool) -> None:
    if wanted:
        print(f"waybill {version('waybill')}")
        raise typer.Exit


@app.callback()
def _top(
    _: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def _streams() -> None:
    """A closed stream swallows what it is told, instead of lending its number to a file or its text to another stream;
    what a terminal's encoding cannot write is escaped.
    """
    for number, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False))
        elif number and isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def main() -> None:
    """Run a command; a refusal is its text and exit code 1, never a traceback."""
    _streams()
    rank = os.environ.get("RANK", "0")
    speaker = "" if rank == "0" else f"rank {rank}: "
    gc.disable()  # what is imported, planned and loaded lives as long as the command does
    try:
        app()
    except WaybillError as error:
        if error.speaks or (error.speaks is None and not speaker):
            print(f"{speaker}{error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output has gone (`| head`); there is nobody left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except MemoryError as error:
        print(f"{speaker}stopped: there is not enough memory; {error}".removesuffix("; "), file=sys.stderr)
        sys.exit(1)
    except OSError as error:  # a full disk behind our output; what a command reads and writes has refusals of its own
        with suppress(OSError):
            print(f"{speaker}stopped by the operating system: {error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or what is still held back fails again on the way out
        sys.exit(1)
    finally:
        gc.freeze()  # or the interpreter looks for cycles among all of it on its way out
