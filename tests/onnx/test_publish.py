"""A package appears whole or not at all: whatever is killed, full, forbidden or taken."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import waybill
from checkpoints import BF16, lively, llama, qwen3, write_tokenizer
from commands import Capture, Patch, run
from packing import Scheme, pack
from sessions import Package
from waybill.errors import CannotLink, CannotWrite, TargetExists, UnboundPackage

Change = Callable[[Patch], None]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_tokenizer(lively(llama(np.float32)).write(tmp_path / "checkpoint"))


@pytest.fixture
def narrow(tmp_path: Path) -> Path:
    """Nothing of it is copied: every byte goes through this process."""
    return lively(llama(BF16)).write(tmp_path / "narrow")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where a package goes, and nothing else is."""
    (tmp_path / "place").mkdir()
    return tmp_path / "place" / "package"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def beside(target: Path) -> list[str]:
    return sorted(path.name for path in target.parent.iterdir())


def raising(number: int) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


# Interrupted; tests/faults has every step killed and failing.


def test_an_interrupted_export_leaves_nothing(narrow: Path, place: Path) -> None:
    def interrupt(_: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        waybill.build(narrow).save(place, progress=interrupt)
    assert beside(place) == []


def test_an_interrupted_command_ends_with_130(
    checkpoint: Path, place: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    code, out, _ = run(monkeypatch, capsys, "export", checkpoint, place)
    assert (code, out, beside(place)) == (130, "", [])


# Full, forbidden, failing.


@contextmanager
def files_limited_to(nbytes: int) -> Iterator[None]:
    """No file may grow beyond this; the kernel says so as it would of a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("kilobytes", [0, 1, 64, 255])
def test_files_that_cannot_grow_are_cannot_write(
    kilobytes: int, checkpoint: Path, place: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    with files_limited_to(kilobytes << 10):
        code, out, err = run(monkeypatch, capsys, "export", checkpoint, place)
    assert (code, out, beside(place)) == (1, "", [])
    assert "the package cannot be written [cannot-write]" in err
    assert "File too large" in err


def test_an_export_that_fails_leaves_the_old_package_as_it_was(narrow: Path, place: Path, monkeypatch: Patch) -> None:
    waybill.build(narrow).save(place)
    old = contents(place)
    monkeypatch.setattr(os, "pwrite", raising(errno.ENOSPC))
    with pytest.raises(CannotWrite, match="No space left on device"):
        waybill.build(narrow, logits="all").save(place, overwrite=True)
    assert (beside(place), contents(place)) == (["package"], old)


def test_too_little_free_space_is_refused_before_a_byte_is_written(
    checkpoint: Path, place: Path, monkeypatch: Patch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1 << 40, 0, 1 << 20))
    monkeypatch.setattr(os, "pwrite", raising(errno.EIO))
    monkeypatch.setattr(os, "copy_file_range", raising(errno.EIO))
    with pytest.raises(CannotWrite, match="not enough free space") as refused:
        waybill.build(checkpoint).save(place)
    assert refused.value.found == "1,048,576 bytes"
    assert beside(place) == []


def test_a_place_below_a_file_cannot_be_written(checkpoint: Path) -> None:
    with pytest.raises(CannotWrite):
        waybill.build(checkpoint).save(checkpoint / "config.json" / "package")


# Taken.


def folder_of_notes(target: Path) -> None:
    target.mkdir()
    (target / "notes.txt").write_text("mine")


TAKEN: dict[str, Callable[[Path], Any]] = {
    "a file": lambda target: target.write_text("mine"),
    "an empty folder": Path.mkdir,
    "a folder without waybill.json": folder_of_notes,
    "a link to nothing": lambda target: target.symlink_to("nowhere"),
}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("taken", TAKEN)
def test_what_is_no_package_is_never_replaced(
    taken: str, overwrite: bool, checkpoint: Path, place: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    TAKEN[taken](place)
    code, out, err = run(monkeypatch, capsys, "export", checkpoint, place, *["--overwrite"] * overwrite)
    assert (code, out, beside(place)) == (1, "", ["package"])
    assert "the target is taken [target-exists]" in err
    assert ("only packages are replaced" in err) == overwrite
    if taken == "a folder without waybill.json":
        assert contents(place) == {"notes.txt": b"mine"}


def test_a_package_is_replaced_when_asked_for_alone(checkpoint: Path, place: Path) -> None:
    waybill.build(checkpoint).save(place)
    old = contents(place)
    (place / "left.txt").write_text("of the old one")
    with pytest.raises(TargetExists):
        waybill.build(checkpoint, logits="all").save(place)
    assert contents(place) == old | {"left.txt": b"of the old one"}
    waybill.build(checkpoint, logits="all").save(place, overwrite=True)
    assert contents(place).keys() == old.keys()
    assert contents(place)["model.onnx"] != old["model.onnx"]
    assert beside(place) == ["package"]


def test_where_names_cannot_be_exchanged_at_once_they_are_in_two_steps(
    checkpoint: Path, place: Path, monkeypatch: Patch
) -> None:
    waybill.build(checkpoint).save(place)
    old = contents(place)
    monkeypatch.setattr("ctypes.CDLL", raising(errno.ENOSYS))
    waybill.build(checkpoint, logits="all").save(place, overwrite=True)
    assert contents(place)["model.onnx"] != old["model.onnx"]
    assert beside(place) == ["package"]


def test_a_link_to_a_package_is_replaced_and_what_it_leads_to_stays(checkpoint: Path, place: Path) -> None:
    waybill.build(checkpoint).save(place.with_name("first"))
    old = contents(place.with_name("first"))
    place.symlink_to("first")
    waybill.build(checkpoint, logits="all").save(place, overwrite=True)
    assert not place.is_symlink()
    assert contents(place.with_name("first")) == old
    assert beside(place) == ["first", "package"]


@pytest.mark.parametrize("name", ["a[1]*", "with space", ".hidden", "-dash", "naïve"])
def test_names_are_only_names(name: str, checkpoint: Path, place: Path) -> None:
    target = place.with_name(name)
    left = target.with_name(f".{name}.1-0.partial")
    left.mkdir()
    (left / "model.onnx").write_text("")
    waybill.build(checkpoint).save(target)
    assert beside(target) == [name]


# Linked.


def test_a_linked_package_holds_no_weights_of_its_own(checkpoint: Path, place: Path) -> None:
    receipt = waybill.build(checkpoint, link=True).save(place, link=True)
    source = checkpoint / "model.safetensors"
    assert (place / source.name).samefile(source)
    package = Package(place)
    bill = json.loads((place / "waybill.json").read_text())["components"]["decoder"]["initializers"]
    own = {name for name, entry in bill.items() if entry["file"] == "model.onnx.data"}
    assert own == {"cos_cache", "sin_cache"}
    assert receipt.linked_bytes == sum(entry["bytes"] for name, entry in bill.items() if name not in own)
    assert package.place("lm_head.weight")[0] == source.name
    logits = [opened.prefill([[5, 6, 7]])[0] for opened in (package, Package(plain(checkpoint, place)))]
    np.testing.assert_allclose(*logits, atol=1e-5)


def test_a_tied_table_in_several_shards_is_linked_once(place: Path) -> None:
    checkpoint = lively(qwen3(np.float32)).write(place.parent / "checkpoint", shard_of=lambda name: len(name) % 3)
    receipt = waybill.build(checkpoint, link=True).save(place, link=True)
    shards = sorted(path.name for path in checkpoint.glob("*.safetensors"))
    assert sorted(path.name for path in place.glob("*.safetensors")) == shards
    assert all((place / name).samefile(checkpoint / name) for name in shards)
    assert receipt.linked_bytes == sum(tensor.nbytes for tensor in lively(qwen3(np.float32)).tensors.values())
    package = Package(place)
    assert package.greedy([5, 6, 7], 8) == Package(plain(checkpoint, place)).greedy([5, 6, 7], 8)


def plain(checkpoint: Path, place: Path) -> Path:
    waybill.build(checkpoint).save(place.with_name("plain"))
    return place.with_name("plain")


def test_what_has_to_be_made_is_not_linked(narrow: Path, place: Path) -> None:
    packed = pack(lively(llama(np.float32)), Scheme("olive", scales=np.float32)).packed.write(place.parent / "packed")
    waybill.build(packed, link=True).save(place, link=True)
    package = Package(place)
    assert package.place("model.layers.0.mlp.up_proj.codes")[0] == "model.safetensors"  # Olive's are the operator's
    assert package.place("model.layers.0.mlp.up_proj.scales")[0] == "model.safetensors"
    receipt = waybill.build(narrow, link=True).save(place.with_name("cast"), link=True)
    assert receipt.linked_bytes == 0


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no second file system")
def test_a_link_to_another_file_system_is_refused(place: Path) -> None:
    other = Path("/dev/shm") / f"waybill-{os.getpid()}"
    if Path("/dev/shm").stat().st_dev == place.parent.stat().st_dev:
        pytest.skip("it is the same file system")
    try:
        lively(llama(np.float32)).write(other)
        with pytest.raises(CannotLink) as refused:
            waybill.build(other, link=True).save(place, link=True)
        assert (refused.value.code, refused.value.found) == ("cannot-link", "Invalid cross-device link")
        assert beside(place) == []
        waybill.build(other).save(place)  # a copy can be made
        assert beside(place) == ["package"]
    finally:
        shutil.rmtree(other)


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def test_where_the_kernel_does_not_copy_the_bytes_are_read_and_written(
    number: int, checkpoint: Path, place: Path, monkeypatch: Patch
) -> None:
    waybill.build(checkpoint).save(place)
    monkeypatch.setattr(os, "copy_file_range", raising(number))
    waybill.build(checkpoint).save(place.with_name("read"))
    assert contents(place) == contents(place.with_name("read"))


@pytest.mark.parametrize("link", [False, True])
def test_progress_is_told_of_every_byte_once(link: bool, checkpoint: Path, narrow: Path, place: Path) -> None:
    for source in (checkpoint, narrow):
        told: list[int] = []
        package = waybill.build(source, link=link)
        package.save(place.with_name(source.name), link=link, progress=told.append)
        assert sum(told) == package.nbytes


def test_a_package_can_be_saved_more_than_once(checkpoint: Path, place: Path) -> None:
    package = waybill.build(checkpoint)
    package.save(place)
    package.save(place.with_name("again"))
    assert contents(place) == contents(place.with_name("again"))


# Without weights.


def test_a_skeleton_is_saved_only_when_that_is_wanted(checkpoint: Path, place: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(os, "preadv", raising(errno.EIO))
    package = waybill.build(checkpoint, load_weights=False)
    with pytest.raises(UnboundPackage) as refused:
        package.save(place)
    assert refused.value.code == "unbound-package"
    assert "parameters without bytes" in refused.value.found
    assert beside(place) == []
    receipt = package.save(place, allow_unbound=True)
    assert receipt.summary == "skeleton: no weights"
    assert (place / "model.onnx").is_file()
    assert not (place / "model.onnx.data").exists()


# What a package is made from.


@pytest.mark.parametrize("inside", [False, True])
def test_a_package_does_not_replace_its_checkpoint(tmp_path: Path, inside: bool) -> None:
    target = tmp_path / "target"
    checkpoint = llama(np.float32).write(target / "checkpoint" if inside else target)
    (target / "waybill.json").write_text("{}")
    before = contents(target)
    with pytest.raises(TargetExists, match="which the package is made from"):
        waybill.build(checkpoint).save(target, overwrite=True)
    assert contents(target) == before
