"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

Dequantize = Annotated[
    bool, typer.Option("--dequantize", help="Compute with floats where GGUF blocks have no exact packed form.")
]
