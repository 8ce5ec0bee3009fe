"""What one forward pass does about routes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from routing.options import RoutingError, check_words
from routing.rng import Draws
from routing.route import Route, Segment
from routing.selection import Selection

__all__ = ["Routing", "RoutingError"]


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
        if isinstance(self.ids, Tensor):
            self.ids = (self.ids,)
        check_words(self.reinsert, self.remove, self.route, self.random_end)

    def drop_before(self, segment: Segment) -> int:
        """Index of the first block that sees fewer tokens in a resolved segment.

        Args:
            segment: Of a resolved route; `remove=after:<k>` acts on the segment that holds k.
        """
        if self.remove == "never":
            return segment.end + 1
        if self.remove.startswith("after:"):
            k = int(self.remove.removeprefix("after:"))
            if segment.start <= k <= segment.end:
                return k + 1
        return segment.start
