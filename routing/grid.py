"""The full grid of tokens: its scan paths and neighbours, as tables computed once per process."""

from __future__ import annotations

import torch
from torch import Tensor

from routing.errors import UserError, suggest
from routing.gather import table

PATHS = ("raster", *(f"zigzag:{k}" for k in range(8)))
REVERSED = ":reversed"


class LayoutError(UserError):
    """A scan order, a policy or a subset that does not exist."""


def path(grid: tuple[int, int], name: str) -> Tensor:
    """Return a dense path over the grid: the raster id at each step, int64 of shape `(N,)`.

    `zigzag:k` is a snake that turns round at the border, so every step moves to a neighbour. Bit 0
    of k walks columns instead of rows, bit 1 starts at the right, bit 2 at the bottom (the eight
    paths of ZigMa, arXiv 2403.13802).

    Args:
        grid: Rows and columns (H, W).
        name: `raster` or `zigzag:0` .. `zigzag:7`, each also with `:reversed`.

    Raises:
        LayoutError: If there is no such path.
    """
    base, backwards = name.removesuffix(REVERSED), name.endswith(REVERSED)
    if base not in PATHS:
        raise LayoutError(
            f"scan order {name!r}: expected raster or zigzag:0 .. zigzag:7, each with or without "
            f"{REVERSED}{suggest(base, PATHS)}"
        )
    ids = torch.arange(grid[0] * grid[1], device="cpu").view(grid)
    if base != "raster":
        k = int(base.removeprefix("zigzag:"))
        ids = ids.flip(1) if k & 2 else ids
        ids = ids.flip(0) if k & 4 else ids
        ids = (ids.T if k & 1 else ids).clone()
        ids[1::2] = ids[1::2].flip(1)
    ids = ids.flatten()
    return ids.flip(0) if backwards else ids


@table
def rank(grid: tuple[int, int], name: str, device: torch.device) -> Tensor:
    """Return each raster id's step on a path, int64 of shape `(N,)`."""
    return path(grid, name).argsort().to(device)


@table
def neighbour_ids(grid: tuple[int, int], device: torch.device) -> Tensor:
    """Return raster ids of left, right, upper and lower neighbours, `(4, N)`; -1 outside."""
    ids = torch.arange(grid[0] * grid[1], device="cpu").view(grid)
    neighbours = torch.full((4, *grid), -1, device="cpu")
    neighbours[0, :, 1:] = ids[:, :-1]
    neighbours[1, :, :-1] = ids[:, 1:]
    neighbours[2, 1:] = ids[:-1]
    neighbours[3, :-1] = ids[1:]
    return neighbours.flatten(1).to(device)
