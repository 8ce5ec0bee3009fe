"""Which forward pass a hook belongs to, also when activation checkpointing runs it again.

In a recomputation, blocks run once more during the backward pass, alone or in groups, in reverse,
perhaps for several passes that are waiting for their gradients. A checkpoint keeps the input of its
first block, so that tensor's address identifies the pass; the blocks behind it in the same group
follow in order.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from routing.foreign import AttachError
from routing.layout import Layout
from routing.moves import Move

_REMEMBERED = 4096  # block inputs; an entry is an address and a few indices


@dataclass
class Pass:
    """What one forward pass decided.

    Attributes:
        step: Its number, among the routed ones.
        routed: Whether tokens are routed in it.
        grads: Whether it ran with gradients.
        last: Last block that it entered.
        open: The segment that is open.
        moves: The gather of each segment, prefix included.
        rows: The same for tables of the grid's tokens.
        layouts: Who stayed in each segment.
        bypass: All tokens at the start of the segment that is open.
        tables: Gathered tables, beside what they were gathered from.
    """

    step: int
    routed: bool
    grads: bool
    last: int = -1
    open: int | None = None
    moves: dict[int, Move] = field(default_factory=dict)
    rows: dict[int, Move] = field(default_factory=dict)
    layouts: dict[int, Layout] = field(default_factory=dict)
    bypass: dict[int, Tensor] = field(default_factory=dict)
    tables: dict[tuple, tuple[Any, Any]] = field(default_factory=dict)


class Passes:
    """The passes of one attachment, by thread (one for each replica) and by block input.

    Attributes:
        step: Number of the next routed pass.
    """

    def __init__(self) -> None:
        self.step = 0
        self._forward: dict[int, Pass] = {}
        self._replay: dict[int, Pass] = {}
        self._seen: OrderedDict[int, Pass] = OrderedDict()
        self._waiting: list[Pass] = []
        self._replayed = False

    def enter(self, i: int, x: Tensor, routed: bool) -> Pass | None:
        """Return the pass that block `i` is being run for; None if it routes nothing.

        Args:
            i: Index of the block.
            x: The block's input.
            routed: Whether a pass that begins here routes tokens.
        """
        compiling = torch.compiler.is_compiling()
        if not compiling and recomputing():
            now = self._recompute(i, x)
        else:
            now = self._advance(i, routed, 0 if compiling else threading.get_ident())
            if not compiling:
                # Dense passes too: a recomputation of one must not be taken for a routed one.
                self._seen[x.data_ptr()] = now
                if len(self._seen) > _REMEMBERED:
                    self._seen.popitem(last=False)
        if now is None:
            return None
        now.last = i
        return now if now.routed else None

    def current(self) -> Pass | None:
        """Return the pass that the calling thread is in; None if it routes nothing."""
        compiling = torch.compiler.is_compiling()
        again = not compiling and recomputing()
        thread = 0 if compiling else threading.get_ident()
        now = (self._replay if again else self._forward).get(thread)
        return now if now is not None and now.routed else None

    def _advance(self, i: int, routed: bool, thread: int) -> Pass:
        """Continue the thread's pass, or begin one where the blocks begin again."""
        now = self._forward.get(thread)
        if now is None or i <= now.last:
            now = self._forward[thread] = Pass(self.step, routed, torch.is_grad_enabled())
            self._replay.pop(thread, None)  # a recomputation may stop early and keep its tokens
            if now.grads or routed:
                self._waiting = [now] if self._replayed else [*self._waiting[-7:], now]
                self._replayed = False
            self.step += routed
        return now

    def _recompute(self, i: int, x: Tensor) -> Pass | None:
        """Find the pass that is being run again."""
        thread = threading.get_ident()
        self._replayed = True
        now = self._replay.get(thread)
        if now is not None and i == now.last + 1:
            return now  # the next block of the same group
        found = self._seen.get(x.data_ptr())
        if found is None and len(self._waiting) == 1:
            found = self._waiting[0]
        if found is None and self._waiting:
            raise AttachError(
                "a block is recomputed from a copy of its input while several passes wait for "
                "their gradients; call backward after each pass"
            )
        if found is None:
            return None
        if not found.grads and torch.is_grad_enabled():
            raise AttachError(
                "reentrant activation checkpointing loses the gradient of tokens that skip; use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        self._replay[thread] = replace(found, open=None, bypass={}, tables={})
        return self._replay[thread]


def recomputing() -> bool:
    """Whether this runs inside a backward pass."""
    return torch._C._current_graph_task_id() != -1
