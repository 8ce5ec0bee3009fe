"""SPRINT's fusion (arXiv 2510.21986): a learned part around one fixed span of blocks.

It acts in dense passes too, or training and sampling would be different functions.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from routing.errors import require
from routing.layout import Move
from routing.route import Route, RouteError


class Fuse(nn.Module):
    """Fuse the tokens from before a span with those that come out of it.

    `Linear(concat(before, after))`, where `after` has a learned [MASK] vector for each token that
    skipped the span. The weight starts as the mean of the two, our choice: the stream then keeps
    its scale.

    Args:
        width: D.
        route: The span, a single segment.
        depth: Number of blocks.
    """

    def __init__(self, width: int, route: Route | str, depth: int) -> None:
        super().__init__()
        segments = Route.parse(route).resolve(depth).segments
        message = f"route={route}: a learned span is a single segment; try route=2--4"
        require(len(segments) == 1, message, RouteError)
        self.segment = segments[0]
        self.mask = nn.Parameter(torch.empty(width).normal_(std=0.02))
        self.linear = nn.Linear(2 * width, width)
        with torch.no_grad():
            self.linear.weight.copy_(torch.eye(width).repeat(1, 2) / 2)
            self.linear.bias.zero_()

    def forward(
        self, before: Tensor, after: Tensor | None, move: Move | None, drop: Tensor | None
    ) -> Tensor:
        """Return the fused tokens, in the type of `before`.

        Args:
            before: State at the span's start, `(B, T, D)`.
            after: Tokens that came out of the span, `(B, T', D)`; None if it was left out.
            move: Which tokens those are; None for all of them.
            drop: Samples whose span is left out, bool `(B,)`.

        Returns:
            Tokens `(B, T, D)`.
        """
        sparse = self.mask.to(before.dtype).expand_as(before)
        if after is not None:
            full = after if move is None else move.put(sparse, after)
            sparse = full if drop is None else torch.where(drop.view(-1, 1, 1), sparse, full)
        # A dense pass has no [MASK]; data parallelism still wants a gradient, of zero, for it.
        bias = self.linear.bias + 0 * self.mask
        joined = functional.linear(torch.cat((before, sparse), -1), self.linear.weight, bias)
        return joined.to(before.dtype)  # autocast's products are narrower than the stream
