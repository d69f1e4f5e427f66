"""GGUF files: header, metadata as a config, the plan, the tokenizer and the template inside."""

from __future__ import annotations

import json
import os
import struct
import tempfile
from contextlib import suppress
from pathlib import Path

import ggufs
import waybill
from hostile.gguf_headers import ARRAY, MALFORMED, STRING, U32, header, pair, text
from waybill.checkpoint import read_checkpoint
from waybill.errors import NoTokenizer, Refused
from waybill.overview import describe
from waybill.text.gguf import settings_of
from waybill.text.tokenizer import read_tokenizer

PATH = Path(tempfile.mkdtemp()) / "model.gguf"
ggufs.model("llama").write(PATH)
WHOLE = PATH.read_bytes()
DATA = sum(tensor.nbytes for tensor in read_checkpoint(PATH).tensors.values())
HEADER = WHOLE[: len(WHOLE) - DATA]
WORDS = [
    pair("tokenizer.ggml.model", STRING, text("gpt2")),
    pair("tokenizer.ggml.tokens", ARRAY, struct.pack("<IQ", STRING, 3) + text("a") + text("b") + text("ab")),
    pair("tokenizer.ggml.merges", ARRAY, struct.pack("<IQ", STRING, 1) + text("a b")),
    pair("tokenizer.ggml.bos_token_id", U32, bytes(4)),
    pair("tokenizer.chat_template", STRING, text("{{ messages }}")),
]
SEEDS = [HEADER, header(pairs=WORDS, infos=[]), *(octets for octets, _ in MALFORMED.values())]


def check(octets: bytes) -> None:
    """Read, report and plan a file of this header, before as much data as there should be."""
    PATH.write_bytes(octets)
    os.truncate(PATH, -(-len(octets) // 32) * 32 + DATA)
    with suppress(NoTokenizer):
        read_tokenizer(PATH)
    checkpoint = read_checkpoint(PATH)
    settings_of(checkpoint.metadata or {})
    size = PATH.stat().st_size
    assert checkpoint.problems or all(tensor.offset + tensor.nbytes <= size for tensor in checkpoint.tensors.values())
    json.dumps(describe(checkpoint).as_dict(), allow_nan=False)
    bill = waybill.plan(checkpoint)
    read = {source for binding in bill.bindings for source in binding.sources}
    assert bill.problems or read | bill.ignored.keys() == checkpoint.tensors.keys()
    raise Refused(bill.problems)
