"""The only loop over blocks: gather, blocks, scatter around each route.

A route r_{i->j} takes the routed tokens T_r past the blocks i..j of B (SG paper, arXiv 2601.01608,
eq. 5, which restates TREAD, arXiv 2501.04765):

    D^r = L_{B-1} o ... o { id           if token in T_r } o ... o L_0
                          { L_j o...o L_i  otherwise     }

Before block i every per-token tensor is gathered once and the blocks get a smaller layout; after
block j the processed tokens are scattered once into the state from before block i, so that routed
tokens arrive bit for bit as they left (`routing.routed_pass`). No block knows that routing exists,
and nothing here knows an architecture. Everything beyond this is in `routing.variants`.

A block is called `block(x, cond, layout) -> x`. It may have

    carries    keys, such as ("v_first",): it is called `block(x, cond, layout, state)` and may
               write them; every tensor in `state` travels with the tokens
    scans      scan orders that it uses, such as ("zigzag:0",)
    tables     other tables of the layout that it looks up, such as (("gaps", "zigzag:0"),); both
               are computed before it runs (`Layout.prepare`)
    prepare    a method that gets the layout first, outside of what `block.compile()` compiles
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from routing.layout import Layout
from routing.learned import Fuse
from routing.options import RoutingError
from routing.route import Route
from routing.routed_pass import RoutedSegment, Routing, Tokens
from routing.variants import Dropped, SumInput, draw_ends, fused_segment


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
            routing: The pass's routing; None is a dense pass.
            state: Per-token tensors to start from, each `(B, T, ...)`.
            taps: Block indices whose outputs to return; -1 is the input.

        Raises:
            RoutingError: If the routing contradicts itself or the stack, or x the layout, or if a
                block of `taps` does not exist or does not run.
            RouteError: If the route does not fit the depth.
        """
        if x.shape[1] != layout.length:
            raise RoutingError(f"{x.shape[1]} tokens come in, and their layout has {layout.length}")
        routing = Routing(Route()) if routing is None else routing
        route = routing.resolve(self.depth)
        tokens = Tokens(x, layout.to(x.device), dict(state or {}))
        segments = self._segments(route, routing, tokens)
        runner = BlockRunner(self, cond, segments, taps)
        if -1 in taps:
            runner.record(-1, tokens)

        inner_layouts: list[Layout] = []
        next_block = 0
        for index, segment in enumerate(segments):
            tokens = runner.run(tokens, next_block, segment.start)
            subset = None
            if segment.rate > 0:
                subset = routing.subset(index, segment.rate, tokens)
                inner_layouts.append(subset.layout)
            processed = segment.process(tokens, subset, runner.run)
            tokens = segment.restore(tokens, subset, processed)
            next_block = segment.end + 1
        tokens = runner.run(tokens, next_block, self.depth)
        runner.check_taps()
        return StackOutput(
            tokens.x,
            runner.taps,
            runner.tap_layouts,
            tokens.layout,
            tuple(inner_layouts),
            None if tokens.layout.is_full else tokens.layout.mask(),
            tokens.state,
        )

    def _segments(self, route: Route, routing: Routing, tokens: Tokens) -> list[RoutedSegment]:
        """Return the segments of a pass, of the kind that its options ask for.

        `tokens` are those before block 0. A dense pass has one if the stack has a fused span.
        """
        options, segments = routing.options, route.segments
        if options.random_end:
            segments = draw_ends(segments, routing)
        if self.fuse is not None:
            return [fused_segment(segments, routing, self.fuse)]
        if options.path_drop:
            raise RoutingError(
                f"path_drop={options.path_drop:g}: leaves a fused span out, and this model has "
                "none; try path_drop=0"
            )
        routed: list[RoutedSegment] = []
        for segment in segments:
            start, end, rate = segment.start, segment.end, segment.rate
            drop_before = segment.drop_before(options.remove)
            if options.reinsert == "none":
                routed.append(Dropped(start, self.depth - 1, rate, drop_before))
            elif options.reinsert == "sum_input" and start > 0:
                routed.append(SumInput(start, end, rate, drop_before, tokens))
            else:
                routed.append(RoutedSegment(start, end, rate, drop_before))
        return routed


class BlockRunner:
    """Runs the blocks of one pass and records the outputs that were requested.

    Args:
        stack: Whose blocks.
        cond: Conditioning of the pass, as for `Stack`.
        segments: The segments of the pass.
        taps: Block indices whose outputs to record.

    Attributes:
        taps: Recorded outputs by block index, `(B, T, D)`.
        tap_layouts: Which tokens they hold.
    """

    def __init__(
        self, stack: Stack, cond: Any, segments: Sequence[RoutedSegment], taps: Collection[int]
    ) -> None:
        self.blocks, self.cond, self.requested = list(stack.blocks), cond, taps
        self.taps: dict[int, Tensor] = {}
        self.tap_layouts: dict[int, Layout] = {}
        self.checkpointed: set[int] = set()  # blocks that are run again in the backward pass
        self.in_fp32: set[int] = set()
        for segment in segments:
            if stack.checkpoint and torch.is_grad_enabled():
                self.checkpointed.update(range(segment.start, segment.end + 1))
            if stack.fp32_after and segment.rate > 0:
                self.in_fp32.add(segment.end + 1)

    def run(self, tokens: Tokens, start: int, end: int) -> Tokens:
        """Run the blocks `start` to `end` - 1 on the tokens, all in the type of the stream."""
        if start == end:
            return tokens
        blocks, layout = self.blocks[start:end], tokens.layout
        prepare(blocks, layout)
        x, state, stream_dtype = tokens.x, tokens.state, tokens.x.dtype
        for index, block in enumerate(blocks, start):
            cond = self.cond[index] if type(self.cond) is tuple else self.cond
            precision: Any = nullcontext()
            if index in self.in_fp32 and torch.is_autocast_enabled(x.device.type):
                precision = torch.autocast(x.device.type, enabled=False)
                x, cond, state = tree_map_only(Tensor, _to_float32, (x, cond, state))
            with precision:
                if index in self.checkpointed:
                    x, state = checkpoint(
                        call_block, block, x, cond, layout, state, use_reentrant=False
                    )
                elif getattr(block, "carries", None):
                    x, state = call_block(block, x, cond, layout, state)
                else:
                    x = block(x, cond, layout)
            x = x.to(stream_dtype)
            if index in self.requested:
                self.record(index, Tokens(x, layout, state))
        return Tokens(x, layout, state)

    def record(self, index: int, tokens: Tokens) -> None:
        """Store the output of a block."""
        self.taps[index], self.tap_layouts[index] = tokens.x, tokens.layout

    def check_taps(self) -> None:
        """Refuse requested outputs of blocks that do not exist or did not run."""
        for index in self.requested:
            if index not in self.taps:
                raise RoutingError(
                    f"block output {index}: expected -1 (the input) or 0..{len(self.blocks) - 1}, "
                    "a block that runs in this pass"
                )


def prepare(blocks: Sequence[nn.Module], layout: Layout) -> None:
    """Compute what blocks look up: a block that did it itself would compile it in, per index."""
    tables: dict[tuple[str, str], None] = {}
    for block in blocks:
        for scan in getattr(block, "scans", ()):
            tables["scan", scan] = None
        for table in getattr(block, "tables", ()):
            tables[table] = None
    if tables:
        layout.prepare(tables)
    for block in blocks:
        prepare_block: Any = getattr(block, "prepare", None)
        if prepare_block is not None:
            prepare_block(layout)


def call_block(
    block: nn.Module, x: Tensor, cond: Any, layout: Layout, state: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run one block on its own copy of the state, so that a recomputation changes nothing."""
    if not getattr(block, "carries", ()):
        return block(x, cond, layout), state
    state = dict(state)
    return block(x, cond, layout, state), state


def _to_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor
