"""LightningDiT (Yao et al., arXiv 2501.01423): RMSNorm, SwiGLU, QK-norm, rotary positions.

The rotary table has a row per place of the full grid; inside a route its rows are gathered with the
tokens. XL/1 on VA-VAE latents (32 channels, 16x16) has 675M parameters, as DiT-XL/2.
"""

from torch import nn

from backbones.dit import Attention
from backbones.layers import Block, RMSNorm, SwiGLU
from backbones.options.lightningdit import LightningDiTOptions, swiglu_width
from backbones.sizes import Size


class LightningDiTBlock(Block):
    """Attention, then SwiGLU of hidden width 8/3 D, each behind an RMSNorm with weights."""

    branches = ("attention", "mlp")

    def __init__(
        self, size: Size, index: int, grid: tuple[int, int], options: LightningDiTOptions
    ) -> None:
        super().__init__(index)
        self.norms = nn.ModuleList(RMSNorm(size.width) for _ in range(2))
        self.attention = Attention(size.width, size.heads, grid, options)
        self.mlp = SwiGLU(size.width, swiglu_width(size.width))
