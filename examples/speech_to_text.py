"""Whisper: sound to a log-mel spectrogram, to states, to tokens.

python examples/speech_to_text.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
from transformers import WhisperConfig, WhisperForConditionalGeneration

import waybill
from waybill.media.audio import log_mel, read_log_mel
from waybill.onnx.folder import read_package
from waybill.onnx.runtime.model import Inputs, open_model

config = WhisperConfig(
    d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=96, decoder_ffn_dim=96, vocab_size=128, max_source_positions=50, max_target_positions=32,
    pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3, begin_suppress_tokens=[2],
)  # fmt: skip
PREPROCESSOR = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 80, "chunk_length": 1}

with tempfile.TemporaryDirectory() as place:
    checkpoint, package = Path(place) / "checkpoint", Path(place) / "package"
    WhisperForConditionalGeneration(config).save_pretrained(checkpoint)
    (checkpoint / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))

    built = waybill.build(checkpoint)
    built.save(package)
    print(f"{', '.join(built)}: {built.nbytes:,} bytes")

    front_end = read_log_mel(package)
    seconds = np.arange(front_end.sampling_rate) / front_end.sampling_rate
    features, _ = log_mel(np.sin(2 * np.pi * 440 * seconds).astype(np.float32), front_end)
    model = open_model(read_package(package))
    answer = model.generate(Inputs([], [{"input_features": features[None]}]), max_new_tokens=8)
    print(answer.token_ids)
