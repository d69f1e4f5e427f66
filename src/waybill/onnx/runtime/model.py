"""A whole package as one model: which graphs run, in which order, and what each is given.

Shapes: B requests, S new tokens, E positions of the other sequence, D and H hidden elements, n features.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from waybill.errors import BadRequest
from waybill.onnx.folder import Package
from waybill.onnx.runtime.decoder import Context, OnnxDecoder
from waybill.onnx.runtime.session import Network, other_inputs
from waybill.text.request import Generation, Sampling, check_request
from waybill.weights.dtypes import Array

Feeds = Mapping[str, Array]
MEDIA = {"image": ("vision", "image_token_id"), "audio": ("speech", "audio_token_id")}
"""Kind of medium to the graph that turns it into features, and the token that stands for one."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """What is asked: prompts as tokens, and media as what their graph takes, in the order of their places."""

    prompts: Sequence[Sequence[int]]
    media: Sequence[Feeds] = field(default=())


class Model(Protocol):
    """What a package does with inputs."""

    decoder: OnnxDecoder
    hears: Collection[str]
    """What the graph that is given sound takes of it."""

    def generate(
        self,
        inputs: Inputs,
        *,
        max_new_tokens: int,
        stop_ids: Collection[int] = (),
        sampling: Sampling | None = None,
        on_token: Callable[[int, int], None] = lambda _request, _token: None,
    ) -> Generation:
        """Answer every request with up to `max_new_tokens`.

        Raises:
            BadRequest: the inputs do not fit the model.
            BadPackage: a graph fails.
        """


def open_model(package: Package) -> Model:
    """The model that a package's graphs make.

    Raises:
        MissingRuntime: onnxruntime is not installed.
        BadPackage: a graph cannot be opened, or is none that can be fed.
    """
    if "encoder" in package.parts:
        return EncoderDecoder(package)
    if "embedding" in package.parts:
        return Multimodal(package)
    return TextModel(package)


class TextModel:
    """One decoder, which is given tokens."""

    hears: Collection[str] = ()

    def __init__(self, package: Package) -> None:
        self.decoder = OnnxDecoder(package)

    def generate(self, inputs: Inputs, **options: object) -> Generation:
        """Continue every prompt."""
        if inputs.media:
            raise _unfit("text alone", f"{len(inputs.media)} files besides", "leave them out")
        return self.decoder.generate(inputs.prompts, **options)  # type: ignore[arg-type]


class EncoderDecoder:
    """An encoder that runs once, on text or on sound, and a decoder that attends to what it made."""

    def __init__(self, package: Package) -> None:
        self.decoder = OnnxDecoder(package)
        self.encoder = Network(package, package.parts["encoder"])
        self.hears: Collection[str] = self.encoder.inputs.keys()

    def generate(self, inputs: Inputs, **options: object) -> Generation:
        """The answers, which begin with the package's own first tokens."""
        package = self.decoder.package
        begin = [*package.start_ids]
        if "input_ids" in self.encoder.inputs:
            if inputs.media:
                raise _unfit("text alone", f"{len(inputs.media)} files besides", "leave them out")
            check_request(inputs.prompts, 0, vocab_size=package.vocab_size, max_position=package.context_length)
            start = time.perf_counter()
            context = _Across(*self._read(inputs.prompts))
            spent = time.perf_counter() - start
            prompts = [begin] * len(inputs.prompts)
            lengths = [*map(len, inputs.prompts)]
        else:
            if len(inputs.prompts) not in (0, len(inputs.media)) or not inputs.media:
                wrong = f"{len(inputs.media)} recordings and {len(inputs.prompts)} prompts"
                raise _unfit("a recording for every request", wrong, "give one --audio file for each request")
            if self.encoder.inputs.keys() != inputs.media[0].keys():
                raise other_inputs(self.encoder.graph, self.encoder.inputs, inputs.media[0])
            feeds = {name: np.concatenate([one[name] for one in inputs.media]) for name in self.encoder.inputs}
            start = time.perf_counter()
            context = _Across(self.encoder(feeds), None)
            spent = time.perf_counter() - start
            first, rest = begin[:1], begin[1:]
            spoken: Sequence[Sequence[int]] = [()] * len(inputs.media)
            if package.language_ids:
                found = self.decoder.likeliest([first] * len(inputs.media), package.language_ids, context)
                spoken = [(token,) for token in found]
            asked = inputs.prompts or [()] * len(inputs.media)
            prompts = [[*first, *heard, *rest, *prompt] for heard, prompt in zip(spoken, asked, strict=True)]
            lengths = [*map(len, prompts)]
        made = self.decoder.generate(prompts, context=context, **options)  # type: ignore[arg-type]
        return replace(made, encode_seconds=spent, prompt_tokens=tuple(lengths))

    def _read(self, prompts: Sequence[Sequence[int]]) -> tuple[Array, Array]:
        ids_BE = np.zeros((len(prompts), max(map(len, prompts))), np.int64)
        mask_BE = np.zeros_like(ids_BE)
        for row, prompt in enumerate(prompts):
            ids_BE[row, : len(prompt)] = prompt
            mask_BE[row, : len(prompt)] = 1
        return self.encoder({"input_ids": ids_BE, "attention_mask": mask_BE}), mask_BE


class Multimodal:
    """A language model whose embeddings are made by a graph of their own, among them those of pictures or sound."""

    def __init__(self, package: Package) -> None:
        self.decoder = OnnxDecoder(package)
        self.embedding = Network(package, package.parts["embedding"])
        kind, (section, token) = next((k, m) for k, m in MEDIA.items() if m[0] in package.parts)
        self.kind = kind
        self.token = package.tokens[token]
        self.reader = Network(package, package.parts[section])
        self.hears: Collection[str] = self.reader.inputs.keys()
        wanted = {"input_ids", f"{kind}_features"}
        if self.embedding.inputs.keys() != wanted:
            raise other_inputs(self.embedding.graph, self.embedding.inputs, wanted)

    def generate(self, inputs: Inputs, **options: object) -> Generation:
        """Continue every prompt, in which one token stands for each medium."""
        start = time.perf_counter()
        features = [self.reader(feeds) for feeds in inputs.media]
        spent = time.perf_counter() - start
        prompts = self._expanded(inputs.prompts, [len(one) for one in features])
        width = self.embedding.inputs[f"{self.kind}_features"].shape[-1]
        dtype = self.embedding.dtype_of(f"{self.kind}_features")
        every = np.concatenate([np.zeros((0, width), dtype), *features])
        context = _Embedded(self.embedding, f"{self.kind}_features", every)
        # No answer holds the token: there would be nothing to put in its place.
        made = self.decoder.generate(prompts, context=context, never=[self.token], **options)  # type: ignore[arg-type]
        return replace(made, encode_seconds=spent, prompt_tokens=tuple(map(len, prompts)))

    def _expanded(self, prompts: Sequence[Sequence[int]], counts: list[int]) -> list[list[int]]:
        """As many of the token as the medium has features, in place of each."""
        places = sum(token == self.token for prompt in prompts for token in prompt)
        if places != len(counts):
            found = f"{places} places, {len(counts)} files"
            fix = f"give one --{self.kind} file for each place, in their order"
            raise _unfit("a file for every place of one in the prompts", found, fix)
        left = iter(counts)
        return [
            [each for token in prompt for each in [token] * (next(left) if token == self.token else 1)]
            for prompt in prompts
        ]


class _Across(Context):
    """Another sequence's states: all of them in the first step, none after it."""

    def __init__(self, states_BED: Array, mask_BE: Array | None) -> None:
        self._states, self._none = states_BED, states_BED[:, :0]
        self._mask = {} if mask_BE is None else {"encoder_attention_mask": mask_BE}

    def first(self, ids_BS: Array) -> Feeds:
        return {"input_ids": ids_BS, "encoder_hidden_states": self._states, **self._mask}

    def later(self, ids_B1: Array) -> Feeds:
        return {"input_ids": ids_B1, "encoder_hidden_states": self._none, **self._mask}


class _Embedded(Context):
    """Embeddings of tokens, with features in place of some in the first step."""

    def __init__(self, embedding: Network, name: str, features_nH: Array) -> None:
        self._embedding, self._name, self._features = embedding, name, features_nH

    def first(self, ids_BS: Array) -> Feeds:
        return {"inputs_embeds": self._embedding({"input_ids": ids_BS, self._name: self._features})}

    def later(self, ids_B1: Array) -> Feeds:
        return {"inputs_embeds": self._embedding({"input_ids": ids_B1, self._name: self._features[:0]})}


def _unfit(expected: str, found: str, fix: str) -> BadRequest:
    return BadRequest("the package cannot be asked that", expected=expected, found=found, fix=fix)
