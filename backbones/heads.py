"""Everything but the blocks: embedders and modulation, head, decoder, projector.

Shapes: B samples, T present tokens (prefix first), N = H W grid tokens, D channels, C image
channels, p patch side, c the conditioning vector (B, D). The embedders are DiT's (arXiv 2212.09748,
section 3.2). On the output side:

* `Head`: DiT's final layer (arXiv 2212.09748).
* `Decoder`: MaskDiT (arXiv 2306.09305). Tokens that were dropped for good come back as a learned
  mask token, and a small DiT predicts every patch.
* `Projector`: REPA (arXiv 2410.06940). Maps a block's tokens to the width of a frozen encoder's
  features.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.dit import DiTBlock
from backbones.layers import RMSNorm, grid_angles, xavier
from backbones.ops.native import OPERATIONS, modulate
from backbones.options.dit import DiTOptions
from backbones.sizes import AlignOptions, DecoderOptions, Size
from routing.layout import Layout, Move
from routing.rng import widest
from routing.stack import Stack


class Modulation(nn.Module):
    """One projection of c for every block of the stack: (B, D) -> depth x 6 x (B, 1, D).

    DiT gives each block its own Linear(SiLU(c)); side by side in one matrix they are one matmul a
    step. The rows of block b are `weight[6 D b : 6 D (b + 1)]`, in DiT's order shift, scale, gate
    of the first branch, then of the second.
    """

    def __init__(self, width: int, depth: int, parts: int = 6) -> None:
        super().__init__()
        self.shape = (depth, parts, 1, width)
        self.project = nn.Linear(width, depth * parts * width)

    def forward(self, c: Tensor) -> tuple[Tensor, ...]:
        """Return a tuple with one (B, parts, 1, D) tensor for each block, in the weights' type.

        The modulation acts on the residual stream, which autocast keeps in that type too.
        """
        flat = self.project(F.silu(c)).to(self.project.weight.dtype)
        return flat.unflatten(1, self.shape).unbind(1)

    def initialise(self) -> None:
        """Set it to zero: with all gates 0, every block starts as the identity (adaLN-zero)."""
        nn.init.zeros_(self.project.weight)
        nn.init.zeros_(self.project.bias)


class BlockNorms(nn.Module):
    """Weights and biases of the blocks' LayerNorms where time and class are tokens (DiS).

    It replaces `Modulation` and is the same for all samples. The gates are fixed at
    1 / sqrt(residual branches of the stack), the factor by which mamba-ssm scales the last layer of
    each branch at initialisation, so that the stream starts with the same scale.
    """

    def __init__(self, width: int, depth: int, branches: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(depth, branches, width))
        self.scale = nn.Parameter(torch.zeros(depth, branches, width))
        self.gate = (depth * branches) ** -0.5

    def forward(self, c: Tensor) -> tuple[Tensor, ...]:
        """Return a tuple with one (B, 3 branches, 1, D) tensor for each block; c has the batch."""
        gate = torch.full_like(self.scale, self.gate)
        rows = torch.stack([self.shift, self.scale, gate], dim=2).flatten(1, 2)
        return rows[None, :, :, None].repeat(c.shape[0], 1, 1, 1, 1).unbind(1)

    def initialise(self) -> None:
        """Initialise as LayerNorms without weights."""
        nn.init.zeros_(self.shift)
        nn.init.zeros_(self.scale)


class Head(nn.Module):
    """AdaLN and a linear layer, both zero at init: tokens (B, N, D) -> patches (B, N, p p C).

    With `weighted`, the norm is an RMSNorm with weights instead of a LayerNorm without.
    """

    def __init__(self, width: int, patch: int, channels: int, weighted: bool = False) -> None:
        super().__init__()
        self.norm = RMSNorm(width) if weighted else None
        self.modulate = Modulation(width, 1, 2)
        self.project = nn.Linear(width, patch * patch * channels)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        """Predict patches from grid tokens and the conditioning vector."""
        shift, scale = self.modulate(c)[0].unbind(1)
        if self.norm is not None:
            return self.project(modulate(self.norm(x), shift, scale))
        return self.project(OPERATIONS[x.device.type].adaln(x, shift, scale))

    def initialise(self) -> None:
        """Set it to zero, so that the untrained model predicts 0 everywhere (DiT)."""
        self.modulate.initialise()
        nn.init.zeros_(self.project.weight)
        nn.init.zeros_(self.project.bias)


class Projector(nn.Module):
    """Tokens of one block -> features of an encoder: (B, T, D) -> (B, T, channels)."""

    def __init__(self, width: int, options: AlignOptions) -> None:
        super().__init__()
        self.block = options.block
        self.mlp = nn.Sequential(
            nn.Linear(width, options.hidden),
            nn.SiLU(),
            nn.Linear(options.hidden, options.hidden),
            nn.SiLU(),
            nn.Linear(options.hidden, options.channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Project tokens (B, T, D)."""
        return self.mlp(x)

    def initialise(self) -> None:
        """Initialise the weights."""
        xavier(self)


class Decoder(nn.Module):
    """A small DiT over all tokens, with mask tokens for the dropped ones; it ends in a head."""

    positions: Tensor

    def __init__(
        self, width: int, options: DecoderOptions, grid: tuple[int, int], patch: int, channels: int
    ) -> None:
        super().__init__()
        size = Size("custom", options.depth, options.width, options.heads, patch)
        self.norm = Head(width, 1, options.width)
        self.mask = nn.Parameter(torch.zeros(options.width))
        self.register_buffer("positions", sincos_2d(options.width, grid), persistent=False)
        self.condition = nn.Linear(width, options.width)
        self.modulate = Modulation(options.width, options.depth)
        self.stack = Stack([DiTBlock(size, b, grid, DiTOptions()) for b in range(options.depth)])
        self.head = Head(options.width, patch, channels)

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
            x = x + 0 * self.mask.to(x.dtype)  # DDP needs a gradient (zero) for every parameter
        x = torch.cat([x[:, : layout.prefix], x[:, layout.prefix :] + self.positions], dim=1)
        c = self.condition(c)
        x = self.stack(x, self.modulate(c), layout).x
        return self.head(x[:, layout.prefix :], c)

    def initialise(self) -> None:
        """Initialise the weights; gates and head start at zero, the input layers do not."""
        blocks: Any = self.stack.blocks
        for block in blocks:
            block.initialise()
        xavier(self.norm.project, self.condition)
        nn.init.normal_(self.mask, std=0.02)
        self.norm.modulate.initialise()
        self.modulate.initialise()
        self.head.initialise()


# --- embedders ------------------------------------------------------------------------------------


def sincos_2d(width: int, grid: tuple[int, int]) -> Tensor:
    """Return the fixed position table (H W, D): half of the channels for the column, then the row.

    Each half is [sin, cos] of position / 10000^(i / (D / 4)), as in DiT and MAE.
    """
    row, column = grid_angles(width, grid)
    return torch.cat([column.sin(), column.cos(), row.sin(), row.cos()], dim=1).float()


class TimeEmbedder(nn.Module):
    """Sinusoids of the model's time input, then a two-layer MLP: (B,) -> (B, D)."""

    def __init__(self, width: int, waves: int, hidden: int) -> None:
        super().__init__()
        self.waves = waves
        first, second = nn.Linear(2 * waves, hidden), nn.Linear(hidden, width)
        self.mlp = nn.Sequential(first, nn.SiLU(), second)

    def forward(self, t: Tensor) -> Tensor:
        """Embed times (B,); the sinusoids in float32 or wider, whatever the weights are in."""
        t = t.to(torch.promote_types(t.dtype, torch.float32))
        steps = torch.arange(self.waves, device=t.device, dtype=widest(t.device)) / self.waves
        angles = t[:, None] * torch.exp(-math.log(10000.0) * steps).to(t.dtype)
        waves = torch.cat([angles.cos(), angles.sin()], dim=1)
        first: nn.Linear = self.mlp[0]  # type: ignore[assignment]
        return self.mlp(waves.to(first.weight.dtype))

    def initialise(self) -> None:
        """Initialise as DiT."""
        for name, parameter in self.mlp.named_parameters():
            nn.init.zeros_(parameter) if "bias" in name else nn.init.normal_(parameter, std=0.02)


class LabelEmbedder(nn.Module):
    """Table of class vectors, with one more row for "no class": (B,) -> (B, D)."""

    def __init__(self, num_classes: int, width: int) -> None:
        super().__init__()
        self.null = num_classes
        self.table = nn.Embedding(num_classes + 1, width)

    def forward(self, y: Tensor | None, batch: int) -> Tensor:
        """Embed labels (B,); None stands for the null class everywhere."""
        if y is None:
            return self.table.weight[self.null].expand(batch, -1)
        return self.table(y)

    def initialise(self) -> None:
        """Initialise as DiT."""
        nn.init.normal_(self.table.weight, std=0.02)


class TextEmbedder(nn.Module):
    """Text states (B, L, E) -> prefix tokens (B, L, D), and their mean for c (B, D)."""

    def __init__(self, shape: Sequence[int], width: int) -> None:
        super().__init__()
        length, channels = self.shape = (int(shape[0]), int(shape[1]))
        self.project = nn.Linear(channels, width)
        self.pool = nn.Linear(channels, width)
        self.null = nn.Parameter(torch.zeros(length, channels))

    def forward(
        self, text: Tensor | None, batch: int, drop: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Embed text; None, or a sample whose `drop` (B,) is true, takes the learned null text."""
        if text is None:
            text = self.null.expand(batch, *self.shape)
        elif drop is not None:
            text = torch.where(drop[:, None, None], self.null.to(text.dtype), text)
        text = text.to(self.null.dtype)
        return self.project(text), self.pool(text.mean(dim=1))

    def initialise(self) -> None:
        """Initialise the null text and the projections."""
        nn.init.normal_(self.null, std=0.02)
        xavier(self.project, self.pool)


class ContextTokens(nn.Module):
    """Class embeddings (B, D) -> class tokens (B, count, D): JiT's (`backbones.context`).

    Each token is the class embedding plus a learned position.
    """

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.empty(count, width))

    def forward(self, label: Tensor) -> Tensor:
        """Repeat each class embedding, and add the positions."""
        return label[:, None] + self.positions

    def initialise(self) -> None:
        """Initialise the positions as JiT does."""
        nn.init.normal_(self.positions, std=0.02)


class PatchEmbed(nn.Module):
    """Images (B, C, H p, W p) -> tokens (B, H W, D), raster order.

    A reshape and one matmul: about twice as fast on a CPU as a strided convolution with the same
    weights. With a `bottleneck` there are two linear layers, the first without a bias (JiT, arXiv
    2511.13720): large pixel patches have many more values than intrinsic dimensions.
    """

    def __init__(
        self, channels: int, patch: int, width: int, bottleneck: int | None = None
    ) -> None:
        super().__init__()
        self.patch = patch
        values = channels * patch * patch
        self.reduce = nn.Linear(values, bottleneck, bias=False) if bottleneck else None
        self.project = nn.Linear(bottleneck or values, width)

    def forward(self, x: Tensor) -> Tensor:
        """Split into patches and project."""
        patches = patchify(x, self.patch)
        if self.reduce is not None:
            patches = self.reduce(patches)
        return self.project(patches)

    def initialise(self) -> None:
        """Initialise the weights."""
        xavier(self)


def patchify(x: Tensor, patch: int) -> Tensor:
    """Split images (B, C, H p, W p) into patches (B, H W, C p p), channels slowest (as Conv2d)."""
    batch, channels, height, width = x.shape
    cut = x.reshape(batch, channels, height // patch, patch, width // patch, patch)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * patch * patch)


def unpatchify(x: Tensor, grid: tuple[int, int], patch: int) -> Tensor:
    """Assemble patches (B, H W, p p C), channels fastest (as DiT), to images (B, C, H p, W p)."""
    batch, (rows, columns) = x.shape[0], grid
    cut = x.reshape(batch, rows, columns, patch, patch, -1).permute(0, 5, 1, 3, 2, 4)
    return cut.reshape(batch, -1, rows * patch, columns * patch)
