"""Chat templates: where a checkpoint keeps them, and a bounded place to run them.

A template is a program from a stranger. Jinja's immutable sandbox keeps it from reaching Python; a process of its own
with limits on memory and processor time keeps it from hanging or swallowing this one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from waybill.checkpoint.jsonfile import read_object
from waybill.checkpoint.opening import is_gguf, read_metadata
from waybill.checkpoint.places import require_inside
from waybill.errors import BadTemplate
from waybill.text.gguf import settings_of

MAX_TEMPLATE_BYTES = 256 << 10
TIMEOUT_SECONDS = 20
"""Wall clock, a few times the worker's own processor limit."""


FAILED = "the template failed"


def render_prompt(folder: Path, text: str, kind: str = "", word: str = "") -> str:
    """The prompt for what a user says, after a file of a kind ("image" or "audio") if `word`, which stands for one in
    prompts, is given.

    Templates read a message as text or as a list of parts. One that is given the other form may fail, or leave
    something out and say nothing of it; so what it makes of each is looked at.

    Raises:
        BadTemplate: as `render_chat`.
    """
    parts = [*([{"type": kind}] if word else []), {"type": "text", "text": text}]
    forms = [f"{word}\n{text}" if word else text, parts]
    failures: list[BadTemplate] = []
    rendered: list[str] = []
    for content in reversed(forms) if word else forms:
        try:
            prompt = render_chat(folder, [{"role": "user", "content": content}])
        except BadTemplate as error:
            if error.what != FAILED:
                raise
            failures.append(error)
            continue
        rendered.append(prompt)
        if text.strip() in prompt and word in prompt:
            return prompt
    if not rendered:
        raise failures[0]
    return rendered[0]


def render_chat(folder: Path, messages: Sequence[Mapping[str, Any]]) -> str:
    """The prompt for `messages`, ending where the assistant is to speak; `folder` may be a GGUF file.

    Raises:
        BadTemplate: there is none, it is not a template, it refuses these messages, or it exceeds its bounds.
    """
    settings = _settings(folder)
    job = {
        "template": _template(folder, settings),
        "messages": list(messages),
        "tokens": {key: _token(settings.get(key)) for key in ("bos_token", "eos_token", "pad_token", "unk_token")},
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", "waybill.text.sandbox"],
            input=json.dumps(job).encode(),
            capture_output=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _bad(folder, "the template ran for too long", f"more than {TIMEOUT_SECONDS} s") from None
    if done.returncode != 0:
        raise _bad(folder, "the template exceeded its bounds", "it was stopped for its use of memory or time")
    answer: dict[str, str] = json.loads(done.stdout)
    if "error" in answer:
        raise _bad(folder, FAILED, answer["error"])
    return answer["text"]


def _settings(folder: Path) -> Mapping[str, Any]:
    if is_gguf(folder):
        return settings_of(read_metadata(folder))
    path = folder / "tokenizer_config.json"
    return read_object(path) if path.exists() else {}


def _template(folder: Path, settings: Mapping[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.exists():
        require_inside(file)
        if not file.is_file():  # opening a pipe would wait for ever
            raise _bad(folder, "the chat template is no file", "a directory, device or pipe")
        if file.stat().st_size > MAX_TEMPLATE_BYTES:
            raise _bad(folder, "the chat template is too large", f"{file.stat().st_size:,} bytes")
        return file.read_text("utf-8", errors="replace")
    legacy = folder / "chat_template.json"  # a processor's, which knows of pictures and recordings
    stated = read_object(legacy).get("chat_template") if legacy.is_file() else settings.get("chat_template")
    if isinstance(stated, list):  # several, by name
        named = {str(t.get("name")): t.get("template") for t in stated if isinstance(t, dict)}
        stated = named.get("default") or next(iter(named.values()), None)
    if not isinstance(stated, str):
        raise _bad(
            folder,
            "there is no chat template",
            "no tokenizer.chat_template in the metadata"
            if is_gguf(folder)
            else "neither chat_template.jinja or .json nor one in tokenizer_config.json",
        )
    if len(stated) > MAX_TEMPLATE_BYTES:
        raise _bad(folder, "the chat template is too large", f"{len(stated):,} characters")
    return stated


def _token(stated: Any) -> str:
    """Special tokens are strings, or objects that hold one."""
    content = stated.get("content") if isinstance(stated, dict) else stated
    return content if isinstance(content, str) else ""


def _bad(folder: Path, what: str, found: str) -> BadTemplate:
    return BadTemplate(
        what,
        where=str(folder),
        expected="a Jinja chat template that renders one user message",
        found=found,
        fix="leave out --chat and write the prompt in full, or use the template the model was published with",
    )
