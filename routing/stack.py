"""The loop over blocks with routes around them: gather, blocks, scatter. There is no other one.

A route r_{i->j} takes the routed tokens T_r past the blocks i..j of B (SG paper, arXiv 2601.01608,
eq. 5, which restates TREAD):

    D^r = L_{B-1} o ... o { id           if token in T_r } o ... o L_0
                          { L_j o...o L_i  otherwise     }

Before block i every per-token tensor is gathered once and the blocks get a smaller layout; after
block j the processed tokens are scattered once into the state from before block i, so that routed
tokens arrive bit for bit as they left. No block knows that routing exists, and nothing here knows
an architecture.

A block is called `block(x, cond, layout) -> x`. One with a class attribute
`carries = ("v_first",)` is called `block(x, cond, layout, state)` and may write those keys; every
tensor in `state` travels with the tokens. One with a method `prepare(layout)` is told the layout
first, outside of what `block.compile()` compiles.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from routing.layout import Layout, Move
from routing.learned import Fuse
from routing.options import RoutingError, RoutingOptions, check_words
from routing.rng import Draws
from routing.route import Route, Segment, keep_count
from routing.selection import Selection, check_ids, given_ids


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
        """Return what all steps of a run share; a step is this `on` its route."""
        return cls(
            Route(),
            Selection(options.selection, options.shared, options.block),
            reinsert=options.reinsert,
            remove=options.remove,
            random_end=options.random_end,
            path_drop=options.path_drop,
        )

    def on(self, route: Route, draws: Draws | None) -> Routing | None:
        """Return the same for another route and its random numbers; None where that is `none`."""
        return replace(self, route=route, draws=draws) if route.segments else None

    def resolve(self, depth: int | None) -> Route:
        """Return the checked route, with absolute block indices where the depth is known."""
        return _checked(self.route, depth, self.reinsert, self.remove, self.random_end)

    def require_draws(self, need: str = "`draws` or `ids` to select tokens") -> Draws:
        """Return the random numbers, or refuse a pass that needs them and has none."""
        if self.draws is None:
            raise RoutingError(f"route {self.route}: pass {need}")
        return self.draws


@lru_cache(maxsize=1024)  # once per run, not once per step
def _checked(
    route: Route, depth: int | None, reinsert: str, remove: str, random_end: bool
) -> Route:
    route = route if depth is None else route.resolve(depth)
    check_words(reinsert, remove, route, random_end)
    return route


@dataclass
class StackOutput:
    """What a stack returns.

    Attributes:
        x: Tokens after the last block, `(B, T, D)`; with `reinsert=none` only those that stayed.
        taps: Block outputs that were requested, by block index (of the tokens that stay inside a
            route); -1 is the input to block 0.
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
        blocks: The blocks, with the call described at the top of this module.
        fp32_after: Run the block after a route's end in float32 under autocast, on any device
            (as in the released code).
        checkpoint: Recompute activations of the blocks inside routes in the backward pass.
        fuse: SPRINT's fusion over one fixed span, dense passes included.
    """

    def __init__(
        self,
        blocks: nn.ModuleList | Sequence[nn.Module],
        fp32_after: bool = True,
        checkpoint: bool = False,
        fuse: Fuse | None = None,
    ) -> None:
        super().__init__()
        self.blocks = blocks if isinstance(blocks, nn.ModuleList) else nn.ModuleList(blocks)
        self.fp32_after, self.checkpoint = fp32_after, checkpoint
        self.fuse = fuse

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
    ) -> StackOutput:
        """Run all blocks.

        Args:
            x: Tokens `(B, T, D)`, prefix first.
            cond: Conditioning: a tuple has an entry for each block, anything else is for all.
            layout: Which tokens `x` holds.
            routing: What to do about routes; None is a dense pass.
            state: Per-token tensors to start from, each `(B, T, ...)`.
            taps: Block indices whose outputs to return; -1 is the input.

        Raises:
            RoutingError: If the routing contradicts itself or the stack, or x the layout.
            RouteError: If the route does not fit the depth.
        """
        at = StackPass(self, x, cond, layout, routing, state)
        skipped = self._skipped(at.routing)
        seen = {-1: (x, at.layout)} if -1 in self._tapped(taps, skipped) else {}
        for first, end in pairwise(at.cuts()):
            if first in at.segments:  # a route starts: choose the tokens that stay
                at.open(*at.segments[first])
            if at.span is not None and first == at.span.drop_before:  # the others leave
                at.gather(at.span)
            if first not in skipped:
                seen |= at.run(first, end, taps)
            if at.span is not None and end > at.span.segment.end and at.returns:  # they return
                at.scatter(at.span, left_out=first in skipped)
        return StackOutput(
            at.x,
            {i: tap for i, (tap, _) in seen.items()},
            {i: tapped for i, (_, tapped) in seen.items()},
            at.layout,
            tuple(at.inner),
            None if at.layout.ids is None else at.layout.mask(),
            at.state,
        )

    def _skipped(self, routing: Routing) -> range:
        """Blocks that a pass leaves out: those of SPRINT's span where it is dropped for all."""
        if self.fuse is not None and routing.path_drop >= 1:
            return range(self.fuse.segment.start, self.fuse.segment.end + 1)
        return range(0)

    def _tapped(self, taps: Collection[int], skipped: range) -> Collection[int]:
        """Check the indices of the requested block outputs."""
        for tap in taps:
            if not -1 <= tap < self.depth:
                raise RoutingError(
                    f"block output {tap}: expected -1 (the input) or 0..{self.depth - 1}"
                )
            if tap in skipped:
                raise RoutingError(f"block output {tap}: block {tap} does not run in this pass")
        return taps


@dataclass
class Span:
    """The segment that a pass is in.

    Attributes:
        segment: Which blocks.
        drop_before: First block that sees fewer tokens.
        outer: Layout around the span.
        inner: Layout of the tokens that stay.
        move: The gather between the two and its scatter; None in a dense pass of a learned span.
        bypass: Tokens before the span, which routed tokens return to.
        bypass_state: Likewise, what blocks carry.
    """

    segment: Segment
    drop_before: int
    outer: Layout
    inner: Layout
    move: Move | None
    bypass: Tensor
    bypass_state: dict[str, Tensor]


class StackPass:
    """The tokens of one pass through a stack, and the span that they are in.

    Attributes:
        x: Tokens present, `(B, T, D)`.
        layout: Which ones they are.
        state: The per-token tensors that blocks carry.
        segments: Index and segment by the first block, with the learned span of a dense pass.
        span: The span that is open.
        inner: Layouts inside the segments so far.
    """

    def __init__(
        self,
        stack: Stack,
        x: Tensor,
        cond: Any,
        layout: Layout,
        routing: Routing | None,
        state: dict[str, Tensor] | None,
    ) -> None:
        if x.shape[1] != layout.length:
            raise RoutingError(f"{x.shape[1]} tokens come in, and their layout has {layout.length}")
        self.stack, self.x, self.input, self.cond = stack, x, x, cond
        self.layout, self.state = layout.to(x.device), dict(state or {})
        self.routing = Routing(Route()) if routing is None else routing
        self.route = self.routing.resolve(stack.depth)
        self.segments = {s.start: (k, s) for k, s in enumerate(self._segments())}
        self.span: Span | None = None
        self.inner: list[Layout] = []
        self.returns = self.routing.reinsert != "none"
        self.fp32_next = False

    def open(self, k: int, segment: Segment) -> None:
        """Enter segment `k`: keep what its routed tokens return to, and decide who stays."""
        outer = self.layout
        inner, move = outer, None
        if self.route.segments:
            inner = self._choose(k, segment)
            move = outer.move_to(inner)
            self.inner.append(inner)
        leave = segment.drop_before(self.routing.remove)
        self.span = Span(segment, leave, outer, inner, move, self.x, dict(self.state))

    def gather(self, span: Span) -> None:
        """Let the routed tokens leave."""
        if span.move is not None:
            self.x = span.move.take(self.x)
            self.state = {key: span.move.take(value) for key, value in self.state.items()}
            self.layout = span.inner

    def cuts(self) -> list[int]:
        """Return where stretches of blocks begin that see the same tokens, and the last one ends.

        That is where a route starts, and its tokens leave or return.
        """
        found = {0, self.stack.depth}
        for _, segment in self.segments.values():
            found |= {segment.start, segment.drop_before(self.routing.remove), segment.end + 1}
        return sorted(found)

    def run(self, first: int, end: int, taps: Collection[int]) -> dict[int, tuple[Tensor, Layout]]:
        """Run the blocks `first` to `end` - 1 on the tokens present; return what `taps` ask for."""
        blocks, device, stream = self.stack.blocks[first:end], self.x.device.type, self.x.dtype
        # Tables are made and conditions picked here: a block that did it would be compiled once
        # for every index, and once more for the tables that are there already.
        prepares: list[Any] = [getattr(block, "prepare", None) for block in blocks]
        for prepare in filter(None, prepares):
            prepare(self.layout)
        inside = self.stack.checkpoint and self.span is not None and torch.is_grad_enabled()
        again = partial(checkpoint, _call, use_reentrant=False) if inside else _call
        wide, self.fp32_next = self.fp32_next and torch.is_autocast_enabled(device), False
        seen = {}
        for i, block in enumerate(blocks, first):
            cond = self.cond[i] if type(self.cond) is tuple else self.cond
            if wide:
                as_float = lambda t: t.float() if t.is_floating_point() else t  # noqa: E731
                given = tree_map_only(Tensor, as_float, (self.x, cond, self.state))
                self.x, cond, self.state = given
            with torch.autocast(device, enabled=False) if wide else nullcontext():
                if inside or getattr(block, "carries", None):
                    self.x, self.state = again(block, self.x, cond, self.layout, self.state)
                else:
                    self.x = block(self.x, cond, self.layout)
            self.x, wide = self.x.to(stream), False
            if i in taps:
                seen[i] = self.x, self.layout
        return seen

    def scatter(self, span: Span, left_out: bool) -> None:
        """Leave a span, whose blocks SPRINT's path drop may have left out: put its tokens back."""
        if self.layout is span.outer:  # remove=never
            self.gather(span)
        move, bypass, fuse = span.move, span.bypass, self.stack.fuse
        if fuse is not None:
            self.x = fuse(bypass, None if left_out else self.x, move, self._path_drop())
        elif move is not None:
            if self.routing.reinsert == "sum_input" and span.segment.start > 0:
                bypass = bypass + self.input
            self.x = move.put(bypass, self.x)
        if move is not None:
            self.state = {
                key: move.put(_before(span, key, value), value) for key, value in self.state.items()
            }
            self.fp32_next = self.stack.fp32_after
        self.layout, self.span = span.outer, None

    def _segments(self) -> Sequence[Segment]:
        """The route's segments with their ends drawn, or the learned span of a dense pass."""
        segments: Sequence[Segment] = self.route.segments
        if self.routing.random_end:
            draws = self.routing.require_draws("`draws` for random_end")
            segments = [
                replace(s, end=s.start + int(draws.scalar(f"end.{k}") * (s.end - s.start + 1)))
                for k, s in enumerate(segments)
            ]
        if self.stack.fuse is None:
            return segments
        fixed = self.stack.fuse.segment
        if segments and [(s.start, s.end) for s in segments] != [(fixed.start, fixed.end)]:
            raise RoutingError(
                f"route {self.route}: this model's learned span is {fixed.span}; "
                f"try route={fixed.span}"
            )
        if self.routing.reinsert != "identity":
            raise RoutingError(
                f"reinsert {self.routing.reinsert}: a learned span has its own; try identity"
            )
        return segments or (fixed,)

    def _choose(self, k: int, segment: Segment) -> Layout:
        """Return the layout of the tokens that stay in segment `k`."""
        outer, routing = self.layout, self.routing
        mode, keep = routing.selection, keep_count(outer.tokens, segment.rate)
        ids = None if routing.ids is None else given_ids(routing.ids, self.route, k)
        if ids is None:
            ids = mode.ids(routing.require_draws(), k, outer.grid, keep, outer.ids)
        check_ids(ids, outer.grid, self.x.shape[0])
        if mode.mode != "unsorted":
            return outer.subset(ids)
        return outer.subset(ids, mode.shuffle(routing.require_draws(), k, ids.shape[-1]))

    def _path_drop(self) -> Tensor | None:
        """Samples whose fused span is left out, bool `(B,)`; None where it is none or all."""
        share = self.routing.path_drop
        if share <= 0 or share >= 1:
            return None
        draws = self.routing.require_draws("`draws` for path_drop")
        return draws.uniform("path", 1)[:, 0] < share


def _call(
    block: nn.Module, x: Tensor, cond: Any, layout: Layout, state: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run one block on its own copy of the state, so that a recomputation changes nothing."""
    if not getattr(block, "carries", ()):
        return block(x, cond, layout), state
    state = dict(state)
    return block(x, cond, layout, state), state


def _before(span: Span, key: str, value: Tensor) -> Tensor:
    """What routed tokens carry on: their value from before the span, zeros if there was none."""
    if key in span.bypass_state:
        return span.bypass_state[key]
    return value.new_zeros(value.shape[0], span.outer.length, *value.shape[2:])
