"""A file on a hub as a stream of byte ranges, each checked to be a part of the file that was listed."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from waybill.checkpoint.asking import asking, bad_answer, changed
from waybill.errors import HubUnreachable

if TYPE_CHECKING:
    from httpx2 import Response

TIMEOUT = 10.0
"""Seconds without a byte."""
PAUSES = (0.5, 2.0)
"""Seconds before something is asked for again, when the hub did not answer."""

_T = TypeVar("_T")


def patiently(ask: Callable[[], _T], stopped: threading.Event) -> _T:
    """An answer, asked for again where the hub does not give one, until nobody waits any more."""
    for pause in PAUSES:
        try:
            return ask()
        except HubUnreachable:
            if stopped.wait(pause):
                raise
    return ask()


class RemoteFile(io.RawIOBase):
    """A file of `size` bytes at one commit; every read is a request, so it is read through a buffer.

    Args:
        url: where it lies.
        where: what messages call it.
        commit: what `url` is of, and each answer must be.
        size: its bytes, as the hub listed it.
        arrived: told the bytes of each answer.
        stopped: set when nobody waits any more.
    """

    def __init__(
        self, url: str, where: str, commit: str, size: int, arrived: Callable[[int], None], stopped: threading.Event
    ) -> None:
        self._url, self._where, self._commit, self._size = url, where, commit, size
        self._arrived, self._stopped = arrived, stopped
        self._at = 0
        self._tag: str | None = None

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """From the beginning, or from here."""
        self._at = offset + (self._at if whence == io.SEEK_CUR else 0)
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer, or what of it the file has bytes for, by one request; repeated where there is no answer.

        Raises:
            HubError: the hub does not give this part.
            FileChanged: it gives a part of another file.
        """
        count = max(0, min(len(buffer), self._size - self._at))
        if count:
            start, end = self._at, self._at + count
            buffer[:count] = patiently(lambda: self._ask(start, end), self._stopped)
            self._arrived(count)
        self._at += count
        return count

    def _ask(self, start: int, end: int) -> bytearray:
        from huggingface_hub import get_session, hf_raise_for_status
        from huggingface_hub.utils import build_hf_headers

        part = bytearray()
        headers = build_hf_headers() | {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        with asking(self._where), get_session().stream("GET", self._url, headers=headers, timeout=TIMEOUT) as response:
            hf_raise_for_status(response)
            self._check(response, f"bytes {start}-{end - 1}/{self._size}")
            for chunk in response.iter_raw():
                part += chunk
                if len(part) > end - start:
                    break
        if len(part) != end - start:
            raise bad_answer(self._where, f"{end - start:,} bytes", f"{len(part):,} bytes")
        return part

    def _check(self, response: Response, wanted: str) -> None:
        """Whether an answer is the part that was asked for, of the same file as before; its body is not read yet."""
        whole = response.status_code == 200 and wanted == f"bytes 0-{self._size - 1}/{self._size}"
        if response.status_code != 206 and not whole:
            found = f"status {response.status_code}: the server gives whole files only"
            raise bad_answer(self._where, "status 206, a part of the file", found)
        if self._url.startswith("https:") and response.url.scheme != "https":
            raise bad_answer(self._where, "a redirect to https", f"a redirect to {response.url}"[:200])
        answers = (*response.history, response)
        for commit in (answer.headers.get("x-repo-commit", self._commit) for answer in answers):
            if commit != self._commit:
                raise changed(self._where, f"commit {self._commit}", f"commit {commit}"[:80])
        stated = wanted if whole else response.headers.get("content-range", "no Content-Range")
        if stated.rpartition("/")[2].isdigit() and stated.rpartition("/")[2] != wanted.rpartition("/")[2]:
            raise changed(self._where, wanted, stated[:80])
        if stated != wanted or response.headers.get("content-encoding", "identity") != "identity":
            raise bad_answer(self._where, wanted, stated[:80])
        tags = (answer.headers.get("x-linked-etag") or answer.headers.get("etag") for answer in answers)
        tag = next(filter(None, tags), None)
        if self._tag is not None and tag != self._tag:
            raise changed(self._where, f"ETag {self._tag}", f"ETag {tag}"[:80])
        self._tag = tag
