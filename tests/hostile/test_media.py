"""Pictures, sounds and preprocessor files that are traps. Their fields one by one: tests/media."""

from __future__ import annotations

import io
import json
import struct
import wave
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image

from strangers import in_bounds
from waybill.errors import BadRequest, WaybillError
from waybill.media.audio import log_mel, read_audio, read_log_mel
from waybill.media.image import pixel_values, read_image
from waybill.media.transform import read_image_transform


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *parts: bytes) -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(parts) + chunk(b"IEND", b"")


def picture(form: str) -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(noise).save(out, form)
    return out.getvalue()


ZEROS = zlib.compress(bytes(1 << 28), 9)
"""A quarter of a gigabyte in 260 kB."""
PICTURES = {
    "a picture of a million million pixels": png(1_000_000, 1_000_000, chunk(b"IDAT", ZEROS)),
    "a picture of 100 megapixels": png(10_000, 10_000, chunk(b"IDAT", ZEROS)),
    "a note of a quarter of a gigabyte": png(8, 8, chunk(b"zTXt", b"note\0\0" + ZEROS), chunk(b"IDAT", ZEROS[:64])),
    "a colour profile of a quarter of a gigabyte": png(8, 8, chunk(b"iCCP", b"p\0\0" + ZEROS), chunk(b"IDAT", b"")),
    "a bitmap of negative size": b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, -9, -9, 1, 24, *[0] * 6),
    "a TIFF whose directory is itself": b"II*\0\x08\0\0\0\x01\0\0\x01\x04\0\x01\0\0\0\x08\0\0\0\x08\0\0\0",
    "a PostScript program": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) (r) file\n",
    "a vector drawing": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
}


@pytest.mark.parametrize("trap", PICTURES)
def test_a_picture_that_is_a_trap_is_refused_in_bounded_memory(tmp_path: Path, trap: str) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(PICTURES[trap])
    assert in_bounds(lambda: read_image(path), tmp_path) == "bad-request"


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_a_picture_cut_off_anywhere_is_refused_or_whole(tmp_path: Path, form: str) -> None:
    whole, path = picture(form), tmp_path / "picture"
    path.write_bytes(whole)
    pixels = np.asarray(read_image(path).convert("RGB"))
    for kept in range(0, len(whole), max(1, len(whole) // 97)):
        path.write_bytes(whole[:kept])
        try:
            image = read_image(path)
        except BadRequest:
            continue
        np.testing.assert_array_equal(np.asarray(image.convert("RGB")), pixels)


def wav(rate: int, channels: int, frames: int, data: bytes = b"") -> bytes:
    """A header that may say anything, before this data."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes(data)
    octets = bytearray(out.getvalue())
    octets[22:28] = struct.pack("<HI", channels, rate)
    octets[32:34] = struct.pack("<H", 2 * channels & 0xFFFF)
    octets[40:44] = struct.pack("<I", frames & 0xFFFFFFFF)
    return bytes(octets)


SOUNDS = {
    "four gigabytes in forty bytes": wav(16_000, 1, 0xFFFFFFFF),
    "no samples a second": wav(0, 1, 100, bytes(100)),
    "four thousand million samples a second": wav(0xFFFFFFFF, 1, 100, bytes(100)),
    "no channels": wav(16_000, 0, 100, bytes(100)),
    "65,535 channels": wav(16_000, 65_535, 1 << 20, bytes(1 << 20)),
    "the first bytes of a FLAC file": b"fLaC\0\0\0\x22" + b"\xff" * 34,
    "an Ogg page of nothing": b"OggS" + bytes(23),
    "a playlist": b"#EXTM3U\nfile:///etc/passwd\n",
    "nothing": b"",
}


@pytest.mark.parametrize("trap", SOUNDS)
def test_a_sound_that_is_a_trap_is_refused_in_bounded_memory(tmp_path: Path, trap: str) -> None:
    path = tmp_path / "sound.wav"
    path.write_bytes(SOUNDS[trap])
    assert in_bounds(lambda: read_audio(path, 16_000), tmp_path) == "bad-request"


@pytest.mark.parametrize("form", ["WAV", "FLAC", "OGG", "MP3"])
def test_a_sound_cut_off_anywhere_is_refused_or_a_whole_sound(tmp_path: Path, form: str) -> None:
    path = tmp_path / f"sound.{form.lower()}"
    soundfile.write(path, np.sin(np.arange(8000) / 9), 16_000, format=form)
    whole = path.read_bytes()
    for kept in range(0, len(whole), max(1, len(whole) // 61)):
        path.write_bytes(whole[:kept])
        try:
            samples = read_audio(path, 16_000)
        except BadRequest:
            continue
        assert len(samples) <= 16_000
        assert np.isfinite(samples).all()


IMAGE = {"image_processor_type": "CLIPImageProcessor"}
AUDIO = {"feature_extractor_type": "WhisperFeatureExtractor"}
ODD: tuple[Any, ...] = (
    0, -1, 10**9, 10**400, 1e308, 1e-308, True, "", "\ud800", [], [[]], {}, {"height": 10**9, "width": 1},
    {"shortest_edge": 10**9}, [0, 0, 0], [1e308] * 3,
)  # fmt: skip
PROCESSORS: dict[str, tuple[dict[str, Any], tuple[str, ...], Callable[[Path], object]]] = {
    "of pictures": (
        IMAGE,
        (
            "image_processor_type",
            "size",
            "crop_size",
            "resample",
            "rescale_factor",
            "image_mean",
            "image_std",
            "do_resize",
        ),
        lambda folder: pixel_values(Image.new("RGB", (50, 30)), read_image_transform(folder)).shape,
    ),
    "of sounds": (
        AUDIO,
        ("feature_extractor_type", "sampling_rate", "feature_size", "hop_length", "chunk_length", "n_fft", "n_samples"),
        lambda folder: log_mel(np.zeros(99, np.float32), read_log_mel(folder))[0].shape,
    ),
}


@pytest.mark.parametrize(
    ("kind", "field"), [(kind, field) for kind, (_, fields, _) in PROCESSORS.items() for field in fields]
)
def test_a_preprocessor_of_senseless_numbers_is_refused_or_prepares_in_bounded_memory(
    tmp_path: Path, kind: str, field: str
) -> None:
    good, _, prepare = PROCESSORS[kind]

    folders = [tmp_path / str(at) for at in range(len(ODD))]
    for folder, value in zip(folders, ODD, strict=True):
        folder.mkdir()
        (folder / "preprocessor_config.json").write_text(json.dumps(good | {field: value}))

    def every() -> None:
        for folder in folders:
            try:
                prepare(folder)
            except WaybillError as refusal:
                assert refusal.code != "error", refusal

    assert in_bounds(every, tmp_path) == ""


@pytest.mark.parametrize("kind", PROCESSORS)
@pytest.mark.parametrize("text", ["", "[]", '{"a":' * 970 + "1" + "}" * 970, " " * (17 << 20)], ids=len)
def test_a_preprocessor_file_of_another_form_is_refused(tmp_path: Path, kind: str, text: str) -> None:
    (tmp_path / "preprocessor_config.json").write_text(text)
    assert in_bounds(lambda: PROCESSORS[kind][2](tmp_path), tmp_path) == "bad-json"
