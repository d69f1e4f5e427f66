"""waybill generate with pictures and recordings: the text that transformers computes for the same files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

import waybill
from commands import Capture, Patch, run
from llavas import PATCH, SIDE
from references import AUDIO, CLIP, FLOAT, NEW, PACKED, SIGLIP, Both, Make
from zoo import Layout

PARTS = (
    "{% for m in messages %}w7{% for p in m.content | selectattr('type', 'equalto', 'image') %} <image>{% endfor %}"
    "{% for p in m.content | selectattr('type', 'equalto', 'text') %} {{ p['text'] }}{% endfor %} w9{% endfor %}"
)
TEXT = "{% for m in messages %}w7 {{ m['content'].strip() }} w9{% endfor %}"
EITHER = (
    "{% for m in messages %}w7 {% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p['type'] == 'audio' %}w8 <|AUDIO|> {% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %} w9"
    "{% endfor %}"
)


def told(patch: Patch, capsys: Capture, package: Path, *options: object) -> str:
    code, out, err = run(patch, capsys, "generate", package, "-n", NEW, *options)
    assert code == 0, err
    return out


def block(*pairs: tuple[str, str]) -> str:
    """A batch as it is printed."""
    return "".join(f"── {prompt}\n{text}\n\n" for prompt, text in pairs)


# What is said of pictures


@pytest.mark.parametrize("layout", [FLOAT, PACKED], ids=lambda layout: layout.title)
@pytest.mark.parametrize("title", [CLIP, SIGLIP])
def test_a_picture_is_answered_as_transformers_does(
    make: Make, files: dict[str, Path], title: str, layout: Layout, monkeypatch: Patch, capsys: Capture
) -> None:
    both, picture = make(title, layout), files["a.png"]
    answers = {}
    for prompt, complete in (("w5 w6", "<image>\nw5 w6"), ("w5 <image> w6", "w5 <image> w6")):
        answers[prompt] = told(monkeypatch, capsys, both.package, "-p", prompt, "--image", picture)
        assert answers[prompt] == both.text(complete, picture) + "\n"
    assert len(set(answers.values())) == 2


def test_several_prompts_have_a_picture_each_in_their_order(
    make: Make, files: dict[str, Path], monkeypatch: Patch, capsys: Capture
) -> None:
    both, (one, two) = make(CLIP), (files["a.png"], files["b.png"])
    out = told(
        monkeypatch, capsys, both.package, "-p", "w5 w6", "-p", "w8 <image> w9 w4", "--image", one, "--image", two
    )
    shown = ("w5 w6", both.text("<image>\nw5 w6", one)), ("w8 <image> w9 w4", both.text("w8 <image> w9 w4", two))
    assert out == block(*shown)


def test_one_prompt_may_have_two_pictures_and_another_none(
    make: Make, files: dict[str, Path], monkeypatch: Patch, capsys: Capture
) -> None:
    both = make(CLIP)
    pictures = ("--image", files["a.png"], "--image", files["b.png"])
    out = told(monkeypatch, capsys, both.package, "-p", "w3 <image> <image>", "-p", "w5 w6", *pictures)
    assert out.endswith(f"── w5 w6\n{both.text('w5 w6')}\n\n")


def test_without_a_picture_a_package_that_sees_is_a_language_model(
    make: Make, monkeypatch: Patch, capsys: Capture
) -> None:
    both = make(SIGLIP)
    out = told(monkeypatch, capsys, both.package, "-p", "w5 w6 w7", "-p", "w11")
    assert out == block(("w5 w6 w7", both.text("w5 w6 w7")), ("w11", both.text("w11")))


def test_json_counts_what_a_picture_takes_of_the_prompt(
    make: Make, files: dict[str, Path], monkeypatch: Patch, capsys: Capture
) -> None:
    both = make(CLIP)
    answer = json.loads(told(monkeypatch, capsys, both.package, "-p", "w5 w6", "--image", files["a.png"], "--json"))
    assert answer["token_ids"] == both.ids("<image>\nw5 w6", files["a.png"])
    assert answer["prompt_tokens"] == (SIDE // PATCH) ** 2 + 2
    assert answer["timings"]["encode_seconds"] > 0


def test_the_graphs_that_were_opened_and_the_positions_they_filled_are_told(
    make: Make, files: dict[str, Path], monkeypatch: Patch, capsys: Capture
) -> None:
    options = ("-p", "w5 w6", "--image", files["a.png"], "-n", 2)
    _, _, err = run(monkeypatch, capsys, "generate", make(CLIP).package, *options)
    assert err.startswith("vision_encoder.onnx, embedding.onnx, decoder.onnx: 2 layers, KV cache in float32; loaded in")
    assert "\nencode in " in err
    assert " s, prefill 6 tokens in " in err


# Chat


@pytest.fixture
def chatty(make: Make, tmp_path: Path) -> Callable[..., Both]:
    """A copy of a package that has a chat template, in one of the files that hold one."""

    def build(title: str, template: str, file: str = "chat_template.jinja") -> Both:
        both = make(title)
        package = tmp_path / "package"
        shutil.copytree(both.package, package)
        text = template if file.endswith(".jinja") else json.dumps({"chat_template": template})
        (package / file).write_text(text)
        return Both(**{**vars(both), "package": package})

    return build


@pytest.mark.parametrize("file", ["chat_template.jinja", "chat_template.json", "tokenizer_config.json"])
@pytest.mark.parametrize("template", [PARTS, TEXT], ids=["parts", "text"])
def test_a_template_is_given_the_form_that_it_reads(
    chatty: Make, files: dict[str, Path], template: str, file: str, monkeypatch: Patch, capsys: Capture
) -> None:
    both, picture = chatty(CLIP, template, file), files["a.png"]
    seen = told(monkeypatch, capsys, both.package, "--chat", "-p", "w5 w6", "--image", picture)
    assert seen == both.text("w7 <image> w5 w6 w9", picture) + "\n"
    assert told(monkeypatch, capsys, both.package, "--chat", "-p", "w5 w6") == both.text("w7 w5 w6 w9") + "\n"
    placed = told(monkeypatch, capsys, both.package, "--chat", "-p", "w5 <image> w6", "--image", picture)
    assert placed == both.text("w7 w5 <image> w6 w9", picture) + "\n"


def test_a_recording_goes_where_the_template_puts_it(
    chatty: Make, files: dict[str, Path], monkeypatch: Patch, capsys: Capture
) -> None:
    both = chatty(AUDIO, EITHER)
    out = told(monkeypatch, capsys, both.package, "--chat", "-p", "w5", "--audio", files["b.wav"])
    assert out == both.text("w7 w8 <|AUDIO|> w5 w9", files["b.wav"]) + "\n"
    assert told(monkeypatch, capsys, both.package, "--chat", "-p", "w5") == both.text("w7 w5 w9") + "\n"


def test_what_writes_down_speech_has_no_chat(
    make: Make, files: dict[str, Path], monkeypatch: Patch, capsys: Capture
) -> None:
    options = ("--chat", "-p", "w5", "--audio", files["a.wav"])
    code, out, err = run(monkeypatch, capsys, "generate", make("Whisper").package, *options)
    assert (code, out, "there is no chat template [bad-template]" in err) == (1, "", True)


def test_a_template_that_fails_in_both_forms_is_refused_with_what_it_said(
    chatty: Make, files: dict[str, Path], monkeypatch: Patch, capsys: Capture
) -> None:
    both = chatty(CLIP, "{{ raise_exception('not today') }}")
    options = ("--chat", "-p", "w5", "--image", files["a.png"])
    code, out, err = run(monkeypatch, capsys, "generate", both.package, *options)
    assert (code, out, "not today" in err) == (1, "", True)


# Sound


@pytest.mark.parametrize("layout", [FLOAT, PACKED], ids=lambda layout: layout.title)
def test_recordings_among_words_are_answered_as_transformers_does(
    make: Make, files: dict[str, Path], layout: Layout, monkeypatch: Patch, capsys: Capture
) -> None:
    both, (one, two) = make(AUDIO, layout), (files["a.wav"], files["b.wav"])
    options = ("-p", "w5 w6", "-p", "w7 <|AUDIO|> w8", "--audio", one, "--audio", two)
    shown = ("w5 w6", both.text("<|AUDIO|> w5 w6", one)), ("w7 <|AUDIO|> w8", both.text("w7 <|AUDIO|> w8", two))
    assert told(monkeypatch, capsys, both.package, *options) == block(*shown)


def test_a_recording_stands_between_the_brackets_that_a_tokenizer_has(
    make: Make, files: dict[str, Path], tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    both = make(AUDIO)
    package = shutil.copytree(both.package, tmp_path / "package")
    spelled = both.tokenizer.to_str().replace('"w60"', '"<|audio_bos|>"').replace('"w61"', '"<|audio_eos|>"')
    tokenizer = Tokenizer.from_str(spelled)
    tokenizer.add_special_tokens(["<|audio_bos|>", "<|audio_eos|>"])
    tokenizer.save(str(package / "tokenizer.json"))
    out = told(monkeypatch, capsys, package, "-p", "w5", "--audio", files["a.wav"])
    assert out == both.text("w60 <|AUDIO|> w61 w5", files["a.wav"]) + "\n"


@pytest.mark.parametrize("layout", [FLOAT, PACKED], ids=lambda layout: layout.title)
def test_recordings_need_no_prompt_and_are_called_by_their_names(
    make: Make, files: dict[str, Path], layout: Layout, monkeypatch: Patch, capsys: Capture
) -> None:
    both, (one, two) = make("Whisper", layout), (files["a.wav"], files["b.wav"])
    out = told(monkeypatch, capsys, both.package, "--audio", one, "--audio", two)
    assert out == block(("a.wav", both.text("", one)), ("b.wav", both.text("", two)))
    assert told(monkeypatch, capsys, both.package, "--audio", two) == both.text("", two) + "\n"


def test_a_prompt_is_how_the_text_of_a_recording_begins_and_nothing_ends_in_it(
    make: Make, files: dict[str, Path], monkeypatch: Patch, capsys: Capture
) -> None:
    both, (one, two) = make("Whisper"), (files["a.wav"], files["b.wav"])
    assert both.tokenizer.encode("w5").ids == [5, both.eos]
    out = told(monkeypatch, capsys, both.package, "-p", "w5", "-p", "w7 w8", "--audio", one, "--audio", two)
    assert out == block(("w5", both.text("w5", one)), ("w7 w8", both.text("w7 w8", two)))


def test_the_language_that_is_heard_comes_first(
    make: Make, files: dict[str, Path], tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    both, languages = make("Whisper"), [9, 30, 41, 77, 90]
    checkpoint = shutil.copytree(both.checkpoint, tmp_path / "checkpoint")
    (checkpoint / "generation_config.json").write_text(
        json.dumps({"lang_to_id": {f"<|l{n}|>": n for n in languages}, "is_multilingual": True,
                    "task_to_id": {"transcribe": 50}, "decoder_start_token_id": 3, "eos_token_id": 2})
    )  # fmt: skip
    waybill.build(checkpoint).save(tmp_path / "package")
    state = json.loads((tmp_path / "package" / "genai_config.json").read_text())["model"]
    assert state["language_token_ids"] == languages
    shown = []
    for name in ("a.wav", "b.wav"):
        with torch.no_grad():
            last = both.model(**both.inputs("", files[name])).logits[0, -1]
        heard = languages[int(last[languages].argmax())]
        begin = (3, heard, *state.get("prompt_ids", []))
        shown.append((name, Both(**{**vars(both), "start": begin}).text("", files[name])))
    out = told(monkeypatch, capsys, tmp_path / "package", "--audio", files["a.wav"], "--audio", files["b.wav"])
    assert out == block(*shown)


# Text to text


@pytest.mark.parametrize("title", ["T5, gated", "T5, plain"])
def test_prompts_of_unequal_length_are_answered_as_each_alone(
    make: Make, title: str, monkeypatch: Patch, capsys: Capture
) -> None:
    both, prompts = make(title), ("w5 w6 w7 w8", "w9", "w40 w41")
    out = told(monkeypatch, capsys, both.package, *(part for prompt in prompts for part in ("-p", prompt)))
    assert out == block(*((prompt, both.text(prompt)) for prompt in prompts))
    answer = json.loads(told(monkeypatch, capsys, both.package, "-p", prompts[0], "--json"))
    assert (answer["token_ids"], answer["prompt_tokens"]) == (both.ids(prompts[0]), 5)


def test_a_decoder_with_inputs_for_each_layer_is_a_text_package(
    make: Make, monkeypatch: Patch, capsys: Capture
) -> None:
    both = make("Llama with per-layer inputs")
    answer = json.loads(told(monkeypatch, capsys, both.package, "-p", "w5 w6 w7", "--json"))
    assert answer["token_ids"] == both.ids("w5 w6 w7")
    assert "encode_seconds" not in answer["timings"]
