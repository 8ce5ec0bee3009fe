"""What a sampling command leaves behind: PNG files, a grid, and the npz of ADM's evaluator."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from experiments.sampling.pictures import image_grid, save_png
from experiments.sampling.request import Request
from experiments.sampling.shards import read_shards, write_npz

MOST_COLUMNS, MOST_ROWS = 16, 20


def write_all(out: Path, request: Request, pngs: int, finished: bool) -> None:
    """Turn the shards below `out` into `samples.npz`, `grid.png` and PNGs; say where they are.

    Args:
        out: The folder; its shards go once the npz is whole.
        request: What was asked for.
        pngs: At most so many PNG files.
        finished: Whether an earlier call did all this.
    """
    if not finished:
        images: list[NDArray[np.uint8]] = []
        labels: list[NDArray[np.int64]] = []
        for pixels, _, classes in read_shards(out / "shards"):
            keep = max(0, max(pngs, MOST_COLUMNS * MOST_ROWS) - sum(len(piece) for piece in images))
            images.append(pixels[:keep])
            labels.append(classes[:keep])
        first, classes = np.concatenate(images), np.concatenate(labels)
        save_png(grid_of(first, request), out / "grid.png")
        for i in range(min(pngs, len(first))):
            drawn = f"_class{classes[i]:04d}" if request.labels is None and classes[i] >= 0 else ""
            save_png(first[i], out / "png" / f"{request.names[i]}{drawn}.png")
        pieces = ((pixels, classes) for pixels, _, classes in read_shards(out / "shards"))
        write_npz(pieces, len(request.seeds), out / "samples.npz")
        for shard in (out / "shards").glob("shard-*.npz"):
            shard.unlink()
    print(f"grid      {out / 'grid.png'}")
    shown = min(pngs, len(request.seeds))
    if shown:
        print(f"images    {out / 'png'} ({shown:,} of {len(request.seeds):,})")
    print(f"npz       {out / 'samples.npz'} (arr_0, for ADM's evaluator)")


def grid_of(images: NDArray[np.uint8], request: Request) -> NDArray[np.uint8]:
    """Return the grid: one row per class or caption, or about square where classes were drawn.

    Args:
        images: The first images, `(n, H, W, 3)`, in the request's order.
        request: What was asked for.
    """
    if request.columns is None:
        return image_grid(images[:100])
    rows = min(len(request.seeds) // request.columns, MOST_ROWS)
    columns = min(request.columns, MOST_COLUMNS)
    chosen = [row * request.columns + column for row in range(rows) for column in range(columns)]
    held = [i for i in chosen if i < len(images)]
    names = request.row_names[:rows] if request.row_names else None
    return image_grid(images[held], columns=columns, row_names=names)
