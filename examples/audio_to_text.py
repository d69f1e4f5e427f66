"""Qwen2-Audio: recordings among the words of a prompt.

python examples/audio_to_text.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

import waybill
from waybill.media.audio import log_mel, read_log_mel
from waybill.onnx.folder import read_package
from waybill.onnx.runtime.model import Inputs, open_model

AUDIO = 100
config = Qwen2AudioConfig(
    audio_config={"model_type": "qwen2_audio_encoder", "d_model": 32, "encoder_layers": 2, "encoder_ffn_dim": 64,
                  "encoder_attention_heads": 2, "num_mel_bins": 80, "max_source_positions": 50},
    text_config={"model_type": "qwen2", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
                 "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128},
    audio_token_index=AUDIO,
)  # fmt: skip
PREPROCESSOR = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 80, "chunk_length": 1}

with tempfile.TemporaryDirectory() as place:
    checkpoint, package = Path(place) / "checkpoint", Path(place) / "package"
    Qwen2AudioForConditionalGeneration(config).save_pretrained(checkpoint)
    (checkpoint / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))

    for name, component in waybill.build(checkpoint).items():
        print(f"{name}: {component.nbytes:,} bytes")
    waybill.build(checkpoint).save(package)

    front_end = read_log_mel(package)
    recording = np.random.default_rng(0).standard_normal(front_end.sampling_rate // 2).astype(np.float32)
    features, valid = log_mel(recording, front_end)
    mask = (np.arange(features.shape[1]) < valid).astype(np.int64)
    model = open_model(read_package(package))
    sound = {"input_features": features[None], "feature_attention_mask": mask[None]}
    answer = model.generate(Inputs([[5, AUDIO, 6, 7]], [sound]), max_new_tokens=8)  # one token stands for all of it
    print(answer.token_ids)
