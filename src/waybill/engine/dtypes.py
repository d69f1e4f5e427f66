"""Safetensors dtype tags as torch dtypes."""

from __future__ import annotations

import torch

TORCH_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U8": torch.uint8,
    "F8_E8M0": torch.uint8,  # torch knows that dtype only since 2.7; see `looked_up`
}
