"""Long skip connections (U-ViT, arXiv 2209.12152; DiS 2402.05608; Diffusion-RWKV 2404.04478).

Of `depth` blocks, the output of block i < depth // 2 is stored, and block depth - 1 - i gets

    x = Linear(concat(x, stored output of block i))

The stack carries the stored output along like the tokens, so skips work across routes. If a route
starts between the two blocks, the stored output is gathered by the same ids. If it ends between
them, a token that bypassed block i contributes its own state from before the route, as if block i
were the identity (`routing.routed_pass.Tokens.scatter_state`).
"""

from typing import Any

import torch
from torch import Tensor, nn

from routing.layout import Layout
from routing.routed_pass import SKIP


class LongSkipBlock(nn.Module):
    """A block that stores its output for its partner, or takes its partner's.

    Args:
        block: The block inside.
        index: Its index.
        depth: Number of blocks.
        width: Channels D.

    Attributes:
        carries: Keys of the per-token tensors that it reads or writes (`routing.stack`).
        join: The layer that joins input and stored output; None in the first half.
    """

    def __init__(self, block: Any, index: int, depth: int, width: int) -> None:
        super().__init__()
        self.block = block
        self.key = f"{SKIP}{min(index, depth - 1 - index)}"
        self.carries = (self.key, *getattr(block, "carries", ()))
        self.scans, self.tables = block.scans, block.tables
        self.kernels = block.kernels
        is_second_half = index >= depth - depth // 2
        self.join = nn.Linear(2 * width, width) if is_second_half else None

    def forward(self, x: Tensor, cond: Tensor, layout: Layout, state: dict[str, Tensor]) -> Tensor:
        """Run the block on tokens (B, T, D); `state` has the carried tensors."""
        if self.join is not None:
            stored = state.pop(self.key)
            # Autocast's products are narrower than the stream.
            x = self.join(torch.cat((x, stored.to(x.dtype)), -1)).to(x.dtype)
        if len(self.carries) > 1:
            x = self.block(x, cond, layout, state)
        else:
            x = self.block(x, cond, layout)
        if self.join is None:
            state[self.key] = x
        return x

    def initialise(self) -> None:
        """Initialise the block; the join starts as the mean, which keeps the stream's scale."""
        self.block.initialise()
        if self.join is not None:
            width = self.join.out_features
            self.join.weight.copy_(torch.eye(width).repeat(1, 2) / 2)
            nn.init.zeros_(self.join.bias)


def with_long_skips(blocks: list[nn.Module], width: int) -> list[nn.Module]:
    """Connect the first half of the blocks to the second; a middle block has no skip."""
    depth = len(blocks)
    joined = []
    for index, block in enumerate(blocks):
        is_middle = index == depth - 1 - index
        joined.append(block if is_middle else LongSkipBlock(block, index, depth, width))
    return joined
