"""Bidirectional WKV as a Triton kernel: linear in tokens, true gaps, state and sums in float32.

One program owns a block of channels of one sample and walks the tokens twice, forward and back,
with the two running sums (numerator and denominator) in registers. Between two tokens at distance g
the sums shrink by exp(-decay g), and the token left behind enters with exp(-decay (g - 1)). The
backward pass is the same walk over the gradients (the operator is symmetric), and uses what the
forward pass left: the denominator, and the slope (before_N - y before_D) / D.

The oracle is `biwkv.reference`. TRITON_INTERPRET=1, set before triton is imported, runs it on the
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

CHANNELS = 64  # Per program: one full line of bfloat16, two warps.


@triton.jit
def _step(sum_n, sum_d, last_n, last_d, gap, decay):
    """Move the sums on by one token."""
    fade = tl.exp(-decay * (gap - 1.0))
    once = fade * tl.exp(-decay)
    return sum_n * once + last_n * fade, sum_d * once + last_d * fade


@triton.jit
def _forward(
    k_ptr,
    v_ptr,
    decay_ptr,
    bonus_ptr,
    position_ptr,
    y_ptr,
    slope_ptr,
    below_ptr,
    top_ptr,
    tokens,
    channels,
    position_stride,
    BLOCK: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = c < channels
    base = sample * tokens * channels + c
    position_ptr += sample * position_stride
    decay = tl.load(decay_ptr + c, mask=live, other=0.0)
    bonus = tl.load(bonus_ptr + c, mask=live, other=1.0)

    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    for t in range(tokens):
        top = tl.maximum(
            top, tl.load(k_ptr + base + t * channels, mask=live, other=0.0).to(tl.float32)
        )
    tl.store(top_ptr + sample * channels + c, top, mask=live)

    sum_n = tl.zeros((BLOCK,), tl.float32)
    sum_d = tl.zeros((BLOCK,), tl.float32)
    last_n = tl.zeros((BLOCK,), tl.float32)
    last_d = tl.zeros((BLOCK,), tl.float32)
    place = tl.load(position_ptr).to(tl.float32) - 1.0
    for t in range(tokens):
        here = tl.load(position_ptr + t).to(tl.float32)
        sum_n, sum_d = _step(sum_n, sum_d, last_n, last_d, here - place, decay)
        place = here
        at = base + t * channels
        tl.store(slope_ptr + at, sum_n, mask=live)
        tl.store(below_ptr + at, sum_d, mask=live)
        last_d = tl.exp(tl.load(k_ptr + at, mask=live, other=0.0).to(tl.float32) - top)
        last_n = last_d * tl.load(v_ptr + at, mask=live, other=0.0).to(tl.float32)

    tl.debug_barrier()
    sum_n = tl.zeros((BLOCK,), tl.float32)
    sum_d = tl.zeros((BLOCK,), tl.float32)
    last_n = tl.zeros((BLOCK,), tl.float32)
    last_d = tl.zeros((BLOCK,), tl.float32)
    place += 1.0
    for i in range(tokens):
        t = tokens - 1 - i
        here = tl.load(position_ptr + t).to(tl.float32)
        sum_n, sum_d = _step(sum_n, sum_d, last_n, last_d, place - here, decay)
        place = here
        at = base + t * channels
        last_d = tl.exp(tl.load(k_ptr + at, mask=live, other=0.0).to(tl.float32) - top)
        last_n = last_d * tl.load(v_ptr + at, mask=live, other=0.0).to(tl.float32)
        before_n = tl.load(slope_ptr + at, mask=live, other=0.0)
        before_d = tl.load(below_ptr + at, mask=live, other=1.0)
        below = before_d + sum_d + bonus * last_d
        y = (before_n + sum_n + bonus * last_n) / below
        tl.store(y_ptr + at, y, mask=live)
        tl.store(below_ptr + at, below, mask=live)
        tl.store(slope_ptr + at, (before_n - y * before_d) / below, mask=live)


@triton.jit
def _backward(
    grad_ptr,
    k_ptr,
    v_ptr,
    decay_ptr,
    bonus_ptr,
    position_ptr,
    y_ptr,
    slope_ptr,
    below_ptr,
    top_ptr,
    dk_ptr,
    dv_ptr,
    ddecay_ptr,
    dbonus_ptr,
    tokens,
    channels,
    position_stride,
    centre,
    BLOCK: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = c < channels
    base = sample * tokens * channels + c
    position_ptr += sample * position_stride
    decay = tl.load(decay_ptr + c, mask=live, other=0.0)
    bonus = tl.load(bonus_ptr + c, mask=live, other=1.0)
    top = tl.load(top_ptr + sample * channels + c, mask=live, other=0.0)

    sum_a = tl.zeros((BLOCK,), tl.float32)
    sum_b = tl.zeros((BLOCK,), tl.float32)
    a = tl.zeros((BLOCK,), tl.float32)
    b = tl.zeros((BLOCK,), tl.float32)
    place = tl.load(position_ptr).to(tl.float32) - 1.0
    for t in range(tokens):
        here = tl.load(position_ptr + t).to(tl.float32)
        sum_a, sum_b = _step(sum_a, sum_b, a, b, here - place, decay)
        place = here
        at = base + t * channels
        tl.store(dv_ptr + at, sum_a, mask=live)
        tl.store(dk_ptr + at, sum_b, mask=live)
        a = tl.load(grad_ptr + at, mask=live, other=0.0).to(tl.float32)
        a /= tl.load(below_ptr + at, mask=live, other=1.0)
        b = -a * tl.load(y_ptr + at, mask=live, other=0.0).to(tl.float32)

    tl.debug_barrier()
    sum_a = tl.zeros((BLOCK,), tl.float32)
    sum_b = tl.zeros((BLOCK,), tl.float32)
    a = tl.zeros((BLOCK,), tl.float32)
    b = tl.zeros((BLOCK,), tl.float32)
    ddecay = tl.zeros((BLOCK,), tl.float32)
    dbonus = tl.zeros((BLOCK,), tl.float32)
    place += 1.0
    for i in range(tokens):
        t = tokens - 1 - i
        here = tl.load(position_ptr + t).to(tl.float32)
        sum_a, sum_b = _step(sum_a, sum_b, a, b, place - here, decay)
        place = here
        at = base + t * channels
        g = tl.load(grad_ptr + at, mask=live, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + at, mask=live, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + at, mask=live, other=0.0).to(tl.float32)
        e = tl.exp(tl.load(k_ptr + at, mask=live, other=0.0).to(tl.float32) - top)
        a = g / tl.load(below_ptr + at, mask=live, other=1.0)
        b = -a * y
        before_a = tl.load(dv_ptr + at, mask=live, other=0.0)
        before_b = tl.load(dk_ptr + at, mask=live, other=0.0)
        total_a = before_a + sum_a + bonus * a
        total_b = before_b + sum_b + bonus * b
        tl.store(dv_ptr + at, e * total_a, mask=live)
        tl.store(dk_ptr + at, e * (v * total_a + total_b), mask=live)
        own = a * e * (v - y)
        slope = tl.load(slope_ptr + at, mask=live, other=0.0)
        moment = 2.0 * g * slope + bonus * own
        moment += e * (v * (before_a - sum_a) + (before_b - sum_b))
        ddecay -= moment * (here - centre) + bonus * own
        dbonus += own
    tl.store(ddecay_ptr + sample * channels + c, ddecay, mask=live)
    tl.store(dbonus_ptr + sample * channels + c, dbonus, mask=live)


class _BiWKV(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        bonus: Tensor,
        position: Tensor,
        stride: int,
        length: int,
    ) -> Tensor:
        batch, tokens, channels = k.shape
        # float32 although v may be bfloat16: a rounded y would shift every gradient of k.
        y = torch.empty(k.shape, dtype=torch.float32, device=k.device)
        slope = torch.empty_like(y)
        below = torch.empty_like(y)
        top = torch.empty(batch, channels, dtype=torch.float32, device=k.device)
        grid = (batch, triton.cdiv(channels, CHANNELS))
        _forward[grid](
            k, v, decay, bonus, position, y, slope, below, top, tokens, channels, stride,
            BLOCK=CHANNELS, num_warps=2,
        )  # fmt: skip
        ctx.save_for_backward(k, v, decay, bonus, position, y, slope, below, top)
        ctx.stride, ctx.length = stride, length
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        k, v, decay, bonus, position, y, slope, below, top = ctx.saved_tensors
        batch, tokens, channels = k.shape
        dk, dv = torch.empty_like(slope), torch.empty_like(slope)
        ddecay, dbonus = torch.empty_like(top), torch.empty_like(top)
        grid = (batch, triton.cdiv(channels, CHANNELS))
        _backward[grid](
            grad.contiguous(), k, v, decay, bonus, position, y, slope, below, top,
            dk, dv, ddecay, dbonus, tokens, channels, ctx.stride, (ctx.length - 1) / 2,
            BLOCK=CHANNELS, num_warps=2,
        )  # fmt: skip
        return dk.to(k.dtype), dv.to(v.dtype), ddecay.sum(0), dbonus.sum(0), None, None, None


def biwkv_triton(
    k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, position: Tensor | None, length: int
) -> Tensor:
    """Run the kernel.

    Args:
        k: (B, T, C) keys, any float type.
        v: (B, T, C) values.
        decay: (C,) float32 decay per unit of distance.
        bonus: (C,) float32 factor of the token itself, exp(u / L).
        position: (T,) or (B, T) ascending integers, or None for 0..T-1.
        length: Tokens of the whole sequence.

    Returns:
        (B, T, C) in v's dtype.
    """
    if position is None:
        position = torch.arange(k.shape[1], device=k.device)
    position = position.to(torch.int32).contiguous()
    stride = 0 if position.dim() == 1 else position.shape[1]
    k, v = k.contiguous(), v.contiguous()
    return _BiWKV.apply(k, v, decay, bonus, position, stride, length).to(v.dtype)
