"""One segment of a route: select tokens, gather them, run the blocks, scatter them back.

`Routing` has the options of a forward pass and selects; `RoutedSegment` does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from torch import Tensor

from routing.gather import Move
from routing.layout import Layout
from routing.options import RoutingError, RoutingOptions, check_words
from routing.rng import Draws
from routing.route import Route, Segment, keep_count
from routing.selection import Selection, check_ids, ids_of_segment

SKIP = "skip."  # Keys of carried tensors that are earlier outputs of blocks (long skips)


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
    """

    start: int
    end: int

    def process(self, tokens: Tokens, subset: Subset | None, run: RunBlocks) -> Tokens:
        """Gather the kept tokens and run the segment's blocks on them."""
        return run(tokens.gather(subset), self.start, self.end + 1)

    def restore(self, tokens: Tokens, subset: Subset | None, processed: Tokens) -> Tokens:
        """Put the processed tokens back among `tokens`, those from before the segment."""
        return tokens.scatter(subset, processed)

    def skipped_blocks(self) -> range:
        """Return the blocks that do not run at all."""
        return range(0)


@dataclass
class Routing:
    """What one forward pass does about routes.

    Args:
        route: Which blocks are skipped.
        selection: How the tokens that stay are chosen.
        draws: The step's random numbers; may be None where `ids` gives every subset.
        ids: Explicit raster ids that stay, one entry for each segment (None draws them), in any
            order; each of shape `(B, K)`, `(1, K)` or `(K,)`.
        reinsert: What routed tokens become at a segment's end: their state from before it
            (`identity`); that plus the network's input (`sum_input`: v1's second route; a segment
            that starts at block 0 has only the input and adds nothing); or nothing: dropped
            tokens never return (`none`).
        remove: When tokens leave: at the segment's `start`; `after:<k>`, once block k has seen all
            of them (delayed removal); or `never`: all blocks see all tokens, and at
            the end routed tokens still fall back to their state from the start (a control).
        random_end: Draw every segment's end for each step, from its start up to its end (v1).
        path_drop: Share of samples whose fused span is left out (SPRINT); 1 skips its blocks.

    Raises:
        RoutingError: If the options contradict each other or the route.
    """

    route: Route
    selection: Selection = field(default_factory=Selection)
    draws: Draws | None = None
    ids: Sequence[Tensor | None] | Tensor | None = None
    reinsert: str = "identity"
    remove: str = "start"
    random_end: bool = False
    path_drop: float = 0.0

    def __post_init__(self) -> None:
        self.resolve(None)

    @classmethod
    def from_options(cls, options: RoutingOptions) -> Routing:
        """Return the settings shared by all steps of a run; `on` adds a step's route and draws."""
        return cls(
            Route(),
            Selection(options.selection, options.shared, options.block),
            reinsert=options.reinsert,
            remove=options.remove,
            random_end=options.random_end,
            path_drop=options.path_drop,
        )

    @property
    def is_plain(self) -> bool:
        """Whether this is TREAD without variants (`routing.variants`)."""
        plain = self.reinsert == "identity" and self.remove == "start"
        return plain and not self.random_end

    def on(self, route: Route, draws: Draws | None) -> Routing | None:
        """Return these settings with a step's route and random numbers; None if dense."""
        return replace(self, route=route, draws=draws) if route.segments else None

    def resolve(self, depth: int | None) -> Route:
        """Return the checked route, with absolute block indices where the depth is known."""
        return _checked(self.route, depth, self.reinsert, self.remove, self.random_end)

    def require_draws(self, need: str = "`draws` or `ids` to select tokens") -> Draws:
        """Return the random numbers, or refuse a pass that needs them and has none."""
        if self.draws is None:
            raise RoutingError(f"route {self.route}: pass {need}")
        return self.draws

    def select(self, index: int, segment: Segment, layout: Layout, batch: int) -> Layout:
        """Choose the tokens that stay in a segment.

        Args:
            index: Number of the segment in the route, from 0.
            segment: The segment, which has the rate.
            layout: The tokens around it.
            batch: Number of samples B.

        Returns:
            The layout of the kept tokens, with ids `(B, K)` or `(1, K)`.
        """
        selection = self.selection
        ids = ids_of_segment(self.ids, self.route, index)
        if ids is None:
            keep = keep_count(layout.tokens, segment.rate)
            ids = selection.ids(self.require_draws(), index, layout.grid, keep, layout.ids)
        check_ids(ids, layout.grid, batch)
        if selection.mode != "unsorted":
            return layout.subset(ids)
        shuffle = selection.shuffle(self.require_draws(), index, ids.shape[-1])
        return layout.subset(ids, shuffle)


@lru_cache(maxsize=1024)  # once per run, not once per step
def _checked(
    route: Route, depth: int | None, reinsert: str, remove: str, random_end: bool
) -> Route:
    route = route if depth is None else route.resolve(depth)
    check_words(reinsert, remove, route, random_end)
    return route
