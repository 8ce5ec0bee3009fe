"""The full grid of tokens: paths, neighbours and groups, as tables computed once per process."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from routing.errors import UserError, suggest

PATHS = ("raster", *(f"zigzag:{k}" for k in range(8)))
REVERSED = ":reversed"
MOST_TABLES = 4096  # a run uses dozens; a loop over seeds or image sizes must not fill memory
_Function = TypeVar("_Function", bound=Callable[..., Any])


def transforming() -> bool:
    """Return whether a transform of torch.func is active: tensors made in it end with it."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None


def table(function: _Function) -> _Function:
    """Compute a table once for each set of (hashable, positional) arguments.

    A plain dictionary rather than `functools.lru_cache`, which `torch.compile` traces through and
    so recomputes. A table made first under `inference_mode` must still serve a training step.
    """
    store: dict[tuple, Any] = {}

    @wraps(function)
    def cached(*key: Any) -> Any:
        if key not in store:
            if transforming():
                return function(*key)
            if len(store) >= MOST_TABLES:
                store.clear()
            with torch.inference_mode(False):
                store[key] = function(*key)
        return store[key]

    return cached  # type: ignore[return-value]


@table
def arange(n: int, device: torch.device) -> Tensor:
    """Return 0..n-1."""
    return torch.arange(n, device=device)


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


def neighbour_slots(
    grid: tuple[int, int], ids: Tensor, slots: Tensor, nearest: bool
) -> tuple[Tensor, Tensor]:
    """Look up the left, right, upper and lower neighbours of the tokens present.

    Args:
        grid: Rows and columns (H, W), N = H * W.
        ids: Raster ids of the tokens present, `(B, K)`.
        slots: Slot of every raster id and, last, of none: -1 where there is no token, `(B, N + 1)`.
        nearest: Take the next token present on each side instead of the adjacent one.

    Returns:
        Slots of the neighbours, -1 where there is none, and which are outside the grid, both
        `(B, 4, K)`.
    """
    raster_ids = neighbour_ids(grid, ids.device)[:, ids].transpose(0, 1)
    outside = raster_ids < 0
    if nearest:
        by_position = nearest_present(slots[:, :-1], grid)
        return by_position.gather(2, ids.unsqueeze(1).expand(-1, 4, -1)), outside
    columns = torch.where(outside, grid[0] * grid[1], raster_ids).flatten(1)
    return slots.gather(1, columns).unflatten(1, (4, -1)), outside


def nearest_present(slots: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return the slot of the next token present on each side of every position, `(B, 4, N)`.

    Args:
        slots: Slot of every raster id, -1 where no token is present, `(B, N)`.
        grid: Rows and columns (H, W).
    """
    grid_slots = slots.unflatten(1, grid)
    sides = []
    for dim, backwards in ((2, False), (2, True), (1, False), (1, True)):
        line = grid_slots.flip(dim) if backwards else grid_slots
        last = _last_present(line, dim)
        sides.append((last.flip(dim) if backwards else last).flatten(1))
    return torch.stack(sides, 1)


def _last_present(line: Tensor, dim: int) -> Tensor:
    """Value of the last entry >= 0 strictly before each position along a dimension, or -1."""
    position = torch.arange(line.shape[dim], device=line.device)
    position = position.unsqueeze(1) if dim == 1 else position
    before = torch.where(line >= 0, position, -1).cummax(dim).values.roll(1, dim)
    before.narrow(dim, 0, 1).fill_(-1)
    return torch.where(before >= 0, line.gather(dim, before.clamp(min=0)), -1)


@table
def tiles(
    grid: tuple[int, int], shape: tuple[int, int], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return each token's group, its position in the group, and every group's size."""
    row = torch.arange(grid[0], device="cpu").unsqueeze(1).expand(grid)
    column = torch.arange(grid[1], device="cpu").expand(grid)
    across = -(-grid[1] // shape[1])
    group = (row // shape[0] * across + column // shape[1]).flatten()
    width = (grid[1] - column // shape[1] * shape[1]).clamp(max=shape[1])
    position = (row % shape[0] * width + column % shape[1]).flatten()
    size = torch.zeros(-(-grid[0] // shape[0]) * across, dtype=torch.int64, device="cpu")
    size.scatter_add_(0, group, torch.ones_like(group))
    return group.to(device), position.to(device), size.to(device)


def whole_groups(
    shape: tuple[int, int], grid: tuple[int, int], keep: int, uniform: Tensor
) -> Tensor:
    """Select tokens in whole groups of a shape, in random order, and the last one in part.

    Where they do not fill the grid, the tiling is shifted at random and wraps around the edges, so
    that incomplete groups lie anywhere. Arguments and ids as in `routing.routed_pass.select`.
    """
    group, position, size = tiles(grid, shape, uniform.device)
    count, largest = size.shape[0], shape[0] * shape[1]
    group_rank = uniform[:, :count].argsort(dim=1, stable=True).argsort(1)
    # The last number says how far the tiling is shifted along each side that it does not divide,
    # and what is left of it where the part that is kept starts in its group (cyclically), so that
    # no column is favoured. With one token to a group nothing is left to draw, and no number.
    row_shifts = grid[0] if grid[0] % shape[0] else 1
    column_shifts = grid[1] if grid[1] % shape[1] else 1
    shift_number = uniform[:, -1:] * (row_shifts * column_shifts)
    shift = shift_number.long()
    token = torch.arange(grid[0] * grid[1], device=uniform.device)
    row = (token // grid[1] + shift // column_shifts) % grid[0]
    shifted = row * grid[1] + (token + shift % column_shifts) % grid[1]
    group, position = group[shifted], position[shifted]
    start = ((shift_number - shift) * size).long().gather(1, group)
    key = group_rank.gather(1, group) * largest + (position + start) % size[group]
    return key.argsort(1)[:, :keep]
