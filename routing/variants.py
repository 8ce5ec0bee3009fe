"""Everything beyond plain TREAD, as variants of a segment.

Each changes how tokens return at the segment's end, `restore`; delayed removal is an attribute of
every segment (`drop_before`).

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
from routing.routed_pass import RoutedSegment, Routing, RunBlocks, Subset, Tokens


@dataclass(frozen=True)
class SumInput(RoutedSegment):
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
class Dropped(RoutedSegment):
    """Skipped tokens never return: the segment lasts until the last block (MaskDiT's encoder)."""

    def restore(self, tokens: Tokens, subset: Subset | None, processed: Tokens) -> Tokens:
        """Return the kept tokens alone."""
        return processed


@dataclass(frozen=True)
class Fused(RoutedSegment):
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


def build_segments(
    route: Route, routing: Routing, depth: int, fuse: Fuse | None, tokens: Tokens
) -> list[RoutedSegment]:
    """Return what a pass does at each segment; for a dense pass its fused span, if it has one.

    Args:
        route: The resolved route of the pass.
        routing: Options and random numbers of the pass.
        depth: Number of blocks.
        fuse: The stack's fusion, if it has one.
        tokens: The tokens before block 0.

    Raises:
        RoutingError: The routing asks for a fused span that the stack does not have.
    """
    options = routing.options
    if options.path_drop and fuse is None:
        raise RoutingError(
            f"path_drop={options.path_drop:g}: leaves a fused span out, and this model has none; "
            "try path_drop=0"
        )
    ends = draw_ends(route.segments, routing)
    if fuse is not None:
        check_fused_span(route, ends, options.reinsert, fuse)
    routed: list[RoutedSegment] = []
    for segment, end in zip(route.segments, ends, strict=True):
        if options.reinsert == "none":
            end = depth - 1
        drop_before = replace(segment, end=end).drop_before(options.remove)
        bounds = segment.start, end, segment.rate, drop_before
        if fuse is not None:
            routed.append(fused_segment(*bounds, routing, fuse))
        elif options.reinsert == "sum_input" and segment.start > 0:
            routed.append(SumInput(*bounds, tokens))
        elif options.reinsert == "none":
            routed.append(Dropped(*bounds))
        else:
            routed.append(RoutedSegment(*bounds))
    if fuse is not None and not routed:
        start, end = fuse.segment.start, fuse.segment.end
        routed.append(fused_segment(start, end, 0.0, start, routing, fuse))
    return routed


def fused_segment(
    start: int, end: int, rate: float, drop_before: int, routing: Routing, fuse: Fuse
) -> RoutedSegment:
    """Return a segment with the stack's fusion; the first arguments are those of a segment."""
    if routing.options.path_drop >= 1:
        return PathDropped(start, end, rate, drop_before, fuse)
    return Fused(start, end, rate, drop_before, fuse, samples_without_span(routing))


def check_fused_span(route: Route, ends: Sequence[int], reinsert: str, fuse: Fuse) -> None:
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
    if reinsert != "identity":
        raise RoutingError(f"reinsert {reinsert}: a learned span has its own; try identity")


def draw_ends(segments: Sequence[Segment], routing: Routing) -> list[int]:
    """Return each segment's end, or with `random_end` one drawn uniformly from its start (v1)."""
    if not routing.options.random_end:
        return [segment.end for segment in segments]
    draws = routing.require_draws("`draws` for random_end")
    ends = []
    for index, segment in enumerate(segments):
        length = segment.end - segment.start + 1
        ends.append(segment.start + int(draws.scalar(f"end.{index}") * length))
    return ends


def samples_without_span(routing: Routing) -> Tensor | None:
    """Draw the samples whose fused span is left out, bool `(B,)`; None for none of them."""
    if routing.options.path_drop <= 0:
        return None
    draws = routing.require_draws("`draws` for path_drop")
    return draws.uniform("path", 1)[:, 0] < routing.options.path_drop
