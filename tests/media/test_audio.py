"""Sound becomes the features that the peer computes, and what cannot become features is refused in words."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import WhisperFeatureExtractor, audio_utils

from waybill.errors import BadConfig, BadJson, BadRequest, MissingRuntime, Refused, WaybillError
from waybill.media.audio import EXTRACTOR, LogMel, log_mel, mel_filters, read_audio, read_log_mel

RATE = 16_000
NUMPY_TOLERANCE = 5e-7
"""Largest difference measured: 2.4e-7, the last bit of a float32 near 3; below 2, 1.2e-7."""
TORCH_TOLERANCE = 1e-4
"""Largest difference measured: 7.4e-5, on a sweep. The peer's own two paths are as far apart: torch transforms in
float32, and 80 dB below the loudest bin its rounding shows."""

Samples = NDArray[np.float32]


def noise(samples: int, loudness: float = 0.1) -> Samples:
    return (np.random.default_rng(samples).standard_normal(samples) * loudness).astype(np.float32)


def sweep(samples: int) -> Samples:
    """A sine that rises from 50 to 7900 Hz."""
    time = np.arange(samples) / RATE
    rise = (7900 - 50) / (samples / RATE)
    return (0.5 * np.sin(2 * np.pi * (50 * time + rise / 2 * time**2))).astype(np.float32)


def tone(hertz: float, seconds: float, rate: int = RATE) -> Samples:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


SOUNDS = {
    "silence": np.zeros(RATE, np.float32),
    "one sample": np.ones(1, np.float32),
    "a tenth of a second": noise(1600),
    "noise": noise(77_777, 0.3),
    "whisper": noise(48_000, 1e-4),
    "far over full scale": tone(1000, 3) * 20_000,
    "a sweep": sweep(160_000),
    "exactly thirty seconds": sweep(480_000),
}


@pytest.mark.parametrize("mels", [80, 128])
@pytest.mark.parametrize("sound", SOUNDS)
def test_features_are_those_of_the_peer(sound: str, mels: int) -> None:
    samples, peer = SOUNDS[sound], WhisperFeatureExtractor(feature_size=mels)
    filled = np.pad(samples, (0, 480_000 - len(samples)))
    ours, heard = log_mel(samples, LogMel(feature_size=mels))
    assert (ours.shape, ours.dtype) == ((mels, 3000), np.float32)
    np.testing.assert_allclose(ours, peer._np_extract_fbank_features([filled], "cpu")[0], rtol=0, atol=NUMPY_TOLERANCE)
    theirs = peer(samples, sampling_rate=RATE, return_attention_mask=True)  # by torch, as it is installed
    np.testing.assert_allclose(ours, theirs["input_features"][0], rtol=0, atol=TORCH_TOLERANCE)
    assert heard == theirs["attention_mask"].sum()


@settings(max_examples=25)
@given(
    length=st.integers(1, RATE),
    hop=st.sampled_from([50, 100, 160, 161, 333]),
    n_fft=st.sampled_from([256, 400, 402, 512]),
)
def test_any_length_hop_and_window_give_the_peers_features_and_mask(length: int, hop: int, n_fft: int) -> None:
    sizes = {"chunk_length": 1, "hop_length": hop, "n_fft": n_fft, "feature_size": 20}
    samples, peer = noise(length), WhisperFeatureExtractor(**sizes)
    ours, heard = log_mel(samples, LogMel(**sizes))
    theirs = peer(samples, sampling_rate=RATE, return_attention_mask=True)
    np.testing.assert_allclose(ours, theirs["input_features"][0], rtol=0, atol=TORCH_TOLERANCE)
    assert heard == theirs["attention_mask"].sum()


@pytest.mark.parametrize("mels", [20, 80, 128])
def test_every_mel_filter_is_a_triangle_of_the_peers_bank(mels: int) -> None:
    parameters = LogMel(feature_size=mels)
    theirs = WhisperFeatureExtractor(feature_size=mels).mel_filters
    np.testing.assert_allclose(mel_filters(parameters), theirs.T, rtol=0, atol=1e-16)


def test_the_defaults_are_those_of_the_class_that_writes_the_files() -> None:
    peer = WhisperFeatureExtractor().to_dict()
    ours = asdict(LogMel()) | {"n_samples": LogMel().n_samples, "nb_max_frames": LogMel().nb_max_frames}
    assert ours == {key: peer[key] for key in ours}


WRITTEN = WhisperFeatureExtractor(feature_size=128, chunk_length=20).to_dict()


def folder_with(path: Path, file: str = "preprocessor_config.json", **changes: Any) -> Path:
    """What the peer writes, with changes; a field changed to ... is left out."""
    stated = {key: value for key, value in (WRITTEN | changes).items() if value is not ... and key != "mel_filters"}
    nested = {"feature_extractor": stated, "processor_class": "WhisperProcessor"}
    (path / file).write_text(json.dumps(nested if file == "processor_config.json" else stated))
    return path


def test_parameters_are_read_from_what_a_feature_extractor_saves(tmp_path: Path) -> None:
    WhisperFeatureExtractor(feature_size=128, chunk_length=20).save_pretrained(tmp_path)
    assert read_log_mel(tmp_path) == LogMel(feature_size=128, chunk_length=20)


def test_parameters_are_read_from_what_older_versions_wrote(tmp_path: Path) -> None:
    older = {"mel_filters": [[0.0, 1.0]], "processor_class": "WhisperProcessor", "dither": ...}
    folder_with(tmp_path, **older)
    assert read_log_mel(tmp_path) == LogMel(feature_size=128, chunk_length=20)


def test_a_processors_nested_object_wins_over_the_older_file_as_it_does_for_the_peer(tmp_path: Path) -> None:
    folder_with(tmp_path, feature_size=80)
    folder_with(tmp_path, "processor_config.json")
    peer = WhisperFeatureExtractor.from_pretrained(tmp_path)
    assert read_log_mel(tmp_path).feature_size == peer.feature_size == 128


def test_a_processor_without_a_feature_extractor_leaves_the_word_to_the_older_file(tmp_path: Path) -> None:
    (tmp_path / "processor_config.json").write_text('{"processor_class": "WhisperProcessor"}')
    assert read_log_mel(folder_with(tmp_path)).feature_size == 128


def test_what_a_file_leaves_out_is_the_class_default(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"feature_extractor_type": EXTRACTOR}))
    assert read_log_mel(tmp_path) == LogMel()


def refusals(folder: Path) -> list[WaybillError]:
    with pytest.raises(Refused) as refused:
        read_log_mel(folder)
    return list(refused.value.problems)


@pytest.mark.parametrize(
    ("changes", "code", "where", "said"),
    [
        ({"feature_size": "80"}, "bad-config", "feature_size", "expected an integer from 1 to 512"),
        ({"feature_size": 513}, "bad-config", "feature_size", "found    513"),
        ({"sampling_rate": 8000}, "bad-config", "sampling_rate", "expected an integer from 16000 to 48,000"),
        ({"hop_length": 0}, "bad-config", "hop_length", "expected an integer from 1 to 8,192"),
        ({"hop_length": True}, "bad-config", "hop_length", "found    True"),
        ({"chunk_length": 1 << 40}, "bad-config", "chunk_length", "expected an integer from 1 to 600"),
        ({"n_fft": 400.0}, "bad-config", "n_fft", "expected an integer from 16 to 8,192"),
        ({"n_fft": 401}, "bad-config", "n_fft, hop_length", "expected an even n_fft"),
        (
            {"hop_length": 1, "nb_max_frames": ...}, "bad-config", "n_fft, hop_length",
            "found    n_fft 400, 128,000,000 numbers",
        ),
        ({"n_samples": 480_000}, "config-conflict", "n_samples", "expected 320000, from chunk_length"),
        ({"nb_max_frames": 3000}, "config-conflict", "nb_max_frames", "found    3000"),
        ({"nb_max_frames": "many"}, "bad-config", "nb_max_frames", "found    'many'"),
        ({"dither": 1e-5}, "unsupported-feature", "dither", "dither 1e-05 is not implemented"),
        ({"padding_value": -1}, "unsupported-feature", "padding_value", "expected 0.0"),
        ({"padding_side": "left"}, "unsupported-feature", "padding_side", "expected right"),
        ({"feature_extractor_type": ...}, "bad-config", "feature_extractor_type", "found    no such field"),
        ({"feature_extractor_type": 1}, "bad-config", "feature_extractor_type", "expected a string"),
        (
            {"feature_extractor_type": "ClapFeatureExtractor", "hop_length": -1}, "unsupported-feature",
            "feature_extractor_type", "found    ClapFeatureExtractor",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("file", ["preprocessor_config.json", "processor_config.json"])
def test_a_front_end_that_cannot_be_is_refused(
    tmp_path: Path, file: str, changes: dict[str, Any], code: str, where: str, said: str
) -> None:
    (problem,) = refusals(folder_with(tmp_path, file, **changes))
    assert problem.code == code
    assert problem.where.startswith(file) and problem.where.endswith(f": {where}")
    assert said in str(problem)


def test_all_wrong_fields_are_refused_together(tmp_path: Path) -> None:
    found = refusals(folder_with(tmp_path, n_fft=0, hop_length=None, feature_size=[], dither=1))
    assert [problem.where.split(": ")[1] for problem in found] == ["feature_size", "n_fft", "dither"]


def test_a_folder_without_either_file_is_told_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(BadConfig) as refused:
        read_log_mel(tmp_path)
    assert str(refused.value).splitlines() == [
        "nothing says how sound becomes features [bad-config]",
        f"  where    {tmp_path}",
        "  expected preprocessor_config.json, or processor_config.json with a feature_extractor",
        "  found    neither",
        "  fix      copy the file from the checkpoint the model was published in",
    ]


def test_a_file_that_is_not_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(BadJson, match=r"preprocessor_config\.json is not a readable JSON object"):
        read_log_mel(tmp_path)


def test_a_feature_extractor_that_is_no_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "processor_config.json").write_text('{"feature_extractor": "whisper"}')
    (problem,) = refusals(tmp_path)
    assert (problem.code, problem.expected, problem.found) == ("bad-config", "an object", "'whisper'")


@pytest.mark.parametrize(("suffix", "kind"), [("wav", "PCM_16"), ("wav", "FLOAT"), ("flac", "PCM_24")])
def test_a_file_at_the_models_rate_is_read_to_the_sample(tmp_path: Path, suffix: str, kind: str) -> None:
    samples, file = noise(40_000), tmp_path / f"noise.{suffix}"
    soundfile.write(file, samples, RATE, subtype=kind)
    read = read_audio(file, RATE)
    assert (read.shape, read.dtype) == (samples.shape, np.float32)
    step = {"PCM_16": 2.0**-15, "PCM_24": 2.0**-23, "FLOAT": 0.0}[kind]
    np.testing.assert_allclose(read, samples, rtol=0, atol=step)


@pytest.mark.parametrize("suffix", ["ogg", "mp3"])
def test_lossy_files_are_read_at_their_full_length(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"tone.{suffix}"
    soundfile.write(file, tone(440, 2), RATE)
    read = read_audio(file, RATE)
    assert len(read) == 2 * RATE
    assert loudest_hertz(read) == pytest.approx(440, abs=1)


def test_channels_are_averaged(tmp_path: Path) -> None:
    left, right, file = noise(20_000), tone(440, 1.25), tmp_path / "stereo.wav"
    soundfile.write(file, np.stack([left, right], axis=1), RATE, subtype="FLOAT")
    np.testing.assert_array_equal(read_audio(file, RATE), (left + right) / 2)


def loudest_hertz(samples: Samples) -> float:
    return float(np.abs(np.fft.rfft(samples)).argmax() * RATE / len(samples))


@pytest.mark.parametrize("rate", [8000, 11_025, 22_050, 44_100, 48_000])
def test_another_rate_is_resampled_as_the_peer_does_and_keeps_duration_and_pitch(tmp_path: Path, rate: int) -> None:
    file = tmp_path / "tone.wav"
    soundfile.write(file, np.stack([tone(1234, 2, rate)] * 2, axis=1), rate)
    read = read_audio(file, RATE)
    assert len(read) == 2 * RATE
    assert loudest_hertz(read) == pytest.approx(1234, abs=1)
    np.testing.assert_array_equal(read, audio_utils.load_audio(str(file), RATE, backend="soundfile"))


@pytest.mark.parametrize("frames", [1, 3, 1000, 44_099])
def test_a_resampled_length_is_rounded_up(tmp_path: Path, frames: int) -> None:
    soundfile.write(tmp_path / "short.wav", noise(frames), 44_100)
    assert len(read_audio(tmp_path / "short.wav", RATE)) == -(-frames * RATE // 44_100)


@pytest.mark.parametrize("rate", [RATE, 44_100])
def test_exactly_as_long_as_the_model_reads_is_read_and_one_sample_more_is_refused(tmp_path: Path, rate: int) -> None:
    file = tmp_path / "long.wav"
    soundfile.write(file, noise(30 * rate), rate)
    assert len(read_audio(file, RATE)) == LogMel().n_samples
    soundfile.write(file, noise(30 * rate + 1), rate)
    with pytest.raises(BadRequest) as refused:
        read_audio(file, RATE)
    assert str(refused.value).splitlines() == [
        "the audio is longer than the model reads [bad-request]",
        f"  where    {file}",
        "  expected at most 30 s",
        f"  found    30.000 s, {30 * rate + 1:,} samples at {rate:,} Hz",
        "  fix      cut it into parts, the first with: ffmpeg -i FILE -t 30 part.wav",
    ]


def test_a_model_that_reads_less_refuses_more(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "sound.wav", noise(3 * RATE), RATE)
    with pytest.raises(BadRequest, match=r"(?s)at most 2 s.*3\.000 s"):
        read_audio(tmp_path / "sound.wav", RATE, 2)


def test_samples_longer_than_the_model_reads_are_refused_not_cut() -> None:
    with pytest.raises(BadRequest, match=r"(?s)audio.*at most 1 s.*1\.000 s, 16,001 samples"):
        log_mel(noise(RATE + 1), LogMel(chunk_length=1))


def said_of(file: Path) -> str:
    with pytest.raises(BadRequest) as refused:
        read_audio(file, RATE)
    assert refused.value.where == str(file)
    return str(refused.value)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("rate", [RATE, 44_100])
def test_samples_that_are_not_finite_are_refused(tmp_path: Path, value: str, rate: int) -> None:
    samples = noise(rate)
    samples[rate // 2] = float(value)
    soundfile.write(tmp_path / "bad.wav", samples, rate, subtype="FLOAT")
    assert re.search(r"all finite\n  found    (nan|-?inf) at 0\.\d{3} s\n", said_of(tmp_path / "bad.wav"))
    with pytest.raises(BadRequest, match=f"found    {value} at 0.500 s" if rate == RATE else "all finite"):
        log_mel(samples[:RATE] if rate == RATE else samples, LogMel())


def test_no_samples_are_refused(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "empty.wav", noise(0), RATE)
    assert "the audio cannot be used" in said_of(tmp_path / "empty.wav")
    with pytest.raises(BadRequest, match="found    no samples"):
        log_mel(noise(0), LogMel())


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("words.wav", b"these are words", "Format not recognised"),
        ("nothing.wav", b"", "Format not recognised"),
        ("bare.raw", bytes(64), "samplerate must be specified"),
    ],
)
def test_what_is_no_sound_file_is_refused(tmp_path: Path, name: str, content: bytes, found: str) -> None:
    (tmp_path / name).write_bytes(content)
    said = said_of(tmp_path / name)
    assert said.startswith("the audio file cannot be read [bad-request]")
    assert found in said
    assert "fix      check the path, or convert it with: ffmpeg" in said


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    assert "found    no such file" in said_of(tmp_path / "missing.wav")
    assert "found    a directory, device or pipe" in said_of(tmp_path)


@pytest.mark.parametrize("rate", [999, 768_001])
def test_a_rate_that_no_recorder_has_is_refused(tmp_path: Path, rate: int) -> None:
    soundfile.write(tmp_path / "odd.wav", noise(100), rate)
    assert f"found    {rate:,} samples a second" in said_of(tmp_path / "odd.wav")


@pytest.mark.parametrize("suffix", ["flac", "mp3"])
def test_a_file_cut_off_on_its_way_is_refused(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"half.{suffix}"
    soundfile.write(file, noise(3 * RATE), RATE)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert "the audio file cannot be read" in said_of(file)


def test_a_decoder_that_stops_early_without_a_word_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    soundfile.write(tmp_path / "sound.wav", noise(40_000), RATE)
    monkeypatch.setattr(soundfile.SoundFile, "read", lambda *_, **__: np.zeros((0, 1), np.float32))
    assert "found    it ends after 0 of 40,000 samples" in said_of(tmp_path / "sound.wav")


@pytest.mark.parametrize("module", ["soundfile", "soxr"])
def test_without_its_libraries_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    soundfile.write(tmp_path / "sound.wav", noise(100), 44_100)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingRuntime) as refused:
        read_audio(tmp_path / "sound.wav", RATE)
    assert "what reads audio is not installed [missing-runtime]" in str(refused.value)
    assert refused.value.expected == "the packages soundfile and soxr"
    assert refused.value.fix == "pip install 'waybill[audio]'"


def test_the_fix_installs_what_is_missing() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    assert {re.split("[<>=]", line)[0] for line in project["optional-dependencies"]["audio"]} == {"soundfile", "soxr"}
