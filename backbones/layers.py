"""Layers that every family shares: embeddings, adaLN-zero, the two-branch block, the head.

Shapes: B samples, T present tokens (prefix first), N = H W grid tokens, D channels, C image
channels, p patch side. The conditioning vector c is (B, D). DiT, arXiv 2212.09748, section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.elementwise import adaln, gated_sum
from backbones.ops.dispatch import resolve

if TYPE_CHECKING:
    from routing.layout import Layout
    from routing.moves import Reorder

EPS = 1e-6


def sincos_2d(width: int, grid: tuple[int, int]) -> Tensor:
    """Return the fixed position table (H W, D): half of the channels for the column, then the row.

    Each half is [sin, cos] of position / 10000^(i / (D / 4)), as in DiT and MAE.
    """
    rows, columns = grid
    rate = 10000.0 ** -(torch.arange(width // 4, dtype=torch.float64) / (width // 4))
    row = torch.arange(rows, dtype=torch.float64).repeat_interleave(columns)
    column = torch.arange(columns, dtype=torch.float64).repeat(rows)
    angles = [position[:, None] * rate for position in (column, row)]
    return torch.cat([f(a) for a in angles for f in (torch.sin, torch.cos)], dim=1).float()


def rope_2d(size: int, grid: tuple[int, int], base: float = 10000.0) -> Tensor:
    """Return the angles (H W, size / 2) of a head's channel pairs: half by row, half by column.

    A position is the number of the row or column, at every size of the grid (LightningDiT, arXiv
    2501.01423, after EVA-02, with its `pt_seq_len` the side of the grid).
    """
    rows, columns = grid
    rate = base ** -(torch.arange(size // 4, dtype=torch.float64) / (size // 4))
    row = torch.arange(rows, dtype=torch.float64).repeat_interleave(columns)
    column = torch.arange(columns, dtype=torch.float64).repeat(rows)
    return torch.cat([row[:, None] * rate, column[:, None] * rate], dim=1).float()


def rotation(angles: Tensor, layout: Layout) -> Tensor:
    """Return cos and sin (2, B or 1, 1, T, size / 2) for the tokens that are present.

    Prefix tokens have no place on the grid and are not rotated.
    """
    rows = layout.take(angles)
    if layout.prefix:
        rows = F.pad(rows, (0, 0, layout.prefix, 0))
    return torch.stack([rows.cos(), rows.sin()])[:, :, None]


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate channel pairs of queries or keys (B, heads, T, size) by `rotation`'s angles."""
    cos, sin = cos_sin.to(x.dtype)
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis, in the dtype of x (autocast casts x alone)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (..., width)."""
        return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), EPS)


class TimeEmbedder(nn.Module):
    """Sinusoids of the model's time input, then a two-layer MLP: (B,) -> (B, D)."""

    def __init__(self, width: int, channels: int = 256) -> None:
        super().__init__()
        self.waves = channels // 2
        self.mlp = nn.Sequential(nn.Linear(channels, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, t: Tensor) -> Tensor:
        """Embed times (B,); the sinusoids in float32 or wider, whatever the weights are in."""
        t = t.to(torch.promote_types(t.dtype, torch.float32))
        steps = torch.arange(self.waves, device=t.device, dtype=torch.float64) / self.waves
        angles = t[:, None] * torch.exp(-math.log(10000.0) * steps).to(t.dtype)
        waves = torch.cat([angles.cos(), angles.sin()], dim=1)
        first: nn.Linear = self.mlp[0]  # type: ignore[assignment]
        return self.mlp(waves.to(first.weight.dtype))

    def initialise(self) -> None:
        """Draw the weights as DiT does."""
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)


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
        """Draw the weights as DiT does."""
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
        """Draw the null text and the projections."""
        nn.init.normal_(self.null, std=0.02)
        for layer in (self.project, self.pool):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)


class PatchEmbed(nn.Module):
    """Images (B, C, H p, W p) -> tokens (B, H W, D), raster order.

    A reshape and one matmul: about twice as fast on a CPU as a strided convolution with the same
    weights.
    """

    def __init__(self, channels: int, patch: int, width: int) -> None:
        super().__init__()
        self.patch = patch
        self.project = nn.Linear(channels * patch * patch, width)

    def forward(self, x: Tensor) -> Tensor:
        """Cut into patches and project."""
        return self.project(patchify(x, self.patch))


def patchify(x: Tensor, patch: int) -> Tensor:
    """Cut images (B, C, H p, W p) into rows (B, H W, C p p), channels slowest (as in Conv2d)."""
    batch, channels, height, width = x.shape
    cut = x.reshape(batch, channels, height // patch, patch, width // patch, patch)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * patch * patch)


def unpatchify(x: Tensor, grid: tuple[int, int], patch: int) -> Tensor:
    """Put rows (B, H W, p p C), channels fastest (as in DiT), back to images (B, C, H p, W p)."""
    batch, (rows, columns) = x.shape[0], grid
    cut = x.reshape(batch, rows, columns, patch, patch, -1).permute(0, 5, 1, 3, 2, 4)
    return cut.reshape(batch, -1, rows * patch, columns * patch)


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
        """Zero it: all gates are 0, so that every block starts as the identity (adaLN-zero)."""
        nn.init.zeros_(self.project.weight)
        nn.init.zeros_(self.project.bias)


class Block(nn.Module):
    """Two residual branches under adaLN-zero; a family fills in `first` and `second`.

    x = x + gate1 * first(adaLN(x; shift1, scale1))
    x = x + gate2 * second(adaLN(x; shift2, scale2))

    Attributes:
        scans: The scan order in which each branch gets its tokens and returns them; None is the
            canonical one, that of the residual stream.
        head_norm: What the model's head normalises with instead of a LayerNorm.
    """

    scans: tuple[str | None, str | None] = (None, None)
    head_norm: type[nn.Module] | None = None

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def first(self, x: Tensor, layout: Layout) -> Tensor:
        """Mix tokens (B, T, D)."""
        raise NotImplementedError

    def second(self, x: Tensor, layout: Layout) -> Tensor:
        """Mix channels, or tokens once more (B, T, D)."""
        raise NotImplementedError

    def ops(self) -> list[tuple[str, str]]:
        """Return the dispatched operations that this block calls: name and the kernel asked for."""
        return []

    def prepare(self, layout: Layout) -> None:
        """Make what the branches look up, once for all blocks: kernels and the layout's tables."""
        for op, kernel in self.ops():
            resolve(op, kernel, layout.device.type)
        for scan in self.scans:
            if scan is not None:
                layout.reorder(scan)

    def norm(
        self, branch: int, x: Tensor, shift: Tensor, scale: Tensor, order: Reorder | None
    ) -> Tensor:
        """Normalise and modulate the input of branch 0 or 1, and put it into its scan order."""
        return adaln(x, shift, scale, order)

    def forward(self, x: Tensor, cond: Tensor, layout: Layout) -> Tensor:
        """Run both branches on tokens (B, T, D) under this block's modulation (B, 6, 1, D)."""
        return self.run(x, cond, layout, self.first, self.second)

    def run(
        self,
        x: Tensor,
        cond: Tensor,
        layout: Layout,
        *branches: Callable[[Tensor, Layout], Tensor],
    ) -> Tensor:
        """Run the given branches as this block's."""
        parts = cond.unbind(1)
        for n, branch in enumerate(branches):
            shift, scale, gate = parts[3 * n : 3 * n + 3]
            scan = self.scans[n]
            order = None if scan is None else layout.reorder(scan)
            y = branch(self.norm(n, x, shift, scale, order), layout)
            x = gated_sum(x, gate, y, order)
        return x

    def initialise(self) -> None:
        """Draw the weights: Xavier for every linear layer, zero biases; a family adds its own."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)


class Head(nn.Module):
    """AdaLN and a linear layer, both zero at init: tokens (B, N, D) -> rows (B, N, p p C).

    Args:
        width: Channels D.
        patch: Side of a patch.
        channels: Image channels C.
        norm: Class of a norm to take instead of the weightless LayerNorm.
    """

    def __init__(
        self, width: int, patch: int, channels: int, norm: type[nn.Module] | None = None
    ) -> None:
        super().__init__()
        self.norm = norm(width) if norm else None
        self.modulate = Modulation(width, 1, 2)
        self.project = nn.Linear(width, patch * patch * channels)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        """Predict patches from grid tokens and the conditioning vector."""
        shift, scale = self.modulate(c)[0].unbind(1)
        if self.norm is not None:
            return self.project(torch.addcmul(shift, self.norm(x), scale + 1))
        return self.project(adaln(x, shift, scale))

    def initialise(self) -> None:
        """Zero it, so that the untrained model predicts 0 everywhere (DiT)."""
        self.modulate.initialise()
        nn.init.zeros_(self.project.weight)
        nn.init.zeros_(self.project.bias)


class SwiGLU(nn.Module):
    """Gated MLP: W_3 (silu(W_1 x) * W_2 x), W_1 and W_2 side by side (arXiv 2002.05202)."""

    def __init__(self, width: int, hidden: int, bias: bool = True) -> None:
        super().__init__()
        self.w12 = nn.Linear(width, 2 * hidden, bias=bias)
        self.w3 = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens (B, T, D)."""
        gate, value = self.w12(x).chunk(2, dim=-1)
        return self.w3(F.silu(gate) * value)


def head_norm(y: Tensor, norm: nn.GroupNorm) -> Tensor:
    """Normalise heads (B, T, H, V) one by one with a GroupNorm of H groups; return (B, T, H V)."""
    flat = y.flatten(0, 1).flatten(1)
    weight, bias = (p.to(flat.dtype) for p in (norm.weight, norm.bias))
    return F.group_norm(flat, norm.num_groups, weight, bias, norm.eps).view(*y.shape[:2], -1)


def turns(index: int) -> str:
    """Return the scan path of block `index` where every block scans once: four ways in turn."""
    return ("zigzag:0", "zigzag:0:reversed", "zigzag:1", "zigzag:1:reversed")[index % 4]
