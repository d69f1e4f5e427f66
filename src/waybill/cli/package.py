"""What `generate` does with an exported package: text, and pictures or recordings, through its graphs. No torch."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from waybill.cli.answers import Request, answer, encode
from waybill.cli.places import NAMES, read_place
from waybill.cli.render import count
from waybill.errors import BadOption, BadRequest
from waybill.text.request import check_request

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from waybill.onnx.folder import Package
    from waybill.onnx.runtime.model import Feeds

MASK = "feature_attention_mask"
"""Which frames lie over sound; some graphs take it."""


class Media(NamedTuple):
    """Files that go with the prompts, in the order of their places."""

    image: Sequence[Path]
    audio: Sequence[Path]


def refuse_choices_of_the_export(dtype: str | None, device: str, check_finite: bool, dequantize: bool) -> None:
    """Options that an engine has a choice about, and a package has not.

    Raises:
        BadOption: one was given.
    """
    given = {
        f"--dtype {dtype}": dtype is not None,
        f"--device {device}": device != "cpu",
        "--check-finite": check_finite,
        "--dequantize": dequantize,
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
    """Answer from a package: onnxruntime does it all. What is wrong with prompts and files is found before it starts.

    Raises:
        BadOption, BadRequest: the package cannot be asked that.
        BadPackage: it is broken, or not of the files that were exported.
    """
    from waybill.onnx.folder import read_package
    from waybill.onnx.runtime.model import Inputs, open_model

    package = read_package(folder)
    _check(package, request, media)
    tokenizer, encoded = _encode(folder, package, request, media)
    if not package.parts:
        check_request(
            encoded, request.max_new_tokens, vocab_size=package.vocab_size, max_position=package.context_length
        )
    feeds = _feeds(folder, media)
    start = time.perf_counter()
    model = open_model(package)
    seconds = time.perf_counter() - start
    before = "".join(f"{graph.name}, " for graph in package.parts.values())
    if not (request.quiet or request.as_json):
        print(f"{before}{model.decoder.summary()}; loaded in {seconds:.2f} s", file=sys.stderr)
    heard = [{name: v for name, v in feed.items() if name != MASK or name in model.hears} for feed in feeds]
    generated = partial(
        model.generate,
        Inputs(encoded, heard),
        max_new_tokens=request.max_new_tokens,
        stop_ids=package.stop_ids,
        sampling=request.sampling,
    )
    labels = () if encoded else [path.name for path in media.audio]
    answer(
        request,
        tokenizer,
        encoded or [[]] * len(labels),
        seconds,
        lambda on_token: generated(on_token=on_token),
        labels,
    )


def _check(package: Package, request: Request, media: Media) -> None:
    """Refuse files that no graph takes, and requests without what is answered."""
    files = {kind: paths for kind, paths in media._asdict().items() if paths}
    if strange := [count(len(paths), NAMES[kind]) for kind, paths in files.items() if kind not in package.files]:
        raise BadOption(
            "the package cannot be given that",
            expected=" and ".join(["text", *(f"{NAMES[kind]}s" for kind in sorted(package.files))]),
            found=", ".join(strange),
            fix="leave them out, or use the package of a model that takes them",
        )
    if not package.transcribes and not request.prompts:
        raise BadOption(
            "a recording alone is no prompt for this package",
            expected="at least one prompt",
            found="none",
            fix="give --prompt, and say what is to be done with the recording",
        )
    if package.transcribes and (not media.audio or len(request.prompts) not in (0, len(media.audio))):
        raise BadRequest(
            "the prompts and the files do not fit together",
            expected="a recording for each prompt, or recordings alone",
            found=f"{count(len(request.prompts), 'prompt')}, {count(len(media.audio), 'recording')}",
            fix="give --audio once for each prompt; a prompt is what the text of its recording begins with",
        )


def _encode(folder: Path, package: Package, request: Request, media: Media) -> tuple[Tokenizer, list[list[int]]]:
    """The prompts as tokens, with a place for every file."""
    from waybill.text.chat import render_prompt
    from waybill.text.tokenizer import read_tokenizer, to_tokens

    kind = next((kind for kind in NAMES if f"{kind}_token_id" in package.tokens), None)
    if kind is None and (request.chat or not package.transcribes):
        return encode(folder, request)
    tokenizer = read_tokenizer(folder)
    if kind is None:  # the beginning of an answer, in which nothing ends
        return tokenizer, to_tokens(tokenizer, request.prompts, complete=True)
    files = len(media.image) + len(media.audio)
    place = read_place(folder, tokenizer, kind, package.tokens[f"{kind}_token_id"])
    lacking = zip(request.prompts, place.lacking(request.prompts, files), strict=True)
    if request.chat:
        texts = [render_prompt(folder, text, kind, place.word if lacks else "") for text, lacks in lacking]
    else:
        texts = [place.before + text if lacks else text for text, lacks in lacking]
    encoded = to_tokens(tokenizer, texts, complete=request.chat)
    place.check(encoded, files)
    return tokenizer, encoded


def _feeds(folder: Path, media: Media) -> list[Feeds]:
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
            feeds.append({"input_features": features[None], MASK: mask[None]})
    return feeds
