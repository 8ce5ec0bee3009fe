"""Everything beyond plain TREAD, as wrappers around a segment.

A wrapper changes one of a segment's two steps, `process` (gather, blocks) and `restore` (scatter),
and passes the other on to what it wraps.

    DelayedRemoval   remove=after:<k>, never    the first blocks still see all tokens
    SumInput         reinsert=sum_input         skipped tokens return plus the network's input (v1)
    Dropped          reinsert=none              skipped tokens never return
    Fused            learned=fuse               SPRINT's fusion of before and after
    PathDropped      path_drop=1                SPRINT's blocks are left out for all samples
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from routing.learned import Fuse
from routing.options import RoutingError
from routing.route import Route, Segment
from routing.segment import RoutedSegment, Routing, RunBlocks, Subset, Tokens


@dataclass(frozen=True)
class SegmentVariant(RoutedSegment):
    """A wrapper that changes nothing.

    Attributes:
        wrapped: The segment inside.
    """

    wrapped: RoutedSegment

    def process(self, tokens: Tokens, subset: Subset | None, run: RunBlocks) -> Tokens:
        """Process as the wrapped segment."""
        return self.wrapped.process(tokens, subset, run)

    def restore(self, tokens: Tokens, subset: Subset | None, processed: Tokens) -> Tokens:
        """Restore as the wrapped segment."""
        return self.wrapped.restore(tokens, subset, processed)


@dataclass(frozen=True)
class DelayedRemoval(SegmentVariant):
    """The segment's first blocks see all tokens; skipped ones still return as they were before.

    Attributes:
        drop_before: First block that sees the kept tokens only; one past the end for none.
    """

    drop_before: int

    def process(self, tokens: Tokens, subset: Subset | None, run: RunBlocks) -> Tokens:
        """Run the first blocks on all tokens, the others on the kept ones."""
        tokens = run(tokens, self.start, self.drop_before)
        return run(tokens.gather(subset), self.drop_before, self.end + 1)


@dataclass(frozen=True)
class SumInput(SegmentVariant):
    """Skipped tokens return with the network's input added (TREAD's first version).

    Attributes:
        network_input: Tokens before block 0.
    """

    network_input: Tokens

    def restore(self, tokens: Tokens, subset: Subset | None, processed: Tokens) -> Tokens:
        """Put the processed tokens back among the sums."""
        summed = replace(tokens, x=tokens.x + self.network_input.x)
        return super().restore(summed, subset, processed)


@dataclass(frozen=True)
class Dropped(SegmentVariant):
    """Skipped tokens never return: the segment lasts until the last block (MaskDiT's encoder)."""

    def restore(self, tokens: Tokens, subset: Subset | None, processed: Tokens) -> Tokens:
        """Return the kept tokens alone."""
        return processed


@dataclass(frozen=True)
class Fused(SegmentVariant):
    """SPRINT: `Linear(concat(before, after))` follows the segment, in dense passes too.

    Attributes:
        fuse: The learned fusion.
        without_span: Samples whose span is left out, bool `(B,)`; None for none of them.
    """

    fuse: Fuse
    without_span: Tensor | None

    def restore(self, tokens: Tokens, subset: Subset | None, processed: Tokens) -> Tokens:
        """Fuse the tokens from before the segment with the processed ones."""
        move = None if subset is None else subset.move
        x = self.fuse(tokens.x, processed.x, move, self.without_span)
        return Tokens(x, tokens.layout, tokens.scatter_state(subset, processed))


@dataclass(frozen=True)
class PathDropped(RoutedSegment):
    """SPRINT's path drop for all samples: no block runs, and only [MASK] vectors are fused.

    Attributes:
        fuse: The learned fusion.
    """

    fuse: Fuse

    def process(self, tokens: Tokens, subset: Subset | None, run: RunBlocks) -> Tokens:
        """Run nothing."""
        return tokens

    def restore(self, tokens: Tokens, subset: Subset | None, processed: Tokens) -> Tokens:
        """Fuse the tokens from before the segment with [MASK] vectors."""
        return replace(tokens, x=self.fuse(tokens.x, None, None, None))

    def skipped_blocks(self) -> range:
        """Return all of the segment's blocks."""
        return range(self.start, self.end + 1)


def build_segments(
    route: Route, routing: Routing, depth: int, fuse: Fuse | None, tokens: Tokens
) -> list[RoutedSegment]:
    """Return what a pass does at each segment; for a dense pass its fused span, if it has one.

    Args:
        route: The resolved route of the pass.
        routing: The options of the pass.
        depth: Number of blocks.
        fuse: The stack's fusion, if it has one.
        tokens: The tokens before block 0.

    Raises:
        RoutingError: The routing asks for a fused span that the stack does not have.
    """
    if routing.path_drop and fuse is None:
        raise RoutingError(
            f"path_drop={routing.path_drop:g}: leaves a fused span out, and this model has none; "
            "try path_drop=0"
        )
    ends = draw_ends(route.segments, routing)
    if fuse is not None:
        check_fused_span(route, ends, routing, fuse)
    routed: list[RoutedSegment] = []
    for segment, end in zip(route.segments, ends, strict=True):
        start, rate = segment.start, segment.rate
        if routing.reinsert == "none":
            end = depth - 1
        variant = RoutedSegment(start, end, rate)
        drop_before = replace(segment, end=end).drop_before(routing.remove)
        if drop_before > start:
            variant = DelayedRemoval(start, end, rate, variant, drop_before)
        if fuse is not None:
            variant = fused_segment(variant, routing, fuse)
        elif routing.reinsert == "sum_input" and start > 0:
            variant = SumInput(start, end, rate, variant, tokens)
        elif routing.reinsert == "none":
            variant = Dropped(start, end, rate, variant)
        routed.append(variant)
    if fuse is not None and not routed:
        span = RoutedSegment(fuse.segment.start, fuse.segment.end, rate=0.0)
        routed.append(fused_segment(span, routing, fuse))
    return routed


def fused_segment(segment: RoutedSegment, routing: Routing, fuse: Fuse) -> RoutedSegment:
    """Wrap a segment in the stack's fusion."""
    start, end, rate = segment.start, segment.end, segment.rate
    if routing.path_drop >= 1:
        return PathDropped(start, end, rate, fuse)
    return Fused(start, end, rate, segment, fuse, samples_without_span(routing))


def check_fused_span(route: Route, ends: Sequence[int], routing: Routing, fuse: Fuse) -> None:
    """Refuse a route beside the stack's fused span, or a second way to reinsert tokens.

    Raises:
        RoutingError: The message names the span.
    """
    span = fuse.segment
    spans = [(segment.start, end) for segment, end in zip(route.segments, ends, strict=True)]
    if spans not in ([], [(span.start, span.end)]):
        raise RoutingError(
            f"route={route}: this model's learned span is {span.span}; try route={span.span}"
        )
    if routing.reinsert != "identity":
        raise RoutingError(f"reinsert {routing.reinsert}: a learned span has its own; try identity")


def draw_ends(segments: Sequence[Segment], routing: Routing) -> list[int]:
    """Return each segment's end, or with `random_end` one drawn uniformly from its start (v1)."""
    if not routing.random_end:
        return [segment.end for segment in segments]
    draws = routing.require_draws("`draws` for random_end")
    ends = []
    for index, segment in enumerate(segments):
        length = segment.end - segment.start + 1
        ends.append(segment.start + int(draws.scalar(f"end.{index}") * length))
    return ends


def samples_without_span(routing: Routing) -> Tensor | None:
    """Draw the samples whose fused span is left out, bool `(B,)`; None for none of them."""
    if routing.path_drop <= 0:
        return None
    draws = routing.require_draws("`draws` for path_drop")
    return draws.uniform("path", 1)[:, 0] < routing.path_drop
