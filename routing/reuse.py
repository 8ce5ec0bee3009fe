"""Reuse what a stretch of blocks adds, between sampling steps.

Neighbouring steps of a sampler change deep features little. Blocks i..j add `delta = out - in` to
the stream; it is recorded at one step and added again at the next ones, and the blocks are skipped.
"""

from __future__ import annotations

from torch import Tensor

from routing.errors import UserError


class ReuseError(UserError):
    """A replay with nothing recorded, or a stretch that cannot be reused."""


class Reuse:
    """The recorded change of blocks `start..end` (both inclusive) in a dense pass.

    Args:
        start: First block.
        end: Last block.
    """

    def __init__(self, start: int, end: int) -> None:
        if not 0 <= start <= end:
            raise ReuseError(f"reuse {start}-{end}: start must not exceed end, as in 4-8")
        self.start, self.end = start, end
        self.delta: Tensor | None = None
        self.replaying = False

    def record(self) -> Reuse:
        """Make the next passes run the blocks and remember what they add."""
        self.replaying = False
        return self

    def replay(self) -> Reuse:
        """Make the next passes skip the blocks and add what was remembered.

        Raises:
            ReuseError: If nothing was recorded.
        """
        if self.delta is None:
            raise ReuseError(f"reuse {self.start}-{self.end}: nothing was recorded yet")
        self.replaying = True
        return self
