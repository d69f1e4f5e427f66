"""T5: an encoder and a decoder, from a checkpoint to a package of two graphs, to tokens.

python examples/text_to_text.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from transformers import T5Config, T5ForConditionalGeneration

import waybill
from waybill.onnx.folder import read_package
from waybill.onnx.runtime.model import Inputs, open_model

config = T5Config(
    d_model=64, d_kv=16, d_ff=96, num_heads=4, num_layers=2, num_decoder_layers=3, vocab_size=128,
    feed_forward_proj="gated-gelu", decoder_start_token_id=0,
)  # fmt: skip

with tempfile.TemporaryDirectory() as place:
    checkpoint, package = Path(place) / "checkpoint", Path(place) / "package"
    T5ForConditionalGeneration(config).save_pretrained(checkpoint)

    bill = waybill.plan(checkpoint, "onnx")  # from headers and config alone
    print(f"{bill.summary()}; {bill.bytes_read:,} bytes to read")

    built = waybill.build(checkpoint)
    built.save(package)
    print(f"{', '.join(built)}: {built.nbytes:,} bytes, of which {built.shared_bytes:,} serve both graphs")

    report = waybill.verify(package, checkpoint)
    print(f"{report.weights} weights equal the checkpoint; {report.runs['decoder']}")

    model = open_model(read_package(package))
    answer = model.generate(Inputs([[5, 6, 7, 8], [9, 10]]), max_new_tokens=8)
    print(answer.token_ids)
