"""Encoded images, decoded to 8-bit RGB and cropped as ADM prepared ImageNet."""

from __future__ import annotations

import contextlib
import io
import itertools
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from experiments.data.data_options import first_line, require

# The longest image that is cropped, in multiples of its shorter side.
_MAX_ASPECT_RATIO = 64


@dataclass(frozen=True)
class RawImage:
    """One image as it is stored in its source."""

    name: str  # for messages
    content: bytes | None  # its encoded bytes, or None if they cannot be read
    label: int | None  # its class, or None
    captions: tuple[str, ...] = ()
    unreadable_reason: str = "no bytes"  # why `content` is None

    def __post_init__(self) -> None:
        require(
            self.label is None or 0 <= self.label < 2**31,
            f"{self.name} has class {self.label}; expected 0 or more",
        )


class CroppedImage(NamedTuple):
    """An image (size, size, 3) uint8, or None and the reason why it could not be read."""

    raw: RawImage
    pixels: np.ndarray[Any, Any] | None
    reason: str = ""


def eight_bits(image: Image.Image) -> Image.Image:
    """Return an image as upright 8-bit RGB; 16 bits are scaled, transparency becomes white."""
    with contextlib.suppress(Exception):  # damaged EXIF data of an intact image
        ImageOps.exif_transpose(image, in_place=True)
    # Pillow's conversion clips 16 bits at 255. Older versions open such PNGs as 32-bit integers.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        values = np.asarray(image).astype(np.uint32)
        return Image.fromarray(((values + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        kind = "floating-point" if image.mode == "F" else "32-bit"
        raise ValueError(f"{kind} values, which have no white; save it with 8 or 16 bits")
    if {"A", "a"} & set(image.getbands()) or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGB", image.size, "white")
        white.paste(image, mask=image.getchannel("A"))
        return white
    return image if image.mode == "RGB" else image.convert("RGB")


def center_crop(image: Image.Image, size: int) -> np.ndarray[Any, Any]:
    """Return the centre of an image, (size, size, 3) uint8, as ADM prepared ImageNet.

    Halve with a box filter while the shorter side is at least twice the target, resize the shorter
    side to `size` with a bicubic filter, crop the centre (Dhariwal and Nichol, 2021).
    """
    if max(image.size) > _MAX_ASPECT_RATIO * min(image.size):
        # With its shorter side resized to `size`, the longer one would fill the memory.
        raise ValueError(f"{image.width}x{image.height} pixels are too long and narrow to crop")
    image = eight_bits(image)
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = size / min(image.size)
    target = (round(image.width * scale), round(image.height * scale))
    pixels = np.asarray(image.resize(target, Image.Resampling.BICUBIC))
    top, left = (pixels.shape[0] - size) // 2, (pixels.shape[1] - size) // 2
    return pixels[top : top + size, left : left + size]


def crop(raw: RawImage, size: int) -> CroppedImage:
    """Decode and crop one image; the result for a damaged one has a reason instead of pixels."""
    if raw.content is None:
        return CroppedImage(raw, None, raw.unreadable_reason)
    try:
        with Image.open(io.BytesIO(raw.content)) as image:
            return CroppedImage(raw, center_crop(image, size))
    except UnidentifiedImageError:
        return CroppedImage(raw, None, "not an image format that Pillow reads")
    except Exception as error:
        return CroppedImage(raw, None, first_line(error))


def crop_ahead(
    pool: ThreadPoolExecutor, images: Iterator[RawImage], size: int, depth: int = 64
) -> Iterator[CroppedImage]:
    """Crop in order with at most `depth` pending results: `Executor.map` would read everything."""
    pending: deque[Future[CroppedImage]] = deque()
    for raw in itertools.islice(images, depth):
        pending.append(pool.submit(crop, raw, size))
    while pending:
        yield pending.popleft().result()
        for raw in itertools.islice(images, 1):
            pending.append(pool.submit(crop, raw, size))
