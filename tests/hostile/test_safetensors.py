"""Checkpoints whose weight file breaks a promise: every command refuses them, or reads exactly the weights intended."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from checkpoints import file_bytes, llama, safetensors_bytes
from hostile.headers import MALFORMED
from strangers import digest_of, judged, read_or_refused, refused

RECIPE = llama(num_hidden_layers=1)
WHOLE = safetensors_bytes(RECIPE.tensors)
START = 8 + int.from_bytes(WHOLE[:8], "little")


def written(folder: Path, content: bytes) -> Path:
    RECIPE.write(folder)
    (folder / "model.safetensors").write_bytes(content)
    return folder


@pytest.mark.parametrize("promise", MALFORMED)
def test_a_malformed_header_is_refused_by_every_command(tmp_path: Path, promise: str) -> None:
    header, _ = MALFORMED[promise]
    assert refused(written(tmp_path, file_bytes(header, bytes(12)))) == {"bad-header"}


WRONG_LENGTHS = {
    "a header that is longer than its file": struct.pack("<Q", 1 << 20) + b"{}",
    "a header of eight exabytes": struct.pack("<Q", 1 << 63) + b"{}",
    "nothing after the length of the header": struct.pack("<Q", 0),
    "fewer bytes than the length of the header takes": b"\x10\0\0",
    "no bytes at all": b"",
    "one byte of the data missing": WHOLE[:-1],
    "all of the data missing": WHOLE[:START],
    "one byte after the data": WHOLE + b"\0",
    "a second file after the first": WHOLE + WHOLE,
}


@pytest.mark.parametrize("promise", WRONG_LENGTHS)
def test_a_file_of_another_length_than_its_header_says_is_refused(tmp_path: Path, promise: str) -> None:
    codes = refused(written(tmp_path, WRONG_LENGTHS[promise]))
    assert codes <= {"bad-header", "wrong-length", "not-safetensors"}


METADATA: dict[str, Any] = {
    "a list": [1],
    "a number": 1e308,
    "null": None,
    "an object of objects": {"format": {"a": {}}},
    "a tensor's entry": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
    "a million characters": {"format": "x" * 1_000_000},
}


@pytest.mark.parametrize("kind", METADATA)
def test_metadata_of_a_file_is_not_looked_at_whatever_it_is(tmp_path: Path, kind: str) -> None:
    intended = digest_of(RECIPE.write(tmp_path / "intended"))
    header = json.loads(WHOLE[8:START]) | {"__metadata__": METADATA[kind]}
    assert read_or_refused(intended, written(tmp_path / "stranger", file_bytes(header, WHOLE[START:]))) == [True]


def test_names_in_another_order_than_their_bytes_are_the_same_weights(tmp_path: Path) -> None:
    intended = digest_of(RECIPE.write(tmp_path / "intended"))
    header = dict(reversed(json.loads(WHOLE[8:START]).items()))
    assert read_or_refused(intended, written(tmp_path / "stranger", file_bytes(header, WHOLE[START:]))) == [True]


NAMES = {
    "a path": "../../../etc/passwd",
    "a terminal's commands": "\x1b[2J\x1b]0;owned\x07",
    "a zero byte": "model.\0.weight",
    "no characters": "",
    "a million characters": "x" * 1_000_000,
    "text that runs backwards": "\u202egnp.weight",
    "formatting": "{0.__class__}%s%n",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_under_a_strange_name_is_refused_and_the_name_only_shown(tmp_path: Path, name: str) -> None:
    header = {NAMES[name]: {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}
    assert "unclaimed-weight" in refused(written(tmp_path, file_bytes(header, bytes(4))))


def test_a_hundred_thousand_empty_tensors_are_refused_in_bounded_memory(tmp_path: Path) -> None:
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    content = file_bytes({f"model.layers.{i}.mlp.experts.{i}.down_proj.weight": empty for i in range(100_000)})
    assert refused(written(tmp_path, content), (["inspect", "--json"],))


def test_a_weight_of_a_terabyte_that_is_not_there_is_refused(tmp_path: Path) -> None:
    folder = written(
        tmp_path, file_bytes({"model.norm.weight": {"dtype": "U8", "shape": [1 << 40], "data_offsets": [0, 1 << 40]}})
    )
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size + (1 << 40))
    assert refused(folder)


def test_the_checkpoint_they_are_made_from_is_read(tmp_path: Path) -> None:
    folder = RECIPE.write(tmp_path)
    assert [outcome.exit for outcome in judged(folder)] == [0] * 4
    assert read_or_refused(digest_of(folder), folder) == [True]
