"""DiT (Peebles and Xie, arXiv 2212.09748): attention and an MLP, both under adaLN-zero.

Attention asks no order of its tokens, so a routed subset needs nothing but its rows of the rotary
table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers import Block, RMSNorm, rope_2d, rotate, rotation
from backbones.registry import register
from backbones.sizes import BackboneError, Size

if TYPE_CHECKING:
    from routing.layout import Layout


class Attention(nn.Module):
    """Multi-head self-attention through torch's fused kernel.

    Args:
        width: Channels D.
        heads: Number of heads.
        grid: Patches (H, W), for the rotary table.
        rope: Rotate queries and keys by their place on the grid.
        qk_norm: RMS-normalise queries and keys per head.
    """

    angles: Tensor | None

    def __init__(
        self, width: int, heads: int, grid: tuple[int, int], rope: bool, qk_norm: bool
    ) -> None:
        super().__init__()
        self.heads = heads
        size = width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.q_norm = RMSNorm(size) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(size) if qk_norm else nn.Identity()
        if rope and size % 4:
            raise BackboneError(
                f"rope=true needs a head size that is a multiple of 4, but width {width} over "
                f"{heads} heads gives {size}; try another heads="
            )
        self.register_buffer("angles", rope_2d(size, grid) if rope else None, persistent=False)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """Let every token (B, T, D) see every other."""
        # Cut along the axis that the projection wrote: the three gradients are then put together
        # in one copy.
        parts = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in parts)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.angles is not None:
            cos_sin = rotation(self.angles, layout)
            q, k = rotate(q, cos_sin), rotate(k, cos_sin)
        out = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v)
        return self.proj(out.transpose(1, 2).flatten(2))


@register("dit")
class DiTBlock(Block):
    """Attention, then an MLP of ratio 4 with tanh-approximated GELU."""

    @dataclass(frozen=True)
    class Options:
        """Options of the family `dit`.

        Attributes:
            rope: Rotate queries and keys by grid position; gathered with the tokens inside a route.
            qk_norm: RMS-normalise queries and keys.
        """

        rope: bool = False
        qk_norm: bool = False

    def __init__(self, size: Size, index: int, grid: tuple[int, int], options: Options) -> None:
        super().__init__(index)
        self.attention = Attention(size.width, size.heads, grid, options.rope, options.qk_norm)
        self.fc1 = nn.Linear(size.width, 4 * size.width)
        self.fc2 = nn.Linear(4 * size.width, size.width)

    def first(self, x: Tensor, layout: Layout) -> Tensor:
        """Attend."""
        return self.attention(x, layout)

    def second(self, x: Tensor, layout: Layout) -> Tensor:
        """Run the MLP."""
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))
