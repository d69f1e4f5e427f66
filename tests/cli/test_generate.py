"""waybill generate: what it prints, where, and how it ends."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import lively, qwen3, write_tokenizer
from waybill.cli.app import main

PROMPT = "w5 w17 w9"
NEW_TOKENS = 6
ECHO = (
    "{{ bos_token }}{% for m in messages %} w7 {{ m.content }}{% endfor %}{% if add_generation_prompt %} w9{% endif %}"
)
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command in this process: exit code, stdout, stderr."""

    def run(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["waybill", "generate", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tokenizer(lively(qwen3(np.float32)).write(tmp_path / "model"))


def as_json(run: Run, *args: object) -> dict[str, Any]:
    code, out, _ = run(*args, "--json")
    assert code == 0
    answer: dict[str, Any] = json.loads(out)
    return answer


def refused(run: Run, code: str, *args: object) -> str:
    """Runs a command that must be refused with this code, and nothing on stdout; what it says."""
    status, out, err = run(*args)
    assert (status, out) == (1, ""), err
    assert f"[{code}]" in err
    assert "Traceback" not in err
    return err


def words(tokens: list[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


def test_json_holds_text_tokens_prompt_length_and_timings(run: Run, folder: Path) -> None:
    answer = as_json(run, folder, "-p", PROMPT, "-n", NEW_TOKENS)
    assert answer.keys() == {"schema", "text", "token_ids", "prompt_tokens", "timings"}
    assert (len(answer["token_ids"]), answer["prompt_tokens"]) == (NEW_TOKENS, 3)
    assert answer["text"] == words(answer["token_ids"])
    assert answer["timings"].keys() == {
        "load_seconds", "prefill_seconds", "prefill_tokens_per_second", "decode_seconds", "decode_tokens_per_second",
    }  # fmt: skip
    assert all(number > 0 for number in answer["timings"].values())


def test_text_goes_to_stdout_and_everything_else_to_stderr(run: Run, folder: Path) -> None:
    text = as_json(run, folder, "-p", PROMPT, "-n", NEW_TOKENS)["text"]
    code, out, err = run(folder, "--prompt", PROMPT, "--max-new-tokens", NEW_TOKENS)
    assert (code, out) == (0, text + "\n")
    assert "consumed 24 of 24 tensors (100.0% of bytes), 0 unbound" in err
    assert "prefill 3 tokens" in err


def test_text_streams_word_by_word(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Pieces(io.StringIO):
        def __init__(self) -> None:
            super().__init__()
            self.flushed: list[str] = []

        def flush(self) -> None:
            self.flushed.append(self.getvalue())

    pieces = Pieces()
    monkeypatch.setattr(sys, "stdout", pieces)
    code, _, _ = run(folder, "-p", PROMPT, "-n", NEW_TOKENS)
    assert code == 0
    lengths = [len(text.split()) for text in dict.fromkeys(pieces.flushed)]
    assert lengths[:NEW_TOKENS] == list(range(1, NEW_TOKENS + 1))


def test_streamed_text_is_the_whole_text_even_when_it_ends_within_a_character(run: Run, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = lively(qwen3(np.float32, vocab_size=256)).write(tmp_path)
    tokenizer = Tokenizer(models.BPE({c: n for n, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    for new_tokens in range(1, 10):
        text = as_json(run, folder, "-p", "€", "-n", new_tokens)["text"]
        assert run(folder, "-p", "€", "-n", new_tokens)[1] == text + "\n"


def test_several_prompts_run_as_one_batch(run: Run, folder: Path) -> None:
    prompts = [PROMPT, "w2", "w40 w41 w42 w43"]
    alone = [as_json(run, folder, "-p", prompt, "-n", NEW_TOKENS) for prompt in prompts]
    flags = [part for prompt in prompts for part in ("-p", prompt)]
    together = as_json(run, folder, *flags, "-n", NEW_TOKENS)
    assert together.keys() == {"schema", "outputs", "timings"}
    assert together["outputs"] == [
        {k: v for k, v in answer.items() if k not in ("schema", "timings")} for answer in alone
    ]
    _, out, _ = run(folder, *flags, "-n", NEW_TOKENS)
    assert out == "".join(f"── {p}\n{answer['text']}\n\n" for p, answer in zip(prompts, alone, strict=True))


def test_a_file_of_prompts_adds_a_request_a_line(run: Run, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("w2\n\nw40 w41\n", "utf-8")
    answer = as_json(run, folder, "-p", PROMPT, "--prompts-file", tmp_path / "prompts", "-n", 1)
    assert [output["prompt_tokens"] for output in answer["outputs"]] == [3, 1, 2]


@pytest.mark.parametrize("content", [None, b"w5 \xff\n"], ids=["missing", "not UTF-8"])
def test_a_file_of_prompts_that_cannot_be_read_is_refused(
    run: Run, folder: Path, tmp_path: Path, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / "prompts").write_bytes(content)
    assert str(tmp_path / "prompts") in refused(run, "bad-request", folder, "--prompts-file", tmp_path / "prompts")


@pytest.mark.parametrize("shape", ["a number", "a list"])
@pytest.mark.parametrize("file", ["generation_config", "config"])
def test_generation_stops_where_the_checkpoint_says(run: Run, tmp_path: Path, shape: str, file: str) -> None:
    recipe = lively(qwen3(np.float32))
    free = as_json(run, write_tokenizer(recipe.write(tmp_path / "free")), "-p", PROMPT, "-n", NEW_TOKENS)["token_ids"]
    stop = free[3]
    stated = {"eos_token_id": stop if shape == "a number" else [1, stop]}
    if file == "config":
        recipe.config |= stated
        folder = recipe.write(tmp_path / "stop", generation_config={})
    else:
        recipe.config |= {"eos_token_id": free[1]}  # the generation config wins
        folder = recipe.write(tmp_path / "stop", generation_config=stated)
    answer = as_json(run, write_tokenizer(folder), "-p", PROMPT, "-n", NEW_TOKENS)
    assert answer["token_ids"] == free[: free.index(stop)]
    assert answer["text"] == words(answer["token_ids"])


def test_no_new_tokens_are_a_valid_request(run: Run, folder: Path) -> None:
    answer = as_json(run, folder, "-p", PROMPT, "-n", 0)
    assert (answer["text"], answer["token_ids"]) == ("", [])
    assert run(folder, "-p", PROMPT, "-n", 0)[:2] == (0, "\n")


def test_a_seed_repeats_a_sampled_run(run: Run, folder: Path) -> None:
    options = (folder, "-p", PROMPT, "-n", NEW_TOKENS, "--temperature", 1.5, "--top-k", 50, "--top-p", 0.9)
    texts = [as_json(run, *options, "--seed", seed)["text"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_a_dtype_can_be_chosen(run: Run, folder: Path) -> None:
    assert len(as_json(run, folder, "-p", PROMPT, "-n", 2, "--dtype", "bfloat16")["token_ids"]) == 2


@pytest.mark.parametrize("place", ["file", "settings", "named"])
def test_a_chat_template_turns_a_prompt_into_a_conversation(run: Run, folder: Path, place: str) -> None:
    settings: dict[str, Any] = {"bos_token": {"content": "<s>", "special": True}}
    if place == "settings":
        settings["chat_template"] = ECHO
    elif place == "named":
        settings["chat_template"] = [{"name": "tool", "template": "w3"}, {"name": "default", "template": ECHO}]
    else:
        settings["chat_template"] = "w3"
        (folder / "chat_template.jinja").write_text(ECHO)
    write_tokenizer(folder, **settings)
    chat = as_json(run, folder, "--chat", "-p", PROMPT, "-n", NEW_TOKENS)
    plain = as_json(run, folder, "-p", f"<s> w7 {PROMPT} w9", "-n", NEW_TOKENS)
    assert chat["prompt_tokens"] == 6
    assert chat["token_ids"] == plain["token_ids"]


@pytest.mark.parametrize(
    "template, found",
    [
        ("{% set n = namespace(x='aa') %}{% for i in range(64) %}{% set n.x = n.x + n.x %}{% endfor %}", "memory"),
        ("{{ 'a' * 10 ** 11 }}", "memory"),
        ("{% for i in range(10 ** 12) %}{% endfor %}", "Range too big"),
        ("{{ 'a' * 5000000 }}", "it rendered 5,000,000 characters"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ raise_exception('a system message comes first') }}", "a system message comes first"),
        ("{% if messages %}", "TemplateSyntaxError"),
        ("{{ messages[3].content }}", "has no element 3"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ cycler.__init__.__globals__.os.system('false') }}", "SecurityError"),
        ("{{ raise_exception.__globals__['sys'] }}", "SecurityError"),
        ("{{ '{0.__class__.__mro__}'.format(messages) }}", "SecurityError"),
        ("{% set _ = messages.append(1) %}", "SecurityError"),
        ("{% include 'tokenizer_config.json' %}", "no loader"),
    ],
)
def test_a_chat_template_that_misbehaves_is_refused(run: Run, folder: Path, template: str, found: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    assert found in refused(run, "bad-template", folder, "--chat", "-p", PROMPT, "-n", 1)


def test_a_chat_template_that_never_ends_is_stopped(run: Run, folder: Path) -> None:
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    (folder / "chat_template.jinja").write_text(loop)
    told = refused(run, "bad-template", folder, "--chat", "-p", PROMPT, "-n", 1)
    # Five seconds of a processor, or twenty of the clock where others want it too.
    assert "exceeded its bounds" in told or "ran for too long" in told


def test_a_checkpoint_without_a_chat_template_cannot_chat(run: Run, folder: Path) -> None:
    assert "there is no chat template" in refused(run, "bad-template", folder, "--chat", "-p", PROMPT)


def test_a_template_file_that_is_too_large_is_refused_and_no_other_template_used(run: Run, folder: Path) -> None:
    write_tokenizer(folder, chat_template=ECHO)
    (folder / "chat_template.jinja").write_text("{# " + "a" * (300 << 10) + " #}" + ECHO)
    assert "too large" in refused(run, "bad-template", folder, "--chat", "-p", PROMPT, "-n", 1)


@pytest.mark.parametrize("content", [None, "{}", "not JSON"])
def test_a_checkpoint_without_a_usable_tokenizer_is_refused(run: Run, folder: Path, content: str | None) -> None:
    (folder / "tokenizer.json").unlink()
    if content is not None:
        (folder / "tokenizer.json").write_text(content)
    assert "tokenizer.json" in refused(run, "no-tokenizer", folder, "-p", PROMPT)


@pytest.mark.parametrize("prompt", ["", "   "])
def test_a_prompt_without_tokens_is_refused(run: Run, folder: Path, prompt: str) -> None:
    assert "prompt 2 has no tokens" in refused(run, "bad-request", folder, "-p", "w5", "-p", prompt)


def test_a_request_longer_than_the_model_is_refused_before_weights_are_read(run: Run, folder: Path) -> None:
    err = refused(run, "bad-request", folder, "-p", PROMPT, "-n", 254)
    assert "3 prompt tokens and 254 new ones, of 256 positions" in err
    assert "consumed" not in err


def test_a_tokenizer_with_more_words_than_the_model_is_refused(run: Run, folder: Path) -> None:
    write_tokenizer(folder, words=200)
    assert "token 150" in refused(run, "bad-request", folder, "-p", "w5 w150")


@pytest.mark.parametrize("where", ["prompt", "template"])
def test_text_that_is_no_unicode_is_refused(run: Run, folder: Path, where: str) -> None:
    """Bytes of a command line that are not UTF-8 arrive as lone surrogates; a template can make them too."""
    if where == "prompt":
        refused(run, "bad-request", folder, "-p", "w5 \udcff")
    else:
        (folder / "chat_template.jinja").write_text("{{ '\\ud800' }}")
        refused(run, "bad-template", folder, "--chat", "-p", "w5")


def test_problems_of_the_checkpoint_are_all_listed(run: Run, folder: Path) -> None:
    recipe = lively(qwen3(np.float32))
    del recipe.tensors["model.norm.weight"], recipe.tensors["model.layers.0.self_attn.k_proj.weight"]
    recipe.write(folder)
    assert "[incomplete-merge]" in refused(run, "missing-weight", folder, "-p", PROMPT)


@pytest.mark.parametrize("device", ["cuda:99", "banana"])
def test_a_device_that_is_not_there_is_refused(run: Run, folder: Path, device: str) -> None:
    assert device in refused(run, "device-unavailable", folder, "-p", PROMPT, "--device", device)


def test_broken_weights_are_refused_on_request(run: Run, folder: Path) -> None:
    recipe = lively(qwen3(np.float32))
    recipe.tensors["model.norm.weight"][0] = np.nan
    recipe.write(folder)
    assert "model.norm.weight" in refused(run, "non-finite-weight", folder, "-p", PROMPT, "--check-finite")


@pytest.mark.parametrize(
    "options, complaint",
    [
        ((), "--prompt"),
        (("-p", PROMPT, "-n", "-1"), "--max-new-tokens"),
        (("-p", PROMPT, "-n", "many"), "--max-new-tokens"),
        (("-p", PROMPT, "--temperature", "-1"), "temperature -1.0"),
        (("-p", PROMPT, "--temperature", "nan"), "temperature nan"),
        (("-p", PROMPT, "--top-p", "0"), "top_p 0.0"),
        (("-p", PROMPT, "--top-k", "-3"), "top_k -3"),
        (("-p", PROMPT, "--temperature", "1", "--seed", "99999999999999999999"), "99999999999999999999"),
        (("-p", PROMPT, "--dtype", "int8"), "int8"),
        (("-p", PROMPT, "--nonsense"), "--nonsense"),
    ],
)
def test_wrong_usage_ends_with_two(run: Run, folder: Path, options: tuple[str, ...], complaint: str) -> None:
    code, out, err = run(folder, *options)
    assert (code, out) == (2, "")
    assert complaint in err
    assert "Traceback" not in err


def test_a_file_of_blank_lines_is_no_prompt(run: Run, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("\n\n")
    assert run(folder, "--prompts-file", tmp_path / "prompts")[0] == 2


def test_the_command_is_a_module_too(run: Run, folder: Path) -> None:
    command = [sys.executable, "-m", "waybill", "generate", str(folder), "-p", PROMPT, "-n", str(NEW_TOKENS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, run(*command[4:])[1])


def test_a_reader_that_leaves_early_ends_the_command_without_a_traceback(folder: Path) -> None:
    command = [sys.executable, "-m", "waybill", "generate", str(folder), "-p", PROMPT, "-n", "200"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()
    assert process.returncode == 1
