"""A checkpoint on a Hugging Face hub: config files whole, headers by byte ranges, weights only when they are wanted.

All requests go through huggingface_hub: its session, token, endpoint, cache and offline mode. Everything is asked of
one commit, the one the hub named first. huggingface_hub is imported by the first call that needs it.
"""

from __future__ import annotations

import io
import re
import shutil
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from waybill.checkpoint.asking import asking, bad_answer, changed
from waybill.checkpoint.files import Folder, Progress, escape, leaves
from waybill.checkpoint.folder import INDEX_ENDING, SIDE_FILES
from waybill.checkpoint.gguf import GgufHeader, gguf_of
from waybill.checkpoint.header import FileHeader, header_of
from waybill.checkpoint.hubid import HubId, bad_id
from waybill.checkpoint.jsonfile import MAX_CONFIG_BYTES, MAX_INDEX_BYTES
from waybill.checkpoint.remote import TIMEOUT, RemoteFile, patiently
from waybill.checkpoint.workers import bar_of, each
from waybill.errors import CannotWrite, HubUnreachable, NotACheckpoint, some

_T = TypeVar("_T")

HEADER_BYTES = 64 << 10
"""Asked for at once: the headers of most shards."""
METADATA_BYTES = 1 << 20
"""The same of a GGUF file, whose vocabulary comes first."""
REQUESTS, DOWNLOADS = 16, 8
"""Headers and files under way at once."""
CONFIGS = ("config.json", "generation_config.json", *SIDE_FILES)
COMPANIONS = (".json", ".jinja", ".txt", ".model")
"""What travels with any weight file: configs, tokenizers, templates."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_TAG = re.compile(r"[\w-]+", re.ASCII)


def open_hub(named: HubId) -> HubFiles | Folder:
    """The files of a repository, with config files brought to the cache; offline, what the cache holds.

    Raises:
        HubError: the hub does not give what is needed.
        PathEscape: it names files that lie outside the repository.
        NotACheckpoint: there is no config.json, or no such GGUF file.
    """
    from huggingface_hub import HfApi, constants, is_offline_mode, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(named.repo)
    except HFValidationError as error:
        raise bad_id("the id is malformed", named.repo, str(error)) from None
    revision, wanted = named.revision or constants.DEFAULT_REVISION, Path(named.file or "config.json")
    if is_offline_mode():
        cached = try_to_load_from_cache(named.repo, str(wanted), revision=revision)
        if not isinstance(cached, str):
            raise _offline(f"{named.repo}@{revision}", str(wanted))
        return Folder(Path(cached).parent)
    with asking(f"{named.repo}@{revision}"):
        try:
            info = HfApi().model_info(named.repo, revision=revision, files_metadata=True, timeout=TIMEOUT)
            commit, sizes = info.sha, {file.rfilename: file.size for file in info.siblings or ()}
        except (AttributeError, KeyError, TypeError) as error:
            raise bad_answer(named.repo, "a list of files", f"{type(error).__name__}: {error}"[:200]) from error
    files = HubFiles(named.repo, *_checked(named.repo, commit, sizes), str(wanted.parent))
    if not files.holds(wanted.name):
        raise _no_checkpoint(named.repo, str(wanted), files.place, sorted(sizes))
    files.fetch_configs()
    files.remember(revision)
    return files


def _checked(repo: str, commit: Any, sizes: Mapping[Any, Any]) -> tuple[str, dict[str, int]]:
    """What a hub says of a repository, now that it may lead to no other place."""
    if not isinstance(commit, str) or _COMMIT.fullmatch(commit) is None:
        raise bad_answer(repo, "the commit of the revision", f"{commit!r}"[:80])
    for name, size in sizes.items():
        if not isinstance(name, str) or type(size) is not int or size < 0:
            raise bad_answer(f"{repo}: {name!r}"[:200], "a size in bytes for every file", f"{size!r}"[:80])
        if leaves(name):
            raise escape(name, repo, "a path that leaves the repository")
    return commit, dict(sizes)


def _offline(where: str, wanted: str) -> HubUnreachable:
    return HubUnreachable(
        "the hub may not be asked, and the cache does not hold this",
        where=where,
        expected=f"{wanted} of that revision in the cache",
        found="HF_HUB_OFFLINE is set",
        fix="unset HF_HUB_OFFLINE, or run once where the hub can be reached",
    )


def _no_checkpoint(repo: str, wanted: str, where: str, names: list[str]) -> NotACheckpoint:
    single = [name for name in names if name.endswith(".gguf")]
    return NotACheckpoint(
        "not a checkpoint",
        where=where,
        expected=wanted,
        found=some(single or names) or "no files",
        fix=f"give the id of a file, such as {repo}/{single[0]}" if single else "name a repository that has it",
    )


class HubFiles:
    """The files of one repository at one commit, below a folder of it; `root` is that folder in the cache."""

    def __init__(self, repo: str, commit: str, sizes: Mapping[str, int], folder: str) -> None:
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name

        self._repo, self._commit = repo, commit
        self._prefix = "" if folder == "." else f"{folder}/"
        self._sizes = {n.removeprefix(self._prefix): s for n, s in sizes.items() if n.startswith(self._prefix)}
        cache = Path(constants.HF_HUB_CACHE).expanduser().resolve()
        self._store = cache / repo_folder_name(repo_id=repo, repo_type="model")
        self.root = self._store / "snapshots" / commit / folder
        self.place = f"{repo}@{commit}"
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self.bytes_read = 0

    def names(self) -> Collection[str]:
        """The files that lie at the top."""
        return [name for name in self._sizes if "/" not in name]

    def holds(self, name: str) -> bool:
        """Whether there is such a file."""
        return name in self._sizes

    def header(self, name: str) -> FileHeader:
        """The header of a safetensors file: of the cache's, or by byte ranges."""
        if self._is_here(name):
            return Folder(self.root).header(name)
        return header_of(self._stream(name, HEADER_BYTES), name, self._sizes[name])

    def gguf(self, name: str) -> GgufHeader:
        """The header of a GGUF file: of the cache's, or by byte ranges."""
        if self._is_here(name):
            return Folder(self.root).gguf(name)
        return gguf_of(self._stream(name, METADATA_BYTES), name, self._sizes[name])

    def octets(self, name: str, offset: int, nbytes: int) -> bytes:
        """A small part of a file."""
        if self._is_here(name):
            return Folder(self.root).octets(name, offset, nbytes)
        stream = self._stream(name, nbytes)
        stream.seek(offset)
        return stream.read(nbytes)

    def each(self, do: Callable[[str], _T], names: Collection[str], most: int = REQUESTS) -> list[_T]:
        """What `do` makes of each name, several at a time."""
        self._stopped = threading.Event()
        return each(do, names, most, self._stopped)

    def summary(self) -> str:
        """What was fetched of weight files."""
        fetched = f"headers alone, {self.bytes_read:,} bytes" if self.bytes_read else "headers from the cache"
        return f"{self.place}: {fetched}"

    def pending(self, names: Collection[str]) -> int:
        """Bytes of these files and of the companions that are not in the cache yet."""
        return sum(self._sizes[name] for name in self._with_companions(names) if not self._is_here(name))

    def fetch(self, names: Collection[str], progress: Progress) -> None:
        """Bring files and companions to the cache.

        Raises:
            HubError: the hub does not give them.
            FileChanged: it gives those of another commit.
            CannotWrite: there is no room for them.
        """
        with asking(str(self._store)):
            self._store.mkdir(parents=True, exist_ok=True)
            need, free = self.pending(names), shutil.disk_usage(self._store).free
        if need > free:
            raise CannotWrite(
                "the download has no room in the cache",
                where=str(self._store),
                expected=f"{need:,} bytes",
                found=f"{free:,} bytes free",
                fix="free some space, or set HF_HOME to another disk",
            )
        self._bring(self._with_companions(names), progress)

    def fetch_configs(self) -> None:
        """Bring what describes the weights: config files and the index."""
        names = [name for name in self.names() if name in CONFIGS or name.endswith(INDEX_ENDING)]
        for name in names:
            most = MAX_INDEX_BYTES if name.endswith(INDEX_ENDING) else MAX_CONFIG_BYTES
            if self._sizes[name] > most:
                raise bad_answer(f"{self.place}: {name}", f"at most {most:,} bytes", f"{self._sizes[name]:,} bytes")
        self._bring(names, lambda _: None)

    def remember(self, revision: str) -> None:
        """Note in the cache which commit a revision is, as huggingface_hub does, so that it is found offline."""
        ref = self._store / "refs" / revision
        if revision != self._commit:
            with suppress(OSError):  # a cache that others fill, and may not be written
                ref.parent.mkdir(parents=True, exist_ok=True)
                ref.write_text(self._commit)

    def _is_here(self, name: str) -> bool:
        return (self.root / name).exists()

    def _with_companions(self, names: Collection[str]) -> set[str]:
        return {*names, *(n for n in self.names() if n.endswith(COMPANIONS) and not n.endswith(INDEX_ENDING))}

    def _bring(self, names: Collection[str], progress: Progress) -> None:
        from huggingface_hub import hf_hub_download

        def get(name: str) -> None:
            patiently(lambda: self._expect(name), self._stopped)
            bar = bar_of(progress, self._stopped, self._sizes[name])
            with asking(f"{self.place}: {name}"):
                got = hf_hub_download(self._repo, self._prefix + name, revision=self._commit, tqdm_class=bar)
            if Path(got) != self.root / name:
                raise changed(f"{self.place}: {name}", f"a file of that commit, {self.root}", str(got))

        self.each(get, sorted(n for n in names if not self._is_here(n)), DOWNLOADS)

    def _expect(self, name: str) -> None:
        """Whether a file is still what was listed; and its tag a name, since huggingface_hub makes a path of it."""
        from huggingface_hub import get_hf_file_metadata

        where = f"{self.place}: {name}"
        with asking(where):
            found = get_hf_file_metadata(self._url(name), timeout=TIMEOUT)
        if found.etag is None or _TAG.fullmatch(found.etag) is None:
            raise bad_answer(where, "an ETag of letters and digits", f"ETag {found.etag}"[:80])
        for what, stated, listed in (
            ("commit", found.commit_hash, self._commit),
            ("size", found.size, self._sizes[name]),
        ):
            if stated not in (None, listed):
                raise changed(where, f"{what} {listed}", f"{what} {stated}"[:80])

    def _url(self, name: str) -> str:
        from huggingface_hub import hf_hub_url

        return hf_hub_url(self._repo, self._prefix + name, revision=self._commit)

    def _stream(self, name: str, ahead: int) -> BinaryIO:
        def arrived(nbytes: int) -> None:
            with self._lock:
                self.bytes_read += nbytes

        raw = RemoteFile(
            self._url(name), f"{self.place}: {name}", self._commit, self._sizes[name], arrived, self._stopped
        )
        return cast(BinaryIO, io.BufferedReader(raw, ahead))
