"""What is done to a picture before a vision model sees it, read strictly from the checkpoint's own files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from waybill.checkpoint.jsonfile import read_object
from waybill.config.fields import Fields
from waybill.errors import BadConfig, Refused, UnsupportedFeature, WaybillError

LARGEST_EDGE = 4096
"""Pixels. Models look at a few hundred."""
SMALLEST_FACTOR, LARGEST_FACTOR = 1e-6, 1e6
"""Of levels, means and deviations: no result is infinite."""
STEPS = ("do_convert_rgb", "do_resize", "do_center_crop", "do_rescale", "do_normalize")

Channels = tuple[float, float, float]

_CLIP = {
    "do_convert_rgb": True,
    "do_resize": True,
    "size": {"shortest_edge": 224},
    "resample": 3,
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_SIGLIP = _CLIP | {
    "size": {"height": 224, "width": 224},
    "do_center_crop": False,
    "crop_size": None,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
PROCESSORS = {"CLIPImageProcessor": _CLIP, "LlavaImageProcessor": _CLIP, "SiglipImageProcessor": _SIGLIP}
"""What each class does where its file says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTransform:
    """What is done to a picture, in the order of the fields. None leaves the step out."""

    convert_rgb: bool
    """False takes RGB pictures only."""
    resize: int | tuple[int, int] | None
    """The shorter edge, keeping the aspect ratio; or height and width."""
    resample: int
    """The filter, by Pillow's number: 0 nearest, 1 Lanczos, 2 bilinear, 3 bicubic, 4 box, 5 Hamming."""
    crop: tuple[int, int] | None
    """Height and width of the middle that is kept; what it lacks is black."""
    rescale: float | None
    """What a level, 0 to 255, is multiplied by."""
    normalize: tuple[Channels, Channels] | None
    """Mean and standard deviation of red, green and blue, after rescaling."""


def read_image_transform(folder: Path) -> ImageTransform:
    """What the checkpoint or package in `folder` does to a picture, from its processor_config.json or older
    preprocessor_config.json; where both describe it, the former counts. Null counts as absent.

    Raises:
        BadConfig: neither file is there, or it names no class.
        BadJson: one is not a JSON object.
        UnsupportedFeature: the class is not one of PROCESSORS.
        Refused: fields that are wrong, or ask for a step that is not implemented.
    """
    raw, where = _description(folder)
    problems: list[WaybillError] = []
    fields = _ProcessorFields(raw, PROCESSORS[_class_of(raw, where)], problems, where)
    transform = ImageTransform(
        convert_rgb=fields.boolean("do_convert_rgb"),
        resize=fields.size() if fields.boolean("do_resize") else None,
        resample=fields.integer("resample", low=0, high=5),
        crop=fields.crop_size() if fields.boolean("do_center_crop") else None,
        rescale=fields.factor() if fields.boolean("do_rescale") else None,
        normalize=fields.mean_and_deviation() if fields.boolean("do_normalize") else None,
    )
    strange = [key for key in raw if key.startswith("do_") and key not in STEPS] + ["use_square_size"]
    problems += [_unsupported(key, raw[key], where, STEPS) for key in strange if raw.get(key) not in (None, False)]
    if problems:
        raise Refused(problems)
    return transform


class _ProcessorFields(Fields):
    """The fields of an image processor, in every spelling they have had; no number is out of bounds."""

    def size(self) -> int | tuple[int, int]:
        """The shorter edge, also as a bare integer, or height and width."""
        expected = f"an edge, shortest_edge, or height and width, from 1 to {LARGEST_EDGE:,}"
        height, *width = _edges(self._check("size", self._value("size"), _edges, 1, expected))
        return (height, width[0]) if width else height

    def crop_size(self) -> tuple[int, int]:
        """Height and width; a bare integer is both."""
        expected = f"an edge, or height and width, from 1 to {LARGEST_EDGE:,}"
        good = lambda v: _edges(v, shortest=False)  # noqa: E731
        edges = _edges(self._check("crop_size", self._value("crop_size"), good, 1, expected))
        return edges[0], edges[-1]

    def factor(self) -> float:
        """What levels are multiplied by."""
        expected = f"a number from {SMALLEST_FACTOR:g} to {LARGEST_FACTOR:,.0f}"
        return float(self._check("rescale_factor", self._value("rescale_factor"), _bounded, 1.0, expected))

    def mean_and_deviation(self) -> tuple[Channels, Channels]:
        """What is subtracted from red, green and blue, and what the difference is divided by."""
        return self.channels("image_mean", -LARGEST_FACTOR), self.channels("image_std", SMALLEST_FACTOR)

    def channels(self, key: str, least: float) -> Channels:
        """A number for each of red, green and blue, or one for all."""
        expected = f"three numbers from {least:g} to {LARGEST_FACTOR:,.0f}, or one"
        good = lambda v: all(_bounded(n, least) for n in (v if isinstance(v, list) and len(v) == 3 else [v]))  # noqa: E731
        value = self._check(key, self._value(key), good, 1.0, expected)
        red, green, blue = value if isinstance(value, list) else [value] * 3
        return float(red), float(green), float(blue)


def _bounded(value: Any, least: float = SMALLEST_FACTOR) -> bool:
    return type(value) in (int, float) and least <= value <= LARGEST_FACTOR


def _edges(size: Any, *, shortest: bool = True) -> tuple[int, ...]:
    """The one edge, or the height and width, that a size states; nothing if it does so in no known form."""
    stated = {key: edge for key, edge in size.items() if edge is not None} if isinstance(size, dict) else {}
    edges: tuple[Any, ...] = ()
    if type(size) is int:
        edges = (size,)
    elif stated.keys() == {"height", "width"}:
        edges = (stated["height"], stated["width"])
    elif shortest and stated.keys() == {"shortest_edge"}:
        edges = (stated["shortest_edge"],)
    return edges if all(type(edge) is int and 1 <= edge <= LARGEST_EDGE for edge in edges) else ()


def _description(folder: Path) -> tuple[dict[str, Any], str]:
    """The fields of the image processor, and where they are written."""
    newer, older = folder / "processor_config.json", folder / "preprocessor_config.json"
    raw = read_object(newer) if newer.exists() else {}
    if raw.get("image_processor") is not None:
        problems: list[WaybillError] = []
        nested = Fields(raw, {}, problems, newer.name).mapping("image_processor")
        if problems:
            raise problems[0]
        return nested, f"{newer.name}: image_processor"
    if not older.exists():
        raise BadConfig(
            "nothing says how a picture is prepared",
            where=str(folder),
            expected="preprocessor_config.json, or processor_config.json with an image_processor",
            found="processor_config.json without an image_processor" if raw else "neither file",
            fix="download the file from where the checkpoint is published; a text model has none, and takes no picture",
        )
    return read_object(older), older.name


def _class_of(raw: dict[str, Any], where: str) -> str:
    """The class's name today: it was a feature extractor once, and is called otherwise on each backend."""
    problems: list[WaybillError] = []
    key = "image_processor_type" if raw.get("image_processor_type") is not None else "feature_extractor_type"
    stated = Fields(raw, {}, problems, where).text(key if key in raw else "image_processor_type")
    if problems:
        raise problems[0]
    name = stated.removesuffix("Pil").removesuffix("Fast").replace("FeatureExtractor", "ImageProcessor")
    if name not in PROCESSORS:
        raise _unsupported(key, stated, where, PROCESSORS)
    return name


def _unsupported(key: str, value: Any, where: str, known: Iterable[str]) -> UnsupportedFeature:
    return UnsupportedFeature(
        f"{key} {value!r}"[:120] + " is not supported",
        where=f"{where}: {key}"[:200],
        expected=", ".join(known),
        found=repr(value)[:120],
        fix="check the field against the model's published files",
    )
