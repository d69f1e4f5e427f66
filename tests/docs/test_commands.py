"""Every `waybill …` in the documentation is one that the command line takes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from waybill.cli.app import app

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
GROUP: Any = typer.main.get_command(app)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CALL = re.compile(r"(?:^|\s)waybill (?=[a-z-])")


def typed() -> Iterator[tuple[str, str]]:
    """Lines after a prompt in a block."""
    for file in FILES:
        for language, block in BLOCK.findall(file.read_text("utf-8")):
            lines = re.sub(r"\\\n", " ", block).splitlines() if language in ("console", "bash", "sh") else []
            for line in lines:
                if line.startswith("$ ") and (call := CALL.search(line)):
                    yield file.relative_to(ROOT).as_posix(), line[call.end() :]


def mentioned() -> Iterator[tuple[str, str]]:
    """Calls between backticks, which may have placeholders and brackets."""
    for file in FILES:
        prose = BLOCK.sub("", file.read_text("utf-8"))
        for code in re.findall(r"`([^`\n]+)`", prose):
            if call := CALL.search(code):
                yield file.relative_to(ROOT).as_posix(), code[call.end() :].replace("\\|", "|")


def words(line: str) -> list[str]:
    """What the shell hands over: up to the next command, a pipe or a comment."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.commenters = "#"
    found = []
    for word in lexer:
        if set(word) <= set(";|&<>()"):
            break
        found.append(word)
    return found


@pytest.mark.parametrize(("file", "line"), dict.fromkeys(typed()), ids=str)
def test_a_line_after_a_prompt_parses(file: str, line: str) -> None:
    verb, *arguments = words(line)
    if verb.startswith("-"):
        GROUP.make_context("waybill", [verb], resilient_parsing=True)
        return
    assert verb in GROUP.commands
    GROUP.commands[verb].make_context(verb, arguments)


@pytest.mark.parametrize(("file", "code"), dict.fromkeys(mentioned()), ids=str)
def test_a_mentioned_command_has_those_options(file: str, code: str) -> None:
    verb, *_ = code.split()
    options = re.findall(r"(?<![\w-])--?[a-z][a-z0-9-]*", code.replace("–", "-"))
    if verb.startswith("-"):
        verb, known = "", {name for parameter in GROUP.params for name in parameter.opts} | {"--help"}
    else:
        assert verb in GROUP.commands, f"{file}: waybill {code}"
        known = {name for parameter in GROUP.commands[verb].params for name in parameter.opts} | {"--help"}
    assert [option for option in options if option not in known] == [], f"{file}: waybill {code}"


def test_lines_and_mentions_are_found() -> None:
    assert len(list(typed())) > 5
    assert len(list(mentioned())) > 10


def test_every_command_has_a_section() -> None:
    headings = re.findall(r"^## (\S+)$", (ROOT / "docs" / "commands.md").read_text("utf-8"), re.MULTILINE)
    assert headings == list(GROUP.commands)
