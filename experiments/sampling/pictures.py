"""Pictures of samples: grids, PNG files, GIFs of a run's progress."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from experiments.runtime.files import atomic_path

#: Images smaller than this are enlarged by a whole factor: an 8x8 digit is no use at 8x8.
SMALLEST = 48
GAP = 2
PAPER = 255  # white, as the page that a grid is printed on


def to_array(images: Tensor | NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return uint8 images `(N, 3, H, W)` or `(N, H, W, 3)` as an array `(N, H, W, 3)`."""
    array = np.asarray(images.cpu() if hasattr(images, "cpu") else images)
    if array.dtype != np.uint8 or array.ndim != 4 or 3 not in (array.shape[1], array.shape[3]):
        raise ValueError(
            f"images are uint8 (N, 3, H, W) or (N, H, W, 3); these are {array.dtype} {array.shape}"
        )
    return array if array.shape[3] == 3 else np.ascontiguousarray(array.transpose(0, 2, 3, 1))


def enlarge(images: NDArray[np.uint8], scale: int | None = None) -> NDArray[np.uint8]:
    """Repeat every pixel of `(N, H, W, 3)` so that tiny images can be seen, without blurring them.

    Without a `scale`, by the smallest whole one that makes the shorter side `SMALLEST`.
    """
    if scale is None:
        scale = max(1, math.ceil(SMALLEST / min(images.shape[1:3])))
    return images.repeat(scale, axis=1).repeat(scale, axis=2)


def image_grid(
    images: Tensor | NDArray[np.uint8],
    columns: int | None = None,
    row_names: Sequence[str] | None = None,
    scale: int | None = None,
) -> NDArray[np.uint8]:
    """Tile uint8 images, `(N, 3, H, W)` or `(N, H, W, 3)`, row by row: uint8 `(height, width, 3)`.

    Without `columns` it is about square; `row_names` stand to the left; places without an image are
    white. Images below 48 pixels are enlarged, or all by `scale`.
    """
    tiles = enlarge(to_array(images), scale)
    count, height, width, _ = tiles.shape
    columns = columns or max(1, math.ceil(math.sqrt(count)))
    rows = max(1, math.ceil(count / columns))
    shape = (rows * (height + GAP) + GAP, columns * (width + GAP) + GAP, 3)
    picture = np.full(shape, PAPER, dtype=np.uint8)
    for i, tile in enumerate(tiles):
        top, left = (i // columns) * (height + GAP) + GAP, (i % columns) * (width + GAP) + GAP
        picture[top : top + height, left : left + width] = tile
    return _named(picture, row_names, height + GAP) if row_names else picture


def _named(picture: NDArray[np.uint8], names: Sequence[str], pitch: int) -> NDArray[np.uint8]:
    """Add a margin on the left with one name per row."""
    font = ImageFont.load_default()
    lines = [textwrap.wrap(name, 24, max_lines=3, placeholder="...") for name in names]
    widths = [font.getlength(line) for block in lines for line in block]
    margin = math.ceil(max(widths, default=0)) + 3 * GAP
    page = Image.new("RGB", (picture.shape[1] + margin, picture.shape[0]), (PAPER,) * 3)
    page.paste(Image.fromarray(picture), (margin, 0))
    draw = ImageDraw.Draw(page)
    for row, block in enumerate(lines):
        middle = GAP + row * pitch + pitch // 2
        draw.multiline_text((GAP * 2, middle), "\n".join(block), fill=0, font=font, anchor="lm")
    return np.asarray(page)


def save_png(picture: NDArray[np.uint8], path: str | os.PathLike[str]) -> None:
    """Write a picture, uint8 `(height, width, 3)`, whole or not at all."""
    with atomic_path(path) as temporary:
        Image.fromarray(np.ascontiguousarray(picture)).save(temporary, format="PNG")


def save_gif(
    frames: Sequence[str | os.PathLike[str]], path: str | os.PathLike[str], seconds: float = 0.4
) -> None:
    """Make a looping GIF of PNG files; the last one stays longer.

    Smaller ones are put on a page of the largest one's size.
    """
    if not frames:
        raise ValueError("a GIF needs at least one frame")
    pages: list[Any] = []
    for name in frames:
        with Image.open(name) as image:
            pages.append(image.convert("RGB"))
    size = max(page.width for page in pages), max(page.height for page in pages)
    sheets = [Image.new("RGB", size, (PAPER,) * 3) for _ in pages]
    for sheet, page in zip(sheets, pages, strict=True):
        sheet.paste(page, (0, 0))
    times = [round(1000 * seconds)] * len(sheets)
    times[-1] = round(4000 * seconds)
    with atomic_path(path) as temporary:
        sheets[0].save(
            temporary, format="GIF", save_all=True, append_images=sheets[1:], duration=times, loop=0
        )
