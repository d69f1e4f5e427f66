"""Checkpoints on a hub: headers alone by byte ranges, weights when they are wanted, and every way a hub can fail."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from huggingface_hub import constants
from huggingface_hub.utils._xet_progress_reporting import XetDownloadProgressReporter

import waybill
from checkpoints import Recipe, file_bytes, llama, write_tokenizer
from ggufs import model
from hub import COMMIT, OTHER_COMMIT, REPO, Handler, Hub, connect, environment, serving
from waybill import errors
from waybill.checkpoint import read_checkpoint, remote
from waybill.checkpoint.hub import HEADER_BYTES
from waybill.checkpoint.hubid import hub_id
from waybill.checkpoint.workers import bar_of, each

Patch = pytest.MonkeyPatch
Fault = Callable[[Handler], bool]
FIRST, LAST = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def served(tmp_path: Path) -> Path:
    """A model in two shards."""
    recipe = llama(np.float32, eos_token_id=2)
    return write_tokenizer(recipe.write(tmp_path / "served", shard_of=lambda name: int("layers.1" in name)))


@pytest.fixture
def hub(served: Path, tmp_path: Path, monkeypatch: Patch) -> Iterator[Hub]:
    with serving(served) as hub:
        connect(monkeypatch, hub, tmp_path / "home")
        yield hub


def on(pattern: str, answer: Callable[[Handler], Any]) -> Fault:
    """A fault of the requests whose path holds the pattern."""

    def fault(request: Handler) -> bool:
        if pattern not in request.path:
            return False
        answer(request)
        return True

    return fault


def refused(text: str = REPO) -> str:
    """What opening says."""
    with pytest.raises(errors.WaybillError) as raised:
        waybill.open(text)
    return str(raised.value)


# What is fetched, and when.


def test_headers_and_configs_are_all_that_inspecting_and_planning_fetch(hub: Hub, monkeypatch: Patch) -> None:
    monkeypatch.setattr("waybill.checkpoint.hub.HEADER_BYTES", 4096)
    bill = waybill.plan(REPO)
    assert bill.problems == ()
    assert hub.weight_bytes == 2 * 4096 < bill.checkpoint.nbytes // 30
    assert {line.rpartition("/")[2] for line in hub.asked(f"resolve/{COMMIT}")} == {
        "config.json", "model.safetensors.index.json", FIRST, LAST,
    }  # fmt: skip
    note = f"{REPO}@{COMMIT}: headers alone, 8,192 bytes"
    assert bill.checkpoint.notices == (note,)


def test_what_a_hub_tells_is_what_the_folder_tells(hub: Hub, served: Path) -> None:
    far, near = waybill.open(REPO), waybill.open(served)
    assert (far.config, far.tensors, far.nbytes) == (near.config, near.tensors, near.nbytes)
    assert [(s.name, s.size, s.tensors) for s in far.shards] == [(s.name, s.size, s.tensors) for s in near.shards]
    assert far.name == f"{REPO}@{COMMIT}"


def test_a_header_longer_than_what_is_read_ahead_is_read_whole(hub: Hub, served: Path) -> None:
    names = {f"{'x' * 100}.{n}": np.zeros(100, np.float32) for n in range(2000)}
    Recipe(llama(np.float32).config, names).write(served)
    for path in (served / FIRST, served / LAST, served / "model.safetensors.index.json"):
        path.unlink()
    assert len(read_checkpoint(REPO).tensors) == 2000
    assert 3 * HEADER_BYTES < hub.weight_bytes < (served / "model.safetensors").stat().st_size // 2


@pytest.mark.parametrize("revision", ["main", "v1.0", "refs/pr/1", COMMIT])
def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: Hub, revision: str) -> None:
    assert waybill.open(f"{REPO}@{revision}").name == f"{REPO}@{COMMIT}"


def test_everything_is_asked_of_the_commit_the_hub_named_first(hub: Hub) -> None:
    waybill.plan(REPO).fetched()
    assert hub.asked("resolve") == hub.asked(f"resolve/{COMMIT}/")


def test_a_token_goes_to_the_hub_and_to_nobody_else(hub: Hub, monkeypatch: Patch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.gated = True
    waybill.plan(REPO).fetched()
    told = {token for _, path, token in hub.log if path.startswith("/network")}
    assert told == {None}
    assert {token for _, path, token in hub.log if not path.startswith("/network")} == {"Bearer hf_secret"}


def test_fetching_brings_the_shards_a_plan_reads_and_the_small_files(hub: Hub, served: Path) -> None:
    recipe = llama(np.float32)
    recipe.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    recipe.write(served, shard_of=lambda name: int("inv_freq" in name))
    bill = waybill.plan(REPO)
    told: list[int] = []
    expected = bill.checkpoint.pending(bill.files)
    local = bill.fetched(told.append)
    root = local.checkpoint.root
    assert sorted(path.name for path in root.iterdir()) == [
        "config.json", FIRST, "model.safetensors.index.json", "tokenizer.json",
    ]  # fmt: skip
    assert sum(told) == expected == (served / FIRST).stat().st_size + (served / "tokenizer.json").stat().st_size
    assert local.checkpoint.pending(bill.files) == 0
    assert (root / FIRST).read_bytes() == (served / FIRST).read_bytes()


def test_what_the_cache_holds_is_not_asked_for_again(hub: Hub) -> None:
    waybill.plan(REPO).fetched()
    before = hub.weight_bytes
    again = waybill.plan(REPO).fetched()
    assert again.checkpoint.notices == (f"{REPO}@{COMMIT}: headers from the cache",)
    assert hub.weight_bytes == before


def test_records_of_a_hub_are_lazy_and_their_values_are_brought(hub: Hub, served: Path) -> None:
    record, near = next(waybill.records(REPO)), next(waybill.records(served))
    assert hub.weight_bytes == 2 * HEADER_BYTES
    assert np.array_equal(waybill.dequantize(record), waybill.dequantize(near))


def test_building_and_loading_bring_what_they_read(hub: Hub, served: Path, tmp_path: Path) -> None:
    waybill.build(REPO).save(tmp_path / "package")
    assert waybill.verify(tmp_path / "package", REPO).problems == []
    far, near = waybill.load(REPO).state_dict(), waybill.load(served).state_dict()
    assert far.keys() == near.keys()
    assert all(far[name].equal(near[name]) for name in near)


def test_a_skeleton_needs_no_weights(hub: Hub) -> None:
    waybill.build(REPO, load_weights=False)
    assert hub.weight_bytes == 2 * HEADER_BYTES


def test_a_plan_that_does_not_add_up_is_refused_before_the_download(hub: Hub, served: Path) -> None:
    recipe = llama(np.float32)
    del recipe.tensors["model.layers.1.mlp.up_proj.weight"]
    recipe.write(served, shard_of=lambda name: int("layers.1" in name))
    with pytest.raises(errors.Refused, match="missing-weight"):
        waybill.build(REPO)
    assert hub.weight_bytes == 2 * HEADER_BYTES


def test_a_repository_of_gguf_files_is_named_with_the_file(hub: Hub, served: Path) -> None:
    for path in served.iterdir():
        path.unlink()
    (served / "deep").mkdir()
    model("llama").write(served / "deep" / "tiny-Q4.gguf")
    assert refused() == (
        "not a checkpoint [not-a-checkpoint]\n"
        f"  where    {REPO}@{COMMIT}\n  expected config.json\n  found    deep/tiny-Q4.gguf\n"
        f"  fix      give the id of a file, such as {REPO}/deep/tiny-Q4.gguf"
    )
    far, near = waybill.open(f"{REPO}/deep/tiny-Q4.gguf@v1.0"), waybill.open(served / "deep" / "tiny-Q4.gguf")
    assert (far.config, far.tensors, far.metadata, far.name) == (near.config, near.tensors, near.metadata, near.name)
    bill = waybill.plan(far).fetched()
    assert bill.checkpoint.location.read_bytes() == (served / "deep" / "tiny-Q4.gguf").read_bytes()


def test_a_gguf_file_that_is_not_there_is_refused_with_those_that_are(hub: Hub) -> None:
    text = refused(f"{REPO}/tiny.gguf")
    assert "[not-a-checkpoint]" in text
    assert "expected tiny.gguf" in text


# Which of the two a name means.


def test_a_folder_of_that_name_wins_and_that_is_said(hub: Hub, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    llama(np.float32).write(tmp_path / REPO)
    assert waybill.open(REPO).notices == (f"{REPO} is read from this disk, not from the hub",)
    assert waybill.open(f"./{REPO}").notices == ()
    assert hub.log == []
    assert waybill.open(f"{REPO}@main").name == f"{REPO}@{COMMIT}"


def test_a_path_object_is_a_path(hub: Hub) -> None:
    with pytest.raises(errors.NotACheckpoint):
        waybill.open(Path(REPO))
    assert hub.log == []


@pytest.mark.parametrize(
    "path", ["model", "a/b/c", "./a/b", "../a", "/a/b", "~/b", "a b/c", "a\\b/c", "org/model@", "@x/y"]
)
def test_what_has_not_the_form_of_an_id_is_a_path(path: str) -> None:
    assert hub_id(path) is None


def test_what_is_neither_is_told_how_an_id_looks() -> None:
    assert refused("a/b/c").endswith(
        "a checkpoint on Hugging Face is ORG/NAME, ORG/NAME@REVISION or ORG/NAME/FILE.gguf"
    )


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        ("https://huggingface.co/org/model", "an address is not an id", "give org/model"),
        ("https://hf.co/org/model/tree/main", "an address is not an id", "give org/model"),
        ("hf://org/model", "an address is not an id", "give org/model"),
        ("org/model@a..b", "the revision is malformed", "give a branch, a tag or a commit after the @"),
        ("org/model@-x", "the revision is malformed", "give a branch, a tag or a commit after the @"),
        ("org/model@/etc", "the revision is malformed", "give a branch, a tag or a commit after the @"),
        ("a..b/c", "the id is malformed", "Cannot have -- or .. in repo_id: 'a..b/c'."),
    ],
)
def test_an_id_that_is_none_is_refused_without_asking(hub: Hub, text: str, what: str, fix: str) -> None:
    said = refused(text)
    assert said.startswith(f"{what} [bad-hub-id]\n  expected ORG/NAME, ORG/NAME@REVISION or ORG/NAME/FILE.gguf\n")
    assert said.endswith(f"  fix      {fix}")
    assert hub.log == []


# A hub that says no.


def test_a_repository_that_does_not_exist(hub: Hub) -> None:
    assert refused("org/other") == (
        "there is no such repository on the hub, and no such path here [not-on-hub]\n"
        "  where    org/other@main\n"
        f"  expected a repository that {hub.endpoint} shows\n"
        "  found    404 Repository not found\n"
        "  fix      check the spelling; if it is private, log in with `hf auth login`, or set HF_TOKEN; a path on this "
        "disk can begin with ./"
    )


@pytest.mark.parametrize("revision", ["nope", OTHER_COMMIT])
def test_a_revision_that_does_not_exist(hub: Hub, revision: str) -> None:
    assert "there is no such revision on the hub" in refused(f"{REPO}@{revision}")


def test_a_file_that_is_listed_and_not_there(hub: Hub) -> None:
    hub.fault = on(f"resolve/{COMMIT}/{LAST}", lambda request: request.refuse(404, "EntryNotFound", "Entry not found"))
    said = refused()
    assert "there is no such file on the hub" in said
    assert LAST in said


def test_a_gated_model_says_how_to_get_in(hub: Hub) -> None:
    hub.gated = True
    (hub.folder / "model.safetensors.index.json").unlink()
    assert refused() == (
        "the hub does not show this to everyone [no-hub-access]\n"
        f"  where    {REPO}@{COMMIT}: config.json\n"
        "  expected a token that may read it\n"
        "  found    401 Access to model org/model is restricted.\n"
        f"  fix      log in with `hf auth login`, or set HF_TOKEN; if the model is gated, accept its licence at "
        f"{hub.endpoint}/{REPO}"
    )


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("place", ["/api/models", f"resolve/{COMMIT}/{LAST}"])
def test_a_token_that_may_not_read_it(hub: Hub, status: int, place: str) -> None:
    hub.fault = on(place, lambda request: request.refuse(status, "", "Forbidden for this token"))
    assert f"[no-hub-access]\n  where    {REPO}@" in (said := refused())
    assert f"{status} Forbidden for this token" in said


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [({"Retry-After": "42"}, "42"), ({"ratelimit": '"api";r=0;t=55'}, "55"), ({}, "some")],
)
@pytest.mark.parametrize("place", ["/api/models", f"resolve/{COMMIT}/{LAST}"])
def test_a_rate_limit_says_when_to_come_back_and_nobody_insists(
    hub: Hub, headers: dict[str, str], seconds: str, place: str
) -> None:
    hub.fault = on(place, lambda request: request.refuse(429, "", "Too many requests", **headers))
    said = refused()
    assert said.startswith("the hub was asked too often [hub-rate-limit]")
    assert f"run again in {seconds} seconds; requests with a token have a higher limit" in said
    assert len(hub.asked(place)) == 1


# A hub that cannot.


def test_a_hub_that_is_not_there(hub: Hub, monkeypatch: Patch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    assert refused() == (
        "the hub cannot be reached [hub-unreachable]\n"
        f"  where    {REPO}@main\n"
        "  expected a connection\n"
        "  found    [Errno 111] Connection refused\n"
        "  fix      check the network and HF_ENDPOINT and run again; HF_HUB_OFFLINE=1 uses what the cache holds"
    )


def test_a_name_that_nobody_knows(hub: Hub, monkeypatch: Patch) -> None:
    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(constants, "ENDPOINT", "http://hub.invalid")
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert "Name or service not known" in (said := refused())
    assert "the hub cannot be reached [hub-unreachable]" in said


@pytest.mark.parametrize("place", ["/api/models", "/network/"])
def test_a_hub_that_never_answers(hub: Hub, monkeypatch: Patch, place: str) -> None:
    over = threading.Event()
    monkeypatch.setattr(remote, "TIMEOUT", 0.2)
    monkeypatch.setattr("waybill.checkpoint.hub.TIMEOUT", 0.2)
    hub.fault = on(place, lambda _: over.wait(60))
    said = refused()
    over.set()
    assert said.startswith("the hub does not answer in time [hub-unreachable]")


@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_a_hub_that_is_out_of_order_is_asked_again_for_a_range(hub: Hub, status: int) -> None:
    hub.fault = on("/network/", lambda request: request.refuse(status, "", "try later"))
    said = refused()
    assert said.startswith("the hub is out of order [hub-unreachable]")
    assert f"{status} try later" in said
    assert 3 <= len(hub.asked(f"/network/.*{FIRST}")) + len(hub.asked(f"/network/.*{LAST}")) <= 6


def test_a_hub_that_stumbles_once_is_forgiven(hub: Hub) -> None:
    seen: list[str] = []

    def fault(request: Handler) -> bool:
        if "/network/" not in request.path or request.path in seen:
            return False
        seen.append(request.path)
        request.refuse(503, "", "try later")
        return True

    hub.fault = fault
    assert waybill.plan(REPO).problems == ()


def broken_off(request: Handler) -> None:
    """Promise more than comes."""
    request.send_response(206)
    request.send_header("Content-Range", f"bytes 0-{HEADER_BYTES - 1}/{request.hub.files()[request.file]}")
    request.send_header("Content-Length", str(HEADER_BYTES))
    request.end_headers()
    request.wfile.write(bytes(100))
    request.close_connection = True


def test_an_answer_that_breaks_off(hub: Hub) -> None:
    hub.fault = on("/network/", broken_off)
    said = refused()
    assert said.startswith("the hub's answer broke off [hub-unreachable]")
    assert "received 100 bytes, expected 65536" in said


# A hub that may not be asked.


def test_offline_what_the_cache_holds_is_enough(hub: Hub, monkeypatch: Patch) -> None:
    waybill.plan(REPO).fetched()
    before = len(hub.log)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert waybill.plan(REPO).problems == waybill.plan(f"{REPO}@{COMMIT}").problems == ()
    assert waybill.open(REPO).name == f"{REPO}@{COMMIT}"
    waybill.load(REPO)
    assert len(hub.log) == before


def test_offline_a_part_of_a_model_is_said_to_be_one(hub: Hub, monkeypatch: Patch) -> None:
    waybill.plan(REPO)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "2 of 2 shards named by the index are not on disk" in refused()


def test_offline_with_nothing_in_the_cache(hub: Hub, monkeypatch: Patch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert refused() == (
        "the hub may not be asked, and the cache does not hold this [hub-unreachable]\n"
        f"  where    {REPO}@main\n"
        "  expected config.json of that revision in the cache\n"
        "  found    HF_HUB_OFFLINE is set\n"
        "  fix      unset HF_HUB_OFFLINE, or run once where the hub can be reached"
    )
    assert hub.log == []


# A hub that answers something else.


def test_a_server_without_ranges_is_refused_and_no_file_is_read(hub: Hub, served: Path) -> None:
    size = 256 << 20
    (served / LAST).write_bytes(file_bytes({"x": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}))
    os.truncate(served / LAST, (served / LAST).stat().st_size + size)
    hub.fault = on(f"/network/{COMMIT}/{LAST}", lambda request: request.content(request.file, ranges=False))
    said = refused()
    assert said.startswith("the hub answers with something else than it was asked for [bad-hub-answer]")
    assert "expected status 206, a part of the file" in said
    assert "found    status 200: the server gives whole files only" in said
    assert hub.sent.get(LAST, 0) < size // 4


def test_a_small_file_may_be_given_whole(hub: Hub, served: Path) -> None:
    (served / LAST).write_bytes(file_bytes({"x": {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}}, bytes(9)))
    hub.fault = on(f"/network/{COMMIT}/{LAST}", lambda request: request.content(request.file, ranges=False))
    assert "x" in read_checkpoint(REPO).tensors


def endless(request: Handler) -> bool:
    """A config that never ends."""
    if request.command == "HEAD" or not request.path.endswith("/config.json"):
        return False
    request.send_response(200)
    request.send_header("Connection", "close")
    request.end_headers()
    for _ in range(1000):
        request.wfile.write(bytes(1 << 20))
        request.hub.sent["endless"] = request.hub.sent.get("endless", 0) + (1 << 20)
    return True


def test_a_file_without_end_is_left_when_it_is_longer_than_was_listed(hub: Hub) -> None:
    hub.fault = endless
    said = refused()
    assert "[bad-hub-answer]" in said
    assert "more than the 376 bytes that were listed" in said
    assert hub.sent["endless"] < 100 << 20


def part(request: Handler, body: bytes, **headers: str) -> None:
    """An answer with the right Content-Range, if nothing else is said."""
    stated = {"Content-Range": f"bytes 0-{HEADER_BYTES - 1}/{request.hub.files()[request.file]}"}
    request.reply(206, stated | {name.replace("_", "-"): value for name, value in headers.items()}, body)


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (lambda request: part(request, bytes(HEADER_BYTES + 1)), "65,537 bytes"),
        (lambda request: part(request, bytes(100)), "100 bytes"),
        (lambda request: part(request, bytes(100), Content_Range="bytes 7-106/*"), "bytes 7-106/*"),
        (lambda request: part(request, bytes(100), Content_Range="elephants"), "elephants"),
        (lambda request: part(request, bytes(100), Content_Encoding="gzip"), "bytes 0-65535/"),
        (lambda request: request.reply(302, {"Location": "file:///etc/passwd"}), "protocol"),
        (lambda request: request.reply(302, {"Location": request.path}), "redirects"),
        (lambda request: request.reply(302, {"Location": "http://[::1"}), "nvalid"),
        (lambda request: request.reply(418, {}), "418"),
    ],
)
def test_an_answer_to_another_question(hub: Hub, answer: Callable[[Handler], Any], found: str) -> None:
    hub.fault = on("/network/", answer)
    said = refused()
    assert "[bad-hub-answer]" in said or "broke off [hub-unreachable]" in said
    assert found in said.replace("an address on the web", "")


@pytest.mark.parametrize(
    "listing",
    [
        b"<html>log in to the hotel's network</html>",
        b"[]",
        b"{}",
        b'{"id": "org/model", "sha": "../../../x", "siblings": []}',
        b'{"id": "org/model", "sha": 1, "siblings": []}',
        json.dumps({"id": REPO, "sha": COMMIT, "siblings": 7}).encode(),
        json.dumps({"id": REPO, "sha": COMMIT, "siblings": [{"rfilename": "config.json"}]}).encode(),
        json.dumps({"id": REPO, "sha": COMMIT, "siblings": [{"rfilename": "config.json", "size": -1}]}).encode(),
        json.dumps({"id": REPO, "sha": COMMIT, "siblings": [{"rfilename": "config.json", "size": 1 << 40}]}).encode(),
        json.dumps({"id": REPO, "sha": COMMIT, "siblings": [{"size": 1}]}).encode(),
    ],
)
def test_a_listing_that_is_none(hub: Hub, listing: bytes) -> None:
    hub.fault = on("/api/models", lambda request: request.reply(200, body=listing))
    assert "[bad-hub-answer]" in refused()


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/../../b.json", "a\\..\\b"])
def test_a_listing_that_leads_out_of_the_repository(hub: Hub, name: str) -> None:
    siblings = [{"rfilename": name, "size": 1}, {"rfilename": "config.json", "size": 2}]
    body = json.dumps({"id": REPO, "sha": COMMIT, "siblings": siblings}).encode()
    hub.fault = on("/api/models", lambda request: request.reply(200, body=body))
    assert "[path-escape]" in (said := refused())
    assert "a path that leaves the repository" in said


def test_an_index_that_leads_out_of_the_repository(hub: Hub, served: Path) -> None:
    index = {"weight_map": {"a": "../../secret.safetensors", "b": "elsewhere.safetensors"}}
    (served / "model.safetensors.index.json").write_text(json.dumps(index))
    said = refused()
    assert "[path-escape]" in said
    assert "[missing-shard]" in said
    assert hub.asked("secret") == []


@pytest.mark.parametrize("tag", ["../../../evil", "/tmp/evil", "a/b", ""])
def test_a_tag_that_is_a_path_is_refused_since_the_cache_names_files_by_tags(
    hub: Hub, tmp_path: Path, monkeypatch: Patch, tag: str
) -> None:
    before = {*tmp_path.rglob("*")}
    monkeypatch.setattr(hub, "tag", lambda _: tag)
    assert "expected an ETag of letters and digits" in refused()
    assert {*tmp_path.rglob("*")} == before


def test_a_header_that_lies_about_its_length_costs_what_is_read_ahead(hub: Hub, served: Path) -> None:
    (served / LAST).write_bytes((1 << 40).to_bytes(8, "little") + bytes(300_000))
    assert "a safetensors header is impossibly long [bad-header]" in refused()
    assert hub.weight_bytes <= 2 * HEADER_BYTES


def test_a_redirect_from_https_to_http_is_not_read() -> None:
    file = remote.RemoteFile("https://hub/x", "x", COMMIT, 10, lambda _: None, threading.Event())
    request = httpx2.Request("GET", "http://network/x")
    answer = httpx2.Response(206, headers={"Content-Range": "bytes 0-9/10"}, request=request)
    with pytest.raises(errors.BadHubAnswer, match="something else"):
        file._check(answer, "bytes 0-9/10")


# A hub whose files change.


def moved(request: Handler) -> None:
    """The branch moved on."""
    linked = {"X-Linked-Size": str(request.hub.files()[request.file]), "X-Linked-ETag": '"another"'}
    location = f"{request.hub.network}/network/{COMMIT}/{request.file}"
    request.reply(302, linked | {"Location": location, "X-Repo-Commit": OTHER_COMMIT})


def test_a_header_of_another_commit(hub: Hub) -> None:
    hub.fault = on(f"resolve/{COMMIT}/{LAST}", moved)
    said = refused()
    assert "a file on the hub changed while it was being read [file-changed]" in said
    assert f"expected commit {COMMIT}\n  found    commit {OTHER_COMMIT}" in said
    assert "fix      run again; a commit after the @ never changes" in said


@pytest.mark.parametrize(
    "grown",
    [lambda request: part(request, b"", Content_Range="bytes 0-65535/99"), lambda r: r.refuse(416, "", "short")],
)
def test_a_file_of_another_size_than_was_listed(hub: Hub, grown: Callable[[Handler], Any]) -> None:
    hub.fault = on("/network/", grown)
    assert "[file-changed]" in refused()


def test_a_file_that_is_replaced_between_two_ranges(hub: Hub, served: Path) -> None:
    names = {f"{'x' * 100}.{n}": np.zeros(1, np.float32) for n in range(2000)}
    Recipe(llama(np.float32).config, names).write(served, shard_of=lambda _: 0)

    def fault(request: Handler) -> bool:
        if "resolve" in request.path and "safetensors" in request.path:
            os.utime(served / "model-00001-of-00001.safetensors", ns=(0, len(hub.log)))
        return False

    hub.fault = fault
    assert "[file-changed]" in (said := refused())
    assert "ETag" in said


def test_a_body_of_another_commit_than_its_header(hub: Hub) -> None:
    bill = waybill.plan(REPO)
    hub.fault = on(f"resolve/{COMMIT}/{LAST}", moved)
    with pytest.raises(errors.FileChanged, match="changed while it was being read"):
        bill.fetched()


def test_a_body_of_the_same_length_that_holds_other_tensors(hub: Hub, served: Path) -> None:
    bill = waybill.plan(REPO)
    octets = (served / LAST).read_bytes()
    (served / LAST).write_bytes(octets.replace(b"layers.1", b"layers.7"))
    with pytest.raises(errors.FileChanged) as raised:
        bill.fetched()
    assert raised.value.what == "a weight file is not the one whose header was read"
    assert "and not the same tensors" in raised.value.found


# A download that fails.


def test_a_download_that_breaks_off(hub: Hub) -> None:
    bill = waybill.plan(REPO)

    def fault(request: Handler) -> bool:
        if request.command == "HEAD" or LAST not in request.path or "/network/" not in request.path:
            return False
        request.send_response(200)
        request.send_header("Content-Length", str(hub.files()[LAST]))
        request.end_headers()
        request.close_connection = True
        return True

    hub.fault = fault
    with pytest.raises(errors.HubUnreachable, match="broke off"):
        bill.fetched()
    assert not (bill.checkpoint.root / LAST).exists()


def test_a_download_that_breaks_off_once_is_gone_on_with(hub: Hub, served: Path) -> None:
    bill = waybill.plan(REPO)
    seen: list[str] = []

    def fault(request: Handler) -> bool:
        if request.command == "HEAD" or LAST not in request.path or "/network/" not in request.path or seen:
            return False
        seen.append(request.path)
        request.send_response(200)
        request.send_header("Content-Length", str(hub.files()[LAST]))
        request.end_headers()
        request.wfile.write((served / LAST).read_bytes()[:1000])
        request.close_connection = True
        return True

    hub.fault = fault
    local = bill.fetched().checkpoint.root
    assert (local / LAST).read_bytes() == (served / LAST).read_bytes()


def test_a_gate_that_closes_before_the_download(hub: Hub) -> None:
    bill = waybill.plan(REPO)
    hub.gated = True
    with pytest.raises(errors.NoHubAccess, match="everyone"):
        bill.fetched()


def test_a_cache_without_room_is_found_before_the_download(hub: Hub, monkeypatch: Patch) -> None:
    bill = waybill.plan(REPO)
    asked = len(hub.log)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(errors.CannotWrite) as raised:
        bill.fetched()
    assert raised.value.what == "the download has no room in the cache"
    assert (raised.value.expected, raised.value.found) == (
        f"{bill.checkpoint.pending(bill.files):,} bytes", "1,000 bytes free",
    )  # fmt: skip
    assert len(hub.log) == asked


def test_a_cache_that_cannot_be_written(hub: Hub, tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
    said = refused()
    assert said.startswith("the download cannot be stored [cannot-write]")
    assert "free some space, or set HF_HOME to another place" in said


def test_when_one_download_fails_the_others_are_given_up(hub: Hub, monkeypatch: Patch) -> None:
    bill = waybill.plan(REPO)
    failed = threading.Event()

    def fault(request: Handler) -> bool:
        if LAST in request.path and "resolve" in request.path:
            request.refuse(403, "", "no")
            failed.set()
            return True
        if FIRST in request.path and request.command == "GET" and "/network/" in request.path:
            failed.wait(60)
        return False

    hub.fault = fault
    with pytest.raises(errors.NoHubAccess):
        bill.fetched()


def test_who_interrupts_does_not_wait_for_a_server_that_stalls() -> None:
    over, stopped = threading.Event(), threading.Event()

    def do(name: str) -> None:
        if name == "interrupted":
            raise KeyboardInterrupt
        over.wait(60)

    with pytest.raises(KeyboardInterrupt):
        each(do, ["stalled", "interrupted"], 2, stopped)
    assert stopped.is_set()
    assert not over.is_set()
    over.set()


# The cache, and what is not imported.


def test_a_blob_may_lie_in_the_store_that_the_repositories_of_a_cache_share(served: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--org--model" / "snapshots" / COMMIT
    blobs, shared = snapshot.parent.parent / "blobs", tmp_path / "hub" / "blobs"
    for folder in (snapshot, blobs, shared):
        folder.mkdir(parents=True)
    for path in served.iterdir():
        (shared / path.name).write_bytes(path.read_bytes())
        (blobs / path.name).symlink_to(shared / path.name)
        (snapshot / path.name).symlink_to(blobs / path.name)
    assert waybill.plan(snapshot).problems == ()
    (blobs / LAST).unlink()
    (blobs / LAST).symlink_to(served / LAST)
    assert [problem.code for problem in read_checkpoint(snapshot).problems] == ["path-escape"]


def test_a_bar_counts_the_bytes_that_are_written_and_not_those_that_travel() -> None:
    told: list[int] = []
    reporter = XetDownloadProgressReporter(
        reconstruction_desc="", total=9, log_level=30, tqdm_class=bar_of(told.append, threading.Event(), 9)
    )
    with reporter:
        report = {"total_bytes_completed": 4, "total_transfer_bytes_completed": 3, "total_bytes_completion_rate": 1.0}
        report |= {"total_transfer_bytes_completion_rate": 1.0, "total_bytes": 9}
        reporter.update_progress(type("Report", (), report))
    assert told == [4]


def test_neither_a_folder_nor_the_version_imports_huggingface_hub(served: Path) -> None:
    script = "import sys, waybill.cli.app, waybill\nwaybill.plan(sys.argv[1])\nprint('huggingface_hub' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script, served], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_another_process_is_told_by_the_variables_of_huggingface_hub(hub: Hub, tmp_path: Path) -> None:
    def inspect(**more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "waybill", "inspect", REPO, "--json"]
        env = environment(hub, tmp_path / "other", **more)
        return subprocess.run(command, capture_output=True, text=True, env=env, check=False)

    done = inspect()
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["tensors"] == 21
    assert (tmp_path / "other" / "hub" / "models--org--model" / "refs" / "main").read_text() == COMMIT
    done = inspect(HF_HUB_OFFLINE="1")
    assert "2 of 2 shards named by the index are not on disk" in done.stdout
