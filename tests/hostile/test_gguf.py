"""GGUF files that break a promise: every command refuses them."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

import ggufs
from hostile.gguf_headers import ARRAY, MALFORMED, STRING, U32, U64, header, info, pair, text
from strangers import FACTS, GENERATE, digest_of, judged, refused


@pytest.mark.parametrize("promise", MALFORMED)
def test_a_malformed_header_is_refused_by_every_command(tmp_path: Path, promise: str) -> None:
    octets, _ = MALFORMED[promise]
    (tmp_path / "model.gguf").write_bytes(octets)
    assert refused(tmp_path / "model.gguf", [*FACTS, *GENERATE]) == {"bad-header"}


LENGTHS = {
    "a tensor that ends after the file": header(infos=[info(shape=(1 << 40,))]),
    "a tensor that begins after the file": header(infos=[info(offset=1 << 40)]),
    "a product of axes beyond 64 bits": header(infos=[info(shape=(1 << 62, 1 << 62, 1 << 62, 4))]),
    "bytes after the last tensor": header(data=4096),
    "no tensors and no data": header(infos=[], data=0),
    "a string that ends after the file": header(pairs=[pair("a", STRING, struct.pack("<Q", 1 << 63) + b"x")]),
    "four million values in arrays of arrays": header(
        pairs=[pair("a", ARRAY, struct.pack("<IQ", ARRAY, 200_000) + struct.pack("<IQ", U32, 0) * 200_000)]
    ),
    "a million keys": header(pairs=[pair(f"{n:x}", U32, bytes(4)) for n in range(100_000)], keys=1_000_000),
    "an alignment of a gigabyte": header(pairs=[pair("general.alignment", U32, struct.pack("<I", 1 << 30))]),
    "an alignment that is a text": header(pairs=[pair("general.alignment", STRING, text("32"))]),
    "an alignment of 64 bits": header(pairs=[pair("general.alignment", U64, struct.pack("<Q", 1 << 63))]),
    "the first letters alone": b"GGUF",
    "four letters of something else": b"GGML" + bytes(100),
    "nothing": b"",
}


@pytest.mark.parametrize("promise", LENGTHS)
def test_a_length_or_place_beyond_the_file_is_refused_in_bounded_memory(tmp_path: Path, promise: str) -> None:
    (tmp_path / "model.gguf").write_bytes(LENGTHS[promise])
    assert refused(tmp_path / "model.gguf")


def test_a_pipe_under_that_name_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf")
    assert refused(tmp_path / "model.gguf") == {"not-a-checkpoint"}


def test_one_of_ninety_nine_thousand_files_is_refused_as_incomplete(tmp_path: Path) -> None:
    path = tmp_path / "model-00001-of-99999.gguf"
    ggufs.model("llama").write(path)
    assert "missing-shard" in refused(path, (["inspect", "--json"], ["plan"]))


def test_the_file_they_are_made_from_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    ggufs.model("llama", "Q8_0").write(path)
    outcomes = judged(path, [*FACTS, ["load"]])
    assert [outcome.exit for outcome in outcomes] == [0] * 5
    assert outcomes[-1].said == digest_of(path)
