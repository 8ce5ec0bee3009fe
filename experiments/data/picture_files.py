"""Pictures from bytes: decoded and cropped as ADM prepared ImageNet, in threads."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from experiments.data.data_options import first_line
from experiments.data.picture_sources import RawPicture

#: The longest picture that is cropped, in multiples of its shorter side.
_NARROW = 64


class CroppedPicture(NamedTuple):
    """A picture (size, size, 3) uint8, or None and the reason why it could not be read."""

    raw: RawPicture
    pixels: np.ndarray[Any, Any] | None
    reason: str = ""


def eight_bits(image: Image.Image) -> Image.Image:
    """Return a picture as 8-bit RGB: 16 bits are scaled, what is transparent is laid on white."""
    # Converting, Pillow cuts 16 bits off at 255; older ones open such PNGs as 32-bit integers.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        values = np.asarray(image).astype(np.uint32)
        return Image.fromarray(((values + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        kind = "floating-point" if image.mode == "F" else "32-bit"
        raise ValueError(f"{kind} values, which have no white; save it with 8 or 16 bits")
    if "A" in image.getbands() or "a" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGB", image.size, "white")
        white.paste(image, mask=image.getchannel("A"))
        return white
    return image if image.mode == "RGB" else image.convert("RGB")


def center_crop(image: Image.Image, size: int) -> np.ndarray[Any, Any]:
    """Return the middle of a picture, (size, size, 3) uint8, as ADM prepared ImageNet.

    Halve with a box filter while the shorter side stays at least twice the target, bring the
    shorter side to `size` with a bicubic filter, cut the middle (Dhariwal and Nichol, 2021).
    """
    if max(image.size) > _NARROW * min(image.size):
        # Its shorter side brought to `size`, the longer one would fill the memory.
        raise ValueError(f"{image.width}x{image.height} pixels are too long and narrow to crop")
    image = eight_bits(image)
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = size / min(image.size)
    target = (round(image.width * scale), round(image.height * scale))
    pixels = np.asarray(image.resize(target, Image.Resampling.BICUBIC))
    top, left = (pixels.shape[0] - size) // 2, (pixels.shape[1] - size) // 2
    return pixels[top : top + size, left : left + size]


def crop(raw: RawPicture, size: int) -> CroppedPicture:
    """Decode and crop one picture; a damaged one becomes a reason, not an error."""
    if raw.content is None:
        return CroppedPicture(raw, None, "no bytes")
    try:
        with Image.open(io.BytesIO(raw.content)) as image:
            return CroppedPicture(raw, center_crop(image, size))
    except UnidentifiedImageError:
        return CroppedPicture(raw, None, "no picture that Pillow knows")
    except Exception as error:
        return CroppedPicture(raw, None, first_line(error))


def crop_ahead(
    pool: ThreadPoolExecutor, pictures: Iterator[RawPicture], size: int, depth: int = 64
) -> Iterator[CroppedPicture]:
    """Crop in order with at most `depth` results waiting: `Executor.map` would read everything."""
    waiting = [pool.submit(crop, raw, size) for raw in itertools.islice(pictures, depth)]
    while waiting:
        yield waiting.pop(0).result()
        waiting += [pool.submit(crop, raw, size) for raw in itertools.islice(pictures, 1)]
