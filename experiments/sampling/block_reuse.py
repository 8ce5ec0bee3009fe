"""Training-free reuse of block outputs between sampling steps.

Neighbouring blocks and neighbouring sampling steps compute nearly the same (TREAD, Figure 4: the
similarity that routing exploits in training). Blocks i..j run at every n-th evaluation only; in
between, what they added to the tokens the last time is added again (`routing.stack.Reuse`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

from experiments.diffusion.diffusion_options import DiffusionError, SamplerOptions
from routing.route import Route
from routing.stack import Reuse


@dataclass
class ReusePlan:
    """Which evaluations compute blocks `start..end`, and what they left behind."""

    start: int  # first block that is reused
    end: int  # last one, included
    every: int  # compute them at every n-th evaluation
    _computed: dict[Hashable, int] = field(default_factory=dict)
    _kept: dict[Hashable, Any] = field(default_factory=dict)

    @property
    def blocks(self) -> tuple[int, ...]:
        """Indices of the blocks."""
        return tuple(range(self.start, self.end + 1))

    def replays(self, evaluation: int, key: Hashable) -> bool:
        """Return whether an evaluation reuses; if not, it counts as computed.

        `key` tells passes apart: a batch of another size or model has nothing to reuse.
        """
        last = self._computed.get(key)
        if last is not None and evaluation - last < self.every:
            return True
        self._computed[key] = evaluation
        return False

    @contextlib.contextmanager
    def run(self, model: Any, evaluation: int, key: Hashable) -> Iterator[None]:
        """Let the stack of `model` record or replay in this block, whatever calls it."""
        kept = self._kept.setdefault(key, Reuse(self.start, self.end))
        reuse = kept.replay() if self.replays(evaluation, key) else kept.record()

        def add(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return args, {**kwargs, "reuse": reuse}

        hook = model.stack.register_forward_pre_hook(add, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()


def plan_reuse(options: SamplerOptions, depth: int, sparse: bool = False) -> ReusePlan | None:
    """Return a new plan for one trajectory, or None without reuse; a `sparse` guidance has none.

    `options.reuse` names the blocks as a route does (`4-9`, `2--3`).
    """
    if options.reuse in (None, "none") or options.reuse_every == 1:
        return None
    segments = Route.parse(options.reuse).resolve(depth).segments
    if len(segments) != 1 or "@" in str(options.reuse):
        raise DiffusionError(
            f"sampler.reuse={options.reuse}: one stretch of blocks is needed, such as "
            f"2-{max(depth - 3, 2)}"
        )
    if sparse:
        raise DiffusionError(
            f"sampler.reuse={options.reuse} needs dense passes, and this guidance drops tokens or "
            "blocks; use one of the two"
        )
    return ReusePlan(segments[0].start, segments[0].end, options.reuse_every)
