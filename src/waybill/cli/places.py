"""Where pictures and recordings stand among the words: a file for every place, and a place for every file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from waybill.cli.render import count
from waybill.errors import BadPackage, BadRequest

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NAMES = {"image": "picture", "audio": "recording"}
"""Kinds of files, to people."""
BRACKETS = ("<|audio_bos|>", "<|audio_eos|>")
"""What a recording stands between, where a tokenizer has words for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The word that stands for a file in a prompt."""

    kind: str
    token: int
    word: str
    before: str
    """What is put before a prompt that does not say where its file goes."""

    def lacking(self, texts: Sequence[str], files: int) -> list[bool]:
        """Which prompts have their file put first: those without a place, if there is a file for each prompt."""
        stated = sum(text.count(self.word) for text in texts)
        return [stated < files == len(texts) and self.word not in text for text in texts]

    def check(self, encoded: Sequence[Sequence[int]], files: int) -> None:
        """Refuse prompts with more or fewer places than there are files.

        Raises:
            BadRequest: the numbers differ.
        """
        places = sum(token == self.token for prompt in encoded for token in prompt)
        if places != files:
            name = NAMES[self.kind]
            raise BadRequest(
                "the prompts and the files do not fit together",
                expected=f"a {name} for every {self.word} in the prompts",
                found=f"{count(places, self.word)} in {count(len(encoded), 'prompt')}, {count(files, name)}",
                fix=f"write {self.word} where each {name} goes, or give one {name} for each prompt",
            )


def read_place(folder: Path, tokenizer: Tokenizer, kind: str, token: int) -> Place:
    """The place of a kind of file, by the tokenizer's word for its token.

    Raises:
        BadPackage: there is no such word.
    """
    word = tokenizer.id_to_token(token)
    if word is None:
        raise BadPackage(
            f"the tokenizer has no word for the place of a {NAMES[kind]}",
            where=str(folder / "tokenizer.json"),
            expected=f"a word for token {token}, as genai_config.json says",
            found=f"{tokenizer.get_vocab_size():,} other words",
            fix="copy tokenizer.json from the checkpoint that was exported",
        )
    bracketed = kind == "audio" and all(tokenizer.token_to_id(bracket) is not None for bracket in BRACKETS)
    return Place(kind=kind, token=token, word=word, before=word.join(BRACKETS) if bracketed else f"{word}\n")
