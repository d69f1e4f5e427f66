"""Sound to log-mel features: the front end of Whisper-shaped encoders, as their checkpoints describe it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from waybill.checkpoint.jsonfile import read_object
from waybill.config.fields import Fields
from waybill.errors import BadConfig, BadRequest, ConfigConflict, MissingRuntime, Refused, UnsupportedFeature

EXTRACTOR = "WhisperFeatureExtractor"
TOP_HERTZ = 8000.0
"""Where the mel scale ends, whatever the sampling rate: the class has no field for it."""
BOUNDS = {
    "feature_size": (1, 512),
    "sampling_rate": (int(2 * TOP_HERTZ), 48_000),  # below, the upper filters would see nothing
    "hop_length": (1, 8192),
    "chunk_length": (1, 600),
    "n_fft": (16, 8192),
}
MOST_WORK = 1 << 25
"""Numbers in all frames together, 256 MiB of float64: over twice those of 300 s at the usual sizes."""
FIXED = {"padding_side": "right", "padding_value": 0.0, "dither": 0.0}
"""Fields with one meaning that is implemented, silence after the sound; dither would make features random."""
FILE_RATES = range(1_000, 768_001)
BLOCK = 1 << 14
"""Frames decoded at a time: a file may state a thousand channels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogMel:
    """The front end's parameters, named as in the files and with the defaults of the class that writes them."""

    feature_size: int = 80  # mel bins
    sampling_rate: int = 16_000  # samples per second
    hop_length: int = 160  # samples from frame to frame
    chunk_length: int = 30  # seconds, always filled
    n_fft: int = 400  # samples of a frame, even

    @property
    def n_samples(self) -> int:
        """Samples the model reads: sound, then silence."""
        return self.chunk_length * self.sampling_rate

    @property
    def nb_max_frames(self) -> int:
        """Frames the model reads."""
        return self.n_samples // self.hop_length


def read_log_mel(folder: Path) -> LogMel:
    """The parameters, from a checkpoint or package folder.

    They stand in processor_config.json under feature_extractor, or else in preprocessor_config.json.

    Raises:
        BadConfig: neither file has them.
        BadJson: a file is not a JSON object.
        Refused: a field is wrong, fields contradict each other, or the features are of another kind.
    """
    raw, where = _feature_extractor(folder)
    fields = Fields(raw, asdict(LogMel()), [], where)
    problems = fields.problems
    kind = fields.text("feature_extractor_type")
    if not problems and kind != EXTRACTOR:
        problems.append(_unsupported("feature_extractor_type", kind, EXTRACTOR, where))
    if problems:  # the fields of another class mean other things
        raise Refused(problems)
    parameters = LogMel(**{key: fields.integer(key, low=low, high=high) for key, (low, high) in BOUNDS.items()})
    for key, value in FIXED.items():
        if fields.stated(key) and raw[key] != value:
            problems.append(_unsupported(key, raw[key], value, where))
    if not fields.wrong:
        _check_together(parameters, fields)
    if problems:
        raise Refused(problems)
    return parameters


def _feature_extractor(folder: Path) -> tuple[dict[str, Any], str]:
    """The feature extractor's own object, and the words for its place."""
    processor, preprocessor = "processor_config.json", "preprocessor_config.json"
    if (folder / processor).exists():
        outer = Fields(read_object(folder / processor), {}, [], processor)
        nested = outer.mapping("feature_extractor")
        if outer.problems:
            raise Refused(outer.problems)
        if nested:
            return nested, f"{processor}, feature_extractor"
    if (folder / preprocessor).exists():
        return read_object(folder / preprocessor), preprocessor
    raise BadConfig(
        "nothing says how sound becomes features", where=str(folder),
        expected=f"{preprocessor}, or {processor} with a feature_extractor",
        found="neither", fix="copy the file from the checkpoint the model was published in",
    )  # fmt: skip


def _unsupported(key: str, found: Any, expected: Any, where: str) -> UnsupportedFeature:
    return UnsupportedFeature(
        f"{key} {str(found)[:80]} is not implemented", where=f"{where}: {key}", expected=str(expected),
        found=str(found)[:80], fix=f"use a model whose audio is read with {key} {expected}",
    )  # fmt: skip


def _check_together(parameters: LogMel, fields: Fields) -> None:
    """What the sizes imply: a frame has a middle, all frames fit in memory, and derived fields say the same."""
    work = parameters.nb_max_frames * parameters.n_fft
    if parameters.n_fft % 2 or work > MOST_WORK:
        fields.problems.append(BadConfig(
            "the frames cannot be computed", where=f"{fields.where}: n_fft, hop_length",
            expected=f"an even n_fft, and at most {MOST_WORK:,} numbers in all frames",
            found=f"n_fft {parameters.n_fft}, {work:,} numbers",
            fix=f"state both in {fields.where} as its producer published them",
        ))  # fmt: skip
    for key in ("n_samples", "nb_max_frames"):
        implied = getattr(parameters, key)
        if fields.stated(key) and (stated := fields.integer(key)) != implied and key not in fields.wrong:
            fields.problems.append(ConfigConflict(
                f"{key} does not follow from the sizes beside it", where=f"{fields.where}: {key}",
                expected=f"{implied}, from chunk_length, sampling_rate and hop_length", found=str(stated),
                fix=f"correct {key} or remove it from {fields.where}",
            ))  # fmt: skip


def read_audio(path: Path, sampling_rate: int, most_seconds: int = 30) -> NDArray[np.float32]:
    """A sound file as samples [samples] at `sampling_rate`: channels averaged, resampled where the rate differs.

    n samples at rate r become ceil(n × sampling_rate / r); full scale is ±1.

    Raises:
        BadRequest: unreadable, cut off, empty, not finite, or longer than `most_seconds`; nothing is ever cut.
        MissingRuntime: what `waybill[audio]` installs is not there.
    """
    samples, rate = _decode(path, most_seconds)
    if rate != sampling_rate:
        length = -(-len(samples) * sampling_rate // rate)
        samples = _require("soxr").resample(samples, rate, sampling_rate, quality="HQ")[:length]
        samples = np.pad(samples, (0, length - len(samples)))
    _check_samples(samples, str(path), sampling_rate, most_seconds)
    return samples


def _decode(path: Path, most_seconds: int) -> tuple[NDArray[np.float32], int]:
    """All samples of a file, averaged over channels block by block, and their rate."""
    soundfile = _require("soundfile")
    if not path.is_file():  # opening a pipe would wait for ever
        raise _unreadable(path, "no such file" if not path.exists() else "a directory, device or pipe")
    try:
        with soundfile.SoundFile(path) as file:
            rate, stated = file.samplerate, file.frames
            if rate not in FILE_RATES:
                raise _unreadable(path, f"{rate:,} samples a second")
            if stated > most_seconds * rate:
                raise _too_long(str(path), stated, rate, most_seconds)
            blocks = [np.zeros(0, np.float32)]
            while len(block := file.read(BLOCK, dtype="float32", always_2d=True)):
                blocks.append(block.mean(axis=1))
    except (OSError, soundfile.SoundFileError, TypeError) as error:  # TypeError: a .raw file says nothing of itself
        raise _unreadable(path, str(error) or "it does not decode") from None
    samples = np.concatenate(blocks)
    if len(samples) < stated:
        raise _unreadable(path, f"it ends after {len(samples):,} of {stated:,} samples")
    return samples, rate


def log_mel(samples: NDArray[np.float32], parameters: LogMel) -> tuple[NDArray[np.float32], int]:
    """Features [feature_size, nb_max_frames], and how many frames lie over sound rather than silence.

    The samples are filled up with silence. With x_t the n_fft samples centred on t × hop_length (reflected at both
    ends), w the periodic Hann window and M the mel filters: S = log10(max(M |rfft(w x_t)|², 1e-10)), then
    (max(S, max S − 8) + 4) / 4. The frame centred on the very end is dropped.

    Raises:
        BadRequest: no samples, more than the model reads, or some are not finite.
    """
    _check_samples(samples, "audio", parameters.sampling_rate, parameters.chunk_length)
    filled = np.zeros(parameters.n_samples)
    filled[: len(samples)] = samples
    centred = np.pad(filled, parameters.n_fft // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(centred, parameters.n_fft)[:: parameters.hop_length]
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(parameters.n_fft) / parameters.n_fft)
    spectrum = np.fft.rfft(frames[: parameters.nb_max_frames] * window)
    power = spectrum.real**2 + spectrum.imag**2
    scale = np.log10(np.maximum(mel_filters(parameters) @ power.T, 1e-10))
    features = (np.maximum(scale, scale.max() - 8) + 4) / 4
    heard = min(-(-len(samples) // parameters.hop_length), parameters.nb_max_frames)
    return features.astype(np.float32), heard


def mel_filters(parameters: LogMel) -> NDArray[np.float64]:
    """Triangles [feature_size, n_fft / 2 + 1], evenly spaced from 0 to 8000 Hz on Slaney's mel scale, each of area 1.

    mel = 3 f / 200 below 1000 Hz, and 15 + 27 ln(f / 1000) / ln 6.4 above (Slaney, Auditory Toolbox, 1998).
    """
    log_step = np.log(6.4) / 27
    mels = np.linspace(0, 15 + np.log(TOP_HERTZ / 1000) / log_step, parameters.feature_size + 2)
    hertz = np.where(mels < 15, 200 * mels / 3, 1000 * np.exp(log_step * (mels - 15)))
    low, centre, high = hertz[:-2, None], hertz[1:-1, None], hertz[2:, None]
    bins = np.linspace(0, parameters.sampling_rate // 2, parameters.n_fft // 2 + 1)
    triangles = np.minimum((bins - low) / (centre - low), (high - bins) / (high - centre))
    filters: NDArray[np.float64] = np.maximum(triangles, 0) * 2 / (high - low)
    return filters


def _require(module: str) -> Any:
    try:
        return import_module(module)
    except (ImportError, OSError) as error:  # OSError: the library behind it is not found
        raise MissingRuntime(
            "what reads audio is not installed", expected="the packages soundfile and soxr",
            found=str(error), fix="pip install 'waybill[audio]'",
        ) from None  # fmt: skip


def _check_samples(samples: NDArray[np.float32], where: str, rate: int, most_seconds: int) -> None:
    if len(samples) > most_seconds * rate:
        raise _too_long(where, len(samples), rate, most_seconds)
    finite = np.isfinite(samples)
    if not len(samples) or not finite.all():
        found = f"{samples[finite.argmin()]} at {finite.argmin() / rate:.3f} s" if len(samples) else "no samples"
        expected, fix = "at least one sample, all finite", "record or convert the sound again"
        raise BadRequest("the audio cannot be used", where=where, expected=expected, found=found, fix=fix)


def _too_long(where: str, samples: int, rate: int, most_seconds: int) -> BadRequest:
    return BadRequest(
        "the audio is longer than the model reads", where=where, expected=f"at most {most_seconds} s",
        found=f"{samples / rate:.3f} s, {samples:,} samples at {rate:,} Hz",
        fix=f"cut it into parts, the first with: ffmpeg -i FILE -t {most_seconds} part.wav",
    )  # fmt: skip


def _unreadable(path: Path, found: str) -> BadRequest:
    return BadRequest(
        "the audio file cannot be read", where=str(path),
        expected="a whole sound file, such as WAV, FLAC, Ogg or MP3, of 1 to 768 kHz",
        found=found, fix="check the path, or convert it with: ffmpeg -i FILE -ac 1 audio.wav",
    )  # fmt: skip
