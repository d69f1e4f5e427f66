"""Every example runs as it stands, from a checkpoint it makes on the spot, and every family has one."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest

from waybill.families import FAMILIES

EXAMPLES = Path(__file__).parents[1] / "examples"
OF_FAMILY = {
    "decoder": "per_layer_inputs.py",
    "t5": "text_to_text.py",
    "llava": "image_to_text.py",
    "whisper": "speech_to_text.py",
    "qwen2_audio": "audio_to_text.py",
}


def test_every_family_has_an_example_and_every_example_is_run() -> None:
    assert OF_FAMILY.keys() == FAMILIES.keys()
    given_a_folder = {"load_model.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*OF_FAMILY.values(), *given_a_folder}


@pytest.mark.parametrize("name", OF_FAMILY.values())
def test_an_example_ends_with_the_tokens_of_an_answer(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    answers = ast.literal_eval(capsys.readouterr().out.splitlines()[-1])
    assert all(len(tokens) == 8 and all(0 <= token < 128 for token in tokens) for tokens in answers)
