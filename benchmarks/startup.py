"""Time to the first token: from starting the command to its end, one token made."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.measure import Row, in_turn, process, warm

PROMPT = "The history of the shipping container begins with"


def model() -> Path:
    """The demo model's folder, in the page cache."""
    folder = Path(process("-m", "scripts.unpack_smollm2")["output"].strip())
    warm(folder / "model.safetensors")
    return folder


def rows(runs: int) -> Iterator[Row]:
    """One row."""
    folder = str(model())
    taken = in_turn(
        {
            "waybill": partial(process, "-m", "waybill", "generate", folder, "--prompt", PROMPT, "-n", "1"),
            "transformers": partial(process, "-m", "benchmarks.startup", folder),
        },
        runs,
    )
    ours, theirs = taken["waybill"], taken["transformers"]
    ratio = ours.median() / theirs.median()
    yield Row(
        "time to first token, SmolLM2-135M float32, whole process",
        ours.text(),
        f"transformers {theirs.text()}",
        f"{ratio:.2f} × transformers",
        "≤ 0.5 ×",
        ratio <= 0.5,
        "importing torch, then reading 538 MB",
    )


def main(folder: str) -> None:
    """What one writes with transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    network = AutoModelForCausalLM.from_pretrained(folder)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    print(tokenizer.decode(network.generate(**inputs, max_new_tokens=1, do_sample=False)[0]))


if __name__ == "__main__":
    main(sys.argv[1])
