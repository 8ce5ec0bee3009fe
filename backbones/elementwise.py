"""Element-wise chains of single families in one pass over memory, for CPUs (see `layers`)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from backbones.layers import pieces
from backbones.ops import native
from backbones.ops.shift import grid_shift


def gated_rms_norm(y: Tensor, z: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """RMSNorm(y silu(z)) weight over the channels of (B, T, C): Mamba-2 before its output."""
    if native.takes(y, z):
        return native.gated_rms_norm(y, z, weight, eps)
    weight = weight.to(y.dtype)
    if parts := pieces(y, z, weight):
        return _GatedRMSNorm.apply(y, z, weight, eps, parts)
    return F.rms_norm(y * F.silu(z), weight.shape, weight, eps)


class _GatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, z: Tensor, weight: Tensor, eps: float, parts: list[slice]
    ) -> Tensor:
        ctx.parts, out = parts, torch.empty_like(y)
        scale = y.new_empty(*y.shape[:-1], 1)
        for piece in parts:
            gated = F.silu(z[piece]).mul_(y[piece])
            power = torch.linalg.vector_norm(gated, dim=-1, keepdim=True).square_()
            scale[piece] = power.div_(y.shape[-1]).add_(eps).rsqrt_()
            torch.mul(gated.mul_(scale[piece]), weight, out=out[piece])
        ctx.save_for_backward(y, z, weight, scale)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, z, weight, scale = ctx.saved_tensors
        dy, dz, dweight = torch.empty_like(y), torch.empty_like(y), torch.zeros_like(weight)
        for piece in ctx.parts:
            sigmoid = torch.sigmoid(z[piece])
            silu = sigmoid * z[piece]
            unit = (silu * y[piece]).mul_(scale[piece])
            dunit = grad[piece] * unit
            dweight += dunit.sum((0, 1))
            along = dunit.mul_(weight).mean(-1, keepdim=True)
            dgated = (grad[piece] * weight).sub_(unit.mul_(along)).mul_(scale[piece])
            torch.mul(dgated, silu, out=dy[piece])
            # silu' = sigmoid + silu (1 - sigmoid)
            slope = torch.addcmul(silu, silu, sigmoid, value=-1).add_(sigmoid)
            torch.mul(dgated.mul_(y[piece]), slope, out=dz[piece])
        return dy, dz, dweight, None, None


def shift_mixtures(
    x: Tensor,
    neighbours: Tensor,
    mix: Tensor,
    grid: tuple[int, int] | None = None,
    prefix: int = 0,
) -> list[Tensor]:
    """Mix every token with its shifted neighbours: `mixtures` of x and `grid_shift` of x."""
    if native.takes(x):
        return native.shift_mix(x, neighbours, mix)
    return mixtures(x, grid_shift(x, neighbours, grid, prefix), mix)


def mixtures(x: Tensor, other: Tensor, mix: Tensor) -> list[Tensor]:
    """Return x mix + other (1 - mix) for each row of `mix`: tokens (B, T, D), rows (M, D)."""
    mix = mix.to(x.dtype)
    if parts := pieces(x, other):
        return list(_Mixtures.apply(x, other, mix, parts))
    return [torch.lerp(other, x, row) for row in mix]


class _Mixtures(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, other: Tensor, mix: Tensor, parts: list[slice]
    ) -> tuple[Tensor, ...]:
        ctx.parts = parts
        outs = tuple(torch.empty_like(x) for _ in mix)
        for piece in parts:
            away = x[piece] - other[piece]
            for row, out in zip(mix, outs, strict=True):
                torch.addcmul(other[piece], away, row, out=out[piece])
        ctx.save_for_backward(x, other, mix)
        return outs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, other, mix = ctx.saved_tensors
        dx, dother, dmix = torch.empty_like(x), torch.empty_like(x), torch.zeros_like(mix)
        for piece in ctx.parts:
            away = x[piece] - other[piece]
            for n, grad in enumerate(grads):
                g = grad[piece]
                dmix[n] += (g * away).sum((0, 1))
                if n == 0:
                    torch.mul(g, mix[0], out=dx[piece])
                    dother[piece] = g
                else:
                    dx[piece].addcmul_(g, mix[n])
                    dother[piece] += g
            dother[piece] -= dx[piece]
        return dx, dother, dmix, None


def gelu(x: Tensor) -> Tensor:
    """Return GELU in its tanh form."""
    return native.gelu(x) if native.takes(x) else F.gelu(x, approximate="tanh")


def sigmoid_gate(x: Tensor, y: Tensor) -> Tensor:
    """Return sigmoid(x) y for tensors of one shape."""
    return native.sigmoid_gate(x, y) if native.takes(x, y) else torch.sigmoid(x) * y


def squared_relu(x: Tensor) -> Tensor:
    """Return relu(x)^2."""
    if native.takes(x):
        return native.squared_relu(x)
    return _SquaredReLU.apply(x) if pieces(x) else torch.relu(x).square()


class _SquaredReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        positive = x.clamp(min=0)
        ctx.save_for_backward(positive)
        return positive * positive

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return (grad * ctx.saved_tensors[0]).mul_(2)
