"""Safetensors headers: what is accepted covers the file, each byte once."""

from __future__ import annotations

import tempfile
from pathlib import Path

from checkpoints import file_bytes, llama, safetensors_bytes
from fuzz.mutation import mutate_json
from hostile.headers import MALFORMED
from waybill.checkpoint.header import DTYPE_BITS, read_header

SMALL = {name: tensor for name, tensor in llama(num_hidden_layers=1).tensors.items() if tensor.ndim == 1}
SEEDS = [file_bytes(header, bytes(12)) for header, _ in MALFORMED.values()] + [safetensors_bytes(SMALL)]
PATH = Path(tempfile.mkdtemp()) / "model.safetensors"


def check(octets: bytes) -> None:
    """Read a file that holds them."""
    PATH.write_bytes(octets)
    header = read_header(PATH, PATH.name)
    at = 8 + int.from_bytes(octets[:8], "little")
    for tensor in header.tensors:
        elements = 1
        for length in tensor.shape:
            elements *= length
        assert tensor.offset == at and tensor.nbytes * 8 == elements * DTYPE_BITS[tensor.dtype], tensor
        at += tensor.nbytes
    assert at == len(octets) == header.size
    assert len({tensor.name for tensor in header.tensors}) == len(header.tensors)


def mutate(octets: bytes, largest: int, seed: int) -> bytes:
    """Mutate the JSON and say its new length, except now and then."""
    length = int.from_bytes(octets[:8], "little")
    text, data = octets[8 : 8 + length], octets[8 + length :]
    changed = mutate_json(text, max(largest - 8 - len(data), 2), seed)
    return file_bytes(changed, data)[:largest] if seed % 8 else mutate_json(octets, largest, seed)
