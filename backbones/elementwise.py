"""Element-wise chains in one pass over memory, for CPUs.

Next to the matmuls, a block on a CPU spends its time streaming activations through memory: every
element-wise operation reads and writes all of them. The functions here walk over pieces that stay
in the cache, forward and backward, and save one tensor where autograd would save several. The two
at the ends of a branch also put tokens into scan order and back, which is then no pass of its own.
On other devices, and under `torch.compile`, they are the plain formula, which compilers fuse.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from routing.moves import Reorder, permute

PIECE = 1 << 17  # Values in a piece: 512 KiB in float32.


def on_cpu(*tensors: Tensor) -> bool:
    """Say whether the piecewise path runs for these tensors."""
    same = len({t.dtype for t in tensors}) == 1
    return same and tensors[0].device.type == "cpu" and not torch.compiler.is_compiling()


def _rows(x: Tensor) -> Iterator[slice]:
    """Split the batch of (B, T, D) into pieces of whole samples."""
    step = max(1, PIECE // max(x[0].numel(), 1))
    return (slice(i, i + step) for i in range(0, x.shape[0], step))


def _reordered(x: Tensor, piece: slice, index: Tensor) -> Tensor:
    """Gather a piece of (B, T, D) in the order of one half of a `Reorder`."""
    length = x.shape[1]
    if index.numel() == length:
        return x[piece].index_select(1, index)
    index = index[piece.start * length : piece.stop * length]
    return x.flatten(0, 1).index_select(0, index).unflatten(0, (-1, length))


def _read(x: Tensor, piece: slice, index: Tensor | None) -> Tensor:
    return x[piece] if index is None else _reordered(x, piece, index)


def adaln(
    x: Tensor, shift: Tensor, scale: Tensor, order: Reorder | None = None, eps: float = 1e-6
) -> Tensor:
    """Normalise tokens (B, T, D), then scale and shift them per sample: (B, 1, D) each.

    Args:
        x: The tokens.
        shift: What to add.
        scale: What to multiply by, less 1.
        order: Put the result into this order.
        eps: Added to the variance.
    """
    if on_cpu(x, shift, scale):
        return _AdaLN.apply(x, shift, scale, eps, *(order or (None, None)))
    unit = F.layer_norm(x, x.shape[-1:], eps=eps)
    return permute(torch.addcmul(shift, unit, scale + 1), order)


class _AdaLN(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        shift: Tensor,
        scale: Tensor,
        eps: float,
        perm: Tensor | None,
        inv: Tensor | None,
    ) -> Tensor:
        out, size = torch.empty_like(x), x.shape[-1:]
        mean, rstd = (x.new_empty(*x.shape[:-1], 1) for _ in range(2))
        factor = scale + 1
        for piece in _rows(x):
            unit, mean[piece], rstd[piece] = torch.native_layer_norm(
                _read(x, piece, perm), size, None, None, eps
            )
            torch.addcmul(shift[piece], unit, factor[piece], out=out[piece])
        mean, rstd = (_read(t, slice(0, x.shape[0]), inv) for t in (mean, rstd))
        ctx.save_for_backward(x, factor, mean, rstd, inv)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, factor, mean, rstd, inv = ctx.saved_tensors
        grad = grad.contiguous()
        dx, dshift, dscale = (torch.empty_like(t) for t in (x, factor, factor))
        backward, size = torch.ops.aten.native_layer_norm_backward, x.shape[-1:]
        if x[0].numel() * 2 >= PIECE:
            # One sample has one scale and shift: to torch's kernel, LayerNorm's own weights.
            for i in range(x.shape[0]):
                g = _read(grad, slice(i, i + 1), inv)[0]
                given = (g, x[i], size, mean[i], rstd[i], factor[i, 0], factor[i, 0])
                dx[i], dscale[i, 0], dshift[i, 0] = backward(*given, [True, True, True])
            return dx, dshift, dscale, None, None, None
        for piece in _rows(x):
            g, statistics = _read(grad, piece, inv), (mean[piece], rstd[piece])
            torch.sum(g, 1, keepdim=True, out=dshift[piece])
            product = (x[piece] - statistics[0]).mul_(statistics[1]).mul_(g)
            torch.sum(product, 1, keepdim=True, out=dscale[piece])
            inner = torch.mul(g, factor[piece], out=product)
            given = (inner, x[piece], size, *statistics, None, None)
            dx[piece] = backward(*given, [True, False, False])[0]
        return dx, dshift, dscale, None, None, None


def gated_sum(x: Tensor, gate: Tensor, y: Tensor, order: Reorder | None = None) -> Tensor:
    """Return x + gate y for tokens (B, T, D) and a gate per sample (B, 1, D).

    Args:
        x: The residual stream.
        gate: The gate.
        y: A branch's output.
        order: The order that y is in, against x.
    """
    if on_cpu(x, gate, y):
        return _GatedSum.apply(x, gate, y, *(order or (None, None)))
    return torch.addcmul(x, gate, permute(y, order and order.inverse()).to(x.dtype))


class _GatedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate: Tensor,
        y: Tensor,
        perm: Tensor | None,
        inv: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(gate, y, perm)
        if inv is None:
            return torch.addcmul(x, gate, y)
        out, y = torch.empty_like(x), y.contiguous()
        for piece in _rows(x):
            torch.addcmul(x[piece], gate[piece], _reordered(y, piece, inv), out=out[piece])
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, y, perm = ctx.saved_tensors
        dy, dgate = torch.empty_like(y), torch.empty_like(gate)
        grad = grad.contiguous()
        for piece in _rows(y):
            g = _read(grad, piece, perm)
            torch.sum(g * y[piece], 1, keepdim=True, out=dgate[piece])
            torch.mul(g, gate[piece], out=dy[piece])
        return grad, dgate, dy, None, None


def gated_rms_norm(y: Tensor, z: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """RMSNorm(y silu(z)) weight over the channels of (B, T, C): Mamba-2 before its output."""
    weight = weight.to(y.dtype)
    if on_cpu(y, z, weight):
        return _GatedRMSNorm.apply(y, z, weight, eps)
    return F.rms_norm(y * F.silu(z), weight.shape, weight, eps)


class _GatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(y)
        scale = y.new_empty(*y.shape[:-1], 1)
        for piece in _rows(y):
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
        for piece in _rows(y):
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
        return dy, dz, dweight, None


def mixtures(x: Tensor, other: Tensor, mix: Tensor) -> list[Tensor]:
    """Return x mix + other (1 - mix) for each row of `mix`: tokens (B, T, D), rows (M, D)."""
    mix = mix.to(x.dtype)
    if on_cpu(x, other):
        return list(_Mixtures.apply(x, other, mix))
    return [torch.lerp(other, x, row) for row in mix]


class _Mixtures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor, mix: Tensor) -> tuple[Tensor, ...]:
        outs = tuple(torch.empty_like(x) for _ in mix)
        for piece in _rows(x):
            away = x[piece] - other[piece]
            for row, out in zip(mix, outs, strict=True):
                torch.addcmul(other[piece], away, row, out=out[piece])
        ctx.save_for_backward(x, other, mix)
        return outs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        x, other, mix = ctx.saved_tensors
        dx, dother, dmix = torch.empty_like(x), torch.empty_like(x), torch.zeros_like(mix)
        for piece in _rows(x):
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
        return dx, dother, dmix


def squared_relu(x: Tensor) -> Tensor:
    """Return relu(x)^2."""
    return _SquaredReLU.apply(x) if on_cpu(x) else torch.relu(x).square()


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
