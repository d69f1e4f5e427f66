"""Models that answer, made and exported once for all tests of commands, and the files they are asked about."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import soundfile
from PIL import Image

if TYPE_CHECKING:
    from references import Both, Make
    from zoo import Layout


@pytest.fixture(scope="session")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """A model by its title and layout."""
    from references import FLOAT, TINY, export  # with the first test that needs it

    made: dict[tuple[str, str], Both] = {}

    def build(title: str, layout: Layout = FLOAT) -> Both:
        if (title, layout.title) not in made:
            made[title, layout.title] = export(TINY[title], layout, tmp_path_factory.mktemp("model"))
        return made[title, layout.title]

    return build


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two pictures and two recordings, and files that are neither."""
    folder, generator = tmp_path_factory.mktemp("files"), np.random.default_rng(0)
    for name, (width, height) in {"a.png": (64, 40), "b.png": (33, 50)}.items():
        Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(folder / name)
    for name, (length, pitch) in {"a.wav": (16_000, 0.02), "b.wav": (9000, 0.3)}.items():
        sound = 0.3 * np.sin(pitch * np.arange(length)) + 0.05 * generator.standard_normal(length)
        soundfile.write(folder / name, sound, 16_000, subtype="FLOAT")
    for name in ("bad.png", "bad.wav"):
        (folder / name).write_bytes(b"nothing of the kind")
    return {path.name: path for path in folder.iterdir()} | {"none": folder / "none", "folder": folder}
