r"""Causal depthwise convolution along a path, with or without the tokens between.

Compact, y_t = b + sum_j weight[W-1-j] x_{t-j}: taps reach over gaps to whichever token came before.
With positions p, tap j of token t is the token at p_t - j, and counts as 0 if that one was dropped:
the dense convolution of the masked input, read at the present tokens. Weights are stored as
torch.nn.Conv1d stores them: the last tap is the token itself.

A depthwise convolution of width 4 is four shifted multiply-adds; so is each half of its gradient.
Written so, sample by sample, it needs no transposition to channels-first and stays in the cache.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from backbones.ops import native
from backbones.ops.dispatch import batches, choose, kernel_function

CACHED = 131072  # Numbers of a block of samples that stay in a CPU's L2 cache.


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    position: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """The definition in float64: every token looks at all others for those at its taps.

    Shapes as `causal_conv`.
    """
    batch, tokens, _ = x.shape
    p = torch.arange(tokens, device=x.device) if position is None else position
    p = p.expand(batch, -1)
    distance = p[:, :, None] - p[:, None, :]  # (B, T, T), token t minus token s
    y = torch.zeros_like(x, dtype=torch.float64)
    for tap in range(weight.shape[1]):
        hit = (distance == tap).double()
        y = y + torch.einsum("bts,bsc->btc", hit, x.double()) * weight[:, -1 - tap].double()
    if bias is not None:
        y = y + bias.double()
    return (F.silu(y) if activation == "silu" else y).to(x.dtype)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    position: Tensor | None = None,
    kernel: str = "auto",
    activation: str | None = None,
) -> Tensor:
    """Causal depthwise convolution over the tokens.

    Args:
        x: (B, T, C) tokens in path order.
        weight: (C, W) taps, the last one for the token itself.
        bias: (C,) or None.
        position: (T,) or (B, T) strictly ascending coordinates along the full path: taps by true
            distance, dropped tokens count as 0. None: compact, the previous W-1 tokens present.
        kernel: auto | torch | reference | causal-conv1d (compact only) | triton | native.
        activation: None or "silu", applied to the result.

    Returns:
        (B, T, C) in x's dtype.

    Raises:
        KernelError: The kernel asked for cannot run on these inputs.
    """
    fits = functools.partial(
        kernel_misfit, channels=x.shape[2], width=weight.shape[1], compact=position is None
    )
    name = choose("conv", kernel, x, fits)
    if name == "reference":
        return reference(x, weight, bias, position, activation)
    if name == "causal-conv1d":
        # It takes (B, C, T) with channels last in memory: a transposed view is just that.
        channels = x.contiguous().transpose(1, 2)
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        return kernel_function("conv", "causal-conv1d")(
            channels, weight, bias, activation=activation
        ).transpose(1, 2)
    if name == "triton":
        return kernel_function("conv", "triton")(x, weight, bias, position, activation == "silu")
    table = None if position is None else taps(position, weight.shape[1])
    if name == "native":
        return torch.ops.tread.conv(x, weight.t().flip(0), bias, table, activation == "silu")
    rows = weight.to(x.dtype).t().flip(0).contiguous()  # (W, C), row j for distance j
    bias = None if bias is None else bias.to(x.dtype)
    if torch.compiler.is_compiling():
        y = _formula(x, rows, bias, table)
    else:
        y = _Conv.apply(x.contiguous(), rows, bias, table)
    return F.silu(y) if activation == "silu" else y


def kernel_misfit(kernel: str, channels: int, width: int, compact: bool) -> str | None:
    """What keeps a kernel from these inputs, or None (causal-conv1d's strides go by 8)."""
    if kernel == "native":
        return f"width {width} exceeds {native.TAPS}" if width > native.TAPS else None
    if kernel == "triton":
        return None
    if not compact:
        return "it knows no positions (use conv=compact or conv=none for it)"
    if channels % 8:
        return f"{channels} channels are not a multiple of 8"
    return None if 2 <= width <= 4 else f"width {width} is not 2, 3 or 4"


def taps(position: Tensor, width: int) -> Tensor:
    """Return (1 or B, W-1, T): the token at distance 1..W-1 before, or T where there is none."""
    p = position if position.dim() == 2 else position[None]
    tokens = p.shape[1]
    missing = p.new_full((p.shape[0], width - 1, tokens), tokens)
    index = torch.arange(tokens, device=p.device)
    # The token j path steps back is at most j places back among the present ones.
    for back in range(1, min(width, tokens)):
        distance = p[:, back:] - p[:, :-back]
        for tap in range(back, width):
            entry = missing[:, tap - 1, back:]
            entry.copy_(torch.where(distance == tap, index[:-back], entry))
    return missing


def _formula(x: Tensor, rows: Tensor, bias: Tensor | None, table: Tensor | None) -> Tensor:
    """The convolution for compilers, which differentiate and fuse it themselves."""
    batch, tokens, channels = x.shape
    y = x * rows[0] if bias is None else torch.addcmul(bias, x, rows[0])
    for tap in range(1, len(rows)):
        if table is None:
            source = F.pad(x, (0, 0, tap, 0))[:, :tokens]
        else:
            index = table[:, tap - 1, :, None].expand(batch, tokens, channels)
            source = F.pad(x, (0, 0, 0, 1)).gather(1, index)
        y = y + source * rows[tap]
    return y


def _followers(table: Tensor) -> Tensor:
    """Invert `taps`: (.., T) index of the token that has this one at tap j, or T."""
    n, width, tokens = table.shape
    inverse = table.new_full((n, width, tokens + 1), tokens)
    index = torch.arange(tokens, device=table.device).expand(n, width, tokens)
    # Every dropped tap writes to the spare last column, which nobody reads.
    return inverse.scatter_(2, table, index)[..., :tokens]


class _Rows:
    """Reads rows of some samples of x through a table, an index of T meaning a row of zeros."""

    def __init__(self, x: Tensor, table: Tensor, samples: slice) -> None:
        own = x[samples]
        self.padded = own.new_empty(len(own), own.shape[1] + 1, own.shape[2])
        self.padded[:, :-1] = own
        self.padded[:, -1] = 0
        self.table = table if len(table) == 1 else table[samples]

    def at(self, tap: int) -> Tensor:
        index, (n, rows, channels) = self.table[:, tap - 1], self.padded.shape
        if len(index) == 1 and n > 1:
            return self.padded.index_select(1, index[0])
        offset = torch.arange(n, device=index.device)[:, None] * rows
        flat = self.padded.view(n * rows, channels)
        return flat.index_select(0, (index + offset).view(-1)).view(n, -1, channels)


class _Conv(torch.autograd.Function):
    """y_t = bias + sum_j rows[j] x[tap j of t]; saves x and the table."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, rows: Tensor, bias: Tensor | None, table: Tensor | None
    ) -> Tensor:
        y = torch.empty_like(x)
        for part in batches(x, CACHED):
            own, out = x[part], y[part]
            torch.mul(own, rows[0], out=out)
            if bias is not None:
                out += bias
            source = None if table is None else _Rows(x, table, part)
            for tap in range(1, len(rows)):
                if source is not None:
                    out.addcmul_(source.at(tap), rows[tap])
                elif tap < x.shape[1]:
                    out[:, tap:].addcmul_(own[:, :-tap], rows[tap])
        ctx.save_for_backward(x, rows, table)
        ctx.has_bias = bias is not None
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, rows, table = ctx.saved_tensors
        dx, drows = torch.empty_like(x), torch.zeros_like(rows)
        dbias = torch.zeros_like(rows[0]) if ctx.has_bias else None
        inverse = None if table is None else _followers(table)
        grad = grad.contiguous()
        for part in batches(x, CACHED):
            own, g, out = x[part], grad[part], dx[part]
            torch.mul(g, rows[0], out=out)
            drows[0] += (own * g).sum((0, 1))
            if dbias is not None:
                dbias += g.sum((0, 1))
            source = None if inverse is None else _Rows(grad, inverse, part)
            for tap in range(1, len(rows)):
                if source is not None:
                    # One read serves both gradients: g of the token that has this one at its tap.
                    after = source.at(tap)
                    out.addcmul_(after, rows[tap])
                    drows[tap] += after.mul_(own).sum((0, 1))
                elif tap < x.shape[1]:
                    out[:, :-tap].addcmul_(g[:, tap:], rows[tap])
                    drows[tap] += (own[:, :-tap] * g[:, tap:]).sum((0, 1))
        return dx, drows, dbias, None
