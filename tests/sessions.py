"""Packages in ONNX Runtime, driven by hand: every input is made here, and nothing of the library's runtime is used."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from checkpoints import Array

Prompts = Sequence[Sequence[int]]
FLOATS = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


class Package:
    """An opened package: one session on the CPU, one thread."""

    def __init__(self, folder: Path) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self.session = ort.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
        self.graph = ir.load(folder / "model.onnx").graph
        self.config: dict[str, Any] = json.loads((folder / "genai_config.json").read_text())
        self.past = [given for given in self.session.get_inputs() if given.name.startswith("past")]
        self.dtype = FLOATS[self.past[0].type]

    @property
    def operators(self) -> list[str]:
        """Operator types in running order."""
        return [node.op_type for node in self.graph]

    def place(self, name: str) -> tuple[str, int, int]:
        """File, offset and bytes of an initializer."""
        tensor = self.graph.initializers[name].const_value
        assert isinstance(tensor, ir.ExternalTensor)
        return str(tensor.location), tensor.offset or 0, tensor.length or 0

    def no_cache(self, requests: int, length: int = 0) -> list[Array]:
        return [np.zeros((requests, given.shape[1], length, given.shape[3]), self.dtype) for given in self.past]

    def step(self, ids: Array, mask: Array, past: list[Array]) -> tuple[Array, list[Array]]:
        """Logits and the cache, which has grown."""
        names = (given.name for given in self.past)
        feeds = {"input_ids": ids, "attention_mask": mask, **dict(zip(names, past, strict=True))}
        logits, *present = self.session.run(None, feeds)
        return logits, present

    def prefill(self, prompts: Prompts) -> tuple[Array, list[Array]]:
        """Prompts of any lengths at once, padded on the right."""
        longest = max(map(len, prompts))
        ids = np.zeros((len(prompts), longest), np.int64)
        mask = np.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = prompt
            mask[row, : len(prompt)] = 1
        return self.step(ids, mask, self.no_cache(len(prompts)))

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """Prefill, then one token after the other, each step's cache given to the next."""
        logits, cache = self.prefill([prompt])
        made = [int(logits[0, -1].argmax())]
        while len(made) < count:
            mask = np.ones((1, len(prompt) + len(made)), np.int64)
            logits, cache = self.step(np.array([[made[-1]]]), mask, cache)
            made.append(int(logits[0, -1].argmax()))
        return made

    def greedy_in_place(self, prompt: Sequence[int], count: int, room: int) -> list[int]:
        """The same with a buffer for `room` positions that is past and present at once: the cache is never copied."""
        binding = self.session.io_binding()
        cache = [ort.OrtValue.ortvalue_from_numpy(values) for values in self.no_cache(1, room)]
        for given, values in zip(self.past, cache, strict=True):
            binding.bind_ortvalue_input(given.name, values)
            binding.bind_ortvalue_output(given.name.replace("past_key_values", "present"), values)
        made: list[int] = []
        new = list(prompt)
        while len(made) < count:
            binding.bind_cpu_input("input_ids", np.array([new]))
            total = len(prompt) + len(made)
            binding.bind_cpu_input("attention_mask", np.ones((1, total), np.int64))
            binding.bind_output("logits")
            self.session.run_with_iobinding(binding)
            made.append(int(binding.get_outputs()[-1].numpy()[0, -1].argmax()))
            new = made[-1:]
        return made
