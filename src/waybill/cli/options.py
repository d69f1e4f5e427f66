"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

Dequantize = Annotated[
    bool, typer.Option("--dequantize", help="Compute with floats where GGUF blocks have minimums, or tables of values.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document, a refusal too: see docs/schemas.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No notes, progress or timings on stderr; refusals stay.")]
