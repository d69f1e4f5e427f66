"""A stand-in for the Hugging Face hub on loopback: it serves a folder as one repository, counts, and can misbehave.

It speaks what huggingface_hub asks: the listing of a revision, its tree, and files with commit, tag, size and ranges.
Weight files lie on a second address, as on a content network, and are redirected to.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

import huggingface_hub.file_download
from huggingface_hub import constants
from huggingface_hub.utils import close_session
from pytest import MonkeyPatch

import waybill.checkpoint.remote

REPO = "org/model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER_COMMIT = "f" * 40
LARGE = (".safetensors", ".gguf")


class Hub:
    """What is served, how, and what was asked. `fault` sees every request first and may answer it itself."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.commit = COMMIT
        self.branches = {"main", "v1.0", "refs/pr/1"}
        self.gated = False
        self.endpoint = self.network = ""
        self.fault: Callable[[Handler], bool] = lambda _: False
        self.log: list[tuple[str, str, str | None]] = []
        self.sent: dict[str, int] = {}
        self.lock = threading.Lock()

    @property
    def weight_bytes(self) -> int:
        """Bytes of weight files that went out."""
        return sum(count for name, count in self.sent.items() if name.endswith(LARGE))

    def asked(self, pattern: str) -> list[str]:
        """Requests so far, as `GET /path`, that match."""
        return [line for verb, path, _ in self.log if re.search(pattern, line := f"{verb} {path}")]

    def files(self) -> dict[str, int]:
        """Names and sizes."""
        paths = (path for path in sorted(self.folder.rglob("*")) if path.is_file())
        return {path.relative_to(self.folder).as_posix(): path.stat().st_size for path in paths}

    def tag(self, name: str) -> str:
        """What identifies the content of a file."""
        stat = (self.folder / name).stat()
        return hashlib.sha256(f"{name} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        self._serve()

    def do_HEAD(self) -> None:
        self._serve()

    def log_message(self, *_: Any) -> None:
        pass

    @property
    def file(self) -> str:
        """The file that is asked for."""
        return unquote(urlsplit(self.path).path).rpartition(f"/{self.hub.commit}/")[2]

    def _serve(self) -> None:
        hub = self.hub
        with hub.lock:
            hub.log.append((self.command, self.path, self.headers.get("Authorization")))
        if hub.fault(self):
            return
        path = unquote(urlsplit(self.path).path)
        if path.startswith("/network/"):
            self.content(path.rpartition(f"/{hub.commit}/")[2])
        elif listing := re.fullmatch(rf"/api/models/{REPO}/(revision|tree)/(.+)", path):
            if listing[2] not in hub.branches | {hub.commit}:
                self.refuse(404, "RevisionNotFound", "Invalid rev id")
            elif listing[1] == "tree":
                self.reply(200, body=json.dumps([self._entry(n, s) for n, s in hub.files().items()]).encode())
            else:
                siblings = [{"rfilename": name, "size": size} for name, size in hub.files().items()]
                about = {"id": REPO, "sha": hub.commit, "siblings": siblings, "gated": hub.gated}
                self.reply(200, body=json.dumps(about).encode())
        elif resolved := re.fullmatch(rf"/{REPO}/resolve/([^/]+)/(.+)", path):
            self._resolve(resolved[1], resolved[2])
        else:
            self.refuse(404, "RepoNotFound", "Repository not found")

    def _entry(self, name: str, size: int) -> dict[str, Any]:
        return {"type": "file", "path": name, "size": size, "oid": self.hub.tag(name)[:40]}

    def _resolve(self, revision: str, name: str) -> None:
        hub = self.hub
        if hub.gated and not self.headers.get("Authorization"):
            self.refuse(401, "GatedRepo", f"Access to model {REPO} is restricted.")
        elif revision not in hub.branches | {hub.commit}:
            self.refuse(404, "RevisionNotFound", "Invalid rev id")
        elif name not in hub.files():
            self.refuse(404, "EntryNotFound", "Entry not found")
        elif name.endswith(LARGE):
            linked = {"X-Linked-Size": str(hub.files()[name]), "X-Linked-ETag": f'"{hub.tag(name)}"'}
            self.reply(302, linked | {"Location": f"{hub.network}/network/{hub.commit}/{name}"})
        else:
            self.content(name)

    def content(self, name: str, *, ranges: bool = True) -> None:
        """A file, or the part of it that is asked for."""
        path, size = self.hub.folder / name, self.hub.files()[name]
        first, last, status = 0, size - 1, 200
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")) if ranges else None
        headers = {"ETag": f'"{self.hub.tag(name)}"', "Accept-Ranges": "bytes"}
        if asked:
            first, last, status = int(asked[1]), min(int(asked[2] or last), last), 206
            if first >= size:
                self.refuse(416, "RangeNotSatisfiable", "no such range")
                return
            headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        with path.open("rb") as stream:
            stream.seek(first)
            self.reply(status, headers, length=last - first + 1, stream=stream, name=name)

    def reply(
        self, status: int, headers: dict[str, str] | None = None, body: bytes = b"", *,
        length: int | None = None, stream: BinaryIO | None = None, name: str = "",
    ) -> None:  # fmt: skip
        """An answer with a body, or with `length` bytes of a stream."""
        length = len(body) if length is None else length
        self.send_response(status)
        for key, value in ({"X-Repo-Commit": self.hub.commit} | (headers or {})).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command == "HEAD":
            return
        sent = 0
        while stream is not None and sent < length:
            part = stream.read(min(1 << 20, length - sent))
            if not part:
                break
            self._count(name, len(part))
            self.wfile.write(part)
            sent += len(part)
        if stream is None:
            self._count(name, len(body))
            self.wfile.write(body)

    def _count(self, name: str, nbytes: int) -> None:
        with self.hub.lock:
            self.hub.sent[name] = self.hub.sent.get(name, 0) + nbytes

    def refuse(self, status: int, code: str, message: str, **headers: str) -> None:
        """An error as the hub words it."""
        self.reply(status, {"X-Error-Code": code, "X-Error-Message": message} | headers)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """Clients leave when they have seen enough."""


@contextmanager
def serving(folder: Path) -> Iterator[Hub]:
    """The stand-in, on two addresses of its own."""
    hub = Hub(folder)
    handler = type("Bound", (Handler,), {"hub": hub})
    with ExitStack() as stack:
        for kind, host in (("endpoint", "127.0.0.1"), ("network", "localhost")):  # two hosts, to a client
            server = stack.enter_context(_Server(("127.0.0.1", 0), handler))
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            setattr(hub, kind, f"http://{host}:{server.server_address[1]}")
        yield hub


def connect(patch: MonkeyPatch, hub: Hub, home: Path) -> None:
    """Make this process use the stand-in, an empty cache and no token; huggingface_hub reads its variables once."""
    patch.setattr(constants, "ENDPOINT", hub.endpoint)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    patch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    patch.setattr(constants, "HF_STORED_TOKENS_PATH", str(home / "stored_tokens"))
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    patch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    patch.setattr(waybill.checkpoint.remote, "PAUSES", (0.0, 0.0))
    patch.setattr(huggingface_hub.file_download.time, "sleep", lambda _: None)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        patch.delenv(name, raising=False)
    close_session()


def environment(hub: Hub, home: Path, **more: str) -> dict[str, str]:
    """The same for another process."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    told = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    return kept | told | {"HF_HUB_DISABLE_TELEMETRY": "1"} | more
