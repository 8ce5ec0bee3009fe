"""DiT (Peebles and Xie, arXiv 2212.09748): attention and an MLP, both under adaLN-zero."""

from torch import Tensor, nn

from backbones.dit_spec import DiTOptions
from backbones.layers import Attention, Block
from backbones.ops.native import gelu
from backbones.sizes import Size
from routing.layout import Layout


class DiTBlock(Block):
    """Attention, then an MLP of ratio 4 with tanh-approximated GELU."""

    branches = ("attention", "mlp")

    def __init__(self, size: Size, index: int, grid: tuple[int, int], options: DiTOptions) -> None:
        super().__init__(index)
        self.attention = Attention(size.width, size.heads, grid, options)
        self.fc1 = nn.Linear(size.width, 4 * size.width)
        self.fc2 = nn.Linear(4 * size.width, size.width)

    def mlp(self, x: Tensor, layout: Layout) -> Tensor:
        """Mix the channels of tokens (B, T, D)."""
        return self.fc2(gelu(self.fc1(x)))
