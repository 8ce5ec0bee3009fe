"""The moving parts of one pass through a stack: where a span opens, what runs, where it closes."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from routing.layout import Layout
from routing.moves import Move
from routing.options import check_words
from routing.reuse import Reuse
from routing.rng import Draws
from routing.route import Route, Segment, keep_count
from routing.spec import Routing, RoutingError

if TYPE_CHECKING:
    from routing.stack import Stack


@dataclass
class Span:
    """A segment being executed.

    Attributes:
        segment: Which blocks.
        k: Which segment of the route it is.
        drop_before: First block that sees fewer tokens.
        routed: False for a learned span in a dense pass, which drops nothing.
        outer: Layout around the span.
        inner: Layout of the tokens that stay.
        move: The gather between the two and its scatter.
        bypass: State at the span's start, and in `bypass_state` what blocks carry.
        gate: Scores of a learned router.
        gathered: Whether the tokens have left.
    """

    segment: Segment
    k: int
    drop_before: int
    routed: bool = True
    outer: Layout | None = None
    inner: Layout | None = None
    move: Move | None = None
    bypass: Tensor | None = None
    bypass_state: dict[str, Tensor] = field(default_factory=dict)
    gate: Tensor | None = None
    gathered: bool = False


class Run:
    """One pass: `open`, `block` and `close` for each index in turn.

    Args:
        stack: Whose blocks.
        x: Tokens `(B, T, D)`.
        cond: Conditioning; of a tuple each block gets its own entry.
        layout: Which tokens `x` holds.
        routing: What to do about routes, or None.
        state: Per-token tensors that blocks carry.
        reuse: Record or replay a stretch.
    """

    def __init__(
        self,
        stack: Stack,
        x: Tensor,
        cond: Any,
        layout: Layout,
        routing: Routing | None,
        state: dict[str, Tensor] | None,
        reuse: Reuse | None,
    ) -> None:
        self.stack, self.cond, self.layout = stack, cond, layout.to(x.device)
        self.x, self.input, self.state = x, x, dict(state or {})
        self.routing = Routing(Route()) if routing is None else routing
        self.spans = _spans(stack, self.routing)
        self.starts = {span.segment.start: span for span in self.spans}
        self.span: Span | None = None
        self.fp32_next = False
        self.reuse, self.entered = reuse, x
        self.skipped = self._skipped()

    def open(self, i: int) -> None:
        """Begin what begins before block `i`.

        Args:
            i: Index of the block about to run.
        """
        if self.reuse is not None and i == self.reuse.start:
            self.entered = self.x
        if i in self.starts:
            self.span = span = self.starts[i]
            span.outer, span.bypass, span.bypass_state = self.layout, self.x, dict(self.state)
            if self.stack.router is not None:
                span.gate = self.stack.router(self.x, self.layout.prefix)
            if span.routed:
                span.inner = self._choose(span)
                span.move = self.layout.move_to(span.inner)
        if self.span is not None and self.span.routed and i == self.span.drop_before:
            self._gather(self.span)

    def block(self, i: int) -> None:
        """Run block `i`, unless this pass leaves it out.

        Args:
            i: Its index.
        """
        if i in self.skipped:
            return
        fp32, self.fp32_next = self.fp32_next, False
        device = self.x.device.type
        # Picked here, and tables made here: a block that did it would be compiled once for every
        # index, and once more for the tables that are there already.
        cond = self.cond[i] if type(self.cond) is tuple else self.cond
        if fp32 and torch.is_autocast_enabled(device):
            scope: Any = torch.autocast(device_type=device, enabled=False)
            x, cond, state = _float(self.x), _float(cond), _float(self.state)
        else:
            scope, x, state = nullcontext(), self.x, self.state
        block = self.stack.blocks[i]
        prepare: Any = getattr(block, "prepare", None)
        if prepare is not None:
            prepare(self.layout)
        recompute = self.stack.checkpoint and self.span is not None and torch.is_grad_enabled()
        with scope:
            args = (block, x, cond, self.layout, state)
            if recompute:
                self.x, self.state = checkpoint(call, *args, use_reentrant=False)
            else:
                self.x, self.state = call(*args)

    def close(self, i: int) -> None:
        """End what ends after block `i`.

        Args:
            i: Index of the block that ran.
        """
        span = self.span
        if span is not None and i == span.segment.end and self.routing.reinsert != "none":
            self._leave(span)
            self.span = None
        if self.reuse is not None and i == self.reuse.end:
            if self.reuse.replaying:
                assert self.reuse.delta is not None
                self.x = self.x + self.reuse.delta
            else:
                self.reuse.delta = self.x - self.entered

    def tap(self, full: bool) -> tuple[Tensor, Layout]:
        """Return the current tokens and their layout; with `full`, those of all tokens.

        Args:
            full: Fill in the tokens that skip, in their state from the span's start.
        """
        span = self.span
        if not full or span is None or not span.gathered:
            return self.x, self.layout
        assert span.move is not None and span.bypass is not None and span.outer is not None
        return span.move.put(span.bypass, self.x), span.outer

    def _gather(self, span: Span) -> None:
        assert span.move is not None and span.inner is not None
        self.x = span.move.take(self.x)
        self.state = {key: span.move.take(value) for key, value in self.state.items()}
        self.layout, span.gathered = span.inner, True
        self.stack.moves["gather"] += 1

    def _leave(self, span: Span) -> None:
        assert span.bypass is not None and span.outer is not None
        if span.routed and not span.gathered:
            self._gather(span)
        move, bypass = span.move, span.bypass
        if span.gate is not None:
            before, gate = (bypass, span.gate) if move is None else _take(move, bypass, span.gate)
            self.x = before + gate * (self.x - before)
        if self.stack.fuse is not None:
            after = None if span.segment.start in self.skipped else self.x
            self.x = self.stack.fuse(bypass, after, move, self._path_drop())
        elif move is not None:
            if self.routing.reinsert == "sum_input" and span.segment.start > 0:
                bypass = bypass + self.input
            self.x = move.put(bypass, self.x)
        if move is not None:
            self.state = {
                key: move.put(_base(span, key, value), value) for key, value in self.state.items()
            }
            self.stack.moves["scatter"] += 1
            self.fp32_next = self.stack.fp32_after
        self.layout = span.outer

    def _choose(self, span: Span) -> Layout:
        """Decide who stays in a span."""
        outer, k, routing = self.layout, span.k, self.routing
        mode, keep = routing.selection, keep_count(outer.tokens, span.segment.rate)
        ids = routing.ids[k] if routing.ids is not None and k < len(routing.ids) else None
        if ids is None and span.gate is not None and self.stack.router is not None:
            ids = self.stack.router.choose(span.gate, outer.prefix, keep)
        if ids is None:
            ids = mode.ids(self._draws(), k, outer.grid, keep, outer.ids)
        rows = 1 if ids.dim() == 1 else ids.shape[0]
        if rows not in (1, self.x.shape[0]):
            raise RoutingError(
                f"route {routing.route}: {rows} rows of ids for a batch of {self.x.shape[0]}; give "
                "each sample a row, or all of them one"
            )
        if mode.mode != "unsorted":
            return outer.subset(ids)
        return outer.subset(ids, mode.shuffle(self._draws(), k, ids.shape[-1]))

    def _draws(self) -> Draws:
        if self.routing.draws is None:
            raise RoutingError(
                f"route {self.routing.route}: neither draws nor ids say which tokens stay"
            )
        return self.routing.draws

    def _path_drop(self) -> Tensor | None:
        share = self.routing.path_drop
        if share <= 0 or share >= 1:
            return None
        return self._draws().uniform("path", 1)[:, 0] < share

    def _skipped(self) -> range:
        """Blocks that this pass leaves out."""
        fuse, reuse = self.stack.fuse, self.reuse
        if reuse is not None:
            if reuse.end >= self.stack.depth:
                raise RoutingError(
                    f"reuse {reuse.start}-{reuse.end}: the last block is {self.stack.depth - 1}"
                )
            if self.spans or any(_carries(block) for block in self.stack.blocks):
                raise RoutingError(
                    "block outputs are reused in dense passes of blocks that carry no state"
                )
            return range(reuse.start, reuse.end + 1) if reuse.replaying else range(0)
        if fuse is not None and self.routing.path_drop >= 1:
            return range(fuse.segment.start, fuse.segment.end + 1)
        return range(0)


def call(
    block: nn.Module, x: Tensor, cond: Any, layout: Layout, state: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run one block on its own copy of the state, so that a recomputation changes nothing.

    Args:
        block: The block.
        x: Tokens.
        cond: Conditioning.
        layout: Which tokens.
        state: What blocks carry.

    Returns:
        Tokens and the new state.
    """
    if not _carries(block):
        return block(x, cond, layout), state
    state = dict(state)
    return block(x, cond, layout, state), state


def _carries(block: nn.Module) -> bool:
    return bool(getattr(block, "carries", ()))


def _take(move: Move, *values: Tensor) -> tuple[Tensor, ...]:
    return tuple(move.take(value) for value in values)


def _base(span: Span, key: str, value: Tensor) -> Tensor:
    """What routed tokens carry on: their value from the start, zeros if there was none."""
    if key in span.bypass_state:
        return span.bypass_state[key]
    assert span.outer is not None
    return value.new_zeros(value.shape[0], span.outer.length, *value.shape[2:])


def _float(value: Any) -> Any:
    """Cast floating tensors to float32, in containers too."""
    if isinstance(value, Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _float(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_float, value))
    if isinstance(value, tuple | list):
        return type(value)(map(_float, value))
    return value


def _spans(stack: Stack, routing: Routing) -> list[Span]:
    """Resolve the route against the stack, with its learned span if it has one."""
    route = routing.route.resolve(stack.depth)
    check_words(routing.reinsert, routing.remove, route, routing.random_end)
    segments = [_random_end(routing, k, segment) for k, segment in enumerate(route.segments)]
    spans = [Span(s, k, routing.drop_before(s)) for k, s in enumerate(segments)]
    learned = stack.fuse or stack.router
    if learned is None:
        return spans
    fixed = learned.segment
    if not spans:
        return [Span(fixed, 0, fixed.end + 1, routed=False)]
    if len(spans) > 1 or (segments[0].start, segments[0].end) != (fixed.start, fixed.end):
        raise RoutingError(
            f"route {route}: this model's learned span is {fixed.span}; try route={fixed.span}"
        )
    if routing.reinsert != "identity":
        raise RoutingError(f"reinsert {routing.reinsert}: a learned span has its own; try identity")
    return spans


def _random_end(routing: Routing, k: int, segment: Segment) -> Segment:
    if not routing.random_end:
        return segment
    if routing.draws is None:
        raise RoutingError("random_end needs draws")
    count = segment.end - segment.start + 1
    end = segment.start + int(routing.draws.scalar(f"end.{k}") * count)
    return Segment(segment.start, end, segment.rate)
