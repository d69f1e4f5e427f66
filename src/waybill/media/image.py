"""Pictures: a file decoded, and made the array that a vision model was trained on.

The steps, their order and their arithmetic are those of transformers' CLIP and SigLIP image processors on their Pillow
backend, so the same picture gives the same bits. Their torchvision backend resizes by other arithmetic, and differs.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from waybill.errors import BadRequest, MissingRuntime
from waybill.media.transform import LARGEST_EDGE, ImageTransform

if TYPE_CHECKING:
    from PIL.Image import Image

LARGEST_PICTURE = 1 << 26
"""Pixels a file may hold: a camera's 64 million."""
LARGEST_RESULT = LARGEST_EDGE**2
"""Pixels a picture may have once it is resized, or left as it is: any square fits, and so does a picture 224 pixels
wide and 334 times as high."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Decoders that a file is offered to. Pillow has others, one of which starts a program to read PostScript."""
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")
"""Eight bits a channel or less, and a known way to red, green and blue. Deeper ones would be clipped, not scaled."""


def read_image(path: Path) -> Image:
    """The one picture in a file, decoded, upright, in the file's own mode.

    A note in the file that it should be turned (EXIF orientation) is followed, as by whoever looks at it.

    Raises:
        MissingRuntime: Pillow is not installed.
        BadRequest: the file is no picture of a known format, is broken or too large, or holds several.
    """
    pillow = _pillow()
    try:
        if not path.is_file():  # opening a pipe would wait for ever
            raise OSError("a directory, device or pipe" if path.exists() else "nothing there")
        with warnings.catch_warnings():
            warnings.simplefilter("error", pillow.DecompressionBombWarning)
            with pillow.open(path, formats=FORMATS) as image:
                width, height = image.size
                frames = getattr(image, "n_frames", 1)
                if frames == 1 and width * height <= LARGEST_PICTURE:
                    image.load()
    except Exception as error:  # each decoder stumbles in its own way
        raise _unreadable(path, (str(error) or type(error).__name__)[:200]) from None
    if frames != 1:
        raise _unreadable(path, f"{frames} pictures")
    if width * height > LARGEST_PICTURE:
        raise _unreadable(path, f"{width:,} × {height:,} pixels")
    from PIL import ImageOps

    return ImageOps.exif_transpose(image)


def pixel_values(image: Image, transform: ImageTransform) -> NDArray[np.float32]:
    """The picture as F32[3, H, W]: red, green and blue. Transparency becomes white.

    H and W are the crop's; without one, what was resized to; without that, the picture's.

    Raises:
        BadRequest: the picture's mode is not one of MODES, or not RGB where nothing converts it; it has no pixels; or
            resized, long and narrow as it is, it would have more than LARGEST_RESULT.
    """
    if image.mode not in (MODES if transform.convert_rgb else ("RGB",)):
        expected = "a picture of at most 8 bits a channel" if transform.convert_rgb else "an RGB picture"
        raise _unfit(expected, f"mode {image.mode}", "save the picture as an 8-bit RGB PNG or JPEG file")
    height, width = _resized(image.height, image.width, transform.resize)
    if not 0 < height * width <= LARGEST_RESULT:
        found = f"{image.width:,} × {image.height:,} pixels, which become {width:,} × {height:,}"
        raise _unfit(f"pixels, and at most {LARGEST_RESULT:,} after resizing", found, "cut the picture to a part of it")
    if transform.convert_rgb:
        image = _rgb(image)
    if transform.resize is not None:
        image = image.resize((width, height), resample=transform.resample)
    if transform.crop is not None:
        rows, columns = transform.crop
        left, top = (width - columns) // 2, (height - rows) // 2  # negative where the picture is the smaller one
        image = image.crop((left, top, left + columns, top + rows))
    table = _levels(transform)
    pixels = np.asarray(image)
    return np.stack([table[:, channel][pixels[..., channel]] for channel in range(3)])


def _levels(transform: ImageTransform) -> NDArray[np.float32]:
    """F32[256, 3]: what each level of each channel becomes. Scaled in float64, then rounded, then normalized."""
    levels = np.arange(256, dtype=np.float64)[:, None].repeat(3, axis=1)
    scaled = (levels if transform.rescale is None else levels * transform.rescale).astype(np.float32)
    if transform.normalize is None:
        return scaled
    mean, deviation = (np.array(channels, np.float32) for channels in transform.normalize)
    normalized: NDArray[np.float32] = (scaled - mean) / deviation
    return normalized


def _resized(height: int, width: int, to: int | tuple[int, int] | None) -> tuple[int, int]:
    """Height and width after resizing; the longer edge is rounded down."""
    if to is None or not height * width:
        return height, width
    if isinstance(to, tuple):
        return to
    longer = int(to * max(height, width) / min(height, width))
    return (longer, to) if width <= height else (to, longer)


def _rgb(image: Image) -> Image:
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    white = _pillow().new("RGBA", image.size, (255, 255, 255, 255))
    on_white: Image = _pillow().alpha_composite(white, image.convert("RGBA"))
    return on_white.convert("RGB")


def _unreadable(path: Path, found: str) -> BadRequest:
    return BadRequest(
        "the picture cannot be read",
        where=str(path),
        expected=f"one picture of at most {LARGEST_PICTURE:,} pixels, as {', '.join(FORMATS)}",
        found=found,
        fix="save the picture as a PNG or JPEG file that holds nothing else",
    )


def _unfit(expected: str, found: str, fix: str) -> BadRequest:
    return BadRequest("the picture cannot be prepared for the model", expected=expected, found=found, fix=fix)


def _pillow() -> ModuleType:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingRuntime(
            "Pillow is not installed",
            expected="the package pillow, which reads pictures",
            found=str(error),
            fix="pip install 'waybill[vision]'",
        ) from None
    return Image
