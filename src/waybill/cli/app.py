"""The commands, and how each ends: 0 done, 1 refused, 2 wrong usage."""

from __future__ import annotations

import gc
import os
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from waybill.cli import export, generate, inspect, plan, verify
from waybill.errors import BadOption, CastOverflow, FileChanged, NonFiniteWeight, WaybillError

app = typer.Typer(
    name="waybill",
    help="From a Hugging Face checkpoint to a model that runs, with every weight accounted for.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("inspect")(inspect.inspect)
app.command("plan")(plan.plan)
app.command("export")(export.export)
app.command("verify")(verify.verify)
app.command("generate")(generate.generate)


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


def main() -> None:
    """Run a command; a refusal is its text and exit code 1, never a traceback."""
    gc.disable()  # what is imported, planned and loaded lives as long as the command does
    try:
        app()
    except WaybillError as error:
        # What headers reveal, every rank finds alike, and one says it. What reading reveals may be one rank's alone.
        rank = os.environ.get("RANK", "0")
        if rank == "0" or isinstance(error, (FileChanged, CastOverflow, NonFiniteWeight)):
            print(error if rank == "0" else f"rank {rank}: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, BadOption) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output has gone (`| head`); there is nobody left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    finally:
        gc.freeze()  # or the interpreter looks for cycles among all of it on its way out
