"""Where a package goes: one export at a time, and places that nothing can be written to."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import waybill
from checkpoints import BF16, lively, llama, write_tokenizer
from commands import Capture, Patch, run, run_unread
from sessions import Package
from waybill.errors import CannotWrite, TargetBusy, TargetExists


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_tokenizer(lively(llama(BF16, num_hidden_layers=1)).write(tmp_path / "checkpoint"))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where a package goes, and nothing else is."""
    (tmp_path / "place").mkdir()
    return tmp_path / "place" / "package"


def beside(target: Path) -> list[str]:
    return sorted(path.name for path in target.parent.iterdir())


# Two at once.


@contextmanager
def exporting(checkpoint: Path, target: Path, *, overwrite: bool = False) -> Iterator[list[BaseException]]:
    """An export that has begun and does not end before the block does; what it raised is in the list."""
    begun, may_end, raised = threading.Event(), threading.Event(), []

    def slow(_: int) -> None:
        begun.set()
        may_end.wait(60)

    def save() -> None:
        try:
            waybill.build(checkpoint).save(target, overwrite=overwrite, progress=slow)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=save)
    thread.start()
    assert begun.wait(60)
    try:
        yield raised
    finally:
        may_end.set()
        thread.join()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_second_export_to_a_target_is_refused_before_anything_is_computed(
    overwrite: bool, checkpoint: Path, place: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    if overwrite:
        waybill.build(checkpoint, logits="all").save(place)
    package = waybill.build(checkpoint)
    with exporting(checkpoint, place, overwrite=overwrite) as raised, monkeypatch.context() as patch:
        staging = [name for name in beside(place) if name != "package"]
        patch.setattr(waybill, "build", None)
        code, out, err = run(patch, capsys, "export", checkpoint, place, *["--overwrite"] * overwrite)
        assert (code, out) == (1, "")
        assert err == (
            "another export is writing to the target [target-busy]\n"
            f"  where    {place}\n"
            "  expected one export to a target at a time\n"
            f"  found    process {os.getpid()}, which is running\n"
            "  fix      wait for it to end, or choose another folder\n"
        )
        with pytest.raises(TargetBusy):
            package.save(place, overwrite=overwrite)
        assert [name for name in beside(place) if name != "package"] == staging
    assert raised == []
    assert beside(place) == ["package"]
    assert not waybill.verify(place, checkpoint).problems


def test_of_many_that_begin_together_one_writes_and_the_others_are_told(checkpoint: Path, place: Path) -> None:
    packages, told = [waybill.build(checkpoint) for _ in range(6)], []
    together = threading.Barrier(len(packages))

    def save(package: Any) -> None:
        together.wait(60)
        try:
            package.save(place)
            told.append("saved")
        except (TargetBusy, TargetExists) as error:
            told.append(error.code)

    threads = [threading.Thread(target=save, args=[package]) for package in packages]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told) == len(packages)
    assert told.count("saved") == 1
    assert beside(place) == ["package"]
    assert not waybill.verify(place, checkpoint).problems


def test_targets_whose_names_begin_alike_are_no_concern_of_each_other(checkpoint: Path, place: Path) -> None:
    other = place.with_name("package.v2")
    dead = place.with_name(".package.v3.1-0.partial")
    dead.mkdir()
    with exporting(checkpoint, other):
        waybill.build(checkpoint).save(place)
    assert beside(place) == [dead.name, "package", "package.v2"]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF])
def test_where_nothing_can_be_locked_leftovers_stay_and_packages_appear(
    number: int, checkpoint: Path, place: Path, monkeypatch: Patch
) -> None:
    def unlockable(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", unlockable)
    left = place.with_name(".package.1-0.partial")
    left.mkdir()
    waybill.build(checkpoint).save(place)
    assert beside(place) == [left.name, "package"]


@pytest.mark.parametrize("left", ["a link to a package", "a pipe", "a file"])
def test_what_bears_the_name_of_a_leftover_is_not_waited_for(left: str, checkpoint: Path, place: Path) -> None:
    name = place.with_name(".package.1-0.partial")
    if left == "a pipe":
        os.mkfifo(name)
    elif left == "a file":
        name.write_text("mine")
    else:  # what was exchanged was a link
        place.with_name("first").mkdir()
        name.symlink_to("first")
    waybill.build(checkpoint).save(place)
    assert beside(place) == (["first", "package"] if left == "a link to a package" else [name.name, "package"])


def test_a_session_goes_on_with_the_package_that_was_replaced(tmp_path: Path, place: Path) -> None:
    """The runtime maps files of a package; they are never written to again, and the old ones live while they are."""
    checkpoint = lively(llama(np.float32)).write(tmp_path / "wide")
    other = lively(llama(np.float32), seed=1).write(tmp_path / "other")
    waybill.build(checkpoint).save(place)
    package = Package(place)
    before = package.greedy([5, 6, 7], 12)
    waybill.build(other).save(place, overwrite=True)
    assert package.greedy([5, 6, 7], 12) == before
    assert Package(place).greedy([5, 6, 7], 12) != before


# Places.


def below_a_file(place: Path) -> Path:
    place.write_text("mine")
    return place / "package"


def below_a_link_to_nothing(place: Path) -> Path:
    place.symlink_to("nowhere/at/all")
    return place / "package"


def below_a_link_to_itself(place: Path) -> Path:
    place.symlink_to(place.name)
    return place / "package"


UNWRITABLE: dict[str, tuple[Callable[[Path], Path], str]] = {
    "below a file": (below_a_file, "File exists"),
    "below a link to itself": (below_a_link_to_itself, "File exists"),
    "a name too long": (lambda place: place.with_name("n" * 256), "File name too long"),
    "a path too long": (lambda place: place / "/".join(["n" * 200] * 30), "File name too long"),
    "in a folder of the kernel": (lambda _: Path("/proc/sys/package"), ""),
}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("where", UNWRITABLE)
def test_a_place_that_cannot_be_written_is_cannot_write_before_a_weight_is_read(
    where: str, overwrite: bool, checkpoint: Path, place: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    make, reason = UNWRITABLE[where]
    target = make(place)
    before = beside(place)
    code, out, err = run_unread(monkeypatch, capsys, "export", checkpoint, target, *["--overwrite"] * overwrite)
    assert (code, out, beside(place)) == (1, "", before)
    assert "the package cannot be written [cannot-write]\n  where    /" in err
    assert f"  found    {reason}" in err


def test_parents_are_made_and_those_of_a_failed_export_removed(
    checkpoint: Path, place: Path, monkeypatch: Patch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    target = place / "a" / "b" / "package"
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(CannotWrite):
            waybill.build(checkpoint).save(target)
    assert beside(place) == []
    waybill.build(checkpoint).save(target)
    assert beside(target) == ["package"]


def test_a_link_to_a_folder_that_is_not_there_yet_is_followed_as_a_parent(checkpoint: Path, place: Path) -> None:
    target = below_a_link_to_nothing(place)
    waybill.build(checkpoint).save(target)
    assert beside(place.parent / "nowhere" / "at" / "all" / "package") == ["package"]


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no second file system")
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_a_package_goes_to_another_file_system(dtype: Any, tmp_path: Path) -> None:
    checkpoint = write_tokenizer(lively(llama(dtype, num_hidden_layers=1)).write(tmp_path / "checkpoint"))
    other = Path("/dev/shm") / f"waybill-{os.getpid()}-{np.dtype(dtype).name}"
    try:
        waybill.build(checkpoint).save(other / "package")
        assert beside(other / "package") == ["package"]
        assert not waybill.verify(other / "package", checkpoint).problems
    finally:
        shutil.rmtree(other)


# Real disks, which are mounted for the test.


def mounted(tmp_path: Path, *arguments: object) -> list[dict[str, Any]]:
    disk = tmp_path / "disk"
    disk.mkdir()
    inside = ["unshare", "--user", "--map-root-user", "--mount"]
    script = 'mount -t tmpfs -o size=64m none "$0" && exec "$@"'
    probe = [*inside, "sh", "-c", script, disk, "true"]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted here")
    own = [sys.executable, Path(__file__).with_name("mounted.py"), disk]
    command = [*inside, "sh", "-c", script, disk, *own, *arguments]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_disk_too_small_is_told_wherever_it_becomes_full(checkpoint: Path, tmp_path: Path) -> None:
    *runs, last = mounted(tmp_path, checkpoint, "full")
    print("full", len(runs))
    assert len(runs) > 10
    for each in runs:
        assert (each["code"], each["found"], each["left"]) == ("cannot-write", "No space left on device", [])
    assert (last["code"], last["left"]) == ("saved", ["package"])


def test_a_disk_that_is_read_only_is_told(checkpoint: Path, tmp_path: Path) -> None:
    [new, replaced] = mounted(tmp_path, checkpoint, "read-only")
    assert (new["code"], new["found"], new["left"]) == ("cannot-write", "Read-only file system", ["package"])
    assert replaced == new
