"""Running a decoder graph in onnxruntime: prefill, then one token a step, in buffers that are never copied.

Shapes: B requests, S new tokens, T positions that the attention mask covers, L positions of the cache, V vocabulary.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np

from waybill.errors import BadPackage
from waybill.onnx import require
from waybill.onnx.folder import Package
from waybill.onnx.providers import PROVIDERS
from waybill.onnx.sampler import Floats, Sampler
from waybill.onnx.verify.entries import read_entries
from waybill.text.request import Generation, Sampling, check_request, collect

DTYPES: dict[str, type[np.floating[Any]]] = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
CACHE_STEP = 64
"""Cache lengths are multiples of it: few distinct sizes, whose memory is found again."""


class OnnxDecoder:
    """The graph of a package, open in a session of its own."""

    def __init__(self, package: Package) -> None:
        """Open the graph, and check that it is one this class can feed.

        Raises:
            MissingRuntime: onnxruntime is not installed.
            BadPackage: onnxruntime cannot open the graph, or the graph is no decoder.
        """
        self.package = package
        runtime = require("onnxruntime")
        options = runtime.SessionOptions()
        options.log_severity_level = 4  # what fails is raised, and told once
        options.intra_op_num_threads = package.threads
        try:
            self.session = runtime.InferenceSession(str(package.graph), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # the runtime's errors have no base class of their own
            raise _unopened(package, error) from None
        self.tensor = runtime.OrtValue.ortvalue_from_numpy
        inputs = {node.name: node for node in self.session.get_inputs()}
        outputs = {node.name: node for node in self.session.get_outputs()}
        self.caches = {
            name: DTYPES[node.type]
            for name, node in inputs.items()
            if name.startswith("past_key_values.") and node.type in DTYPES
        }
        fed = {"input_ids", "attention_mask", *self.caches}
        made = {"logits", *map(_present, self.caches)}
        if not self.caches or inputs.keys() != fed or outputs.keys() != made or outputs["logits"].type not in DTYPES:
            raise _no_decoder(package, _unexpected(inputs, outputs, fed, made))
        self.logits_dtype = DTYPES[outputs["logits"].type]

    def summary(self) -> str:
        """One line: the graph, its layers, and the dtype of its cache."""
        dtypes = sorted({dtype.__name__ for dtype in self.caches.values()})
        return f"{self.package.graph.name}: {len(self.caches) // 2} layers, KV cache in {', '.join(dtypes)}"

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        stop_ids: Collection[int] = (),
        sampling: Sampling | None = None,
        on_token: Callable[[int, int], None] = lambda _request, _token: None,
    ) -> Generation:
        """Continue every prompt by up to `max_new_tokens`; `on_token(request, token)` hears of each as it is made.

        Raises:
            BadRequest: a prompt is empty, holds an unknown token, or would outgrow the model's positions.
            BadPackage: the graph fails.
        """
        context = self.package.context_length
        check_request(prompts, max_new_tokens, vocab_size=self.package.vocab_size, max_position=context)
        longest = max(map(len, prompts)) + max_new_tokens
        length = min(math.ceil(longest / CACHE_STEP) * CACHE_STEP, context)
        return collect(
            _steps(_Batch(self, prompts, length), Sampler(sampling or Sampling())),
            requests=len(prompts),
            max_new_tokens=max_new_tokens,
            stop_ids=stop_ids,
            on_token=on_token,
        )


class _Batch:
    """Requests in flight, and their buffers: the graph reads and extends the cache where it lies."""

    def __init__(self, decoder: OnnxDecoder, prompts: Sequence[Sequence[int]], length: int) -> None:
        self._decoder = decoder
        self._binding = decoder.session.io_binding()
        self._lengths_B = np.array([len(prompt) for prompt in prompts])
        self._positions_L = np.arange(length)
        self._mask = np.empty(len(prompts) * length, np.int64)
        self._binding.bind_output("logits")  # by the runtime, which alone knows whether S positions or one come out
        shape = (len(prompts), decoder.package.num_kv_heads, length, decoder.package.head_dim)
        self._caches = {name: np.zeros(shape, dtype) for name, dtype in decoder.caches.items()}
        for name, cache in self._caches.items():
            tensor = decoder.tensor(cache)
            self._binding.bind_ortvalue_input(name, tensor)
            self._binding.bind_ortvalue_output(_present(name), tensor)
        self._ids_BS = np.zeros((len(prompts), self._lengths_B.max()), np.int64)
        for row, prompt in enumerate(prompts):
            self._ids_BS[row, : len(prompt)] = prompt  # padded on the right: the mask's sums say where a row ends
        self._binding.bind_ortvalue_input("input_ids", decoder.tensor(self._ids_BS))

    def prefill(self) -> Floats:
        """Run the prompts; logits `[B, V]` after the last token of each."""
        self._run()
        value = self._binding.get_outputs()[0]
        shape = value.shape()
        rows, longest = self._ids_BS.shape
        if len(shape) != 3 or shape[0] != rows or shape[1] not in (1, longest):
            raise _no_decoder(self._decoder.package, f"logits of shape {shape} for {rows} prompts of {longest} tokens")
        dtype = np.dtype(self._decoder.logits_dtype)
        memory = (ctypes.c_char * (math.prod(shape) * dtype.itemsize)).from_address(value.data_ptr())
        logits_BSV = np.frombuffer(memory, dtype).reshape(shape)  # not a copy: it may be gigabytes
        ends = self._lengths_B - 1 if shape[1] > 1 else 0
        last_BV: Floats = logits_BSV[np.arange(rows), ends]
        # From here on every shape but the mask's stays, and so do the buffers.
        self._ids_BS = np.empty((rows, 1), np.int64)
        self._logits_B1V = np.empty((rows, 1, shape[2]), dtype)
        self._binding.bind_ortvalue_input("input_ids", self._decoder.tensor(self._ids_BS))
        self._binding.bind_ortvalue_output("logits", self._decoder.tensor(self._logits_B1V))
        return last_BV

    def extend(self, tokens_B: Sequence[int]) -> Floats:
        """Add a token to each request; logits `[B, V]` after it, valid until the next call."""
        self._ids_BS[:, 0] = tokens_B
        self._lengths_B += 1
        self._run()
        return self._logits_B1V[:, 0]

    def _run(self) -> None:
        covered = int(self._lengths_B.max())
        mask_BT = self._mask[: len(self._lengths_B) * covered].reshape(-1, covered)
        mask_BT[...] = self._positions_L[:covered] < self._lengths_B[:, None]
        self._binding.bind_ortvalue_input("attention_mask", self._decoder.tensor(mask_BT))
        try:
            self._decoder.session.run_with_iobinding(self._binding)
        except Exception as error:  # the runtime's errors have no base class of their own
            raise _failed(self._decoder.package, "onnxruntime cannot run the graph", error) from None


def _steps(batch: _Batch, sampler: Sampler) -> Iterator[Sequence[int]]:
    """The next token of every request, for as long as somebody asks."""
    tokens = sampler(batch.prefill())
    while True:
        yield tokens
        tokens = sampler(batch.extend(tokens))


def _present(past: str) -> str:
    """The output that a cache input comes back as."""
    return past.replace("past_key_values", "present", 1)


def _unexpected(inputs: dict[str, Any], outputs: dict[str, Any], fed: set[str], made: set[str]) -> str:
    """What the graph lacks, and what it has that cannot be fed or is not known."""
    lacks = sorted((fed - inputs.keys()) | (made - outputs.keys()))
    extra = [node for nodes, known in ((inputs, fed), (outputs, made)) for n, node in nodes.items() if n not in known]
    parts = [f"no {name}" for name in lacks] + [f"{node.name} {node.type}{node.shape}" for node in extra]
    return ", ".join(parts)[:300] or "logits of another dtype, or no cache"


def _no_decoder(package: Package, found: str) -> BadPackage:
    return BadPackage(
        "the graph is not a decoder that can be run here",
        where=str(package.graph),
        expected="input_ids, attention_mask, past_key_values.{i}.key|value; logits [B, S, V], present.{i}.key|value",
        found=found,
        fix="export the checkpoint again, with this version",
    )


def _unopened(package: Package, error: Exception) -> BadPackage:
    """What the exporter knew comes before what the runtime says of it."""
    try:
        because = read_entries(package.graph.parent).obstacles.get(PROVIDERS["cpu"], ())
    except BadPackage:  # one that somebody else exported has no bill
        because = ()
    if not because:
        return _failed(package, "onnxruntime cannot open the graph", error)
    return BadPackage(
        "the package was exported for another provider",
        where=str(package.graph),
        expected=f"a package that the {PROVIDERS['cpu']} runs",
        found="; ".join(because),
        fix="export the checkpoint again, with --ep cpu",
    )


def _failed(package: Package, what: str, error: Exception) -> BadPackage:
    return BadPackage(
        what,
        where=str(package.graph),
        expected="a graph and its data that onnxruntime runs on this machine's CPU",
        found=str(error)[:300],
        fix="copy the whole package folder again, or export it again; a newer onnxruntime may know more operators",
    )
