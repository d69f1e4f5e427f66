"""Safetensors headers as they come from strangers: every broken promise is refused in words, with the file's name."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from checkpoints import file_bytes, llama, safetensors_bytes
from hostile.headers import GOOD, MALFORMED, entry
from waybill.checkpoint.header import MAX_HEADER_BYTES, FileHeader, read_header
from waybill.errors import BadHeader, CheckpointError, NotSafetensors, WrongLength

FILE = "model-00001-of-00002.safetensors"
WHOLE = safetensors_bytes(llama().tensors)


def read(folder: Path, content: bytes) -> FileHeader:
    path = folder / "blob"
    path.write_bytes(content)
    return read_header(path, FILE)


def refusal(folder: Path, content: bytes, kind: type[CheckpointError]) -> CheckpointError:
    with pytest.raises(CheckpointError) as refused:
        read(folder, content)
    assert type(refused.value) is kind
    assert refused.value.where == FILE
    assert refused.value.fix
    return refused.value


def test_tensors_come_in_file_order_with_absolute_offsets(tmp_path: Path) -> None:
    header = {
        "b": {"dtype": "F16", "shape": [2, 3], "data_offsets": [4, 16]},
        "__metadata__": {"format": "pt"},
        "a": GOOD,
        "empty": {"dtype": "I64", "shape": [0, 7], "data_offsets": [16, 16]},
        "scalar": {"dtype": "U8", "shape": [], "data_offsets": [16, 17]},
        "nibbles": {"dtype": "F4", "shape": [4], "data_offsets": [17, 19]},
    }
    content = file_bytes(header, bytes(19))
    found = read(tmp_path, content)
    start = len(content) - 19
    assert [(t.name, t.offset - start, t.nbytes) for t in found.tensors] == [
        ("a", 0, 4), ("b", 4, 12), ("empty", 16, 0), ("scalar", 16, 1), ("nibbles", 17, 2),
    ]  # fmt: skip
    assert found.size == len(content)
    assert str(found.tensors[1]) == "F16[2, 3]"


def test_a_file_of_the_reference_writer_reads_back(tmp_path: Path) -> None:
    arrays = {
        f"{np.dtype(dtype)}.{rank}": np.zeros((3,) * rank, dtype)
        for dtype in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.int8, np.uint8, np.bool_)
        for rank in range(4)
    }
    found = read(tmp_path, save(arrays))
    assert {t.name: (t.shape, t.nbytes) for t in found.tensors} == {k: (a.shape, a.nbytes) for k, a in arrays.items()}


def test_a_header_padded_with_spaces_is_read(tmp_path: Path) -> None:
    assert len(read(tmp_path, file_bytes(json.dumps(entry()).encode() + b"   ", bytes(4))).tensors) == 1


def test_a_header_is_read_whatever_lies_in_a_terabyte_of_data(tmp_path: Path) -> None:
    size = 1 << 40
    path = tmp_path / "sparse"
    path.write_bytes(file_bytes({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}))
    os.truncate(path, path.stat().st_size + size)
    assert read_header(path, FILE).tensors[0].nbytes == size


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_header_is_refused_with_the_broken_promise(tmp_path: Path, name: str) -> None:
    header, words = MALFORMED[name]
    error = refusal(tmp_path, file_bytes(header, bytes(12)), BadHeader)
    assert error.what == "a safetensors header is malformed"
    assert words in error.found
    assert len(error.found) < 400


def test_a_malformed_entry_is_named(tmp_path: Path) -> None:
    assert "'layers.0.w'" in refusal(tmp_path, file_bytes(entry(shape=[7]), bytes(4)), BadHeader).found


def test_a_tensor_that_ends_inside_a_byte_is_refused_in_bits(tmp_path: Path) -> None:
    error = refusal(tmp_path, file_bytes(entry(dtype="F4", shape=[3], data_offsets=[0, 1]), bytes(1)), BadHeader)
    assert "12 bits" in error.found


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-32-le"])
def test_a_header_in_another_encoding_is_refused(tmp_path: Path, encoding: str) -> None:
    refusal(tmp_path, file_bytes(json.dumps(entry()).encode(encoding), bytes(4)), BadHeader)


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES + 1, (1 << 64) - 1])
def test_an_impossible_header_length_is_refused_before_it_is_allocated(tmp_path: Path, length: int) -> None:
    error = refusal(tmp_path, struct.pack("<Q", length) + b"{}", BadHeader)
    assert error.expected == "at most 100,000,000 bytes"
    assert f"{length:,} bytes in a file of 10" in error.found


def test_an_impossible_header_length_is_refused_in_a_file_that_is_long_enough(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    path.write_bytes(struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{")
    os.truncate(path, 1 << 30)
    with pytest.raises(BadHeader, match="impossibly long"):
        read_header(path, FILE)


def test_a_header_longer_than_its_file_is_a_truncated_file(tmp_path: Path) -> None:
    error = refusal(tmp_path, struct.pack("<Q", 1000) + b"{}", WrongLength)
    assert error.what == "a shard is truncated"
    assert error.expected.startswith("at least 1,008 bytes")
    assert error.found == "10 bytes: 998 bytes are missing"


@pytest.mark.parametrize("kept", [len(WHOLE) - 8, len(WHOLE) - 1, len(WHOLE) // 2])
def test_a_truncated_shard_is_refused_with_the_missing_bytes(tmp_path: Path, kept: int) -> None:
    error = refusal(tmp_path, WHOLE[:kept], WrongLength)
    assert error.what == "a shard is truncated"
    assert error.expected == f"{len(WHOLE):,} bytes, by its header"
    assert error.found == f"{kept:,} bytes: {len(WHOLE) - kept:,} bytes are missing"
    assert error.fix == f"download {FILE} again"


@pytest.mark.parametrize("kept", [8, 200])
def test_a_shard_cut_inside_its_header_is_refused_with_the_missing_bytes(tmp_path: Path, kept: int) -> None:
    start = 8 + int.from_bytes(WHOLE[:8], "little")
    error = refusal(tmp_path, WHOLE[:kept], WrongLength)
    assert error.expected == f"at least {start:,} bytes, by its header"
    assert error.found == f"{kept} bytes: {start - kept:,} bytes are missing"


def test_bytes_after_the_data_are_refused_with_their_number(tmp_path: Path) -> None:
    error = refusal(tmp_path, WHOLE + bytes(64), WrongLength)
    assert error.what == "a shard has bytes after its data"
    assert error.found == f"{len(WHOLE) + 64:,} bytes: 64 bytes too many"


def test_a_file_of_zeros_is_refused(tmp_path: Path) -> None:
    assert "does not start with '{'" in refusal(tmp_path, bytes(4096), BadHeader).found


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1503300328\n"
DISGUISES = {
    "lfs": (LFS, "a Git LFS pointer", "git lfs pull"),
    "html": (b"<!DOCTYPE html><html><head>", "an HTML page", "not the web page"),
    "html after a line": (b"\n  <html lang=en>" + bytes(99), "an HTML page", "not the web page"),
    "zip": (b"PK\x03\x04\x00\x00\x08\x08" + bytes(99), "a zip archive", "convert"),
    "pickle 2": (b"\x80\x02}q\x00." + bytes(99), "a Python pickle", "convert"),
    "pickle 4": (b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00}." + bytes(99), "a Python pickle", "convert"),
    "gguf": (b"GGUF\x03\x00\x00\x00" + bytes(99), "a GGUF file", "safetensors"),
    "empty": (b"", "0 bytes", "again"),
    "seven bytes": (WHOLE[:7], "7 bytes", "again"),
}


@pytest.mark.parametrize("name", DISGUISES)
def test_another_kind_of_file_is_called_what_it_is(tmp_path: Path, name: str) -> None:
    content, kind, fix = DISGUISES[name]
    error = refusal(tmp_path, content, NotSafetensors)
    assert kind in error.found
    assert fix in error.fix


def test_an_empty_file_is_called_empty(tmp_path: Path) -> None:
    assert "empty" in refusal(tmp_path, b"", NotSafetensors).what


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotSafetensors, match="not a regular file"):
        read_header(tmp_path / "pipe", FILE)


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotSafetensors, match="not a regular file"):
        read_header(tmp_path, FILE)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
SIZES = st.lists(st.integers(-1, 9) | JSON, max_size=3)
ENTRY = st.fixed_dictionaries({}, optional={"dtype": st.sampled_from(["F32", "U8", "F4"]) | JSON,
                                            "shape": SIZES | JSON, "data_offsets": SIZES | JSON})  # fmt: skip


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.dictionaries(st.text(max_size=3), ENTRY | JSON, max_size=3), st.binary(max_size=40))
def test_no_header_is_both_accepted_and_wrong(tmp_path: Path, header: dict[str, Any], data: bytes) -> None:
    try:
        found = read(tmp_path, file_bytes(header, data))
    except CheckpointError:
        return
    assert sum(tensor.nbytes for tensor in found.tensors) == len(data)
    assert {tensor.name for tensor in found.tensors} == header.keys() - {"__metadata__"}


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.integers(0, len(WHOLE) - 1), st.binary(min_size=1, max_size=9))
def test_no_damage_ends_in_anything_but_a_refusal(tmp_path: Path, at: int, damage: bytes) -> None:
    content = WHOLE[:at] + damage + WHOLE[at + len(damage) :]
    try:
        found = read(tmp_path, content)
    except CheckpointError:
        return
    assert found.size == len(content)
