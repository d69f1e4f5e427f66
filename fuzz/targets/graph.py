"""A package's graph: the structure that waybill.json is held against, from protobuf bytes of any kind."""

from __future__ import annotations

from dataclasses import replace

from blake3 import blake3

from fuzz.targets.bill import FOLDERS
from fuzz.targets.bill import SEEDS as BILLS
from waybill.errors import Refused
from waybill.onnx.verify.entries import read_entries
from waybill.onnx.verify.structure import examine

SEEDS = [(folder / "model.onnx").read_bytes() for folder in FOLDERS]
for _folder, _bill in zip(FOLDERS, BILLS, strict=True):
    (_folder / "waybill.json").write_bytes(_bill)
PACKAGES = [read_entries(folder) for folder in FOLDERS]


def check(octets: bytes) -> None:
    """Hold this graph against the bills."""
    problems = []
    for folder, package in zip(FOLDERS, PACKAGES, strict=True):
        (folder / "model.onnx").write_bytes(octets)
        component = replace(package.components["decoder"], digest=blake3(octets).hexdigest())
        problems += examine(folder, component)[0]
    raise Refused(problems)
