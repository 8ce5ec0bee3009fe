"""Pictures of samples: grids, PNGs and GIFs."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch import Tensor

from experiments.runtime.files import atomic_path

#: Images whose shorter side is below this are enlarged by a whole factor.
SMALLEST = 48
GAP = 2  # pixels between images
PAPER = 255  # white
_LAST_FRAME = 4  # duration of a GIF's last frame, in durations of the others


def image_grid(
    images: Tensor, columns: int | None = None, row_names: Sequence[str] | None = None
) -> NDArray[np.uint8]:
    """Tile uint8 images `(N, 3, H, W)` row by row: uint8 `(height, width, 3)`.

    Without `columns` the grid is about square. `row_names` are written on the left. Empty cells are
    white.
    """
    scale = max(1, math.ceil(SMALLEST / min(images.shape[2:])))
    tiles = images.cpu().repeat_interleave(scale, 2).repeat_interleave(scale, 3)
    if not columns:
        columns = max(1, math.ceil(math.sqrt(len(tiles))))
    rows = math.ceil(len(tiles) / columns)
    height, width = tiles.shape[2] + GAP, tiles.shape[3] + GAP
    # Each cell has its gap above and to the left.
    cells = tiles.new_full((rows * columns, 3, height, width), PAPER)
    cells[: len(tiles), :, GAP:, GAP:] = tiles
    cells = cells.view(rows, columns, 3, height, width).permute(0, 3, 1, 4, 2)
    pixels = cells.reshape(rows * height, columns * width, 3).numpy()
    picture = np.pad(pixels, ((0, GAP), (0, GAP), (0, 0)), constant_values=PAPER)
    return _add_row_names(picture, row_names, height) if row_names else picture


def _add_row_names(
    picture: NDArray[np.uint8], names: Sequence[str], row_height: int
) -> NDArray[np.uint8]:
    """Add a margin on the left with one name per row."""
    font = ImageFont.load_default()
    blocks = [textwrap.wrap(name, 24, max_lines=3, placeholder="...") for name in names]
    text_width = 0.0
    for lines in blocks:
        for line in lines:
            text_width = max(text_width, font.getlength(line))
    margin = math.ceil(text_width) + 3 * GAP
    page = Image.new("RGB", (picture.shape[1] + margin, picture.shape[0]), (PAPER,) * 3)
    page.paste(Image.fromarray(picture), (margin, 0))
    draw = ImageDraw.Draw(page)
    for row, lines in enumerate(blocks):
        middle = GAP + row * row_height + row_height // 2
        draw.multiline_text((GAP * 2, middle), "\n".join(lines), fill=0, font=font, anchor="lm")
    return np.asarray(page)


def save_png(picture: NDArray[np.uint8], path: str | os.PathLike[str]) -> None:
    """Write a picture, uint8 `(height, width, 3)`, atomically."""
    with atomic_path(path) as temporary:
        Image.fromarray(np.ascontiguousarray(picture)).save(temporary, format="PNG")


def save_gif(
    frames: Sequence[str | os.PathLike[str]], path: str | os.PathLike[str], seconds: float = 0.4
) -> None:
    """Make a looping GIF of PNG files; the last frame stays longer.

    Smaller pictures are padded to the size of the largest one.
    """
    pictures: list[Image.Image] = []
    for frame in frames:
        with Image.open(frame) as image:
            pictures.append(image.convert("RGB"))
    width = max(picture.width for picture in pictures)
    height = max(picture.height for picture in pictures)
    pages = []
    for picture in pictures:
        padding = (0, 0, width - picture.width, height - picture.height)
        pages.append(ImageOps.expand(picture, padding, fill="white"))
    durations = [round(1000 * seconds)] * len(pages)
    durations[-1] = round(1000 * _LAST_FRAME * seconds)
    with atomic_path(path) as temporary:
        pages[0].save(
            temporary,
            format="GIF",
            save_all=True,
            append_images=pages[1:],
            duration=durations,
            loop=0,
        )
