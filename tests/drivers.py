"""Packages of several graphs in ONNX Runtime, driven by hand: nothing of the library's runtime is used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from checkpoints import Array

FLOATS = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


class Driver:
    """Every graph of a package in a session of its own."""

    def __init__(self, folder: Path) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        files = {"decoder" if path.stem == "model" else path.stem: path for path in sorted(folder.glob("*.onnx"))}
        providers = ["CPUExecutionProvider"]
        self.sessions = {name: ort.InferenceSession(path, options, providers=providers) for name, path in files.items()}
        self.models = {name: onnx.load(path, load_external_data=False) for name, path in files.items()}

    def run(self, graph: str, feeds: Mapping[str, Array]) -> dict[str, Array]:
        session = self.sessions[graph]
        names = [output.name for output in session.get_outputs()]
        wanted = {given.name for given in session.get_inputs()}
        return dict(zip(names, session.run(names, {n: v for n, v in feeds.items() if n in wanted}), strict=True))

    def steps(
        self, inputs: Mapping[str, Array], prompts: Array, count: int, first: str, never: int | None
    ) -> tuple[Array, Array]:
        """Logits [count, B, V] and likeliest tokens [B, count]; prompts [B, S] are of one length."""
        given: dict[str, Array] = dict(self.run(first, inputs)) if first in self.sessions else {}
        mask = {"encoder_attention_mask": inputs["attention_mask"]} if "attention_mask" in inputs else {}
        decoder = self.sessions["decoder"]
        rows = len(prompts)
        past = {
            node.name: np.zeros((rows, node.shape[1], 0, node.shape[3]), FLOATS[node.type])
            for node in decoder.get_inputs()
            if node.name.startswith("past_")
        }
        ids, logits, made = prompts, [], []
        for step in range(count):
            total = prompts.shape[1] + step
            feeds = {"input_ids": ids, "attention_mask": np.ones((rows, total), np.int64), **given, **mask, **past}
            if "embedding" in self.sessions:
                feeds |= self.run("embedding", feeds)
            out = self.run("decoder", feeds)
            if never is not None:
                out["logits"][..., never] = -1e9
            logits.append(out["logits"][:, -1])
            ids = logits[-1].argmax(-1)[:, None]
            made.append(ids)
            past = {name: out[name.replace("past_key_values", "present")] for name in past if "cross" not in name} | {
                name: out[name.replace("past_cross_values", "present_cross")] if step == 0 else past[name]
                for name in past
                if "cross" in name
            }
            given = {name: values[:, :0] if values.ndim == 3 else values[:0] for name, values in given.items()}
        return np.stack(logits), np.concatenate(made, 1)

    def packed(self) -> dict[str, dict[str, tuple[int, int]]]:
        """By graph: every packed product's module, with its bits and block; q, k and v made as one are three."""
        found: dict[str, dict[str, tuple[int, int]]] = {}
        for name, model in self.models.items():
            held = found.setdefault(name, {})
            for node in every_node(model.graph):
                if node.op_type == "MatMulNBits":
                    number = {a.name: a.i for a in node.attribute}
                    module = node.input[1].removesuffix(".codes")
                    stem = module.removesuffix("qkv_proj")
                    for each in [module] if stem == module else [f"{stem}{letter}_proj" for letter in "qkv"]:
                        held[each] = (number["bits"], number["block_size"])
        return found


def every_node(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Nodes, and those of branches."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from every_node(attribute.g)
