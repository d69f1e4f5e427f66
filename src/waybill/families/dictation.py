"""What a model that writes down speech is told before it writes: language, task, and tokens it may not choose.

generation_config.json says it, or config.json where that is silent. Older files list tokens by position
(forced_decoder_ids); newer ones name a language and a task, and then the list does not count. Where no file decides the
language, the model does: it is the likeliest of the language tokens after the first token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from waybill.config.composite import first_id
from waybill.errors import BadConfig

GENERATION, CONFIG = "generation_config.json", "config.json"
DEFAULT_TASK = "transcribe"
"""What is done where only a language is stated."""


def dictation_facts(
    hf_config: Mapping[str, Any], generation: Mapping[str, Any], *, start: int, vocab_size: int
) -> dict[str, Any]:
    """The tokens an answer begins with, and those it must not hold.

    - `decoder_start_token_id`: the first, `start` unless stated;
    - `language_token_ids`: there only where the language is open: the likeliest of these is the second;
    - `prompt_ids`: what follows;
    - `suppress_tokens`: never chosen; `begin_suppress_tokens`: not chosen right after those. Ids beyond the vocabulary,
      which suppress nothing, are left out.

    Raises:
        BadConfig: one of them is stated in a way that means nothing.
    """
    prompt, languages = _prompt(hf_config, generation, vocab_size)
    stated = first_id("decoder_start_token_id", {GENERATION: generation, CONFIG: hf_config}, vocab_size)
    first = start if stated is None else stated
    if strangers := [token for token in (first, *prompt, *languages) if token >= vocab_size]:
        raise _bad("the prompt of every answer", GENERATION, f"tokens below vocab_size {vocab_size}", strangers)
    facts: dict[str, Any] = {"decoder_start_token_id": first}
    if languages:
        facts["language_token_ids"] = languages
    facts["prompt_ids"] = prompt
    for key in ("suppress_tokens", "begin_suppress_tokens"):
        where, value = _first(key, hf_config, generation)
        facts[key] = [token for token in _ids(key, where, value) if token < vocab_size]
    return facts


def _prompt(
    hf_config: Mapping[str, Any], generation: Mapping[str, Any], vocab_size: int
) -> tuple[list[int], list[int]]:
    """The tokens after the first, and those one of which comes before them."""
    languages, tasks = (_table(key, generation) for key in ("lang_to_id", "task_to_id"))
    language, task = generation.get("language"), generation.get("task")
    forced = [] if language or task else _forced(hf_config, generation)
    is_open = not language and bool(languages) and (not forced or forced[0] is None)
    prompt = [token for token in forced if token is not None]
    if language:
        prompt.append(_named("language", language, languages, "lang_to_id"))
    if task:
        prompt.append(_named("task", task, tasks, "task_to_id"))
    elif language and DEFAULT_TASK in tasks:
        prompt.append(tasks[DEFAULT_TASK])
    plain = first_id("no_timestamps_token_id", {GENERATION: generation}, vocab_size)
    if plain is not None and generation.get("return_timestamps") is not True and prompt[-1:] != [plain]:
        prompt.append(plain)
    return prompt, sorted(languages.values()) if is_open else []


def _forced(hf_config: Mapping[str, Any], generation: Mapping[str, Any]) -> list[int | None]:
    """Tokens by position, from the second on; null is a token that is left open."""
    key = "forced_decoder_ids"
    where, value = _first(key, hf_config, generation)
    good = isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and pair[0] == at and (pair[1] is None or _is_id(pair[1]))
        for at, pair in enumerate(value, 1)
    )
    if not good:
        raise _bad(key, where, "a list of [position, token id or null], positions 1, 2, … in order", value)
    return [token for _, token in value]


def _first(key: str, hf_config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[str, Any]:
    """What the first file that states a field says, and which that is; an empty list when none does."""
    for where, place in ((GENERATION, generation), (CONFIG, hf_config)):
        if (value := place.get(key)) is not None:
            return where, value
    return CONFIG, []


def _ids(key: str, where: str, value: Any) -> list[int]:
    if isinstance(value, list) and all(map(_is_id, value)):
        return value
    raise _bad(key, where, "a list of token ids", value)


def _table(key: str, generation: Mapping[str, Any]) -> dict[str, int]:
    value = generation.get(key) or {}
    if isinstance(value, Mapping) and all(map(_is_id, value.values())):
        return dict(value)
    raise _bad(key, GENERATION, "an object of names and token ids", value)


def _named(key: str, name: Any, table: Mapping[str, int], listed: str) -> int:
    """The token of a name, which may lack the marks that set it off in the vocabulary."""
    for written in (name, f"<|{name}|>"):
        if isinstance(written, str) and written in table:
            return table[written]
    raise _bad(key, GENERATION, f"one of the {len(table)} that {listed} has a token for, by its code there", name)


def _is_id(value: Any) -> bool:
    return type(value) is int and value >= 0


def _bad(key: str, where: str, expected: str, found: Any) -> BadConfig:
    return BadConfig(
        f"{key} cannot be used",
        where=f"{where}: {key}",
        expected=expected,
        found=repr(found)[:120],
        fix=f"correct {key} in {where}, or remove it",
    )
