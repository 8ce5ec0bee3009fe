"""Run a stack of blocks with routes: the only loop over blocks in the project.

Where a route starts, every per-token tensor is gathered once and the blocks get a smaller layout;
where it ends, the tokens that were processed are scattered once into the state from the start, so
that the others arrive bit for bit as they left (TREAD; SG paper, eq. 5). No block knows that
routing exists, and nothing here knows an architecture.

A block is called `block(x, cond, layout) -> x`. One with a class attribute
`carries = ("v_first",)` is called `block(x, cond, layout, state)` and may write those keys; every
tensor in `state` travels with the tokens. One with a method `prepare(layout)` is told the layout
first, outside of what `block.compile()` compiles.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from routing.execute import Run
from routing.layout import Layout
from routing.learned import Fuse, LearnedRouter
from routing.reuse import Reuse
from routing.spec import Routing, RoutingError

__all__ = ["Routing", "RoutingError", "Stack", "StackOutput"]


@dataclass
class StackOutput:
    """What a stack returns.

    Attributes:
        x: Tokens after the last block, `(B, T, D)`; with `reinsert=none` only those that stayed.
        taps: Block outputs asked for, by block index; -1 is the input to block 0.
        tap_layouts: Which tokens each tap holds.
        layout: Which tokens `x` holds.
        inner: The layout inside each segment; `.ids` are its raster ids, `.mask()` marks them.
        kept: Mask of the grid tokens in `x`, bool `(B, N)` or `(1, N)`, where some were dropped
            for good; None otherwise.
        state: The per-token tensors that blocks carry.
    """

    x: Tensor
    taps: dict[int, Tensor]
    tap_layouts: dict[int, Layout]
    layout: Layout
    inner: tuple[Layout, ...]
    kept: Tensor | None
    state: dict[str, Tensor]


class Stack(nn.Module):
    """Blocks in sequence, with routes around them.

    Args:
        blocks: The blocks, called as the module's docstring says.
        fp32_after: Run the block after a route's end in float32 under autocast, on any device
            (as in the released code).
        checkpoint: Recompute activations of the blocks inside routes in the backward pass.
        fuse: SPRINT's fusion over one fixed span, dense passes included.
        router: A learned choice of tokens over one fixed span (Mixture of Depths; a control).
    """

    def __init__(
        self,
        blocks: nn.ModuleList | Sequence[nn.Module],
        fp32_after: bool = True,
        checkpoint: bool = False,
        fuse: Fuse | None = None,
        router: LearnedRouter | None = None,
    ) -> None:
        super().__init__()
        self.blocks = blocks if isinstance(blocks, nn.ModuleList) else nn.ModuleList(blocks)
        self.fp32_after, self.checkpoint = fp32_after, checkpoint
        if fuse is not None and router is not None:
            raise RoutingError("a stack has a fusion or a learned router, not both")
        self.fuse, self.router = fuse, router
        self.moves = {"gather": 0, "scatter": 0}

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    def forward(
        self,
        x: Tensor,
        cond: Any,
        layout: Layout,
        routing: Routing | None = None,
        state: dict[str, Tensor] | None = None,
        taps: Collection[int] = (),
        *,
        full_taps: bool = False,
        reuse: Reuse | None = None,
    ) -> StackOutput:
        """Run all blocks.

        Args:
            x: Tokens `(B, T, D)`, prefix first.
            cond: Conditioning: a tuple has an entry for each block, anything else is for all.
            layout: Which tokens `x` holds.
            routing: What to do about routes; None is a dense pass.
            state: Per-token tensors to start from, each `(B, T, ...)`.
            taps: Block indices whose outputs to return; -1 is the input.
            full_taps: Inside a route, return taps of all tokens (those that skip in their state
                from the route's start) instead of those that stay.
            reuse: Record or replay what a stretch of blocks adds (between sampling steps).

        Raises:
            RoutingError: If the routing contradicts itself or the stack.
            RouteError: If the route does not fit the depth.
        """
        run = Run(self, x, cond, layout, routing, state, reuse)
        tapped = _tapped(taps, self.depth, run.skipped)
        seen: dict[int, tuple[Tensor, Layout]] = {}
        if -1 in tapped:
            seen[-1] = x, run.layout
        for i in range(self.depth):
            run.open(i)
            run.block(i)
            if i in tapped:
                seen[i] = run.tap(full_taps)
            run.close(i)
        return StackOutput(
            run.x,
            {i: tap[0] for i, tap in seen.items()},
            {i: tap[1] for i, tap in seen.items()},
            run.layout,
            tuple(span.inner for span in run.spans if span.inner is not None),
            None if run.layout.is_full else run.layout.mask(),
            run.state,
        )


def _tapped(taps: Collection[int], depth: int, skipped: Collection[int]) -> set[int]:
    """Check the indices of the outputs asked for."""
    for tap in taps:
        if not -1 <= tap < depth:
            raise RoutingError(f"block output {tap}: expected -1 (the input) or 0..{depth - 1}")
        if tap in skipped:
            raise RoutingError(f"block output {tap}: block {tap} does not run in this pass")
    return set(taps)
