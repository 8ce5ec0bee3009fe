"""Causal depthwise convolution along a path as Triton kernels, with SiLU and true gaps.

A tile is TOKENS by CHANNELS, read once for each tap: all reads but the first come from the cache.
Taps by true distance read the same few previous tokens (positions ascend, so a token at a distance
below the width is at most that many places back) with the weight of their distance.
The backward pass takes two launches: the gradient before the activation with the sums for the
weights, then what each token gets from those after it.

The oracle is `conv.reference`. TRITON_INTERPRET=1, set before triton is imported, runs it on the
CPU.
"""

# Triton reads the signatures of its kernels itself.
# ruff: noqa: ANN001, ANN202
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS = 32
CHANNELS = 64


@triton.jit
def _weight(
    rows_ptr, c, channels, distance, lag: tl.constexpr, W: tl.constexpr, GAPS: tl.constexpr
):  # fmt: skip
    """Return the weight (T or 1, C) of a token `lag` places away, at these distances (T,)."""
    here = c < channels
    weight = tl.load(rows_ptr + lag * channels + c, mask=here, other=0.0)[None, :]
    if GAPS and lag > 0:
        weight = tl.where((distance == lag)[:, None], weight, 0.0)
        for tap in tl.static_range(lag + 1, W):
            row = tl.load(rows_ptr + tap * channels + c, mask=here, other=0.0)[None, :]
            weight = tl.where((distance == tap)[:, None], row, weight)
    return weight


@triton.jit
def _distance(position_ptr, stride, low, high, present, GAPS: tl.constexpr):
    """Return how far apart along the path the tokens `low` and `high` (T,) are."""
    apart = high - low
    if GAPS:
        at = position_ptr + tl.program_id(0) * stride
        last = tl.load(at + high, mask=present, other=0)
        apart = last - tl.load(at + low, mask=present, other=0)
    return apart


@triton.jit
def _before(
    x_ptr, rows_ptr, bias_ptr, position_ptr, base, t, c, tokens, channels, stride,
    W: tl.constexpr, BIAS: tl.constexpr, GAPS: tl.constexpr,
):  # fmt: skip
    """Return the convolution (T, C) before its activation."""
    here = c < channels
    u = tl.zeros((t.shape[0], c.shape[0]), tl.float32)
    if BIAS:
        u += tl.load(bias_ptr + c, mask=here, other=0.0)[None, :]
    for lag in tl.static_range(W):
        present = (t >= lag) & (t < tokens)
        at = base + (t - lag)[:, None] * channels + c[None, :]
        x = tl.load(x_ptr + at, mask=present[:, None] & here[None, :], other=0.0).to(tl.float32)
        distance = _distance(position_ptr, stride, t - lag, t, present, GAPS)
        u += x * _weight(rows_ptr, c, channels, distance, lag, W, GAPS)
    return u


@triton.jit
def _forward(
    x_ptr, rows_ptr, bias_ptr, position_ptr, y_ptr, tokens, channels, stride,
    SILU: tl.constexpr, W: tl.constexpr, BIAS: tl.constexpr, GAPS: tl.constexpr,
    T: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    base = tl.program_id(0).to(tl.int64) * tokens * channels
    t = tl.program_id(1) * T + tl.arange(0, T)
    c = tl.program_id(2) * C + tl.arange(0, C)
    u = _before(
        x_ptr, rows_ptr, bias_ptr, position_ptr, base, t, c, tokens, channels, stride,
        W, BIAS, GAPS,
    )  # fmt: skip
    if SILU:
        u = u * tl.sigmoid(u)
    live = (t < tokens)[:, None] & (c < channels)[None, :]
    tl.store(y_ptr + base + t[:, None] * channels + c[None, :], u, mask=live)


@triton.jit
def _inner_gradient(
    grad_ptr, x_ptr, rows_ptr, bias_ptr, position_ptr, inner_ptr, sums_ptr,
    tokens, channels, stride,
    SILU: tl.constexpr, W: tl.constexpr, BIAS: tl.constexpr, GAPS: tl.constexpr,
    T: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Write the gradient before the activation, and this tile's sums for weights and bias."""
    sample, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    base = sample * tokens * channels
    t = chunk * T + tl.arange(0, T)
    c = tl.program_id(2) * C + tl.arange(0, C)
    here = c < channels
    at = base + t[:, None] * channels + c[None, :]
    live = (t < tokens)[:, None] & here[None, :]
    g = tl.load(grad_ptr + at, mask=live, other=0.0).to(tl.float32)
    if SILU:
        u = _before(
            x_ptr, rows_ptr, bias_ptr, position_ptr, base, t, c, tokens, channels, stride,
            W, BIAS, GAPS,
        )  # fmt: skip
        gate = tl.sigmoid(u)
        g = g * gate * (1.0 + u * (1.0 - gate))
        tl.store(inner_ptr + at, g, mask=live)
    out = sums_ptr + (sample * tl.num_programs(1) + chunk) * (W + 1) * channels + c
    for tap in tl.static_range(W):
        total = tl.zeros((T, C), tl.float32)
        # The token at this tap is at most that many places back; without gaps, exactly.
        for lag in tl.static_range(W):
            if lag <= tap and (lag == tap or (GAPS and lag > 0)):
                present = (t >= lag) & (t < tokens)
                distance = _distance(position_ptr, stride, t - lag, t, present, GAPS)
                hit = (present & (distance == tap))[:, None] & here[None, :]
                x = tl.load(x_ptr + at - lag * channels, mask=hit, other=0.0).to(tl.float32)
                total += g * x
        tl.store(out + tap * channels, tl.sum(total, 0), mask=here)
    tl.store(out + W * channels, tl.sum(g, 0), mask=here)


@triton.jit
def _spread(
    inner_ptr, rows_ptr, position_ptr, dx_ptr, tokens, channels, stride,
    W: tl.constexpr, GAPS: tl.constexpr, T: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Write dx: each token's gradient from itself and from the tokens that have it at a tap."""
    base = tl.program_id(0).to(tl.int64) * tokens * channels
    t = tl.program_id(1) * T + tl.arange(0, T)
    c = tl.program_id(2) * C + tl.arange(0, C)
    here = c < channels
    at = base + t[:, None] * channels + c[None, :]
    dx = tl.zeros((T, C), tl.float32)
    for lag in tl.static_range(W):
        present = t + lag < tokens
        live = present[:, None] & here[None, :]
        g = tl.load(inner_ptr + at + lag * channels, mask=live, other=0.0).to(tl.float32)
        distance = _distance(position_ptr, stride, t, t + lag, present, GAPS)
        dx += g * _weight(rows_ptr, c, channels, distance, lag, W, GAPS)
    tl.store(dx_ptr + at, dx, mask=(t < tokens)[:, None] & here[None, :])


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, rows: Tensor, bias: Tensor | None, position: Tensor | None, silu: bool
    ) -> Tensor:
        batch, tokens, channels = x.shape
        stride = tokens if position is not None and position.dim() == 2 else 0
        ctx.grid = batch, triton.cdiv(tokens, TOKENS), triton.cdiv(channels, CHANNELS)
        ctx.shape = tokens, channels, stride
        ctx.form = {"W": len(rows), "GAPS": position is not None, "T": TOKENS, "C": CHANNELS}
        ctx.switches = {"SILU": silu, "BIAS": bias is not None}
        y = torch.empty_like(x)
        # Absent tensors are replaced by a pointer that is never read.
        _forward[ctx.grid](
            x, rows, rows if bias is None else bias, rows if position is None else position, y,
            *ctx.shape, **ctx.switches, **ctx.form,
        )  # fmt: skip
        ctx.save_for_backward(x, rows, bias, position)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, rows, bias, position = ctx.saved_tensors
        grad, width = grad.contiguous(), len(rows)
        where = rows if position is None else position
        sums = rows.new_empty(*ctx.grid[:2], width + 1, x.shape[2])
        inner = torch.empty_like(grad) if ctx.switches["SILU"] else grad
        _inner_gradient[ctx.grid](
            grad, x, rows, rows if bias is None else bias, where, inner, sums,
            *ctx.shape, **ctx.switches, **ctx.form,
        )  # fmt: skip
        dx = torch.empty_like(x)
        _spread[ctx.grid](inner, rows, where, dx, *ctx.shape, **ctx.form)
        total = sums.sum((0, 1))
        return dx, total[:width], None if bias is None else total[width], None, None


def conv_triton(
    x: Tensor, weight: Tensor, bias: Tensor | None, position: Tensor | None, silu: bool
) -> Tensor:
    """Run the kernels; arguments as for `conv.causal_conv`, products and sums in float32."""
    rows = weight.float().t().flip(0).contiguous()  # (W, C), row j for distance j
    if position is not None:
        position = position.to(torch.int32).contiguous()
    bias = None if bias is None else bias.float()
    return _Conv.apply(x.contiguous(), rows, bias, position, silu)
