"""waybill.json of a package: read, held against graph and files, and what it describes is what it was told."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

import waybill
from checkpoints import llama
from fuzz.mutation import mutate_json as mutate
from packing import Scheme, pack
from waybill.errors import Refused
from waybill.onnx.verify.digests import check_digests
from waybill.onnx.verify.entries import read_entries
from waybill.onnx.verify.structure import examine, overlaps

__all__ = ["SEEDS", "check", "mutate"]

ROOT = Path(tempfile.mkdtemp())
PACKED = pack(llama(np.float32, num_hidden_layers=1), Scheme("gptq", 4, 32)).packed
for _name, _recipe in (("float", llama(np.float32, num_hidden_layers=1)), ("packed", PACKED)):
    waybill.build(_recipe.write(ROOT / f"{_name} checkpoint")).save(ROOT / _name)
FOLDERS = (ROOT / "float", ROOT / "packed")
SEEDS = [(folder / "waybill.json").read_bytes() for folder in FOLDERS]


def check(octets: bytes) -> None:
    """Hold the packages against this bill: what is in order lies inside their files, with the digests it states."""
    problems = []
    for folder in FOLDERS:
        (folder / "waybill.json").write_bytes(octets)
        package = read_entries(folder)
        for component in package.components.values():
            found, sound = examine(folder, component)
            for entry in sound:
                file = (folder / entry.file).resolve()
                assert file.is_relative_to(folder.resolve()) and entry.end <= file.stat().st_size, entry
            problems += [*found, *check_digests(folder, sound, lambda _: None), *overlaps(sound)]
    raise Refused(problems)
