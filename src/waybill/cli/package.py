"""What `generate` does with an exported package: text, and pictures or recordings, through its graphs. No torch."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from waybill.cli.answers import Request, answer, encode
from waybill.errors import BadOption
from waybill.text.request import check_request

if TYPE_CHECKING:
    from waybill.onnx.runtime.model import Feeds, Model


class Media(NamedTuple):
    """Files that go with the prompts, in the order of their places."""

    image: Sequence[Path]
    audio: Sequence[Path]


def refuse_choices_of_the_export(dtype: str | None, device: str, check_finite: bool) -> None:
    """Options that an engine has a choice about, and a package has not.

    Raises:
        BadOption: one was given.
    """
    given = {
        f"--dtype {dtype}": dtype is not None,
        f"--device {device}": device != "cpu",
        "--check-finite": check_finite,
        f"torchrun with {os.environ.get('WORLD_SIZE')} ranks": os.environ.get("WORLD_SIZE", "1") != "1",
    }
    if any(given.values()):
        raise BadOption(
            "a package runs as it was exported",
            expected="no option that changes its weights or where they are",
            found=", ".join(option for option, is_given in given.items() if is_given),
            fix="leave it out; what it chooses is chosen when the checkpoint is exported",
        )


def run_package(folder: Path, request: Request, media: Media) -> None:
    """Answer from a package: onnxruntime does it all."""
    from waybill.onnx.folder import read_package
    from waybill.onnx.runtime.model import Inputs, open_model

    package = read_package(folder)
    kinds = [
        f"{len(files)} {kind} files" for kind, files in media._asdict().items() if files and not _takes(package, kind)
    ]
    if kinds:
        raise BadOption(
            "the package cannot be given that",
            expected="files for a graph that it has",
            found=f"{', '.join(kinds)}, for a package of {', '.join([*package.parts, 'decoder'])}",
            fix="leave them out, or use the package of a model that takes them",
        )
    place = next((name for name in package.tokens if name in ("image_token_id", "audio_token_id")), None)
    tokenizer, encoded = encode(folder, request, package.tokens[place] if place else None, [*media.image, *media.audio])
    if not package.parts:
        check_request(
            encoded, request.max_new_tokens, vocab_size=package.vocab_size, max_position=package.context_length
        )
    start = time.perf_counter()
    model = open_model(package)
    seconds = time.perf_counter() - start
    print(f"{model.decoder.summary()}; loaded in {seconds:.2f} s", file=sys.stderr)
    inputs = Inputs(encoded, _feeds(folder, model, media))
    generated = partial(
        model.generate,
        inputs,
        max_new_tokens=request.max_new_tokens,
        stop_ids=package.stop_ids,
        sampling=request.sampling,
    )
    if not encoded:
        encoded = [[] for _ in media.audio]
    answer(request, tokenizer, encoded, seconds, lambda on_token: generated(on_token=on_token))


def _takes(package: Any, kind: str) -> bool:
    """Whether a package has a graph for pictures, or for sound."""
    section = {"image": "vision", "audio": "speech"}[kind]
    return section in package.parts or (kind == "audio" and "encoder" in package.parts)


def _feeds(folder: Path, model: Model, media: Media) -> list[Feeds]:
    """Each file as the arrays its graph takes."""
    feeds: list[Feeds] = []
    if media.image:
        from waybill.media.image import pixel_values, read_image
        from waybill.media.transform import read_image_transform

        transform = read_image_transform(folder)
        feeds += [{"pixel_values": pixel_values(read_image(path), transform)[None]} for path in media.image]
    if media.audio:
        import numpy as np

        from waybill.media.audio import log_mel, read_audio, read_log_mel

        parameters = read_log_mel(folder)
        for path in media.audio:
            samples = read_audio(path, parameters.sampling_rate, parameters.chunk_length)
            features, valid = log_mel(samples, parameters)
            mask = (np.arange(features.shape[1]) < valid).astype(np.int64)
            every: Feeds = {"input_features": features[None], "feature_attention_mask": mask[None]}
            feeds.append({name: values for name, values in every.items() if name in model.hears})
    return feeds
