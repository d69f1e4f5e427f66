"""Pictures: the same bits as the processors that models were trained behind, in every spelling of their files."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tokenizers import Tokenizer, models
from transformers import CLIPImageProcessorPil, LlavaProcessor, PreTrainedTokenizerFast, SiglipImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

from waybill.errors import BadConfig, BadJson, BadRequest, MissingRuntime, Refused, UnsupportedFeature
from waybill.media.image import LARGEST_RESULT, MODES, pixel_values, read_image
from waybill.media.transform import ImageTransform, read_image_transform

CLIP, SIGLIP = CLIPImageProcessorPil, SiglipImageProcessorPil
SIZE = "an edge, shortest_edge, or height and width, from 1 to 4,096"
DEPTH = "a picture of at most 8 bits a channel"
AREA = "pixels, and at most 16,777,216 after resizing"
SIZES = [(64, 64), (37, 91), (91, 37), (1, 1), (3, 2), (1, 40), (40, 1), (23, 24), (101, 100)]
SMALL: dict[Any, dict[str, Any]] = {
    CLIP: {"size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}},
    SIGLIP: {"size": {"height": 24, "width": 20}},
}
every_class = pytest.mark.parametrize("kind", [CLIP, SIGLIP])


def noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """A picture of random levels; a palette's colours are random too."""
    generator = np.random.default_rng(width * 1000 + height)
    drawn = Image.fromarray(generator.integers(0, 256, (height, width, 4), np.uint8), "RGBA")
    if mode in ("RGB", "L", "1", "LA", "YCbCr", "CMYK", "RGBX"):
        return drawn.convert("RGB").convert(mode)
    if mode in ("P", "PA"):
        flat = Image.fromarray(generator.integers(0, 256, (height, width), np.uint8), "P")
        flat.putpalette(generator.integers(0, 256, 768, np.uint8).tobytes())
        return flat.convert(mode)
    return drawn.convert(mode)


def write(folder: Path, content: dict[str, Any], name: str = "preprocessor_config.json") -> Path:
    (folder / name).write_text(json.dumps(content))
    return folder


def saved(processor: Any, folder: Path) -> ImageTransform:
    """The transform, as read from what the processor writes about itself."""
    processor.save_pretrained(folder)
    return read_image_transform(folder)


def assert_same_bits(image: Image.Image, processor: Any, transform: ImageTransform) -> None:
    (theirs,) = processor(image, return_tensors="np")["pixel_values"]
    ours = pixel_values(image, transform)
    assert (ours.dtype, ours.flags.c_contiguous) == (np.float32, True)
    np.testing.assert_array_equal(ours, theirs)


@every_class
@pytest.mark.parametrize("size", SIZES)
def test_every_shape_of_picture_gives_the_same_bits(kind: Any, size: tuple[int, int], tmp_path: Path) -> None:
    processor = kind(**SMALL[kind])
    assert_same_bits(noise(*size), processor, saved(processor, tmp_path))


@pytest.mark.parametrize("kind", [CLIP, SIGLIP, LlavaImageProcessorPil])
def test_the_classes_as_they_come_give_the_same_bits(kind: Any, tmp_path: Path) -> None:
    assert_same_bits(noise(300, 250), kind(), saved(kind(), tmp_path))


@every_class
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_same_bits(kind: Any, mode: str, tmp_path: Path) -> None:
    processor = kind(**SMALL[kind])
    image = noise(31, 45, mode)
    assert image.mode == mode
    assert_same_bits(image, processor, saved(processor, tmp_path))


@pytest.mark.parametrize("mode, key", [("P", 7), ("P", bytes(range(256))), ("L", 3), ("RGB", (1, 2, 3))])
def test_a_transparent_colour_gives_the_same_bits(mode: str, key: Any, tmp_path: Path) -> None:
    noise(31, 45, mode).save(tmp_path / "picture.png", transparency=key)
    image = read_image(tmp_path / "picture.png")
    assert "transparency" in image.info
    processor = CLIP(**SMALL[CLIP])
    assert_same_bits(image, processor, saved(processor, tmp_path))


def test_what_is_transparent_becomes_white(tmp_path: Path) -> None:
    write(tmp_path, {"image_processor_type": "SiglipImageProcessor"})
    glass = Image.new("RGBA", (5, 5), (9, 9, 9, 0))
    assert set(pixel_values(glass, read_image_transform(tmp_path)).flat) == {np.float32(1)}


@settings(max_examples=60)
@given(
    width=st.integers(1, 40),
    height=st.integers(1, 40),
    edge=st.integers(1, 20),
    rows=st.integers(1, 30),
    columns=st.integers(1, 30),
    resample=st.integers(0, 5),
    resizes=st.booleans(),
)
def test_any_size_and_any_crop_give_the_same_bits(
    width: int, height: int, edge: int, rows: int, columns: int, resample: int, resizes: bool
) -> None:
    processor = CLIP(
        size={"shortest_edge": edge},
        crop_size={"height": rows, "width": columns},
        resample=resample,
        do_resize=resizes,
    )
    transform = ImageTransform(
        convert_rgb=True,
        resize=edge if resizes else None,
        resample=resample,
        crop=(rows, columns),
        rescale=1 / 255,
        normalize=(tuple(processor.image_mean), tuple(processor.image_std)),
    )
    assert_same_bits(noise(width, height), processor, transform)


@pytest.mark.parametrize("off", ["do_convert_rgb", "do_resize", "do_center_crop", "do_rescale", "do_normalize"])
def test_a_step_that_is_off_is_left_out(off: str, tmp_path: Path) -> None:
    processor = CLIP(**SMALL[CLIP], **{off: False})
    assert_same_bits(noise(31, 45), processor, saved(processor, tmp_path))


@pytest.mark.parametrize(
    "options",
    [
        {"do_rescale": False, "do_normalize": False},
        {"image_mean": 0.25, "image_std": [0.1, 2, 3.5]},
        {"image_mean": [-1.0, 0.0, 1.0], "rescale_factor": 1 / 127.5},
        {"do_center_crop": True, "crop_size": 30},
        {"size": 24},
        {"resample": 0},
        {"resample": 1},
    ],
    ids=str,
)
def test_other_numbers_give_the_same_bits(options: dict[str, Any], tmp_path: Path) -> None:
    processor = SIGLIP(**SMALL[SIGLIP] | options)
    assert_same_bits(noise(31, 45), processor, saved(processor, tmp_path))


@pytest.mark.parametrize("kind", [CLIP, SIGLIP, LlavaImageProcessorPil])
def test_what_a_file_leaves_out_or_null_is_what_the_class_does(kind: Any, tmp_path: Path) -> None:
    whole = saved(kind(), tmp_path)
    stated = json.loads((tmp_path / "preprocessor_config.json").read_text())
    name = {"image_processor_type": stated["image_processor_type"]}
    assert read_image_transform(write(tmp_path, name)) == whole
    assert read_image_transform(write(tmp_path, dict.fromkeys(stated) | name)) == whole


@pytest.mark.parametrize("suffix", ["", "Fast", "Pil"])
def test_a_class_is_known_by_its_names_on_every_backend(suffix: str, tmp_path: Path) -> None:
    write(tmp_path, {"image_processor_type": f"SiglipImageProcessor{suffix}"})
    assert read_image_transform(tmp_path).resize == (224, 224)


def test_the_oldest_spelling_is_read_as_the_newest(tmp_path: Path) -> None:
    old = {"feature_extractor_type": "CLIPFeatureExtractor", "size": 24, "crop_size": 24, "do_resize": True}
    assert read_image_transform(write(tmp_path, old)) == saved(CLIP(**SMALL[CLIP]), tmp_path)


def test_an_edge_that_is_null_is_not_stated(tmp_path: Path) -> None:
    size = {"height": None, "longest_edge": None, "shortest_edge": 24, "width": None}
    write(tmp_path, {"image_processor_type": "SiglipImageProcessor", "size": size})
    assert read_image_transform(tmp_path).resize == 24


def test_of_two_class_names_the_newer_one_counts(tmp_path: Path) -> None:
    names = {"feature_extractor_type": "ViTFeatureExtractor", "image_processor_type": "CLIPImageProcessor"}
    assert read_image_transform(write(tmp_path, names)).resize == 224


def test_a_whole_processor_is_read_from_its_nested_image_processor(tmp_path: Path) -> None:
    alone, nested = tmp_path / "alone", tmp_path / "nested"
    words = Tokenizer(models.WordLevel({"a": 0, "<image>": 1}, unk_token="a"))
    image_processor = CLIP(**SMALL[CLIP])
    LlavaProcessor(image_processor, PreTrainedTokenizerFast(tokenizer_object=words)).save_pretrained(nested)
    assert not (nested / "preprocessor_config.json").exists()
    assert read_image_transform(nested) == saved(image_processor, alone)


def test_of_two_descriptions_the_nested_one_counts(tmp_path: Path) -> None:
    write(tmp_path, {"image_processor_type": "CLIPImageProcessor"})
    assert read_image_transform(write(tmp_path, {"patch_size": 14}, "processor_config.json")).resize == 224
    nested = {"image_processor": {"image_processor_type": "CLIPImageProcessor", "size": 32}}
    assert read_image_transform(write(tmp_path, nested, "processor_config.json")).resize == 32


@pytest.mark.parametrize(
    "field, value, expected",
    [
        ("size", 0, SIZE),
        ("size", 4097, SIZE),
        ("size", True, SIZE),
        ("size", {}, SIZE),
        ("size", {"shortest_edge": "24"}, SIZE),
        ("size", {"height": 24}, SIZE),
        ("size", {"shortest_edge": 24, "longest_edge": 48}, SIZE),
        ("crop_size", {"shortest_edge": 24}, "an edge, or height and width, from 1 to 4,096"),
        ("crop_size", {"height": 24, "width": 1 << 40}, "an edge, or height and width, from 1 to 4,096"),
        ("resample", 6, "an integer from 0 to 5"),
        ("resample", "bicubic", "an integer from 0 to 5"),
        ("rescale_factor", 0, "a number from 1e-06 to 1,000,000"),
        ("rescale_factor", 1e300, "a number from 1e-06 to 1,000,000"),
        ("image_mean", [0.5, 0.5], "three numbers from -1e+06 to 1,000,000, or one"),
        ("image_mean", [0.5, 0.5, "half"], "three numbers from -1e+06 to 1,000,000, or one"),
        ("image_std", [0.5, 0.5, 0.0], "three numbers from 1e-06 to 1,000,000, or one"),
        ("image_std", 1e-300, "three numbers from 1e-06 to 1,000,000, or one"),
        ("do_resize", "yes", "a boolean"),
        ("do_convert_rgb", 1, "a boolean"),
    ],
)
def test_a_field_that_means_nothing_is_refused(field: str, value: Any, expected: str, tmp_path: Path) -> None:
    write(tmp_path, {"image_processor_type": "CLIPImageProcessor", field: value})
    with pytest.raises(Refused) as refused:
        read_image_transform(tmp_path)
    (problem,) = refused.value.problems
    assert problem.as_dict() == {
        "code": "bad-config",
        "what": f"{field} is not {expected}",
        "where": f"preprocessor_config.json: {field}",
        "expected": expected,
        "found": repr(value),
        "fix": f"state {field} in preprocessor_config.json as its producer published it",
    }


def test_a_crop_without_a_size_is_refused_with_all_else_that_is_wrong(tmp_path: Path) -> None:
    nested = {"image_processor_type": "SiglipImageProcessor", "do_center_crop": True, "do_pad": True, "resample": 9}
    write(tmp_path, {"image_processor": nested}, "processor_config.json")
    with pytest.raises(Refused) as refused:
        read_image_transform(tmp_path)
    assert [(problem.what, problem.where) for problem in refused.value.problems] == [
        ("resample is not an integer from 0 to 5", "processor_config.json: image_processor: resample"),
        ("crop_size is missing", "processor_config.json: image_processor: crop_size"),
        ("do_pad True is not supported", "processor_config.json: image_processor: do_pad"),
    ]


@pytest.mark.parametrize("step", ["do_pad", "do_flip_channel_order", "use_square_size"])
def test_a_step_that_is_not_implemented_is_refused_unless_it_is_off(step: str, tmp_path: Path) -> None:
    name = {"image_processor_type": "CLIPImageProcessor"}
    for off in (None, False):
        assert read_image_transform(write(tmp_path, name | {step: off})) == saved(CLIP(), tmp_path)
    with pytest.raises(Refused) as refused:
        read_image_transform(write(tmp_path, name | {step: True}))
    (problem,) = refused.value.problems
    assert (problem.code, problem.what) == ("unsupported-feature", f"{step} True is not supported")
    assert problem.expected == "do_convert_rgb, do_resize, do_center_crop, do_rescale, do_normalize"


def test_another_processor_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"image_processor_type": "PixtralImageProcessorFast"})
    with pytest.raises(UnsupportedFeature) as refused:
        read_image_transform(tmp_path)
    assert refused.value.what == "image_processor_type 'PixtralImageProcessorFast' is not supported"
    assert refused.value.where == "preprocessor_config.json: image_processor_type"
    assert refused.value.expected == "CLIPImageProcessor, LlavaImageProcessor, SiglipImageProcessor"


@pytest.mark.parametrize(
    "content, what",
    [
        ({}, "image_processor_type is missing"),
        ({"image_processor_type": 7}, "image_processor_type is not a string"),
        ({"feature_extractor_type": []}, "feature_extractor_type is not a string"),
    ],
)
def test_a_file_that_names_no_class_is_refused(content: dict[str, Any], what: str, tmp_path: Path) -> None:
    with pytest.raises(BadConfig) as refused:
        read_image_transform(write(tmp_path, content))
    assert refused.value.what == what


def test_an_image_processor_that_is_no_object_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="image_processor is not an object"):
        read_image_transform(write(tmp_path, {"image_processor": "clip"}, "processor_config.json"))


def test_a_file_that_is_no_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text("[]")
    with pytest.raises(BadJson, match=r"preprocessor_config\.json is not a readable JSON object"):
        read_image_transform(tmp_path)


def test_a_folder_that_says_nothing_about_pictures_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="nothing says how a picture is prepared") as refused:
        read_image_transform(tmp_path)
    assert (refused.value.where, refused.value.found) == (str(tmp_path), "neither file")
    assert refused.value.expected == "preprocessor_config.json, or processor_config.json with an image_processor"
    with pytest.raises(BadConfig) as refused:
        read_image_transform(write(tmp_path, {"patch_size": 14}, "processor_config.json"))
    assert refused.value.found == "processor_config.json without an image_processor"


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "gif", "bmp", "tiff"])
def test_one_picture_is_read_as_pillow_reads_it(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"picture.{suffix}"
    noise(19, 11).save(path)
    image = read_image(path)
    with Image.open(path) as same:
        assert (image.mode, image.size, image.tobytes()) == (same.mode, (19, 11), same.tobytes())


def test_a_note_that_the_picture_should_be_turned_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    picture = noise(64, 40)
    exif = Image.Exif()
    exif[0x0112] = 6  # Orientation: show it turned by a quarter
    picture.save(path, exif=exif)
    image = read_image(path)
    assert (image.size, dict(image.getexif())) == ((40, 64), {})
    np.testing.assert_array_equal(np.asarray(image), np.rot90(np.asarray(picture), 3))


def png_of(width: int, height: int) -> bytes:
    """The beginning of a PNG file that says it is this large."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [header, b"IDAT" + zlib.compress(b"")]
    chunks = [struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part)) for part in parts]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def cut_short(path: Path) -> None:
    noise(64, 64).save(path, "PNG")
    path.write_bytes(path.read_bytes()[:-500])


def animated(path: Path, form: str) -> None:
    noise(8, 8).save(path, form, save_all=True, append_images=[noise(9, 8).resize((8, 8)), noise(7, 7).resize((8, 8))])


def postscript(path: Path) -> None:
    noise(8, 8).save(path, "EPS")


@pytest.mark.parametrize(
    "make, found",
    [
        (lambda path: None, "nothing there"),
        (Path.mkdir, "a directory, device or pipe"),
        (os.mkfifo, "a directory, device or pipe"),
        (lambda path: path.write_bytes(b""), "cannot identify image file"),
        (lambda path: path.write_bytes(b"nothing like a picture"), "cannot identify image file"),
        (postscript, "cannot identify image file"),
        (cut_short, "image file is truncated"),
        (lambda path: path.write_bytes(png_of(8, 8)), "image file is truncated"),
        (lambda path: path.write_bytes(png_of(8200, 8200)), "8,200 × 8,200 pixels"),
        (lambda path: path.write_bytes(png_of(10_000, 10_000)), "exceeds limit of"),
        (lambda path: path.write_bytes(png_of(1 << 30, 1 << 30)), "exceeds limit of"),
        (lambda path: animated(path, "GIF"), "3 pictures"),
        (lambda path: animated(path, "PNG"), "3 pictures"),
        (lambda path: animated(path, "WEBP"), "3 pictures"),
        (lambda path: animated(path, "TIFF"), "3 pictures"),
        (lambda path: animated(path, "MPO"), "3 pictures"),
    ],
)
def test_a_file_that_is_not_one_whole_picture_is_refused(
    make: Callable[[Path], object], found: str, tmp_path: Path
) -> None:
    path = tmp_path / "picture"
    make(path)
    with pytest.raises(BadRequest, match="the picture cannot be read") as refused:
        read_image(path)
    assert found in refused.value.found
    assert refused.value.where == str(path)
    assert refused.value.expected == "one picture of at most 67,108,864 pixels, as PNG, JPEG, WEBP, GIF, BMP, TIFF"
    assert refused.value.fix == "save the picture as a PNG or JPEG file that holds nothing else"


@pytest.mark.parametrize(
    "image, options, expected, found",
    [
        (Image.new("I;16", (4, 4)), {}, DEPTH, "mode I;16"),
        (Image.new("F", (4, 4)), {}, DEPTH, "mode F"),
        (Image.new("L", (4, 4)), {"do_convert_rgb": False}, "an RGB picture", "mode L"),
        (Image.new("L", (0, 4)), {}, AREA, "0 × 4 pixels, which become 0 × 4"),
        (Image.new("L", (1, 335)), {}, AREA, "1 × 335 pixels, which become 224 × 75,040"),
        (Image.new("1", (4097, 4096)), {"do_resize": False}, AREA, "4,097 × 4,096 pixels, which become 4,097 × 4,096"),
    ],
)
def test_a_picture_that_cannot_be_prepared_is_refused(
    image: Image.Image, options: dict[str, Any], expected: str, found: str, tmp_path: Path
) -> None:
    transform = read_image_transform(write(tmp_path, {"image_processor_type": "CLIPImageProcessor"} | options))
    with pytest.raises(BadRequest, match="the picture cannot be prepared for the model") as refused:
        pixel_values(image, transform)
    assert (refused.value.expected, refused.value.found) == (expected, found)
    assert refused.value.fix


def test_the_longest_picture_that_is_taken_is_cut_to_the_crop(tmp_path: Path) -> None:
    transform = saved(CLIP(), tmp_path)
    assert LARGEST_RESULT >= 224 * 224 * 334
    assert pixel_values(Image.new("L", (1, 334)), transform).shape == (3, 224, 224)


def test_without_pillow_the_command_to_install_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingRuntime, match="Pillow is not installed") as refused:
        read_image(tmp_path / "picture.png")
    assert refused.value.expected == "the package pillow, which reads pictures"
    assert refused.value.fix == "pip install 'waybill[vision]'"


def test_pillow_is_imported_with_the_first_picture() -> None:
    script = "import sys, waybill.media.image\nprint('PIL' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
