"""Graphs of each family, put together from parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from waybill.onnx.graph import Graph
from waybill.onnx.graphs.decoder import decoder_graphs
from waybill.onnx.graphs.llava import llava_graphs
from waybill.onnx.graphs.qwen2_audio import qwen2_audio_graphs
from waybill.onnx.graphs.t5 import t5_graphs
from waybill.onnx.graphs.whisper import whisper_graphs
from waybill.onnx.graphs.workbench import Workbench

GRAPHS: Mapping[str, Callable[[Any, Workbench], dict[str, Graph]]] = {
    "decoder": decoder_graphs,
    "t5": t5_graphs,
    "whisper": whisper_graphs,
    "llava": llava_graphs,
    "qwen2_audio": qwen2_audio_graphs,
}
"""By family: its graphs, by component, from its config."""
