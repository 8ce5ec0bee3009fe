"""A routed forward pass: at each segment of the route, select tokens, gather, run blocks, scatter.

`Routing` holds the settings of a pass, and `RoutedSegment` runs one segment. The number of tokens
that stay is exact, and their order ascending; a function of `SELECTIONS`, at the end of the file,
chooses them, so that every token stays equally often.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from routing.errors import one_of, require
from routing.explicit_ids import check_ids, ids_of_segment
from routing.grid import whole_groups
from routing.layout import Layout, Move
from routing.options import (
    CONSTRAINTS,
    RoutingError,
    RoutingOptions,
    SelectionError,
    check_reinsertion,
)
from routing.rng import Draws
from routing.route import MODES, Route, keep_count

SKIP = "skip."  # Keys of carried tensors that are earlier outputs of blocks (long skips)


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
        require(
            self.block >= 1, f"block={self.block}: expected a side of at least 1", SelectionError
        )

    def ids(self, draws: Draws, k: int, grid: tuple[int, int], keep: int) -> Tensor:
        """Draw the tokens that stay in the k-th route.

        Args:
            draws: The step's random numbers; the stream is `route.<k>`.
            k: Which route of the pass, from 0.
            grid: Rows and columns of tokens.
            keep: How many stay.

        Returns:
            Raster ids, int64 of shape `(B, keep)`, or `(1, keep)` where shared, ascending.

        Raises:
            SelectionError: If the mode cannot keep that many tokens of the grid.
        """
        uniform = self._uniform(draws, f"route.{k}", grid[0] * grid[1])
        return select(self.mode, grid, keep, uniform, self.block)

    def shuffle(self, draws: Draws, k: int, keep: int) -> Tensor | None:
        """Draw the permutation of mode `unsorted`, `(B, keep)` or `(1, keep)`; None otherwise.

        The stream of route k is `order.<k>`; the other arguments are those of `ids`.
        """
        if self.mode != "unsorted":
            return None
        return self._uniform(draws, f"order.{k}", keep).argsort(dim=1, stable=True)

    def _uniform(self, draws: Draws, stream: str, n: int) -> Tensor:
        return draws.shared().uniform(stream, n)[:1] if self.shared else draws.uniform(stream, n)


@dataclass
class Routing:
    """The routing of one forward pass.

    Args:
        route: Which blocks are skipped.
        options: Which tokens stay, and when and how the others return. The options of the model
            (`learned`, `fp32_after`, `checkpoint`) and of a run (`schedule`, `off_after`) do not
            affect a pass.
        draws: The step's random numbers; may be None where `ids` gives every subset.
        ids: Explicit raster ids that stay, one entry for each segment (None draws them), in any
            order; each of shape `(B, K)`, `(1, K)` or `(K,)`.

    Attributes:
        selection: How the tokens that stay are chosen.

    Raises:
        RoutingError: If the options contradict each other or the route.
    """

    route: Route
    options: RoutingOptions = RoutingOptions()
    draws: Draws | None = None
    ids: Sequence[Tensor | None] | Tensor | None = None
    selection: Selection = field(init=False)

    def __post_init__(self) -> None:
        self.selection = _selection(self.options)
        self.resolve(None)

    def resolve(self, depth: int | None) -> Route:
        """Return the checked route, with absolute block indices where the depth is known."""
        return _checked(self.route, depth, self.options)

    def require_draws(self, need: str = "`draws` or `ids` to select tokens") -> Draws:
        """Return the random numbers, or refuse a pass that needs them and has none."""
        if self.draws is None:
            raise RoutingError(f"route={self.route}: pass {need}")
        return self.draws

    def subset(self, index: int, rate: float, tokens: Tokens) -> Subset:
        """Choose the tokens that stay in a segment.

        Args:
            index: Number of the segment in the route, from 0.
            rate: Fraction of the tokens that skips.
            tokens: The tokens around the segment.
        """
        selection, layout, batch = self.selection, tokens.layout, tokens.x.shape[0]
        ids = None
        if self.ids is not None:
            ids = ids_of_segment(self.ids, self.route, index)
        if ids is not None:
            check_ids(ids, layout.grid, batch)
        else:
            keep = keep_count(layout.tokens, rate)
            ids = selection.ids(self.require_draws(), index, layout.grid, keep)
            if ids.shape[0] not in (1, batch):
                raise SelectionError(
                    f"draws for {ids.shape[0]} samples: expected {batch}, the batch size"
                )
        shuffle = None
        if selection.mode == "unsorted":
            shuffle = selection.shuffle(self.require_draws(), index, ids.shape[-1])
        inner = layout.subset(ids, shuffle)
        return Subset(inner, layout.move_to(inner))


# Both once per run, not once per step.


@lru_cache(maxsize=1024)
def _selection(options: RoutingOptions) -> Selection:
    return Selection(options.selection, options.shared, options.block)


@lru_cache(maxsize=1024)
def _checked(route: Route, depth: int | None, options: RoutingOptions) -> Route:
    route = route if depth is None else route.resolve(depth)
    check_reinsertion(options.reinsert, options.remove, route, options.random_end)
    return route


@dataclass
class Subset:
    """The tokens that stay in a segment.

    Attributes:
        layout: Where they are on the grid.
        move: Their gather from the sequence around the segment, and the scatter back into it.
    """

    layout: Layout
    move: Move


@dataclass
class Tokens:
    """The tokens at one point of the stack.

    Attributes:
        x: Their features `(B, T, D)`, prefix first.
        layout: Where they are on the grid.
        state: Other per-token tensors, which blocks carry along, each `(B, T, ...)`.
    """

    x: Tensor
    layout: Layout
    state: dict[str, Tensor]

    def gather(self, subset: Subset | None) -> Tokens:
        """Return the tokens of a subset; None is all of them."""
        if subset is None:
            return self
        state = {}
        for key, value in self.state.items():
            state[key] = subset.move.take(value)
        return Tokens(subset.move.take(self.x), subset.layout, state)

    def scatter(self, subset: Subset | None, processed: Tokens) -> Tokens:
        """Return all tokens, those of the subset as `processed`; the others do not change."""
        if subset is None:
            return processed
        x = subset.move.put(self.x, processed.x)
        return Tokens(x, self.layout, self.scatter_state(subset, processed))

    def scatter_state(self, subset: Subset | None, processed: Tokens) -> dict[str, Tensor]:
        """Return the carried tensors of all tokens.

        One that is new is 0 for skipped tokens, but a long skip is their state from before the
        segment: what the block would have returned for them as the identity.
        """
        if subset is None:
            return processed.state
        state = {}
        for key, value in processed.state.items():
            before = self.state.get(key)
            if before is None and key.startswith(SKIP):
                before = self.x
            elif before is None:
                shape = (value.shape[0], self.layout.length, *value.shape[2:])
                before = value.new_zeros(shape)
            state[key] = subset.move.put(before, value)
        return state


# Runs the blocks from the first index up to, not including, the second.
RunBlocks = Callable[[Tokens, int, int], Tokens]


@dataclass(frozen=True)
class RoutedSegment:
    """Plain TREAD: skipped tokens keep the state from before the segment, bit for bit.

    Attributes:
        start: First block that they skip.
        end: Last block that they skip.
        rate: Fraction of the tokens that skips; 0 in a dense pass, for the fused span alone.
        drop_before: First block that sees the kept tokens only: `start`, or a later one with
            delayed removal, where the blocks before it see all tokens; one past the end for none.
    """

    start: int
    end: int
    rate: float
    drop_before: int

    def process(self, tokens: Tokens, subset: Subset | None, run: RunBlocks) -> Tokens:
        """Gather the kept tokens and run the segment's blocks on them.

        `Stack.forward` calls it, then `restore`.

        Args:
            tokens: The state before block `start`.
            subset: The tokens that stay, drawn for this pass; None if the rate is 0.
            run: `BlockRunner.run`.
        """
        if self.drop_before > self.start:
            tokens = run(tokens, self.start, self.drop_before)
        return run(tokens.gather(subset), self.drop_before, self.end + 1)

    def restore(self, tokens: Tokens, subset: Subset | None, processed: Tokens) -> Tokens:
        """Put the processed tokens back among `tokens`, those from before the segment."""
        return tokens.scatter(subset, processed)


def select(mode: str, grid: tuple[int, int], keep: int, uniform: Tensor, block: int = 2) -> Tensor:
    """Choose `keep` tokens of a grid for each sample.

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
    if mode not in SELECTIONS:
        one_of("selection", mode, MODES, SelectionError)
    if mode in CONSTRAINTS:
        CONSTRAINTS[mode].check(grid, keep)
    return SELECTIONS[mode](grid, keep, uniform, block).sort(1).values


# One function for each selection. Its arguments are those of `select` without the mode; it returns
# the ids in any order. The first line of its docstring names the selection in docs/explainer.html.


def _random(grid: tuple[int, int], keep: int, uniform: Tensor, block: int) -> Tensor:
    """Any tokens (TREAD)."""
    return uniform.argsort(dim=1, stable=True)[:, :keep]


def _unsorted(grid: tuple[int, int], keep: int, uniform: Tensor, block: int) -> Tensor:
    """A control: random, with scans shuffled.

    `Selection.shuffle` draws the order of the scans in the route.
    """
    return _random(grid, keep, uniform, block)


def _rows(grid: tuple[int, int], keep: int, uniform: Tensor, block: int) -> Tensor:
    """Whole rows."""
    return whole_groups((1, grid[1]), grid, keep, uniform)


def _columns(grid: tuple[int, int], keep: int, uniform: Tensor, block: int) -> Tensor:
    """Whole columns."""
    return whole_groups((grid[0], 1), grid, keep, uniform)


def _blocks(grid: tuple[int, int], keep: int, uniform: Tensor, block: int) -> Tensor:
    """Whole squares, 2 x 2 by default."""
    return whole_groups((block, block), grid, keep, uniform)


def _stride(grid: tuple[int, int], keep: int, uniform: Tensor, block: int) -> Tensor:
    """Evenly spread.

    The shift is random and cyclic.
    """
    n = grid[0] * grid[1]
    base = torch.arange(keep, device=uniform.device) * n // keep
    return (base + (uniform[:, :1] * n).long()) % n


def _quad(grid: tuple[int, int], keep: int, uniform: Tensor, block: int) -> Tensor:
    """One of every 2 x 2 (SPRINT)."""
    rows = torch.arange(0, grid[0], 2, device=uniform.device).unsqueeze(1) * grid[1]
    corners = (rows + torch.arange(0, grid[1], 2, device=uniform.device)).flatten()
    choice = (uniform[:, :keep] * 4).long()
    return corners + choice // 2 * grid[1] + choice % 2


#: The function of every selection, by its name in `SelectionMode`; what it needs is in
#: `routing.options.CONSTRAINTS`.
SELECTIONS: dict[str, Callable[[tuple[int, int], int, Tensor, int], Tensor]] = {
    "random": _random,
    "rows": _rows,
    "columns": _columns,
    "blocks": _blocks,
    "stride": _stride,
    "quad": _quad,
    "unsorted": _unsorted,
}
