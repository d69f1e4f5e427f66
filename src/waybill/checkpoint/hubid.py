"""Names of repositories on a hub, told apart from paths by their form alone."""

from __future__ import annotations

import re
from typing import NamedTuple

from waybill.errors import BadHubId

_FORM = "ORG/NAME, ORG/NAME@REVISION or ORG/NAME/FILE.gguf"
_ID = re.compile(r"(?P<repo>[^/@\\\s]+/[^/@\\\s]+)(?:/(?P<file>[^@\\]+\.gguf))?(?:@(?P<revision>.+))?")
_ADDRESS = re.compile(r"(?:https?|hf):/+(?:(?:www\.)?(?:huggingface\.co|hf\.co)/)?(?P<repo>[^/]+/[^/@?#]+)?.*")
_REVISION = re.compile(r"(?!.*\.\.)\w[\w./-]*", re.ASCII)


class HubId(NamedTuple):
    """A repository, a GGUF file in it if one is meant, and a branch, tag or commit if one was given."""

    repo: str
    file: str | None
    revision: str | None


def hub_id(text: str) -> HubId | None:
    """What a text names if it has the form of an id; None where it can only be a path.

    Raises:
        BadHubId: an address, or a revision that is none.
    """
    if (address := _ADDRESS.fullmatch(text)) is not None:
        raise bad_id("an address is not an id", text, f"give {address['repo'] or 'the id alone'}")
    match = None if text.startswith(("/", ".", "~")) else _ID.fullmatch(text)
    if match is None:
        return None
    if match["revision"] is not None and _REVISION.fullmatch(match["revision"]) is None:
        raise bad_id("the revision is malformed", text, "give a branch, a tag or a commit after the @")
    return HubId(match["repo"], match["file"], match["revision"])


def bad_id(what: str, found: str, fix: str) -> BadHubId:
    """A text that cannot be asked for."""
    return BadHubId(what, expected=_FORM, found=found, fix=fix)
