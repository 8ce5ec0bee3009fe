"""The way out: the head that predicts patches, and learned parts that some baselines add.

* `Head`: DiT's final layer (arXiv 2212.09748).
* `Decoder`: MaskDiT (arXiv 2306.09305). Tokens that were dropped for good come back as a learned
  mask token, and a small DiT predicts every patch.
* `Projector`: REPA (arXiv 2410.06940). Maps a block's tokens to the width of a frozen encoder's
  features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from backbones.dit import DiTBlock
from backbones.dit_spec import DiTOptions
from backbones.embeddings import sincos_2d
from backbones.head_options import AlignOptions, DecoderOptions
from backbones.layers import Modulation, RMSNorm, xavier
from backbones.ops.native import adaln
from backbones.sizes import Size
from routing.layout import Layout, Move
from routing.stack import Stack


class Head(nn.Module):
    """AdaLN and a linear layer, both zero at init: tokens (B, N, D) -> rows (B, N, p p C).

    It is `weighted` where its norm is an RMSNorm with weights, not a LayerNorm without.
    """

    def __init__(self, width: int, patch: int, channels: int, weighted: bool = False) -> None:
        super().__init__()
        self.norm = RMSNorm(width) if weighted else None
        self.modulate = Modulation(width, 1, 2)
        self.project = nn.Linear(width, patch * patch * channels)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        """Predict patches from grid tokens and the conditioning vector."""
        shift, scale = self.modulate(c)[0].unbind(1)
        return self.project(adaln(x, shift, scale, norm=self.norm))

    def initialise(self) -> None:
        """Zero it, so that the untrained model predicts 0 everywhere (DiT)."""
        self.modulate.initialise()
        nn.init.zeros_(self.project.weight)
        nn.init.zeros_(self.project.bias)


class Projector(nn.Module):
    """Tokens of one block -> features of an encoder: (B, T, D) -> (B, T, channels)."""

    def __init__(self, width: int, given: AlignOptions) -> None:
        super().__init__()
        self.block = given.block
        self.mlp = nn.Sequential(
            nn.Linear(width, given.hidden),
            nn.SiLU(),
            nn.Linear(given.hidden, given.hidden),
            nn.SiLU(),
            nn.Linear(given.hidden, given.channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Project tokens (B, T, D)."""
        return self.mlp(x)

    def initialise(self) -> None:
        """Draw the weights."""
        xavier(self)


class Decoder(nn.Module):
    """A small DiT over all tokens, mask tokens where the backbone has none; it ends in a head."""

    positions: Tensor

    def __init__(
        self, width: int, given: DecoderOptions, grid: tuple[int, int], patch: int, channels: int
    ) -> None:
        super().__init__()
        size = Size("custom", given.depth, given.width, given.heads, patch)
        self.norm = Head(width, 1, given.width)
        self.mask = nn.Parameter(torch.zeros(given.width))
        table = sincos_2d(given.width, grid)
        self.register_buffer("positions", table, persistent=False)
        self.condition = nn.Linear(width, given.width)
        self.modulate = Modulation(given.width, given.depth)
        blocks = [DiTBlock(size, b, grid, DiTOptions()) for b in range(given.depth)]
        self.stack = Stack(blocks)
        self.head = Head(given.width, patch, channels)

    def forward(self, x: Tensor, c: Tensor, move: Move | None, layout: Layout) -> Tensor:
        """Predict patches.

        Args:
            x: Tokens of the backbone (B, T', D), prefix first.
            c: Conditioning vector (B, D).
            move: Which of the full sequence's tokens they are; None for all of them.
            layout: Of the full sequence.

        Returns:
            Rows (B, N, p p C) for every grid token.
        """
        x = self.norm(x, c)
        if move is not None:
            x = move.put(self.mask.to(x.dtype).expand(x.shape[0], layout.length, -1), x)
        elif self.training:
            x = x + 0 * self.mask.to(x.dtype)  # data parallelism wants a gradient, of zero, for it
        x = torch.cat([x[:, : layout.prefix], x[:, layout.prefix :] + self.positions], dim=1)
        c = self.condition(c)
        x = self.stack(x, self.modulate(c), layout).x
        return self.head(x[:, layout.prefix :], c)

    def initialise(self) -> None:
        """Draw the weights; gates and head start at zero, the way in does not."""
        blocks: Any = self.stack.blocks
        for block in blocks:
            block.initialise()
        xavier(self.norm.project, self.condition)
        nn.init.normal_(self.mask, std=0.02)
        self.norm.modulate.initialise()
        self.modulate.initialise()
        self.head.initialise()
