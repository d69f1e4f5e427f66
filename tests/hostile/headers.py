"""Safetensors headers that each break one promise of the format, and the words the refusal must hold."""

from __future__ import annotations

import json
from typing import Any

GOOD = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


def entry(**changes: Any) -> dict[str, Any]:
    return {"layers.0.w": GOOD | changes}


TWICE = b'{"w":' + json.dumps(GOOD).encode() + b',"w":' + json.dumps(GOOD).encode() + b"}"
SECOND = GOOD | {"data_offsets": [4, 8]}
MALFORMED = {
    "not json": (b"{nope", "property name"),
    "an array": (b"[]", "does not start with '{'"),
    "a leading space": (b" {}", "does not start with '{'"),
    "nothing": (b"", "does not start with '{'"),
    "not utf-8": (b'{"\xff": 1}', "not UTF-8"),
    "half a character": (b'{"\\ud800":' + json.dumps(GOOD).encode() + b"}", "is no Unicode name"),
    "nan": (b'{"w": NaN}', "NaN is not JSON"),
    "too many digits": (b'{"w": ' + b"9" * 5000 + b"}", "5000 digits"),
    "deep nesting": (b'{"w":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    "a name twice": (TWICE, "'w' occurs twice"),
    "a field twice": (b'{"w": {"dtype": "F32", "dtype": "F16", "shape": [2], "data_offsets": [0, 4]}}', "'dtype'"),
    "no entry": ({"w": None}, "'w' lacks dtype, shape or data_offsets"),
    "half an entry": ({"w": {"dtype": "F32", "shape": [1]}}, "'w' lacks dtype, shape or data_offsets"),
    "an overlap": ({"v": GOOD, "w": GOOD | {"data_offsets": [2, 6]}}, "'w' at data offset 2 overlaps"),
    "two names for one range": ({"v": GOOD, "w": GOOD}, "'w' at data offset 0 overlaps"),
    "a gap": ({"v": GOOD, "w": GOOD | {"data_offsets": [8, 12]}}, "'w' at data offset 8 leaves a gap"),
    "a gap at the start": ({"w": SECOND}, "'w' at data offset 4 leaves a gap"),
    "a far offset": ({"w": GOOD | {"data_offsets": [1 << 62, (1 << 62) + 4]}}, f"{1 << 62} leaves a gap"),
    "an offset of 64 bits": (entry(data_offsets=[0, 1 << 64]), f"[0, {1 << 64}]"),
    "a negative offset": (entry(data_offsets=[-4, 0]), "[-4, 0]"),
    "offsets backwards": (entry(data_offsets=[4, 0]), "needs 4 bytes and is given -4"),
    "three offsets": (entry(data_offsets=[0, 2, 4]), "[0, 2, 4]"),
    "offsets as text": (entry(data_offsets=["0", "4"]), "['0', '4']"),
    "offsets as floats": (entry(data_offsets=[0, 4.0]), "[0, 4.0]"),
    "offsets as an object": (entry(data_offsets={"0": 4}), "data_offsets"),
    "too few bytes": (entry(shape=[2]), "F32[2] needs 8 bytes and is given 4"),
    "too many bytes": (entry(dtype="F16"), "F16[1] needs 2 bytes and is given 4"),
    "a product beyond 64 bits": (entry(shape=[1 << 32, 1 << 32], data_offsets=[0, 0]), "73,786,976,294,838,206,464"),
    "a dimension of 63 bits": (entry(shape=[1 << 63]), f"[{1 << 63}]"),
    "a negative dimension": (entry(shape=[-1]), "shape [-1]"),
    "a boolean dimension": (entry(shape=[True]), "shape [True]"),
    "a float dimension": (entry(shape=[1.0]), "shape [1.0]"),
    "a dimension as text": (entry(shape=["1"]), "shape ['1']"),
    "a shape as a number": (entry(shape=1), "shape 1"),
    "a shape of a hundred axes": (entry(shape=[1] * 100), "shape [1, 1"),
    "an unknown dtype": (entry(dtype="F128"), "unknown dtype 'F128'"),
    "a dtype in lower case": (entry(dtype="f32"), "unknown dtype 'f32'"),
    "a dtype as a list": (entry(dtype=["F32"]), "unknown dtype"),
    "a dtype as null": (entry(dtype=None), "unknown dtype 'None'"),
}  # fmt: skip
