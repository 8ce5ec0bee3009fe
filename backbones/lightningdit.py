"""LightningDiT (Yao et al., arXiv 2501.01423): RMSNorm, SwiGLU, QK-norm, rotary positions.

The rotary table has a row for each patch of the full grid; inside a route its rows are gathered
with the tokens. XL/1 on VA-VAE latents (32 channels, 16x16) has 675M parameters, as DiT-XL/2.
"""

from torch import Tensor, nn

from backbones.dit import Attention
from backbones.layers import Block, RMSNorm, SwiGLU
from backbones.ops.native import OPERATIONS, modulate
from backbones.options.lightningdit import LightningDiTOptions, swiglu_width
from backbones.sizes import Size
from routing.layout import Layout


class LightningDiTBlock(Block):
    """Attention, then SwiGLU of hidden width 8/3 D, each behind an RMSNorm with weights."""

    def __init__(
        self, size: Size, index: int, grid: tuple[int, int], options: LightningDiTOptions
    ) -> None:
        super().__init__(index)
        self.norms = nn.ModuleList([RMSNorm(size.width), RMSNorm(size.width)])
        self.attention = Attention(size.width, size.heads, grid, options)
        self.mlp = SwiGLU(size.width, swiglu_width(size.width))

    def forward(self, x: Tensor, cond: Tensor, layout: Layout) -> Tensor:
        """Run the block on tokens (B, T, D) under its modulation (B, 6, 1, D)."""
        ops = OPERATIONS[x.device.type]
        shift1, scale1, gate1, shift2, scale2, gate2 = cond.unbind(1)
        y = self.attention(modulate(self.norms[0](x), shift1, scale1), layout)
        x = ops.gated_sum(x, gate1, y)
        y = self.mlp(modulate(self.norms[1](x), shift2, scale2), layout)
        return ops.gated_sum(x, gate2, y)
