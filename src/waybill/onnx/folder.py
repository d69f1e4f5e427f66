"""A package folder: an ONNX graph, and genai_config.json that says how to run it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from waybill.checkpoint.jsonfile import read_object
from waybill.checkpoint.places import require_inside
from waybill.errors import BadPackage, PathEscape
from waybill.onnx.publish import MARKER

CONFIG_NAME = "genai_config.json"
SECTIONS = {
    "decoder": "decoder", "encoder": "encoder", "vision_encoder": "vision", "audio_encoder": "speech",
    "embedding": "embedding",
}  # fmt: skip
"""What the generation library calls the components, by role."""
PARTS = ("encoder", "vision", "speech", "embedding")
"""Sections of graphs that run before the decoder's, in their order."""
SINGLE = ("decoder_start_token_id", "image_token_id", "audio_token_id")
TOKENS = (*SINGLE, "prompt_ids", "language_token_ids", "suppress_tokens", "begin_suppress_tokens")
"""What a model of several graphs says of its tokens: one, or a list."""
LARGEST_STATE = 1 << 16
"""Heads of a cache, and elements of one."""
MOST_THREADS = 1024
"""More than any machine's cores; the runtime would start every one it is told to."""


@dataclass(frozen=True, slots=True)
class Package:
    """What genai_config.json says, checked. `graph` is the decoder's."""

    graph: Path
    vocab_size: int
    context_length: int
    """Positions of the model, prompt and answer together."""
    num_kv_heads: int
    head_dim: int
    stop_ids: frozenset[int]
    threads: int
    """Of one operator; 0 leaves it to the runtime."""
    parts: Mapping[str, Path] = field(default_factory=dict)
    """The other graphs, by the runtime's names for them: encoder, embedding, vision, speech."""
    tokens: Mapping[str, int] = field(default_factory=dict)
    """Tokens that stand for pictures or sound."""
    start_ids: tuple[int, ...] = ()
    """What an answer to another sequence begins with."""
    language_ids: tuple[int, ...] = ()
    """The likeliest of these comes after the first of them: the language that is heard."""
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()
    """Tokens that are never made, and that no answer begins with."""
    files: frozenset[str] = frozenset()
    """Kinds of files that a graph is given: image, audio."""

    @property
    def transcribes(self) -> bool:
        """Whether recordings are what is answered: a prompt is then how the answer begins, and may be left out."""
        return "encoder" in self.parts and "audio" in self.files


def is_package(folder: Path) -> bool:
    """Whether `folder` is an exported package, or what is left of one; false also for a name no file system takes."""
    try:
        return (folder / CONFIG_NAME).exists() or (folder / MARKER).exists()
    except (OSError, ValueError):
        return False


def read_package(folder: Path) -> Package:
    """Read and check genai_config.json; no weight and no graph is read.

    Raises:
        BadJson: genai_config.json is not a JSON object.
        BadPackage: it, a field of it or the graph is missing, or a field is of the wrong type.
        PathEscape: the graph is said to lie outside the folder.
    """
    from waybill.text.tokenizer import stop_tokens  # its library is not needed to ask for a package

    if not (folder / CONFIG_NAME).is_file():
        raise BadPackage(
            "the package does not say how it is run",
            where=str(folder),
            expected=CONFIG_NAME,
            found="no such file",
            fix="copy the whole package folder, or export it again",
        )
    config = _object(read_object(folder / CONFIG_NAME), "model", folder)
    decoder = _object(config, "decoder", folder)
    options = _object(decoder, "session_options", folder) if "session_options" in decoder else {}
    stops = config.get("eos_token_id")
    listed = stops if isinstance(stops, list) else [] if stops is None else [stops]
    if any(type(token) is not int for token in listed):
        raise _broken(folder, "eos_token_id", "a token id, or a list of them", stops)
    threads = _count(options, "intra_op_num_threads", folder) if "intra_op_num_threads" in options else 0
    if threads > MOST_THREADS:
        raise _broken(folder, "intra_op_num_threads", f"at most {MOST_THREADS}", threads)
    vocab_size = _count(config, "vocab_size", folder)
    parts = {name: _object(config, name, folder) for name in PARTS if name in config}
    tokens = {name: ids for name in TOKENS if name in config for ids in [_ids(config, name, vocab_size, folder)]}
    start = (*tokens.get("decoder_start_token_id", ()), *tokens.get("prompt_ids", ()))
    if "encoder" in parts and not start:
        raise _broken(folder, "decoder_start_token_id", "a token id", None)
    medium = "image_token_id" if "vision" in parts else "audio_token_id"
    if "embedding" in parts and (medium not in tokens or not {"vision", "speech"} & parts.keys()):
        raise _broken(folder, medium, "a token id", None)
    return Package(
        _graph(decoder.get("filename"), folder),
        vocab_size,
        _count(config, "context_length", folder),
        _count(decoder, "num_key_value_heads", folder, LARGEST_STATE),
        _count(decoder, "head_size", folder, LARGEST_STATE),
        stop_tokens(config, {}),
        threads,
        parts={name: _graph(part.get("filename"), folder) for name, part in parts.items()},
        tokens={name: ids[0] for name, ids in tokens.items() if name.endswith("_token_id")},
        start_ids=start,
        language_ids=tokens.get("language_token_ids", ()),
        suppressed=tokens.get("suppress_tokens", ()),
        suppressed_first=tokens.get("begin_suppress_tokens", ()),
        files=_files(parts),
    )


def _files(parts: Mapping[str, Mapping[str, Any]]) -> frozenset[str]:
    """What kinds of files the graphs take; an encoder takes sound unless it says that it takes tokens."""
    encoder = parts.get("encoder")
    hears = encoder is not None and "input_ids" not in str(encoder.get("inputs"))
    kinds = {"image": "vision" in parts, "audio": "speech" in parts or hears}
    return frozenset(kind for kind, taken in kinds.items() if taken)


def _ids(fields: Mapping[str, Any], name: str, vocab_size: int, folder: Path) -> tuple[int, ...]:
    """A token id, or several."""
    value = fields[name]
    listed = value if isinstance(value, list) and name not in SINGLE else [value]
    if any(type(token) is not int or not 0 <= token < vocab_size for token in listed):
        raise _broken(folder, name, f"token ids below {vocab_size}", value)
    return tuple(listed)


def _object(fields: Mapping[str, Any], name: str, folder: Path) -> Mapping[str, Any]:
    value = fields.get(name)
    if not isinstance(value, dict):
        raise _broken(folder, name, "an object", value)
    return value


def _count(fields: Mapping[str, Any], name: str, folder: Path, most: int = (1 << 31) - 1) -> int:
    value = fields.get(name)
    if type(value) is not int or not 0 < value <= most:
        raise _broken(folder, name, f"a positive number, at most {most:,}", value)
    return value


def _broken(folder: Path, name: str, expected: str, value: Any) -> BadPackage:
    return BadPackage(
        f"{CONFIG_NAME} does not describe a decoder",
        where=str(folder / CONFIG_NAME),
        expected=f"{name}: {expected}",
        found=f"{name}: {value!r}"[:160] if value is not None else f"no {name}",
        fix="export the package again",
    )


def _graph(name: Any, folder: Path) -> Path:
    if not isinstance(name, str) or not name:
        raise _broken(folder, "filename", "the graph's file name", name)
    if Path(name).is_absolute() or ".." in Path(name).parts or "\\" in name or "\0" in name:
        raise PathEscape(
            "the graph lies outside the package folder",
            where=f"{folder / CONFIG_NAME}: {name}",
            expected="a file inside the folder",
            found="a path that leaves the folder",
            fix="copy the file into the folder, or export the package again",
        )
    try:
        there = (folder / name).is_file()
    except OSError:  # longer than any file name
        there = False
    if not there:
        raise BadPackage(
            "the package has no graph",
            where=str(folder),
            expected=f"{name[:160]}, named by {CONFIG_NAME}",
            found=", ".join(sorted(path.name for path in folder.glob("*.onnx"))) or "no .onnx file",
            fix="copy the whole package folder, or export it again",
        )
    return require_inside(folder / name)
