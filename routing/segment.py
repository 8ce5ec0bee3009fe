"""One segment of a route: gather the kept tokens, run the blocks, scatter them back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from routing.gather import Move
from routing.layout import Layout


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
        """Return the carried tensors of all tokens; one that is new is 0 for skipped tokens."""
        if subset is None:
            return processed.state
        state = {}
        for key, value in processed.state.items():
            before = self.state.get(key)
            if before is None:
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
