"""What the engine asks of a plan. No torch here: planning a load must not wait for it."""

from __future__ import annotations

from waybill.blueprint import DECODER_MERGES, decoder_parameters
from waybill.plan.target import Target

TORCH = Target("torch", DECODER_MERGES, decoder_parameters)
"""The PyTorch engine: q, k, v and gate, up merged; experts in banks."""
