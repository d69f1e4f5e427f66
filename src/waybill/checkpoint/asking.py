"""What goes wrong when a hub is asked, as refusals that say what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from waybill.errors import (
    BadHubAnswer,
    CannotWrite,
    FileChanged,
    HubRateLimit,
    HubUnreachable,
    NoHubAccess,
    NotOnHub,
    WaybillError,
)

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"
AGAIN = "check the network and HF_ENDPOINT and run again; HF_HUB_OFFLINE=1 uses what the cache holds"


@contextmanager
def asking(where: str) -> Iterator[None]:
    """Refusals in place of whatever huggingface_hub and its transport raise inside."""
    import httpx2

    try:
        yield
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError) as error:
        raise _refusal(error, where) from error


def bad_answer(where: str, expected: str, found: str) -> BadHubAnswer:
    """An answer that is none to what was asked."""
    return BadHubAnswer(
        "the hub answers with something else than it was asked for",
        where=where,
        expected=expected,
        found=found,
        fix="check HF_ENDPOINT and proxies; or `hf download` the model elsewhere, and give its folder",
    )


def changed(where: str, expected: str, found: str) -> FileChanged:
    """Two answers that do not belong together."""
    return FileChanged(
        "a file on the hub changed while it was being read",
        where=where,
        expected=expected,
        found=found,
        fix="run again; a commit after the @ never changes",
    )


def _refusal(error: BaseException, where: str) -> WaybillError:
    import httpx2
    from huggingface_hub import errors

    if isinstance(error, errors.HfHubHTTPError):
        return _status(error, where)
    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        return _refusal(error.__cause__, where)
    found = str(error) or type(error).__name__
    if isinstance(error, httpx2.TimeoutException):
        what, expected = "the hub does not answer in time", "an answer within seconds"
    elif isinstance(error, (httpx2.RemoteProtocolError, httpx2.ReadError)) or "Consistency check" in found:
        what, expected = "the hub's answer broke off", "an answer as long as it says"
    elif isinstance(error, (httpx2.UnsupportedProtocol, httpx2.TooManyRedirects, httpx2.InvalidURL)):
        return bad_answer(where, "an address on the web", found)
    elif isinstance(error, (httpx2.TransportError, errors.OfflineModeIsEnabled)):
        what, expected = "the hub cannot be reached", "a connection"
    elif isinstance(error, OSError) and error.errno is not None:
        return CannotWrite(
            "the download cannot be stored",
            where=where,
            expected="room in the cache, and the right to write there",
            found=error.strerror or found,
            fix="free some space, or set HF_HOME to another place",
        )
    else:
        return bad_answer(where, "an answer of a hub", found[:200])
    return HubUnreachable(what, where=where, expected=expected, found=found, fix=AGAIN)


def _status(error: HfHubHTTPError, where: str) -> WaybillError:
    """The refusal of an answer with a status that is an error."""
    from huggingface_hub import constants, errors
    from huggingface_hub.utils import parse_ratelimit_headers

    status, headers = error.response.status_code, error.response.headers
    said = error.server_message or error.response.reason_phrase
    found = f"{status} {said}"[:200]
    if isinstance(error, errors.GatedRepoError) or (
        status in (401, 403) and not isinstance(error, errors.RepositoryNotFoundError)
    ):
        page = f"{constants.ENDPOINT}/{where.partition('@')[0]}"
        return NoHubAccess(
            "the hub does not show this to everyone", where=where, expected="a token that may read it", found=found,
            fix=f"{LOG_IN}; if the model is gated, accept its licence at {page}",
        )  # fmt: skip
    if status == 404 or isinstance(error, errors.RepositoryNotFoundError):
        missing = {"RevisionNotFound": "revision", "EntryNotFound": "file"}.get(
            headers.get("X-Error-Code", ""), "repository"
        )
        return NotOnHub(
            f"there is no such {missing} on the hub, and no such path here", where=where,
            expected=f"a {missing} that {constants.ENDPOINT} shows", found=found,
            fix=f"check the spelling; if it is private, {LOG_IN}; a path on this disk can begin with ./",
        )  # fmt: skip
    if status == 429:
        limit = parse_ratelimit_headers(headers)
        seconds = limit.reset_in_seconds if limit else headers.get("Retry-After", "some")
        return HubRateLimit(
            "the hub was asked too often", where=where, expected="fewer requests", found=found,
            fix=f"run again in {seconds} seconds; requests with a token have a higher limit: {LOG_IN}",
        )  # fmt: skip
    if status == 416:
        return changed(where, "a file of the size that the hub listed", found)
    if status >= 500:
        return HubUnreachable("the hub is out of order", where=where, expected="an answer", found=found, fix=AGAIN)
    return bad_answer(where, "an answer of a hub", found)
