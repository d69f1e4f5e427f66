"""Running a decoder graph in onnxruntime: prefill, then one token a step, in buffers that are never copied.

Shapes: B requests, S new tokens, T positions that the attention mask covers, L positions of the cache, V vocabulary.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from waybill.errors import BadPackage
from waybill.onnx.folder import LARGEST_STATE, Package
from waybill.onnx.runtime.sampler import Floats, Sampler
from waybill.onnx.runtime.session import DTYPES, failed, open_session, other_inputs, to_tensor
from waybill.text.request import Generation, Sampling, check_request, collect
from waybill.weights.dtypes import Array

CACHE_STEP = 64
"""Cache lengths are multiples of it: few distinct sizes, whose memory is found again."""
PAST, PRESENT = "past_key_values.", "present."
PAST_CROSS, PRESENT_CROSS = "past_cross_values.", "present_cross."
GIVEN = ({"input_ids"}, {"inputs_embeds"}, {"input_ids", "encoder_hidden_states"},
         {"input_ids", "encoder_hidden_states", "encoder_attention_mask"})  # fmt: skip
"""What a decoder's graph may be given besides its caches and the mask of its own positions."""


class Context(Protocol):
    """What a decoder is given in place of tokens, or beside them."""

    def first(self, ids_BS: Array) -> Mapping[str, Array]:
        """For the prompts."""

    def later(self, ids_B1: Array) -> Mapping[str, Array]:
        """For one more token a request."""


class Tokens:
    """Nothing but the tokens."""

    def first(self, ids_BS: Array) -> Mapping[str, Array]:
        """For the prompts."""
        return {"input_ids": ids_BS}

    later = first


class OnnxDecoder:
    """The decoder graph of a package, open in a session of its own."""

    def __init__(self, package: Package) -> None:
        """Open the graph, and check that it is one this class can feed.

        Raises:
            MissingRuntime: onnxruntime is not installed.
            BadPackage: onnxruntime cannot open the graph, or the graph is no decoder.
        """
        self.package = package
        self.session = open_session(package, package.graph)
        inputs = {node.name: node for node in self.session.get_inputs()}
        outputs = {node.name: node for node in self.session.get_outputs()}
        known = {name: node for name, node in inputs.items() if node.type in DTYPES}
        self.caches = {name: DTYPES[node.type] for name, node in known.items() if name.startswith(PAST)}
        self.crosses = {
            name: (DTYPES[node.type], node.shape) for name, node in known.items() if name.startswith(PAST_CROSS)
        }
        own = {"attention_mask", *self.caches, *self.crosses}
        made = {"logits", *map(present_of, self.caches), *map(present_of, self.crosses)}
        given = inputs.keys() - own
        fits = own <= inputs.keys() and given in GIVEN and ("encoder_hidden_states" in given) == bool(self.crosses)
        if not self.caches or not fits or outputs.keys() != made or outputs["logits"].type not in DTYPES:
            raise _no_decoder(package, _unexpected(inputs, outputs, own | GIVEN[0], made))
        for name in (*self.caches, *self.crosses):
            shape = inputs[name].shape
            stated = [package.num_kv_heads, package.head_dim] if name in self.caches else [*filter(_is_size, shape[1:])]
            if len(shape) != 4 or shape[1::2] != stated:
                raise _no_decoder(package, f"{name} {shape}, and {stated} heads and elements of each are stated")
        self.given = given
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
        context: Context | None = None,
        never: Sequence[int] = (),
    ) -> Generation:
        """Continue every prompt by up to `max_new_tokens`; `on_token(request, token)` hears of each as it is made.

        `context` is what the graph is given besides: nothing, for a language model. `never`: tokens that no answer
        holds, besides those the package names.

        Raises:
            BadRequest: a prompt is empty, holds an unknown token, or would outgrow the model's positions.
            BadPackage: the graph fails.
        """
        package = self.package
        check_request(prompts, max_new_tokens, vocab_size=package.vocab_size, max_position=package.context_length)
        longest = max(map(len, prompts)) + max_new_tokens
        length = min(math.ceil(longest / CACHE_STEP) * CACHE_STEP, package.context_length)
        sampler = Sampler(sampling or Sampling(), [*package.suppressed, *never], package.suppressed_first)
        return collect(
            _steps(_Batch(self, prompts, length, context or Tokens()), sampler),
            requests=len(prompts),
            max_new_tokens=max_new_tokens,
            stop_ids=stop_ids,
            on_token=on_token,
        )

    def likeliest(self, prompts: Sequence[Sequence[int]], among: Sequence[int], context: Context) -> list[int]:
        """Which of some tokens each prompt is most likely followed by."""
        logits_BV = _Batch(self, prompts, max(map(len, prompts)), context).prefill()
        return [among[at] for at in logits_BV[:, list(among)].argmax(axis=-1)]


class _Batch:
    """Requests in flight, and their buffers: the graph reads and extends the cache where it lies."""

    def __init__(self, decoder: OnnxDecoder, prompts: Sequence[Sequence[int]], length: int, context: Context) -> None:
        self._decoder = decoder
        self._context = context
        self._binding = decoder.session.io_binding()
        self._lengths_B = np.array([len(prompt) for prompt in prompts])
        self._positions_L = np.arange(length)
        self._mask = np.empty(len(prompts) * length, np.int64)
        self._binding.bind_output("logits")  # by the runtime, which alone knows whether S positions or one come out
        for name, (dtype, (_, heads, _, width)) in decoder.crosses.items():
            self._binding.bind_ortvalue_input(name, to_tensor(np.zeros((len(prompts), heads, 0, width), dtype)))
            self._binding.bind_output(present_of(name))
        shape = (len(prompts), decoder.package.num_kv_heads, length, decoder.package.head_dim)
        self._caches = {name: np.zeros(shape, dtype) for name, dtype in decoder.caches.items()}
        for name, cache in self._caches.items():
            tensor = to_tensor(cache)
            self._binding.bind_ortvalue_input(name, tensor)
            self._binding.bind_ortvalue_output(present_of(name), tensor)
        self._ids_BS = np.zeros((len(prompts), self._lengths_B.max()), np.int64)
        for row, prompt in enumerate(prompts):
            self._ids_BS[row, : len(prompt)] = prompt  # padded on the right: the mask's sums say where a row ends

    def prefill(self) -> Floats:
        """Run the prompts; logits `[B, V]` after the last token of each."""
        first = self._context.first(self._ids_BS)
        if first.keys() != self._decoder.given:
            raise other_inputs(self._decoder.package.graph, self._decoder.given, first)
        self._run(first)
        value, *crosses = self._binding.get_outputs()[: 1 + len(self._decoder.crosses)]
        shape = value.shape()
        rows, longest = self._ids_BS.shape
        words = self._decoder.package.vocab_size
        if len(shape) != 3 or shape[0] != rows or shape[1] not in (1, longest) or shape[2] != words:
            found = f"logits of shape {shape} for {rows} prompts of {longest} tokens, of {words:,} there are"
            raise _no_decoder(self._decoder.package, found)
        dtype = np.dtype(self._decoder.logits_dtype)
        memory = (ctypes.c_char * (math.prod(shape) * dtype.itemsize)).from_address(value.data_ptr())
        logits_BSV = np.frombuffer(memory, dtype).reshape(shape)  # not a copy: it may be gigabytes
        ends = self._lengths_B - 1 if shape[1] > 1 else 0
        last_BV: Floats = logits_BSV[np.arange(rows), ends]
        # From here on every shape but the mask's stays, and so do the buffers.
        self._ids_BS = np.empty((rows, 1), np.int64)
        self._logits_B1V = np.empty((rows, 1, shape[2]), dtype)
        self._binding.bind_ortvalue_output("logits", to_tensor(self._logits_B1V))
        for name, cross in zip(self._decoder.crosses, crosses, strict=True):
            self._binding.bind_ortvalue_input(name, cross)
            self._binding.bind_output(present_of(name))  # nothing, from here on
        return last_BV

    def extend(self, tokens_B: Sequence[int]) -> Floats:
        """Add a token to each request; logits `[B, V]` after it, valid until the next call."""
        self._ids_BS[:, 0] = tokens_B
        self._lengths_B += 1
        self._run(self._context.later(self._ids_BS))
        return self._logits_B1V[:, 0]

    def _run(self, given: Mapping[str, Array]) -> None:
        covered = int(self._lengths_B.max())
        mask_BT = self._mask[: len(self._lengths_B) * covered].reshape(-1, covered)
        mask_BT[...] = self._positions_L[:covered] < self._lengths_B[:, None]
        for name, values in {**given, "attention_mask": mask_BT}.items():
            self._binding.bind_ortvalue_input(name, to_tensor(values))
        try:
            self._decoder.session.run_with_iobinding(self._binding)
        except Exception as error:  # the runtime's errors have no base class of their own
            raise failed(self._decoder.package.graph, "onnxruntime cannot run the graph", error) from None


def _steps(batch: _Batch, sampler: Sampler) -> Iterator[Sequence[int]]:
    """The next token of every request, for as long as somebody asks."""
    tokens = sampler(batch.prefill())
    while True:
        yield tokens
        tokens = sampler(batch.extend(tokens))


def _is_size(length: object) -> bool:
    return isinstance(length, int) and 0 < length <= LARGEST_STATE


def present_of(past: str) -> str:
    """The output that a cache input comes back as."""
    own = past.startswith(PAST)
    return past.replace(PAST, PRESENT, 1) if own else past.replace(PAST_CROSS, PRESENT_CROSS, 1)


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
