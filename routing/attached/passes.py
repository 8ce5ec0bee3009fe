"""Which forward pass a hook belongs to, also when activation checkpointing runs it again.

In a recomputation, blocks run once more during the backward pass, alone or in groups, in reverse,
perhaps for several passes that are waiting for their gradients. A checkpoint keeps the input of its
first block, so the storage of that tensor identifies the pass; the blocks after it in the same
group follow in order. Compilers must not trace any of this: they would specialise on it.
"""

import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from routing.attached.keep import AttachError, KeptTokens
from routing.rng import Draws
from routing.route import Route

_REMEMBERED = 4096  # block inputs; an entry is a weak reference and at most two passes
_WAITING = 8  # passes without gradients yet; more than one is already ambiguous
_KEPT = "routing.attach"
_REENTRANT = (
    "reentrant activation checkpointing loses the gradient of tokens that skip; use "
    "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
)
_GONE = (
    "activation checkpointing recomputes the end of a route without its beginning, and the tokens "
    "that skipped are gone, as no gradient goes through them; checkpoint each block by itself"
)
_SHARED_INPUT = (
    "a block is recomputed whose input several passes share that wait for their gradients; call "
    "backward after each pass, or give each a copy of the input"
)
_COPIED_INPUT = (
    "a block is recomputed from a copy of its input while several passes wait for their gradients; "
    "call backward after each pass"
)
_Address = tuple[int, int]  # of a tensor's storage, and the offset in it


class Skipped(list[Any]):
    """All tokens at the start of a segment, then what blocks hand on; can be referenced weakly."""


@dataclass(eq=False)
class ForwardPass:
    """State of one forward pass.

    Attributes:
        step: Its number, among the routed ones.
        grads: Whether it began with gradients.
        routed: Whether tokens are routed in it, known once a route starts.
        route: Its route, from then on.
        last: Last block that it entered.
        task: The backward pass that runs it again; None in the forward pass.
        replayed: Whether some of it was run again.
        finished: Whether it was run again before a later pass began.
        kept: The tokens that stayed in each segment.
        skipped: All tokens, and what blocks hand on, at the start of the segment that is open:
            those that skip return to it.
        skipped_refs: The same of closed segments, for as long as autograd's graph lives.
        closed_without_grad: Segments that were closed without gradients.
        next_block: Which block came after each; a model may leave some out.
        late_ends: Segment by the block before which it was closed, as its last one was left out.
        tables: Gathered tables, beside what they were gathered from.
    """

    step: int
    grads: bool
    routed: bool = False
    route: Route | None = None
    last: int = -1
    task: int | None = None
    replayed: bool = False
    finished: bool = False
    kept: dict[int, KeptTokens] = field(default_factory=dict)
    skipped: dict[int, Skipped] = field(default_factory=dict)
    skipped_refs: dict[int, weakref.ref[Skipped]] = field(default_factory=dict)
    closed_without_grad: set[int] = field(default_factory=set)
    next_block: dict[int, int] = field(default_factory=dict)
    late_ends: dict[int, int] = field(default_factory=dict)
    tables: dict[tuple, tuple[Any, Any]] = field(default_factory=dict)

    def draws(self, seed: int, batch: int, device: torch.device) -> Draws:
        """Return the pass's random numbers for this process's samples."""
        return Draws(seed, self.step, torch.arange(batch, device=device) + _rank() * batch)

    def open(self, k: int, values: list[Any]) -> list[Any]:
        """Begin segment `k`: take its rows `(B, K, ...)` of the tokens and what blocks hand on."""
        self.skipped[k] = Skipped(values)
        take = self.kept[k].move.take
        return [None if value is None else take(value) for value in values]

    def close(self, k: int, values: list[Any]) -> list[Any]:
        """End segment `k`: put its rows `(B, K, ...)` back among the others, `(B, T, ...)`.

        What was not there at the segment's start is 0 for the tokens that skipped.

        Raises:
            AttachError: If this is a recomputation and the others are gone.
        """
        base = self.skipped.pop(k, None)
        self.tables.clear()
        if base is None and k in self.skipped_refs:
            # A recomputation of a group of blocks that begins inside the route.
            base = self.skipped_refs[k]()
        if base is None:
            raise AttachError(_REENTRANT if k in self.closed_without_grad else _GONE)
        kept, out = self.kept[k], list[Any]()
        for before, value in zip(base, values, strict=True):
            if value is not None and before is None:
                before = value.new_zeros(len(value), kept.length, *value.shape[2:])
            out.append(value if value is None else kept.move.put(before, value))
        node: Any = out[0].grad_fn
        if self.task is None and not torch.is_grad_enabled():
            self.closed_without_grad.add(k)
        elif self.task is None and node is not None:
            # The node lives as long as a backward pass may ask for a recomputation, no longer.
            node.metadata[_KEPT] = base
            self.skipped_refs[k] = weakref.ref(base)
        return out

    @property
    def waits(self) -> bool:
        """Whether a backward pass through it may still come."""
        alive = not self.skipped_refs or any(
            ref() is not None for ref in self.skipped_refs.values()
        )
        return (self.grads or self.routed) and not self.finished and alive


class Passes:
    """The passes of one attachment, by thread (one for each replica) and by block input.

    Attributes:
        step: Number of the next routed pass.
    """

    def __init__(self, step: int = 0) -> None:
        self.step = step
        self._forward: dict[int, ForwardPass] = {}
        self._replay: dict[int, ForwardPass] = {}
        self._seen: OrderedDict[_Address, tuple[StorageWeakRef, list[ForwardPass]]] = OrderedDict()
        self._waiting: list[ForwardPass] = []

    def enter(self, i: int, x: Any, routed: bool) -> ForwardPass | None:
        """Return the pass that block `i` is being run for; None if it routes nothing.

        Its input x identifies a pass that is recomputed; `routed` says that a route starts here.
        """
        x = x if isinstance(x, Tensor) else torch.empty(0)  # has no memory to identify it by
        if recomputing():
            now = self._recompute(i, x)
        else:
            now = self._advance(i, routed)
            self._remember(x, now)
        if now is None:
            return None
        now.last = i
        return now if now.routed else None

    def current(self) -> ForwardPass | None:
        """Return the pass that the calling thread is in; None if it routes nothing."""
        now = (self._replay if recomputing() else self._forward).get(threading.get_ident())
        return now if now is not None and now.routed else None

    def _advance(self, i: int, routed: bool) -> ForwardPass:
        """Continue the thread's pass, or begin one where the blocks begin again."""
        thread = threading.get_ident()
        now = self._forward.get(thread)
        if now is None or i <= now.last:
            if now is not None and now.skipped:  # an error inside a route ended it
                now.finished, now.skipped = True, {}
            now = self._forward[thread] = ForwardPass(self.step, torch.is_grad_enabled())
            self._replay.pop(thread, None)  # a recomputation may stop early and keep its tokens
            self._forget_finished()
            self._waiting = [*self._waiting[1 - _WAITING :], now]
        else:
            now.next_block[now.last] = i
        if routed and not now.routed:
            now.routed, now.step = True, self.step
            self.step += 1
        return now

    def _forget_finished(self) -> None:
        """Forget inputs that are gone, and passes that no backward pass can ask for again."""
        for key, (ref, _) in list(self._seen.items()):
            if ref.expired():
                del self._seen[key]
        any_replayed = any(p.replayed for p in self._waiting)
        for p in self._waiting:
            # A dense pass keeps nothing that says whether its graph is still there.
            p.finished |= p.replayed or (any_replayed and not p.skipped_refs)
        self._waiting = [p for p in self._waiting if p.waits]

    def _remember(self, x: Tensor, now: ForwardPass) -> None:
        """Note that a pass got this input; dense passes too, as they are recomputed densely."""
        key, ref = _address(x)
        _, before = self._seen.pop(key, (ref, []))
        earlier = [p for p in before if p is not now and p.waits]
        self._seen[key] = ref, [*earlier[-1:], now]
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)

    def _recompute(self, i: int, x: Tensor) -> ForwardPass | None:
        """Find the pass that is being run again."""
        thread, task = threading.get_ident(), torch._C._current_graph_task_id()
        key, ref = _address(x)
        _, same_input = self._seen.get(key, (ref, []))  # passes that got this very tensor
        now = self._replay.get(thread)
        if (
            not same_input
            and now is not None
            and now.task == task
            and i == now.next_block.get(now.last)
        ):
            return now  # the next block of the same group
        waiting = [p for p in same_input or self._waiting if p.waits]
        if len(waiting) > 1:
            raise AttachError(_SHARED_INPUT if same_input else _COPIED_INPUT)
        if not waiting and not same_input:
            return None
        original = waiting[0] if waiting else same_input[-1]
        original.replayed = True
        self._replay[thread] = replace(original, task=task, skipped={}, tables={})
        return self._replay[thread]


def _address(x: Tensor) -> tuple[_Address, StorageWeakRef]:
    """Return what identifies a tensor's memory for as long as the weak reference is held."""
    ref = StorageWeakRef(x.untyped_storage())
    return (ref.cdata, int(x.storage_offset())), ref


def recomputing() -> bool:
    """Whether this runs inside a backward pass."""
    return torch._C._current_graph_task_id() != -1


def _rank() -> int:
    group = torch.distributed
    return group.get_rank() if group.is_available() and group.is_initialized() else 0
