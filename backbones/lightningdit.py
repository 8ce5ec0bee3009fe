"""LightningDiT (Yao et al., arXiv 2501.01423): RMSNorm, SwiGLU, QK-norm, rotary positions.

The rotary table has a row per place of the full grid; inside a route its rows are gathered with the
tokens. XL/1 on VA-VAE latents (32 channels, 16x16) has 675M parameters, as DiT-XL/2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from backbones.dit import Attention
from backbones.layers import Block, RMSNorm, SwiGLU
from backbones.registry import register
from backbones.sizes import Size
from routing.moves import Reorder, permute

if TYPE_CHECKING:
    from routing.layout import Layout


@register("lightningdit")
class LightningDiTBlock(Block):
    """Attention, then SwiGLU of hidden width 8/3 D, each behind an RMSNorm with weights."""

    head_norm = RMSNorm

    @dataclass(frozen=True)
    class Options:
        """Options of the family `lightningdit`.

        Attributes:
            rope: Rotate queries and keys by grid position.
            qk_norm: RMS-normalise queries and keys.
        """

        rope: bool = True
        qk_norm: bool = True

    def __init__(self, size: Size, index: int, grid: tuple[int, int], options: Options) -> None:
        super().__init__(index)
        width = size.width
        self.norms = nn.ModuleList(RMSNorm(width) for _ in range(2))
        self.attention = Attention(width, size.heads, grid, options.rope, options.qk_norm)
        self.mlp = SwiGLU(width, int(8 * width / 3))

    def norm(
        self, branch: int, x: Tensor, shift: Tensor, scale: Tensor, order: Reorder | None
    ) -> Tensor:
        """Normalise and modulate the input of branch 0 or 1, and put it into its scan order."""
        return permute(torch.addcmul(shift, self.norms[branch](x), scale + 1), order)

    def first(self, x: Tensor, layout: Layout) -> Tensor:
        """Attend."""
        return self.attention(x, layout)

    def second(self, x: Tensor, layout: Layout) -> Tensor:
        """Run the MLP."""
        return self.mlp(x)
