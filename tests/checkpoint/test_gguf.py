"""GGUF headers, hostile ones above all: every refusal says which file, which field, and what is wrong with it."""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import ggufs
import waybill
from checkpoints import Array
from hostile.gguf_headers import ARRAY, MALFORMED, STRING, U32, header, info, pair, text
from waybill.checkpoint import read_checkpoint
from waybill.checkpoint.gguf import BLOCKS, MAX_VALUES, read_gguf, shortest
from waybill.config import RotaryConfig
from waybill.errors import BadHeader, MissingShard, NotACheckpoint, NoTokenizer, Refused, WaybillError, WrongLength
from waybill.overview import describe
from waybill.text.gguf import documents


def refusal(folder: Path, octets: bytes, kind: type[WaybillError] = BadHeader) -> WaybillError:
    path = folder / "model.gguf"
    path.write_bytes(octets)
    with pytest.raises(kind) as refused:
        read_gguf(path, path.name)
    assert refused.value.where == "model.gguf"
    assert type(refused.value) is kind
    return refused.value


@pytest.mark.parametrize("name", MALFORMED)
def test_a_header_that_breaks_a_promise_is_refused_with_the_field(name: str, tmp_path: Path) -> None:
    octets, found = MALFORMED[name]
    error = refusal(tmp_path, octets)
    assert error.what == "a GGUF header is malformed"
    assert found in error.found


@pytest.mark.parametrize(
    ("infos", "data", "what", "found"),
    [
        ([info(shape=(1 << 40,))], 16, "truncated", "bytes are missing"),
        ([info(shape=(1 << 62, 1 << 62))], 16, "truncated", "bytes are missing"),
        ([info()], 12, "truncated", "4 bytes are missing"),
        ([info()], 40, "bytes after its data", "24 bytes too many"),
    ],
)
def test_a_length_that_the_header_does_not_imply_is_refused(
    infos: list[bytes], data: int, what: str, found: str, tmp_path: Path
) -> None:
    error = refusal(tmp_path, header(infos=infos, data=data), WrongLength)
    assert what in error.what
    assert found in error.found


@pytest.mark.parametrize(
    ("octets", "found"),
    [
        (b"", "nothing, 0 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
        (b"<!DOCTYPE html>" + bytes(64), "an HTML page"),
        (b"GGML" + bytes(64), "something else"),
    ],
)
def test_a_file_that_is_no_gguf_is_called_what_it_is(octets: bytes, found: str, tmp_path: Path) -> None:
    error = refusal(tmp_path, octets)
    assert error.what == "a file named .gguf is not GGUF"
    assert error.found.startswith(found)


def test_every_beginning_of_a_file_is_refused_and_none_is_a_traceback(tmp_path: Path) -> None:
    ggufs.model("llama", "Q8_0").write(tmp_path / "whole.gguf")
    whole = (tmp_path / "whole.gguf").read_bytes()
    for length in [*range(0, 400), *range(400, len(whole), len(whole) // 40)]:
        (tmp_path / "part.gguf").write_bytes(whole[:length])
        with pytest.raises((BadHeader, WrongLength)):
            read_gguf(tmp_path / "part.gguf", "part.gguf")


def test_any_byte_of_a_header_may_be_wrong_and_none_is_a_traceback(tmp_path: Path) -> None:
    whole = header(pairs=[pair("general.alignment", U32, struct.pack("<I", 32)), pair("a", STRING, text("b"))])
    for at in range(len(whole) - 16):
        for flip in (1, 0x80, 0xFF):
            octets = bytearray(whole)
            octets[at] ^= flip
            (tmp_path / "model.gguf").write_bytes(octets)
            try:
                read_gguf(tmp_path / "model.gguf", "model.gguf")
            except WaybillError as error:
                assert error.found


def test_more_values_than_any_vocabulary_are_refused_before_they_are_read(tmp_path: Path) -> None:
    many = pair("a", ARRAY, struct.pack("<IQ", 0, MAX_VALUES + 1) + bytes(MAX_VALUES + 1))
    error = refusal(tmp_path, header(pairs=[many]))
    assert error.found == f"'a': more than {MAX_VALUES:,} values in all"


def test_types_and_sizes_of_blocks_are_those_of_gguf_itself() -> None:
    theirs = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {number: BLOCKS[number] for number in theirs} == theirs


def test_values_of_every_type_are_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "any")
    wanted: dict[str, Any] = {}
    for kind, value in {"uint8": 255, "int8": -3, "uint16": 65535, "int16": -300, "uint32": 1 << 31, "int32": -70000,
                        "float32": 1e-5, "bool": True, "string": "é", "uint64": 1 << 63, "int64": -(1 << 40),
                        "float64": 0.1, "array": ["a", "b"]}.items():  # fmt: skip
        getattr(writer, f"add_{kind}")(kind, value)
        wanted[kind] = value
    writer.add_tensor("w", np.zeros((3, 5), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = read_gguf(tmp_path / "model.gguf", "model.gguf")
    assert {key: read.metadata[key] for key in wanted} == wanted
    (tensor,) = read.file.tensors
    assert (tensor.name, str(tensor), tensor.nbytes) == ("w", "F16[3, 5]", 30)


@pytest.mark.parametrize("number", [0.0, 1e-5, 1e-6, 10000.0, 1e6, 0.1, float("inf"), 3.4028234663852886e38, 1e-45])
def test_a_float32_is_read_as_the_shortest_decimal_that_it_is(number: float) -> None:
    stored = struct.unpack("<f", struct.pack("<f", number))[0]
    assert struct.pack("<f", shortest(stored)) == struct.pack("<f", number)
    assert len(repr(shortest(stored))) <= len(repr(stored))


def test_the_config_is_what_config_json_would_say(tmp_path: Path) -> None:
    ggufs.model("qwen3", tied=True).write(tmp_path / "model.gguf")
    bill = waybill.plan(tmp_path / "model.gguf")
    config = bill.require_clean().text
    assert config is not None
    assert (config.num_layers, config.hidden_size, config.head_dim, config.num_kv_heads) == (2, 256, 64, 2)
    assert (config.rms_norm_eps, config.rotary_config.base, config.vocab_size) == (1e-5, 10000.0, ggufs.VOCAB)
    assert config.tie_word_embeddings


@pytest.mark.parametrize(
    ("key", "value", "code", "found"),
    [
        ("llama.attention.head_count", ("add_array", [4, 4]), "bad-config", "[4, 4]"),
        ("llama.rope.dimension_count", ("add_uint32", 32), "unsupported-rope", "partial_rotary_factor 0.5"),
        ("llama.rope.scaling.type", ("add_string", "longrope"), "unsupported-rope", "rope_type 'longrope'"),
        ("llama.context_length", ("add_string", "long"), "bad-config", "'long'"),
        ("llama.vocab_size", ("add_uint32", 97), "vocab-mismatch", "96 rows, vocab_size says 97"),
    ],
)
def test_metadata_that_cannot_be_followed_is_refused(
    key: str, value: tuple[str, Any], code: str, found: str, tmp_path: Path
) -> None:
    model = ggufs.model("llama")
    model.metadata[key] = value
    model.write(tmp_path / "model.gguf")
    problems = waybill.plan(tmp_path / "model.gguf").problems
    assert code in [problem.code for problem in problems]
    assert any(found in problem.found for problem in problems if problem.code == code)


def with_factors(path: Path, factors: Array) -> Path:
    model = ggufs.model("llama")
    model.weights["rope_freqs.weight"] = factors.astype(np.float32)
    model.write(path)
    return path


@pytest.mark.parametrize("factors", [np.linspace(1, 8, 32), np.zeros(32), np.full(31, 8.0)])
def test_factors_of_frequencies_that_are_no_published_scaling_are_refused(factors: Array, tmp_path: Path) -> None:
    (problem,) = waybill.plan(with_factors(tmp_path / "model.gguf", factors)).problems
    assert problem.code == "unsupported-rope"
    assert problem.found == "rope_type 'a factor for each frequency'"


def test_factors_of_frequencies_are_read_as_the_scaling_they_come_from(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}  # fmt: skip
    plain, scaled = (RotaryConfig(64, 64, 256, 10000.0, given).frequencies()[0] for given in (None, scaling))
    bill = waybill.plan(with_factors(tmp_path / "model.gguf", np.array(plain) / np.array(scaled)))
    text = bill.require_clean().text
    assert text is not None
    assert text.rotary_config.scaling == scaling
    assert bill.ignored == {"rope_freqs.weight": "its factors were read with the config"}


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "t5")
    writer.add_tensor("w", np.zeros(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (problem,) = waybill.plan(tmp_path / "model.gguf").problems
    assert problem.code == "unsupported-architecture"
    assert (problem.where, problem.found) == ("GGUF metadata: general.architecture", "'t5'")
    assert problem.expected == "llama | qwen2 | qwen3 | qwen3moe"


def test_what_the_metadata_leaves_out_is_not_guessed(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(header(pairs=[pair("general.architecture", STRING, text("llama"))]))
    problems = waybill.plan(tmp_path / "model.gguf").problems
    missing = {problem.where for problem in problems if "is missing" in problem.what}
    assert {f"GGUF metadata: {name}" for name in ("hidden_size", "num_hidden_layers", "rms_norm_eps")} <= missing


def test_a_file_without_metadata_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(header())
    (problem,) = waybill.plan(tmp_path / "model.gguf").problems
    assert (problem.code, problem.found) == ("unsupported-architecture", "none stated")


def test_a_model_in_several_files_is_one(tmp_path: Path) -> None:
    ggufs.model("qwen3", "Q8_0").write(tmp_path / "whole.gguf")
    split(tmp_path / "whole.gguf", tmp_path)
    parts = read_checkpoint(tmp_path / "m-00002-of-00002.gguf")
    whole = read_checkpoint(tmp_path / "whole.gguf")
    assert [shard.name for shard in parts.shards] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    assert {name: str(t) for name, t in parts.tensors.items()} == {name: str(t) for name, t in whole.tensors.items()}
    assert not waybill.plan(parts).problems
    for name, record in {record.source_name: record for record in waybill.records(whole)}.items():
        other = next(r for r in waybill.records(parts) if r.source_name == name)
        assert np.array_equal(waybill.dequantize(other), waybill.dequantize(record))


def test_a_missing_file_of_several_is_named(tmp_path: Path) -> None:
    ggufs.model("qwen3").write(tmp_path / "whole.gguf")
    split(tmp_path / "whole.gguf", tmp_path)
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(Refused) as refused:
        waybill.open(tmp_path / "m-00001-of-00002.gguf")
    (problem,) = refused.value.problems
    assert isinstance(problem, MissingShard)
    assert problem.expected == "m-00002-of-00002.gguf"


def test_a_folder_of_gguf_files_says_that_a_file_is_meant(tmp_path: Path) -> None:
    ggufs.model("llama").write(tmp_path / "model.gguf")
    with pytest.raises(NotACheckpoint) as refused:
        waybill.open(tmp_path)
    assert refused.value.found == "a folder without config.json, with model.gguf"
    assert refused.value.fix == f"give the path of the file, {tmp_path / 'model.gguf'}"


def split(path: Path, folder: Path) -> None:
    """The same model as two files, as gguf's own tools split it: the second has tensors and hardly any metadata."""
    reader = gguf.GGUFReader(path)
    for number in (1, 2):
        writer = gguf.GGUFWriter(folder / f"m-{number:05d}-of-00002.gguf", "qwen3")
        if number == 1:
            for name, entry in reader.fields.items():
                if name.startswith("qwen3."):
                    method = "add_float32" if isinstance(entry.contents(), float) else "add_uint32"
                    getattr(writer, method)(name, entry.contents())
        writer.add_uint16("split.no", number - 1)
        for tensor in reader.tensors[number - 1 :: 2]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


ODD_VALUES: list[tuple[str, Any]] = [
    ("add_string", "x"), ("add_string", ""), ("add_int32", -1), ("add_uint32", 0), ("add_uint64", (1 << 64) - 1),
    ("add_float32", float("nan")), ("add_float32", -1.0), ("add_bool", True), ("add_array", [1, 2]),
    ("add_array", ["a", "b"]),
]  # fmt: skip
KEYS = (
    "general.architecture", "llama.block_count", "llama.context_length", "llama.embedding_length", "llama.vocab_size",
    "llama.feed_forward_length", "llama.attention.head_count", "llama.attention.head_count_kv", "llama.expert_count",
    "llama.attention.key_length", "llama.attention.layer_norm_rms_epsilon", "llama.rope.freq_base",
    "llama.rope.dimension_count", "llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.rope.scale_linear",
    "tokenizer.ggml.tokens", "tokenizer.ggml.eos_token_id", "tokenizer.ggml.merges", "tokenizer.ggml.model",
    "tokenizer.ggml.pre", "tokenizer.ggml.token_type", "tokenizer.ggml.add_bos_token", "tokenizer.chat_template",
)  # fmt: skip


@pytest.mark.parametrize("key", KEYS)
def test_no_value_of_any_key_is_a_traceback(key: str, tmp_path: Path) -> None:
    tokens = ["a", "b", "ab"]
    good = {"tokenizer.ggml.model": ("add_string", "gpt2"), "tokenizer.ggml.tokens": ("add_array", tokens),
            "tokenizer.ggml.merges": ("add_array", ["a b"]), "tokenizer.ggml.pre": ("add_string", "gpt-2"),
            "tokenizer.ggml.bos_token_id": ("add_uint32", 0), "tokenizer.ggml.add_bos_token": ("add_bool", True),
            "llama.rope.scaling.type": ("add_string", "yarn"), "llama.rope.scaling.factor": ("add_float32", 2.0),
    }  # fmt: skip
    for number, odd in enumerate(ODD_VALUES):
        model = ggufs.model("llama")
        model.metadata = good | {key: odd}
        path = tmp_path / f"{number}.gguf"
        model.write(path)
        bill = waybill.plan(path)
        assert all(problem.found and problem.fix for problem in bill.problems)
        describe(read_checkpoint(path)).as_dict()
        with suppress(NoTokenizer):
            documents(read_checkpoint(path).metadata or {}, path.name)
