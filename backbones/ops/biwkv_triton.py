"""Bidirectional WKV as Triton kernels over chunks of tokens: linear, true gaps, sums in float32.

Between the two scalings of `biwkv` the operator K is a prefix sum and a suffix sum, so chunks of
tokens are independent but for what they hand on. Both passes take two launches: every chunk's own
sums, then (after a running sum over the few chunks) every chunk's tokens, with scans of CHUNK steps
inside. Sums are exclusive without any subtraction: a token's neighbour is loaded in its place. The
backward pass applies the same K to the gradients (it is symmetric), and uses what the forward pass
left: the denominator, and the slope (before_N - y before_D) / D.

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

CHANNELS = 32  # Per program; with 64 the backward kernel spills registers on an H100 (cuobjdump).
CHUNK = 32  # Tokens of a program: a tile of both is held in registers several times.


@triton.jit
def _pair(one_ptr, two_ptr, three_ptr, at, top, live, BACKWARD: tl.constexpr):
    """What K is applied to: (e^k v, e^k), and in the backward pass (g / D, -y g / D)."""
    if BACKWARD:
        a = tl.load(one_ptr + at, mask=live, other=0.0).to(tl.float32)
        a /= tl.load(two_ptr + at, mask=live, other=1.0)
        return a, -a * tl.load(three_ptr + at, mask=live, other=0.0)
    e = tl.exp(tl.load(one_ptr + at, mask=live, other=float("-inf")).to(tl.float32) - top)
    return e * tl.load(two_ptr + at, mask=live, other=0.0).to(tl.float32), e


@triton.jit
def _place(position_ptr, stride, t, present, decay, centre):
    """Return the factors exp((p + 1/2) d) and exp((1/2 - p) d) of tokens `t`, p from the centre."""
    at = position_ptr + tl.program_id(0) * stride + t
    p = (tl.load(at, mask=present, other=0).to(tl.float32) - centre)[:, None]
    return tl.exp((p + 0.5) * decay[None, :]), tl.exp((0.5 - p) * decay[None, :]), p


@triton.jit
def _chunk_sums(
    one_ptr, two_ptr, three_ptr, top_ptr, decay_ptr, position_ptr, sums_ptr,
    tokens, channels, stride, centre,
    BACKWARD: tl.constexpr, T: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Write each chunk's four sums: both values, scaled for later and for earlier tokens."""
    sample, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = tl.program_id(2) * C + tl.arange(0, C)
    t = chunk * T + tl.arange(0, T)
    present = t < tokens
    live = present[:, None] & (c < channels)[None, :]
    at = (sample * tokens + t)[:, None] * channels + c[None, :]
    top = tl.load(top_ptr + sample * channels + c, mask=c < channels, other=0.0)[None, :]
    decay = tl.load(decay_ptr + c, mask=c < channels, other=0.0)
    up, down, _ = _place(position_ptr, stride, t, present, decay, centre)
    first, second = _pair(one_ptr, two_ptr, three_ptr, at, top, live, BACKWARD)
    out = sums_ptr + (sample * tl.num_programs(1) + chunk) * 4 * channels + c
    tl.store(out, tl.sum(tl.where(live, up * first, 0.0), 0), mask=c < channels)
    tl.store(out + channels, tl.sum(tl.where(live, up * second, 0.0), 0), mask=c < channels)
    tl.store(out + 2 * channels, tl.sum(tl.where(live, down * first, 0.0), 0), mask=c < channels)
    tl.store(out + 3 * channels, tl.sum(tl.where(live, down * second, 0.0), 0), mask=c < channels)


@triton.jit
def _halves(
    one_ptr, two_ptr, three_ptr, top, carry_ptr, position_ptr, stride, decay, centre,
    base, chunk, c, tokens, channels, BACKWARD: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Return what earlier tokens add to both values at each token of a chunk, and later ones."""
    i = tl.arange(0, T)
    t = chunk * T + i
    up, down, _ = _place(position_ptr, stride, t, t < tokens, decay, centre)
    some = (c < channels)[None, :]
    carry = carry_ptr + c
    # The neighbour before each token stands in its place; the chunk's first gets the carry.
    present = (i > 0) & (t <= tokens)
    live = present[:, None] & some
    before, _, _ = _place(position_ptr, stride, t - 1, present, decay, centre)
    at = base + (t - 1)[:, None] * channels + c[None, :]
    first, second = _pair(one_ptr, two_ptr, three_ptr, at, top, live, BACKWARD)
    first = tl.cumsum(tl.where(live, before * first, 0.0), 0)
    second = tl.cumsum(tl.where(live, before * second, 0.0), 0)
    earlier_1 = down * (first + tl.load(carry, mask=c < channels, other=0.0)[None, :])
    earlier_2 = down * (second + tl.load(carry + channels, mask=c < channels, other=0.0)[None, :])
    # And the neighbour after each.
    present = (i < T - 1) & (t + 1 < tokens)
    live = present[:, None] & some
    _, after, _ = _place(position_ptr, stride, t + 1, present, decay, centre)
    at = base + (t + 1)[:, None] * channels + c[None, :]
    first, second = _pair(one_ptr, two_ptr, three_ptr, at, top, live, BACKWARD)
    first = tl.cumsum(tl.where(live, after * first, 0.0), 0, reverse=True)
    second = tl.cumsum(tl.where(live, after * second, 0.0), 0, reverse=True)
    carry += 2 * channels
    later_1 = up * (first + tl.load(carry, mask=c < channels, other=0.0)[None, :])
    later_2 = up * (second + tl.load(carry + channels, mask=c < channels, other=0.0)[None, :])
    return earlier_1, earlier_2, later_1, later_2


@triton.jit
def _forward(
    k_ptr, v_ptr, top_ptr, carry_ptr, decay_ptr, bonus_ptr, position_ptr,
    y_ptr, slope_ptr, below_ptr, tokens, channels, stride, centre,
    T: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    sample, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = tl.program_id(2) * C + tl.arange(0, C)
    t = chunk * T + tl.arange(0, T)
    live = (t < tokens)[:, None] & (c < channels)[None, :]
    base = sample * tokens * channels
    at = base + t[:, None] * channels + c[None, :]
    top = tl.load(top_ptr + sample * channels + c, mask=c < channels, other=0.0)[None, :]
    decay = tl.load(decay_ptr + c, mask=c < channels, other=0.0)
    bonus = tl.load(bonus_ptr + c, mask=c < channels, other=1.0)[None, :]
    carry = carry_ptr + (sample * tl.num_programs(1) + chunk) * 4 * channels
    before_n, before_d, after_n, after_d = _halves(
        k_ptr, v_ptr, v_ptr, top, carry, position_ptr, stride, decay, centre,
        base, chunk, c, tokens, channels, False, T,
    )  # fmt: skip
    own_n, own_d = _pair(k_ptr, v_ptr, v_ptr, at, top, live, False)
    below = before_d + after_d + bonus * own_d
    y = (before_n + after_n + bonus * own_n) / below
    tl.store(y_ptr + at, y, mask=live)
    tl.store(below_ptr + at, below, mask=live)
    tl.store(slope_ptr + at, (before_n - y * before_d) / below, mask=live)


@triton.jit
def _backward(
    grad_ptr, k_ptr, v_ptr, top_ptr, carry_ptr, decay_ptr, bonus_ptr, position_ptr,
    y_ptr, slope_ptr, below_ptr, dk_ptr, dv_ptr, ddecay_ptr, dbonus_ptr,
    tokens, channels, stride, centre,
    T: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    sample, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = tl.program_id(2) * C + tl.arange(0, C)
    t = chunk * T + tl.arange(0, T)
    live = (t < tokens)[:, None] & (c < channels)[None, :]
    base = sample * tokens * channels
    at = base + t[:, None] * channels + c[None, :]
    top = tl.load(top_ptr + sample * channels + c, mask=c < channels, other=0.0)[None, :]
    decay = tl.load(decay_ptr + c, mask=c < channels, other=0.0)
    bonus = tl.load(bonus_ptr + c, mask=c < channels, other=1.0)[None, :]
    carry = carry_ptr + (sample * tl.num_programs(1) + chunk) * 4 * channels
    before_a, before_b, after_a, after_b = _halves(
        grad_ptr, below_ptr, y_ptr, top, carry, position_ptr, stride, decay, centre,
        base, chunk, c, tokens, channels, True, T,
    )  # fmt: skip
    _, _, p = _place(position_ptr, stride, t, t < tokens, decay, centre)
    e = tl.exp(tl.load(k_ptr + at, mask=live, other=float("-inf")).to(tl.float32) - top)
    v = tl.load(v_ptr + at, mask=live, other=0.0).to(tl.float32)
    a, b = _pair(grad_ptr, below_ptr, y_ptr, at, top, live, True)
    total_a = before_a + after_a + bonus * a
    total_b = before_b + after_b + bonus * b
    tl.store(dv_ptr + at, e * total_a, mask=live)
    tl.store(dk_ptr + at, e * (v * total_a + total_b), mask=live)
    g = tl.load(grad_ptr + at, mask=live, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + at, mask=live, other=0.0)
    slope = tl.load(slope_ptr + at, mask=live, other=0.0)
    self_term = a * e * (v - y)
    # d/dd of exp(-d (|p_t - p_s| - 1)), with p_t - p_s split into the tokens' own positions.
    moment = (
        2.0 * g * slope + bonus * self_term + e * (v * (before_a - after_a) + (before_b - after_b))
    )
    out = (sample * tl.num_programs(1) + chunk) * channels + c
    ddecay = tl.sum(tl.where(live, moment * p + bonus * self_term, 0.0), 0)
    tl.store(ddecay_ptr + out, -ddecay, mask=c < channels)
    tl.store(dbonus_ptr + out, tl.sum(tl.where(live, self_term, 0.0), 0), mask=c < channels)


def _carries(pair: tuple[Tensor, ...], top: Tensor, where: tuple[Any, ...], back: bool) -> Tensor:
    """Return what enters each chunk from before and from after it: (B, chunks, 2, 2, C)."""
    decay, position, stride, centre = where
    batch, tokens, channels = pair[0].shape
    chunks = triton.cdiv(tokens, CHUNK)
    sums = torch.empty(batch, chunks, 2, 2, channels, dtype=torch.float32, device=top.device)
    _chunk_sums[batch, chunks, triton.cdiv(channels, CHANNELS)](
        *pair, top, decay, position, sums, tokens, channels, stride, centre,
        BACKWARD=back, T=CHUNK, C=CHANNELS,
    )  # fmt: skip
    carries = torch.zeros_like(sums)
    torch.cumsum(sums[:, :-1, 0], 1, out=carries[:, 1:, 0])
    carries[:, :-1, 1] = sums[:, 1:, 1].flip(1).cumsum(1).flip(1)
    return carries


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
        slope, below = torch.empty_like(y), torch.empty_like(y)
        top = k.amax(1).float()
        where = (decay, position, stride, (length - 1) / 2)
        carries = _carries((k, v, v), top, where, False)
        _forward[batch, carries.shape[1], triton.cdiv(channels, CHANNELS)](
            k, v, top, carries, decay, bonus, position, y, slope, below,
            tokens, channels, stride, where[-1], T=CHUNK, C=CHANNELS,
        )  # fmt: skip
        ctx.save_for_backward(k, v, decay, bonus, position, y, slope, below, top)
        ctx.where = where[2:]
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        k, v, decay, bonus, position, y, slope, below, top = ctx.saved_tensors
        batch, tokens, channels = k.shape
        grad = grad.contiguous()
        carries = _carries((grad, below, y), top, (decay, position, *ctx.where), True)
        dk, dv = torch.empty_like(slope), torch.empty_like(slope)
        ddecay, dbonus = (carries.new_empty(*carries.shape[:2], channels) for _ in range(2))
        _backward[batch, carries.shape[1], triton.cdiv(channels, CHANNELS)](
            grad, k, v, top, carries, decay, bonus, position, y, slope, below,
            dk, dv, ddecay, dbonus, tokens, channels, *ctx.where, T=CHUNK, C=CHANNELS,
        )  # fmt: skip
        sums = (x.sum((0, 1)) for x in (ddecay, dbonus))
        return dk.to(k.dtype), dv.to(v.dtype), *sums, None, None, None


def biwkv_triton(
    k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, position: Tensor | None, length: int
) -> Tensor:
    """Run the kernels: `biwkv` on decay w / length and bonus exp(u / length), both float32 (C,)."""
    if position is None:
        position = torch.arange(k.shape[1], device=k.device)
    position = position.to(torch.int32).contiguous()
    stride = 0 if position.dim() == 1 else position.shape[1]
    k, v = k.contiguous(), v.contiguous()
    return _BiWKV.apply(k, v, decay, bonus, position, stride, length).to(v.dtype)
