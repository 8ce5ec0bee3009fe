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
from routing.route import Segment
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


def fused_segment(segments: Sequence[Segment], routing: Routing, fuse: Fuse) -> RoutedSegment:
    """Return the segment of a stack with a fusion: its span, which a dense pass has too.

    Args:
        segments: The segments of the pass; none in a dense one.
        routing: Options and random numbers of the pass.
        fuse: The stack's fusion.

    Raises:
        RoutingError: The route lies beside the span, or tokens are to return in another way.
    """
    span, options = fuse.segment, routing.options
    spans = [segment.span for segment in segments]
    if spans not in ([], [span.span]):
        raise RoutingError(
            f"route={routing.route}: this model's learned span is {span.span}; try "
            f"route={span.span}"
        )
    if options.reinsert != "identity":
        raise RoutingError(f"reinsert {options.reinsert}: a learned span has its own; try identity")
    rate, drop_before = 0.0, span.start
    if segments:
        rate, drop_before = segments[0].rate, segments[0].drop_before(options.remove)
    bounds = span.start, span.end, rate, drop_before
    if options.path_drop >= 1:
        return PathDropped(*bounds, fuse)
    return Fused(*bounds, fuse, samples_without_span(routing))


def draw_ends(segments: Sequence[Segment], routing: Routing) -> tuple[Segment, ...]:
    """Return the segments with ends drawn uniformly from their start on (`random_end`, v1)."""
    draws = routing.require_draws("`draws` for random_end")
    drawn = []
    for index, segment in enumerate(segments):
        length = segment.end - segment.start + 1
        end = segment.start + int(draws.scalar(f"end.{index}") * length)
        drawn.append(replace(segment, end=end))
    return tuple(drawn)


def samples_without_span(routing: Routing) -> Tensor | None:
    """Draw the samples whose fused span is left out, bool `(B,)`; None for none of them."""
    if routing.options.path_drop <= 0:
        return None
    draws = routing.require_draws("`draws` for path_drop")
    return draws.uniform("path", 1)[:, 0] < routing.options.path_drop
