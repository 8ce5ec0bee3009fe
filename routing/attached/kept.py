"""The tokens of a foreign block's sequence that stay in a route, wherever they are in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from routing.layout import Layout, Move


@dataclass
class KeptTokens:
    """The tokens of a sequence that stay in a route.

    Attributes:
        layout: Where those that may skip are on the grid; the protected ones count as its prefix.
        move: Their gather from the whole sequence of a block, `(B, T, D)`.
        routable_move: Their gather from the tokens that may skip, `(B, N, ...)`.
        length: Length T of the whole sequence.
        front: Class and register tokens at its beginning, all of them protected.
        index: Positions of the tokens that stay, in ascending order, `(1, K)` or `(B, K)`.
    """

    layout: Layout
    move: Move
    routable_move: Move
    length: int
    front: int
    index: Tensor

    @property
    def move_after_front(self) -> Move:
        """Their gather from the sequence without the tokens in front, `(B, T - front, ...)`."""
        return Move(self.index[:, self.front :] - self.front, self.length - self.front)

    @classmethod
    def select(
        cls, outer: Layout, ids: Tensor, positions: Tensor, length: int, front: int
    ) -> KeptTokens:
        """Return the tokens that stay, by their ids among those that may skip.

        Args:
            outer: The layout of all tokens.
            ids: Ids `(K,)`, `(1, K)` or `(B, K)`.
            positions: Where the tokens that may skip are in the sequence, `(1, N)` or `(B, N)`.
            length: Length T of the sequence.
            front: Class and register tokens at its beginning, none of which may skip.
        """
        layout = outer.subset(ids)
        assert layout.ids is not None
        # Either may be shared by all samples; a batch may also have none.
        rows = len(layout.ids) if len(positions) == 1 else len(positions)
        kept_ids = layout.ids.expand(rows, -1)
        may_skip = torch.zeros(rows, length, dtype=torch.bool, device=positions.device)
        may_skip.scatter_(1, positions.expand(rows, -1), True)
        protected_count = length - positions.shape[1]
        protected = may_skip.int().argsort(dim=1, stable=True)[:, :protected_count]
        image = positions.expand(rows, -1).gather(1, kept_ids)
        index = torch.cat((protected, image), 1).sort(1).values
        routable_move = Move(layout.ids, positions.shape[1])
        return cls(layout, Move(index, length), routable_move, length, front, index)
