"""Run by test_targets.py on a disk that was mounted for it: `mounted.py DISK CHECKPOINT full|read-only`.

Prints a JSON line for each export: what came of it, and what is on the disk after it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import waybill
from waybill.onnx import publish
from waybill.onnx.package import ModelPackage

publish.SLACK = -(1 << 40)  # or it would be refused before anything is written


def remount(disk: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", disk], check=True)


def export(package: ModelPackage, target: Path, *, overwrite: bool = False) -> str:
    try:
        package.save(target, overwrite=overwrite)
        code, found = "saved", ""
    except waybill.WaybillError as error:
        code, found = error.code, error.found
    print(json.dumps({"code": code, "found": found, "left": [path.name for path in target.parent.iterdir()]}))
    return code


def main(disk: Path, checkpoint: Path, what: str) -> None:
    package = waybill.build(checkpoint)
    if what == "full":
        kilobytes, code = 4, ""
        while code != "saved":
            remount(disk, f"size={kilobytes}k")
            code = export(package, disk / "package")
            kilobytes += 8
        return
    package.save(disk / "package")
    remount(disk, "ro")
    export(package, disk / "other")
    export(package, disk / "package", overwrite=True)


main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
