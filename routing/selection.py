"""Which tokens stay inside a route: always an exact number of them, always in ascending order.

    random    any tokens (TREAD)                    rows, columns  whole ones
    unsorted  random, and the scan orders inside    blocks         whole `block` x `block` squares
              the route are shuffled (a control)    stride         evenly spread, cyclic shift
                                                    quad           one of every 2x2 (SPRINT)

Whole rows, columns and blocks are drawn at random; the last one is kept in part so that the count
is exact. Where squares do not fill the grid, the cut ones lie anywhere: the tiling is shifted at
random, round the edges. Every token stays equally often.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from routing.errors import one_of
from routing.gather import table
from routing.options import RoutingError, check_quad
from routing.rng import Draws
from routing.route import MODES, Route


class SelectionError(RoutingError):
    """A selection that cannot be made on this grid or at this rate."""


def check_ids(ids: Tensor, grid: tuple[int, int], batch: int) -> None:
    """Refuse ids (K,), (1, K) or (B, K) that do not fit the batch or the grid.

    On a GPU their values are not looked at: the host would wait for them.

    Raises:
        SelectionError: No ids, another type or shape, another number of rows, an id outside the
            grid, or one that comes twice.
    """
    integers = isinstance(ids, Tensor) and not ids.is_floating_point()
    if not integers or ids.dim() not in (1, 2) or not ids.shape[-1]:  # a batch may be empty
        description = f"{ids.dtype} {(*ids.shape,)}" if isinstance(ids, Tensor) else ids
        raise SelectionError(f"ids {description}: expected whole numbers (K,), (1, K) or (B, K)")
    rows = ids if ids.dim() > 1 else ids[None]
    if len(rows) not in (1, batch):
        raise SelectionError(
            f"{len(rows)} rows of ids for a batch of {batch}; give each sample a row, or all of "
            "them one"
        )
    if ids.device.type != "cpu":
        return
    tokens, ascending = grid[0] * grid[1], rows.sort(1).values
    inside = bool(((ascending >= 0) & (ascending < tokens)).all())
    if not inside or bool((ascending.diff(dim=1) == 0).any()):
        raise SelectionError(f"ids have to be distinct numbers from 0 to {tokens - 1}")


def ids_of_segment(
    ids: Sequence[Tensor | None] | Tensor | None, route: Route, index: int
) -> Tensor | None:
    """Return the explicit ids of a segment of a route; None draws them.

    Args:
        ids: One tensor for each segment, or None to draw it; a tensor alone for a single segment.
        route: The route.
        index: Number of the segment.

    Raises:
        SelectionError: If there are not as many as segments.
    """
    if ids is None:
        return None
    by_segment = ids if isinstance(ids, Sequence) else (ids,)
    if len(by_segment) != len(route.segments):
        raise SelectionError(
            f"{len(by_segment)} tensors of ids for the {len(route.segments)} segments of route "
            f"{route}; give one for each, or None to draw it"
        )
    return by_segment[index]


@dataclass(frozen=True)
class Selection:
    """How the tokens that stay are chosen.

    Args:
        mode: One of `MODES`.
        shared: One choice for the whole batch instead of one for each sample.
        block: Side of the squares of mode `blocks`, in tokens.

    Raises:
        SelectionError: If the mode is unknown or the block is empty.
    """

    mode: str = "random"
    shared: bool = False
    block: int = 2

    def __post_init__(self) -> None:
        one_of("selection", self.mode, MODES, SelectionError)
        if self.block < 1:
            raise SelectionError(f"block {self.block}: a block has at least 1 token; try block=2")

    def ids(
        self, draws: Draws, k: int, grid: tuple[int, int], keep: int, present: Tensor | None = None
    ) -> Tensor:
        """Draw the tokens that stay in the k-th route.

        Args:
            draws: The step's random numbers; the stream is `route.<k>`.
            k: Which route of the pass, from 0.
            grid: Rows and columns of tokens.
            keep: How many stay.
            present: Ids to choose from, ascending, `(B, K)` or `(1, K)`; None for the full grid.

        Returns:
            Raster ids, int64 of shape `(B, keep)`, or `(1, keep)` where shared, ascending.

        Raises:
            SelectionError: If a spatial mode is asked to choose from part of a grid.
        """
        n = grid[0] * grid[1] if present is None else present.shape[1]
        uniform = self._rows(draws, f"route.{k}", n)
        if present is None:
            return select(self.mode, grid, keep, uniform, self.block)
        if self.mode not in ("random", "unsorted"):
            raise SelectionError(
                f"selection {self.mode}: part of the grid is left; try selection=random"
            )
        local = select("random", (1, n), keep, uniform)
        rows = max(local.shape[0], present.shape[0])
        return present.expand(rows, -1).gather(1, local.expand(rows, -1))

    def shuffle(self, draws: Draws, k: int, keep: int) -> Tensor | None:
        """Draw the permutation of mode `unsorted`, `(B, keep)` or `(1, keep)`; None otherwise.

        The stream of route k is `order.<k>`; the other arguments are those of `ids`.
        """
        if self.mode != "unsorted":
            return None
        return self._rows(draws, f"order.{k}", keep).argsort(dim=1, stable=True)

    def _rows(self, draws: Draws, stream: str, n: int) -> Tensor:
        return draws.shared().uniform(stream, n)[:1] if self.shared else draws.uniform(stream, n)


def select(mode: str, grid: tuple[int, int], keep: int, uniform: Tensor, block: int = 2) -> Tensor:
    """Choose `keep` tokens of a grid for every row of random numbers.

    Args:
        mode: One of `MODES`.
        grid: Rows and columns of tokens, N = rows * columns.
        keep: How many stay, 1..N.
        uniform: Numbers in [0, 1), shape `(B, N)`.
        block: Side of the squares of mode `blocks`.

    Returns:
        Ids in raster order, int64 of shape `(B, keep)`, ascending.

    Raises:
        SelectionError: If the mode is unknown, or cannot keep that many of that grid.
    """
    n = grid[0] * grid[1]
    if not 1 <= keep <= n:
        raise SelectionError(f"keep {keep}: a grid of {grid[0]}x{grid[1]} keeps 1..{n} tokens")
    if mode in ("random", "unsorted"):
        ids = uniform.argsort(dim=1, stable=True)[:, :keep]
    elif mode in ("rows", "columns", "blocks"):
        ids = _whole_groups(mode, grid, keep, uniform, block)
    elif mode == "stride":
        base = torch.arange(keep, device=uniform.device) * n // keep
        ids = (base + (uniform[:, :1] * n).long()) % n
    else:
        one_of("selection", mode, MODES, SelectionError)
        check_quad(grid, keep)
        rows = torch.arange(0, grid[0], 2, device=uniform.device).unsqueeze(1) * grid[1]
        corners = (rows + torch.arange(0, grid[1], 2, device=uniform.device)).flatten()
        choice = (uniform[:, :keep] * 4).long()
        ids = corners + choice // 2 * grid[1] + choice % 2
    return ids.sort(1).values


def _whole_groups(
    mode: str, grid: tuple[int, int], keep: int, uniform: Tensor, block: int
) -> Tensor:
    """Fill up with whole groups (rows, columns or blocks) in random order, the last one in part."""
    shape = {"rows": (1, grid[1]), "columns": (grid[0], 1), "blocks": (block, block)}[mode]
    group, position, size = _groups(grid, shape, uniform.device)
    count, largest = size.shape[0], shape[0] * shape[1]
    rank = uniform[:, :count].argsort(dim=1, stable=True).argsort(1)
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
    key = rank.gather(1, group) * largest + (position + start) % size[group]
    return key.argsort(1)[:, :keep]


@table
def _groups(
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
