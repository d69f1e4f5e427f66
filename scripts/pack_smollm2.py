"""Pack the demo model to 4 bits with auto-round, as people who publish packed checkpoints do.

`python -m scripts.pack_smollm2` prints the folder. Needs the `producers` extra, and no network: weights are rounded to
nearest, no text is looked at.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from scripts.unpack_smollm2 import made, unpacked

# Asymmetric, which auto-round writes in the AWQ layout, in groups that divide both 576 and 1536: of symmetric and
# asymmetric, 32 and 64, it costs the least perplexity. Freezing what the imports left behind takes it out of the
# garbage collections around every layer, which are most of the time otherwise.
PRODUCE = """
import gc, sys
from auto_round import AutoRound
gc.freeze()
AutoRound(
    sys.argv[1], bits=4, group_size=32, sym=False, iters=0, disable_opt_rtn=True, disable_model_free=True,
    enable_torch_compile=False, device_map="cpu",
).quantize_and_save(sys.argv[2], format="auto_round")
"""


def packed(source: Path) -> Path:
    """`source` packed, in a folder beside it that is made on the first call; processes wait for the one making it."""
    folder = source.with_name(f"{source.name}-auto-round-w4")
    return made(folder, lambda staging: _produce(source.resolve(), staging))


def _produce(source: Path, staging: Path) -> Path:
    """In a process of its own: what the producer logs, warns of and leaves in memory stays there."""
    command = [sys.executable, "-c", PRODUCE, str(source), str(staging)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=staging, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise RuntimeError(f"auto-round ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return next(staging.glob("*/config.json")).parent  # auto-round adds a level named by scheme


if __name__ == "__main__":
    print(packed(unpacked()))
