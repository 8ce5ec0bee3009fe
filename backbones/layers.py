"""Layers of all families: the block of two branches under adaLN-zero, norms, SwiGLU.

A block (DiT, arXiv 2212.09748, section 3.2) is

    x = x + gate1 * first(adaLN(x; shift1, scale1))
    x = x + gate2 * second(adaLN(x; shift2, scale2))

on tokens x (B, T, D), with shifts, scales and gates from the conditioning vector c (B, D)
(`backbones.heads.Modulation`). On a CPU the element-wise operations are fused into one pass over
memory (`ops.native`); elsewhere, and under `torch.compile`, they are the plain formulas, which
compilers fuse.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.ops.native import EPS
from routing.layout import Layout


class Block(nn.Module):
    """Base class of a family's block: residual branches under adaLN-zero.

    A family defines `forward(x, cond, layout)`, which takes tokens (B, T, D) and the block's
    modulation (B, 6, 1, D) and returns tokens; `backbones.dit.DiTBlock` is a short one.

    Attributes:
        scans: Every scan order that it uses (names for `Layout.scan_order`).
        kernels: Operations with several kernels that it calls, each with the kernel requested,
            as in ("biwkv", "auto"): the banner names the one in use; a missing one is refused.
        tables: Other tables of the layout that it looks up, as in ("gaps", "zigzag:0")
            (`Layout.prepare`).
    """

    scans: tuple[str, ...] = ()

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.kernels: list[tuple[str, str]] = []
        self.tables: list[tuple[str, str]] = []

    def initialise(self) -> None:
        """Initialise the linear layers; a family with other parameters extends this."""
        xavier(self)


def xavier(*parts: nn.Module) -> None:
    """Initialise every linear layer in `parts`: Xavier-uniform weights, zero biases."""
    for part in parts:
        for module in part.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis, in the dtype of x (autocast casts x alone)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (..., width)."""
        return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), EPS)


def grid_angles(size: int, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return row and column / 10000^(i / (size / 4)) of every token, (H W, size / 4) in float64."""
    rows, columns = grid
    rate = 10000.0 ** -(torch.arange(size // 4, dtype=torch.float64) / (size // 4))
    row = torch.arange(rows, dtype=torch.float64).repeat_interleave(columns)
    column = torch.arange(columns, dtype=torch.float64).repeat(rows)
    return row[:, None] * rate, column[:, None] * rate


class SwiGLU(nn.Module):
    """Gated MLP: W_3 (silu(W_1 x) * W_2 x), W_1 and W_2 side by side (arXiv 2002.05202)."""

    def __init__(self, width: int, hidden: int, bias: bool = True) -> None:
        super().__init__()
        self.w12 = nn.Linear(width, 2 * hidden, bias=bias)
        self.w3 = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """Map tokens (B, T, D)."""
        gate, value = self.w12(x).chunk(2, dim=-1)
        return self.w3(F.silu(gate) * value)


def rotating_path(index: int) -> str:
    """Return the scan path of block `index` if each block scans once: four paths in rotation."""
    return ("zigzag:0", "zigzag:0:reversed", "zigzag:1", "zigzag:1:reversed")[index % 4]
