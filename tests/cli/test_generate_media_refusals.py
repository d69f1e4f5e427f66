"""waybill generate with files that do not fit the package, the prompts or anything: what is said, and the exit code."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from commands import Capture, Patch, run
from references import AUDIO, CLIP, Make

T5, WHISPER, TEXT = "T5, gated", "Whisper", "Llama with per-layer inputs"
A, B = ("--image", "a.png"), ("--image", "b.png")
SOUND, NOISE = ("--audio", "a.wav"), ("--audio", "b.wav")
ASK = ("-p", "w5 w6")
NOT_GIVEN, UNFIT = "the package cannot be given that", "the prompts and the files do not fit together"
EXPORT_FIRST = "export the checkpoint with waybill export, and generate from the package"


def refused(patch: Patch, capsys: Capture, folder: Path, files: dict[str, Path], *options: str) -> tuple[int, str]:
    """Exit code and text of a refusal; nothing was printed but that."""
    arguments = [files.get(option, option) for option in options]
    code, out, err = run(patch, capsys, "generate", folder, *arguments)
    assert (code > 0, out) == (True, "")
    return code, err


@pytest.mark.parametrize(
    ("title", "options", "expected", "found"),
    [
        (TEXT, (*ASK, *A), "text", "1 picture"),
        (TEXT, (*ASK, *SOUND, *NOISE), "text", "2 recordings"),
        (T5, (*ASK, *SOUND), "text", "1 recording"),
        (T5, (*ASK, *A), "text", "1 picture"),
        (CLIP, (*ASK, *SOUND), "text and pictures", "1 recording"),
        (CLIP, (*ASK, *A, *SOUND), "text and pictures", "1 recording"),
        (WHISPER, A + SOUND, "text and recordings", "1 picture"),
        (AUDIO, (*ASK, *A), "text and recordings", "1 picture"),
    ],
)
def test_files_that_no_graph_takes_are_wrong_usage(
    title: str, options: tuple[str, ...], expected: str, found: str, make: Make, files: dict[str, Path],
    monkeypatch: Patch, capsys: Capture,
) -> None:  # fmt: skip
    code, err = refused(monkeypatch, capsys, make(title).package, files, *options)
    assert code == 2
    assert f"{NOT_GIVEN} [bad-option]\n  expected {expected}\n  found    {found}\n" in err


@pytest.mark.parametrize(
    ("title", "options", "found"),
    [
        (CLIP, (*ASK, *A, *B), "0 <image>s in 1 prompt, 2 pictures"),
        (CLIP, (*ASK, *ASK, *A), "0 <image>s in 2 prompts, 1 picture"),
        (CLIP, ("-p", "w5 <image>"), "1 <image> in 1 prompt, 0 pictures"),
        (CLIP, ("-p", "<image> <image>", *A), "2 <image>s in 1 prompt, 1 picture"),
        (AUDIO, (*ASK, *ASK, "-p", "<|AUDIO|>", *SOUND, *NOISE), "1 <|AUDIO|> in 3 prompts, 2 recordings"),
        (WHISPER, (*ASK, *SOUND, *NOISE), "1 prompt, 2 recordings"),
        (WHISPER, (*ASK, *ASK, *SOUND), "2 prompts, 1 recording"),
        (WHISPER, ASK, "1 prompt, 0 recordings"),
    ],
)
def test_too_few_and_too_many_files_are_counted(
    title: str, options: tuple[str, ...], found: str, make: Make, files: dict[str, Path], monkeypatch: Patch,
    capsys: Capture,
) -> None:  # fmt: skip
    code, err = refused(monkeypatch, capsys, make(title).package, files, *options)
    assert code == 1
    assert f"{UNFIT} [bad-request]\n" in err
    assert f"found    {found}\n" in err


@pytest.mark.parametrize(
    ("title", "file", "found"),
    [
        (CLIP, "none", "nothing there"),
        (CLIP, "folder", "a directory, device or pipe"),
        (CLIP, "bad.png", "cannot identify image file"),
        (CLIP, "a.wav", "cannot identify image file"),
        (WHISPER, "none", "no such file"),
        (WHISPER, "folder", "a directory, device or pipe"),
        (WHISPER, "bad.wav", "Format not recognised"),
        (AUDIO, "a.png", "Format not recognised"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_before_a_graph_is_opened(
    title: str, file: str, found: str, make: Make, files: dict[str, Path], monkeypatch: Patch, capsys: Capture
) -> None:
    option = "--image" if title == CLIP else "--audio"
    code, err = refused(monkeypatch, capsys, make(title).package, files, *ASK, option, file)
    assert code == 1
    assert "cannot be read [bad-request]\n" in err
    assert f"where    {files[file]}\n" in err
    assert found in err
    assert "loaded in" not in err


def test_a_recording_alone_is_no_prompt_for_a_language_model(
    make: Make, files: dict[str, Path], monkeypatch: Patch, capsys: Capture
) -> None:
    code, err = refused(monkeypatch, capsys, make(AUDIO).package, files, *SOUND)
    assert (code, "a recording alone is no prompt for this package [bad-option]" in err) == (2, True)


@pytest.mark.parametrize(("title", "options"), [(CLIP, (*ASK, *A)), (WHISPER, SOUND)])
def test_a_checkpoint_is_to_be_exported_before_it_sees_or_hears(
    title: str, options: tuple[str, ...], make: Make, files: dict[str, Path], monkeypatch: Patch, capsys: Capture
) -> None:
    code, err = refused(monkeypatch, capsys, make(title).checkpoint, files, *options)
    assert code == 2
    assert err.startswith("the engine reads text alone [bad-option]\n")
    assert f"found    1 file for a checkpoint\n  fix      {EXPORT_FIRST}\n" in err


@pytest.mark.parametrize(
    ("title", "options", "found"),
    [
        (CLIP, ("-p", "w5 w6", *A, "-n", "59"), "6 prompt tokens and 59 new ones, of 64 positions"),
        (AUDIO, ("-p", "w5 w6", *SOUND, "-n", "58"), "7 prompt tokens and 58 new ones, of 64 positions"),
        (WHISPER, (*ASK, *SOUND, "-n", "30"), "3 prompt tokens and 30 new ones, of 32 positions"),
    ],
)
def test_positions_are_counted_with_those_that_a_file_takes(
    title: str, options: tuple[str, ...], found: str, make: Make, files: dict[str, Path], monkeypatch: Patch,
    capsys: Capture,
) -> None:  # fmt: skip
    code, err = refused(monkeypatch, capsys, make(title).package, files, *options)
    assert (code, f"found    {found}\n" in err) == (1, True)
    fewer = [*options[:-1], str(int(options[-1]) - 1)]
    arguments = [files.get(option, option) for option in fewer]
    assert run(monkeypatch, capsys, "generate", make(title).package, *arguments)[0] == 0


@pytest.mark.parametrize(("title", "options"), [(CLIP, (*ASK, *A)), (WHISPER, SOUND), (T5, ASK)])
def test_nothing_new_may_be_asked_for(
    title: str, options: tuple[str, ...], make: Make, files: dict[str, Path], monkeypatch: Patch, capsys: Capture
) -> None:
    arguments = [files.get(option, option) for option in options]
    code, out, _ = run(monkeypatch, capsys, "generate", make(title).package, *arguments, "-n", 0)
    assert (code, out) == (0, "\n")


def test_a_package_of_several_graphs_is_not_cut_into_ranks(
    make: Make, files: dict[str, Path], monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, err = refused(monkeypatch, capsys, make(CLIP).package, files, *ASK, *A)
    assert (code, "torchrun with 2 ranks" in err) == (2, True)


# Packages that are not whole, or not of one piece


def without(*names: str) -> Callable[[Path], None]:
    def damage(package: Path) -> None:
        for name in names:
            (package / name).unlink()

    return damage


def swapped(one: str, other: str) -> Callable[[Path], None]:
    def damage(package: Path) -> None:
        kept = (package / one).read_bytes()
        (package / one).write_bytes((package / other).read_bytes())
        (package / other).write_bytes(kept)

    return damage


def restated(file: str, old: str, new: str) -> Callable[[Path], None]:
    def damage(package: Path) -> None:
        text = (package / file).read_text()
        assert old in text
        (package / file).write_text(text.replace(old, new))

    return damage


NO_GRAPH, OTHER = "the package has no graph [bad-package]", "a graph takes other inputs than it should [bad-package]"
GENAI, PROCESSOR = "genai_config.json", "processor_config.json"
SEES, HEARS = (*ASK, *A), (*ASK, *SOUND)


@pytest.mark.parametrize(
    ("title", "options", "damage", "what"),
    [
        (CLIP, SEES, without("vision_encoder.onnx"), NO_GRAPH),
        (CLIP, ASK, without("embedding.onnx"), NO_GRAPH),
        (CLIP, ASK, without("decoder.onnx"), NO_GRAPH),
        (AUDIO, HEARS, without("audio_encoder.onnx"), NO_GRAPH),
        (T5, ASK, without("encoder.onnx"), NO_GRAPH),
        (CLIP, ASK, swapped("vision_encoder.onnx", "embedding.onnx"), OTHER),
        (CLIP, SEES, swapped("vision_encoder.onnx", "embedding.onnx"), OTHER),
        (CLIP, ASK, swapped("embedding.onnx", "decoder.onnx"), "the graph is not a decoder that can be run here"),
        (CLIP, ASK, restated(GENAI, '"embedding": {', '"other": {'), OTHER),
        (T5, ASK, restated(GENAI, '"encoder": {', '"other": {'), OTHER),
        (CLIP, SEES, without(PROCESSOR), "nothing says how a picture is prepared [bad-config]"),
        (AUDIO, HEARS, without(PROCESSOR), "nothing says how sound becomes features [bad-config]"),
        (CLIP, SEES, restated(PROCESSOR, "30", "28"), "an input does not fit the graph [bad-request]"),
        (AUDIO, HEARS, restated(PROCESSOR, '"feature_size": 16', '"feature_size": 20'), "an input does not fit the"),
        (CLIP, SEES, without("tokenizer.json"), "there is no tokenizer.json [no-tokenizer]"),
        (CLIP, SEES, restated(GENAI, '"image_token_id": 100', '"image_token_id": 127'), "cannot run the graph"),
        (CLIP, SEES, restated("tokenizer.json", "<image>", "<picture>"), ""),
    ],
)
def test_a_package_that_is_not_of_one_piece_is_refused(
    title: str, options: tuple[str, ...], damage: Callable[[Path], None], what: str, make: Make,
    files: dict[str, Path], tmp_path: Path, monkeypatch: Patch, capsys: Capture,
) -> None:  # fmt: skip
    package = shutil.copytree(make(title).package, tmp_path / "package")
    damage(package)
    if not what:  # another word for a place is as good
        assert run(monkeypatch, capsys, "generate", package, *ASK, "--image", files["a.png"], "-n", 2)[0] == 0
        return
    code, err = refused(monkeypatch, capsys, package, files, *options, "-n", "3")
    assert code == 1
    assert what in err


def test_a_tokenizer_without_a_word_for_a_place_is_refused(
    make: Make, files: dict[str, Path], tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    package = shutil.copytree(make(CLIP).package, tmp_path / "package")
    tokenizer = json.loads((package / "tokenizer.json").read_text())
    del tokenizer["model"]["vocab"]["<image>"]
    tokenizer["added_tokens"] = []
    (package / "tokenizer.json").write_text(json.dumps(tokenizer))
    code, err = refused(monkeypatch, capsys, package, files, *SEES)
    assert code == 1
    assert "the tokenizer has no word for the place of a picture [bad-package]" in err
    assert "expected a word for token 100, as genai_config.json says\n" in err


# What the other commands say beforehand


def test_export_copies_the_files_that_say_how_media_are_prepared(make: Make) -> None:
    for title in (CLIP, AUDIO):
        assert (make(title).package / PROCESSOR).read_bytes() == (make(title).checkpoint / PROCESSOR).read_bytes()
    assert (make(WHISPER).package / "preprocessor_config.json").is_file()


@pytest.mark.parametrize(
    ("title", "things"), [(CLIP, "pictures"), (AUDIO, "recordings"), (WHISPER, "recordings"), (T5, ""), (TEXT, "")]
)
def test_export_notices_that_nothing_says_how_media_are_prepared(
    title: str, things: str, make: Make, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    checkpoint = shutil.copytree(make(title).checkpoint, tmp_path / "checkpoint")
    told = f"there is no preprocessor_config.json: the package can be given arrays, not {things}"
    assert told not in run(monkeypatch, capsys, "export", checkpoint, tmp_path / "whole")[2]
    (checkpoint / PROCESSOR).write_text('{"patch_size": 14}')
    (checkpoint / "preprocessor_config.json").unlink(missing_ok=True)
    code, _, err = run(monkeypatch, capsys, "export", checkpoint, tmp_path / "package")
    assert code == 0
    assert (f"note: {told}\n" in err) == bool(things)
    assert ("preprocessor" in err) == bool(things)


def test_the_tables_of_models_with_long_names_break_none(make: Make, monkeypatch: Patch, capsys: Capture) -> None:
    arguments = ("plan", "--target", "onnx", make(CLIP).checkpoint)
    name = "model.vision_tower.encoder.layers.{0–1}.self_attn.out_proj.weight"
    _, piped, _ = run(monkeypatch, capsys, *arguments)
    assert re.search(rf"^{re.escape(name)} +32×32 +F32 +2 × 1 +8.19 kB$", piped, re.MULTILINE)
    assert "dropped 18 tensors, vision_tower.encoder.layers.2.layer_norm1.bias and others: features are" in piped
    assert run(monkeypatch, capsys, *arguments, "--full")[1].count("\ndropped vision_tower.") == 18
    monkeypatch.setattr("waybill.cli.render.sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    _, shown, _ = run(monkeypatch, capsys, *arguments)
    assert re.search(rf"^{re.escape(name)}\n  32×32 +F32 +2 × 1 +8.19 kB$", shown, re.MULTILINE)


def test_inspect_says_which_names_are_spelled_otherwise_than_in_the_running_model(
    make: Make, monkeypatch: Patch, capsys: Capture
) -> None:
    _, out, _ = run(monkeypatch, capsys, "inspect", make(AUDIO).checkpoint)
    assert re.search(r"^names +audio_tower for model.audio_tower \(.*\), 37 times *$", out, re.MULTILINE)
    assert re.search(r"^ +language_model.lm_head for lm_head \(.*\), 1 time *$", out, re.MULTILINE)
    assert re.search("^ +embedding +1 tensor, 32.8 kB, float *$", out, re.MULTILINE)
    names = json.loads(run(monkeypatch, capsys, "inspect", make(AUDIO).checkpoint, "--json")[1])["names"]
    assert ("audio_tower", "model.audio_tower", 37) in {(n["stored"], n["runtime"], n["tensors"]) for n in names}


def test_export_says_what_each_component_takes_and_what_is_stored_once(
    make: Make, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    code, out, _ = run(monkeypatch, capsys, "export", make(CLIP).checkpoint, tmp_path / "package")
    assert code == 0
    _, *lines, last = out.splitlines()
    assert [line.split()[0] for line in lines] == ["vision_encoder", "embedding", "decoder"]
    assert last == "32.8 kB used by several components, stored once"
    _, out, _ = run(monkeypatch, capsys, "export", make(CLIP).checkpoint, tmp_path / "package", "--overwrite", "--json")
    told = json.loads(out)
    assert told["shared_bytes"] == 128 * 64 * 4
    assert list(told["component_bytes"]) == told["components"]
    assert told["component_bytes"]["embedding"] == 128 * 64 * 4
    code, out, _ = run(monkeypatch, capsys, "export", make(TEXT).checkpoint, tmp_path / "other")
    assert (code, len(out.splitlines())) == (0, 1)


# What is imported


@pytest.mark.parametrize(
    ("title", "option", "file", "there"),
    [(CLIP, "--image", "a.png", {"PIL"}), (WHISPER, "--audio", "a.wav", {"soundfile"}), (T5, "-p", "w5", set())],
)
def test_only_what_reads_the_files_is_imported(
    title: str, option: str, file: str, there: set[str], make: Make, files: dict[str, Path]
) -> None:
    script = (
        "import sys\nfrom waybill.cli.app import main\ntry:\n    main()\nfinally:\n"
        "    print(*({'torch', 'transformers', 'onnx_ir', 'PIL', 'soundfile', 'soxr', 'jinja2'} & sys.modules.keys()))"
    )
    options = ["generate", str(make(title).package), "-p", "w5", option, str(files.get(file, file)), "-n", "2"]
    done = subprocess.run([sys.executable, "-c", script, *options], capture_output=True, text=True, check=True)
    assert set(done.stdout.splitlines()[-1].split()) == there
