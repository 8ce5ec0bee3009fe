"""Grids and GIFs of samples."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image

from experiments.evaluation.pictures import GAP, image_grid, save_gif, save_png


def images(n, size=8):
    values = torch.arange(n, dtype=torch.uint8).reshape(-1, 1, 1, 1) + 1
    return values.expand(n, 3, size, size).contiguous()


def test_grid_is_row_major_and_enlarged_by_a_whole_factor():
    picture = image_grid(images(5), columns=3)
    assert picture.shape == (2 * (48 + GAP) + GAP, 3 * (48 + GAP) + GAP, 3)
    for i in range(5):
        top, left = (i // 3) * 50 + GAP, (i % 3) * 50 + GAP
        assert (picture[top : top + 48, left : left + 48] == i + 1).all()
    assert (picture[50 + GAP :, 2 * 50 + GAP :] == 255).all()  # a place without an image


def test_rows_can_have_names():
    plain = image_grid(images(4), columns=2)
    named = image_grid(images(4), columns=2, row_names=["zero", "one"])
    margin = named.shape[1] - plain.shape[1]
    assert margin > 10 and np.array_equal(named[:, margin:], plain)
    for row in range(2):
        assert (named[row * 50 : row * 50 + 50, :margin] < 128).any()


def test_png_and_gif(tmp_path):
    frames = []
    for i in range(3):
        path = tmp_path / f"{i}.png"
        save_png(image_grid(images(i + 1) * 40, columns=3), path)
        frames.append(path)
    save_png(image_grid(images(6), columns=3), tmp_path / "3.png")
    save_gif([*frames, tmp_path / "3.png"], tmp_path / "progress.gif", seconds=0.1)
    with Image.open(tmp_path / "progress.gif") as gif:
        assert gif.n_frames == 4 and gif.size == (152, 102) and gif.info["loop"] == 0
        durations = []
        for k in range(4):
            gif.seek(k)
            durations.append(gif.info["duration"])
        assert durations == [100, 100, 100, 400]
        gif.seek(0)
        first = np.asarray(gif.convert("RGB"))
    assert abs(int(first[20, 20, 0]) - 40) <= 2 and (first[60:, :] == 255).all()
