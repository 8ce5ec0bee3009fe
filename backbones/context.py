"""In-context class tokens (JiT, Li and He, arXiv 2511.13720).

From block `start` on, the tokens (`backbones.heads.ContextTokens`) precede all others; they are
removed before the head. JiT has 32 of them, from a third of the depth on (block 4 of 12 in B, 8 of
24 in L; 10 of 32 in H), in addition to the class in adaLN. Its rotary positions skip them, as ours
skip every prefix token.

Here they are in the sequence from the beginning, and the blocks before `start` run without them.
To a route they are prefix tokens, which it never removes.
"""

from typing import Any

import torch
from torch import Tensor, nn

from backbones.sizes import BackboneError
from routing.layout import Layout
from routing.stack import prepare


class WithoutContext(nn.Module):
    """A block before `start`: it runs without the class tokens, which pass unchanged.

    Args:
        block: The block inside.
        count: Class tokens, the first of the prefix.

    Attributes:
        kernels: Of the block inside (`backbones.layers.Block`).
    """

    def __init__(self, block: Any, count: int) -> None:
        super().__init__()
        self.block, self.count = block, count
        self.kernels = block.kernels

    def prepare(self, layout: Layout) -> None:
        """Compute the layout without the class tokens, and the tables that the block looks up."""
        prepare([self.block], self._without(layout))

    def forward(self, x: Tensor, cond: Tensor, layout: Layout) -> Tensor:
        """Run the block on all tokens (B, T, D) but the class tokens."""
        y = self.block(x[:, self.count :], cond, self._without(layout))
        return torch.cat((x[:, : self.count], y), dim=1)

    def _without(self, layout: Layout) -> Layout:
        key = ("without context", str(self.count))
        if key not in layout.tables:
            prefix = layout.prefix - self.count
            layout.tables[key] = Layout(
                layout.grid, layout.ids, prefix, layout.shuffle, layout.device
            )
        return layout.tables[key]

    def initialise(self) -> None:
        """Initialise the block."""
        self.block.initialise()


def with_context(blocks: list[nn.Module], count: int, start: int) -> list[nn.Module]:
    """Let the first `start` blocks run without the class tokens.

    Raises:
        BackboneError: The blocks carry per-token tensors, which later tokens would lack.
    """
    if any(getattr(block, "carries", ()) for block in blocks):
        raise BackboneError(
            f"context_tokens={count}: expected 0 for blocks that hand per-token tensors on"
        )
    return [WithoutContext(block, count) for block in blocks[:start]] + blocks[start:]
