"""Any damage to a checkpoint or a package: the same weights as before, or a typed refusal; never other weights.

Data of a checkpoint has no checksum, so its headers and JSON files are damaged; in a package everything is, because
waybill.json holds digests. What a producer says of its weights is the only word there is: damage that turns the name of
an optional field into an unknown one can make a file say something else, and docs/security.md says so.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ggufs
import waybill
from checkpoints import Recipe, llama, qwen3
from packing import Scheme, pack
from strangers import digest_of
from waybill.errors import Refused, WaybillError
from waybill.onnx.verify.entries import read_entries

Damage = list[tuple[float, int, bytes]]
"""Places as fractions of a file, bytes that are removed there, bytes that are put there."""
DAMAGE: st.SearchStrategy[Damage] = st.lists(
    st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 3), st.binary(max_size=3) | st.sampled_from(
        [b"0", b"1", b"8", b"-", b'"', b"{", b"}", b"[", b"]", b",", b"null", b"true", b"false", b"1e9", b"\\", b"\0"]
    )), min_size=1, max_size=3,
)  # fmt: skip
many = settings(
    max_examples=150, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)


def damaged(octets: bytes, damage: Damage) -> bytes:
    for place, removed, put in damage:
        at = int(place * len(octets))
        octets = octets[:at] + put + octets[at + removed :]
    return octets


def flipped(octets: bytes, damage: Damage) -> bytes:
    """The same number of bytes, some of them others."""
    changed = bytearray(octets)
    for place, _, put in damage:
        for offset, octet in enumerate(put or b"\xff"):
            changed[(int(place * len(octets)) + offset) % len(octets)] ^= octet or 1
    return bytes(changed)


def recipes() -> dict[str, Recipe]:
    small = llama(np.float32, num_hidden_layers=1)
    return {
        "float": llama(num_hidden_layers=1, torch_dtype="float32"),
        "tied": qwen3(num_hidden_layers=1, torch_dtype="float32"),
        "gptq": pack(small, Scheme("gptq", 4, 32)).packed,
        "awq": pack(small, Scheme("awq", 4, 32)).packed,
        "olive": pack(small, Scheme("olive", 4, 32, symmetric=True)).packed,
    }


RECIPES = recipes()


def same_or_refused(folder: Path, intended: str) -> None:
    try:
        found = digest_of(folder, "float32")
    except WaybillError as refusal:
        problems = refusal.problems if isinstance(refusal, Refused) else [refusal]
        assert all(problem.code != "error" and problem.what for problem in problems)
        return
    assert found == intended


@pytest.mark.parametrize("file", ["header", "config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("kind", RECIPES)
def test_a_damaged_checkpoint_gives_the_same_weights_or_is_refused(tmp_path: Path, kind: str, file: str) -> None:
    folder = RECIPES[kind].write(tmp_path, shard_of=lambda name: len(name) % 2)
    intended = digest_of(folder, "float32")
    path = folder / (file if file != "header" else "model-00001-of-00002.safetensors")
    whole = path.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little") if file == "header" else len(whole)

    @many
    @given(DAMAGE, st.booleans())
    def damage_it(damage: Damage, sealed: bool) -> None:
        head = damaged(whole[:start], damage)
        if file == "header" and sealed:  # with a length that fits again
            head = (len(head) - 8).to_bytes(8, "little", signed=True) + head[8:] if len(head) > 8 else head
        path.write_bytes(head + whole[start:])
        same_or_refused(folder, intended)

    damage_it()


def test_a_damaged_gguf_header_gives_the_same_weights_or_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    ggufs.model("qwen3").write(path)
    intended, whole = digest_of(path, "float32"), path.read_bytes()
    start = len(whole) - waybill.open(path).nbytes

    @many
    @given(DAMAGE, st.booleans())
    def damage_it(damage: Damage, moved: bool) -> None:
        path.write_bytes((damaged if moved else flipped)(whole[:start], damage) + whole[start:])
        same_or_refused(path, intended)

    damage_it()


def held(folder: Path) -> dict[str, Any]:
    """The graph and the bytes of every initializer, by name, as waybill.json says where they lie."""
    (component,) = read_entries(folder).components.values()
    octets: dict[str, bytes] = {"the graph": (folder / component.file).read_bytes()}
    for name, entry in component.initializers.items():
        octets[name] = (folder / entry.file).read_bytes()[entry.offset : entry.end]
    return octets


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    waybill.build(RECIPES["gptq"].write(folder / "checkpoint")).save(folder / "package")
    return folder / "package"


@pytest.mark.parametrize("file", ["model.onnx", "model.onnx.data", "waybill.json", "genai_config.json"])
def test_a_damaged_package_holds_the_same_weights_or_is_not_proven(exported: Path, tmp_path: Path, file: str) -> None:
    folder = Path(shutil.copytree(exported, tmp_path / "package"))
    intended, whole = held(folder), (folder / file).read_bytes()

    @settings(many, max_examples=60)
    @given(DAMAGE, st.booleans())
    def damage_it(damage: Damage, moved: bool) -> None:
        (folder / file).write_bytes((damaged if moved else flipped)(whole, damage))
        try:
            waybill.verify(folder).require_clean()
        except WaybillError as refusal:
            assert refusal.code != "error"
            return
        assert held(folder) == intended

    damage_it()
