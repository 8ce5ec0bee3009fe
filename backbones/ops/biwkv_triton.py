"""Bidirectional WKV as Triton kernels over chunks of tokens: linear, true gaps, sums in float32.

Between the two scalings of `biwkv` the operator K is a prefix sum and a suffix sum, so chunks of
tokens are independent but for what they hand on. Both passes launch their kernel twice. With SUMS
it writes every chunk's own sums; then, given the running sums over the few chunks (`_carries`), it
computes every chunk's tokens, with scans of CHUNK steps inside. Sums exclude the token itself
without any subtraction.

Memory holds only the inputs, the output and the gradients, each in its own type, and four float32
sums per chunk and channel. The backward pass recomputes the denominator D, y and the slope
(before_N - y before_D) / D in registers, which is faster than reading them as float32, and applies
the same K to the gradients (K is symmetric).

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

CHANNELS = 32  # Per program.
CHUNK = 32  # Tokens per program: registers hold several tiles of CHUNK x CHANNELS.


@triton.jit
def _tile(
    k_ptr, v_ptr, top_ptr, decay_ptr, bonus_ptr, position_ptr,
    tokens, channels, stride, centre, T: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Load what every kernel needs of its tile (T, C), in float32.

    Offsets and a mask; e^k (0 outside the mask) and v; the position p from the centre with the
    factors exp((p + 1/2) d) and exp((1/2 - p) d); the weight of the token itself.
    """
    sample = tl.program_id(0).to(tl.int64)
    t = tl.program_id(1) * T + tl.arange(0, T)
    c = tl.program_id(2) * C + tl.arange(0, C)
    here = c < channels
    present = t < tokens
    live = present[:, None] & here[None, :]
    at = sample * tokens * channels + t[:, None] * channels + c[None, :]
    top = tl.load(top_ptr + sample * channels + c, mask=here, other=0.0)[None, :]
    e = tl.exp(tl.load(k_ptr + at, mask=live, other=float("-inf")).to(tl.float32) - top)
    v = tl.load(v_ptr + at, mask=live, other=0.0).to(tl.float32)
    decay = tl.load(decay_ptr + c, mask=here, other=0.0)[None, :]
    bonus = tl.load(bonus_ptr + c, mask=here, other=1.0)[None, :]
    position = tl.load(position_ptr + sample * stride + t, mask=present, other=0)
    p = (position.to(tl.float32) - centre)[:, None]
    return at, live, e, v, p, tl.exp((p + 0.5) * decay), tl.exp((0.5 - p) * decay), bonus


@triton.jit
def _chunk_pointer(ptr, rows: tl.constexpr, channels, C: tl.constexpr):
    """Point at this chunk's row of channels in a tensor (B, chunks, rows, channels)."""
    chunk = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    return ptr + chunk * rows * channels + tl.program_id(2) * C + tl.arange(0, C)


@triton.jit
def _write_sums(sums_ptr, first, second, up, down, channels, C: tl.constexpr):
    """Write a chunk's four sums: both values, scaled for later and for earlier tokens."""
    out = _chunk_pointer(sums_ptr, 4, channels, C)
    here = tl.program_id(2) * C + tl.arange(0, C) < channels
    tl.store(out, tl.sum(up * first, 0), mask=here)
    tl.store(out + channels, tl.sum(up * second, 0), mask=here)
    tl.store(out + 2 * channels, tl.sum(down * first, 0), mask=here)
    tl.store(out + 3 * channels, tl.sum(down * second, 0), mask=here)


@triton.jit
def _join(sum_1, last_1, sum_2, last_2, next_sum_1, next_last_1, next_sum_2, next_last_2):
    """Join two runs of tokens, each given by the sum of all but its last token, and by that one."""
    return sum_1 + last_1 + next_sum_1, next_last_1, sum_2 + last_2 + next_sum_2, next_last_2


@triton.jit
def _others(first, second, up, down, carry_ptr, channels, C: tl.constexpr):
    """Return the sums over earlier, then over later tokens, of both values at each token."""
    carry = _chunk_pointer(carry_ptr, 4, channels, C)
    here = tl.program_id(2) * C + tl.arange(0, C) < channels
    none = tl.zeros_like(first)
    sum_1, _, sum_2, _ = tl.associative_scan((none, up * first, none, up * second), 0, _join)
    before_1 = down * (sum_1 + tl.load(carry, mask=here, other=0.0)[None, :])
    before_2 = down * (sum_2 + tl.load(carry + channels, mask=here, other=0.0)[None, :])
    sum_1, _, sum_2, _ = tl.associative_scan(
        (none, down * first, none, down * second), 0, _join, reverse=True
    )
    after_1 = up * (sum_1 + tl.load(carry + 2 * channels, mask=here, other=0.0)[None, :])
    after_2 = up * (sum_2 + tl.load(carry + 3 * channels, mask=here, other=0.0)[None, :])
    return before_1, before_2, after_1, after_2


@triton.jit
def _output(e, v, up, down, bonus, live, carry_ptr, channels, C: tl.constexpr):
    """Return y, its denominator and its slope (before_N - y before_D) / D; y is 0 off the mask."""
    before_n, before_d, after_n, after_d = _others(e * v, e, up, down, carry_ptr, channels, C)
    below = tl.where(live, before_d + after_d + bonus * e, 1.0)
    y = tl.where(live, (before_n + after_n + bonus * e * v) / below, 0.0)
    return y, below, (before_n - y * before_d) / below


@triton.jit
def _forward(
    k_ptr, v_ptr, top_ptr, decay_ptr, bonus_ptr, position_ptr, sums_ptr, y_ptr,
    tokens, channels, stride, centre, T: tl.constexpr, C: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """With SUMS, write each chunk's sums of e^k v and e^k; else read the carries and write y."""
    at, live, e, v, _, up, down, bonus = _tile(
        k_ptr, v_ptr, top_ptr, decay_ptr, bonus_ptr, position_ptr,
        tokens, channels, stride, centre, T, C,
    )  # fmt: skip
    if SUMS:
        _write_sums(sums_ptr, e * v, e, up, down, channels, C)
    else:
        y, _, _ = _output(e, v, up, down, bonus, live, sums_ptr, channels, C)
        tl.store(y_ptr + at, y, mask=live)


@triton.jit
def _backward(
    k_ptr, v_ptr, top_ptr, decay_ptr, bonus_ptr, position_ptr, carry_ptr, grad_ptr,
    sums_ptr, dk_ptr, dv_ptr, ddecay_ptr, dbonus_ptr,
    tokens, channels, stride, centre, T: tl.constexpr, C: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """With SUMS, write each chunk's sums of g / D and -y g / D; else read their carries.

    Then write dk and dv in the types of k and v, and each chunk's share of the other gradients.
    """
    at, live, e, v, p, up, down, bonus = _tile(
        k_ptr, v_ptr, top_ptr, decay_ptr, bonus_ptr, position_ptr,
        tokens, channels, stride, centre, T, C,
    )  # fmt: skip
    y, below, slope = _output(e, v, up, down, bonus, live, carry_ptr, channels, C)
    g = tl.load(grad_ptr + at, mask=live, other=0.0).to(tl.float32)
    a = g / below
    b = -a * y
    if SUMS:
        _write_sums(sums_ptr, a, b, up, down, channels, C)
    else:
        before_a, before_b, after_a, after_b = _others(a, b, up, down, sums_ptr, channels, C)
        total_a = before_a + after_a + bonus * a
        total_b = before_b + after_b + bonus * b
        tl.store(dv_ptr + at, e * total_a, mask=live)
        tl.store(dk_ptr + at, e * (v * total_a + total_b), mask=live)
        self_term = a * e * (v - y)
        # d/dd of exp(-d (|p_t - p_s| - 1)), with p_t - p_s split into the tokens' own positions.
        differences = v * (before_a - after_a) + (before_b - after_b)
        moment = 2.0 * g * slope + bonus * self_term + e * differences
        here = tl.program_id(2) * C + tl.arange(0, C) < channels
        ddecay = -tl.sum(tl.where(live, moment * p + bonus * self_term, 0.0), 0)
        tl.store(_chunk_pointer(ddecay_ptr, 1, channels, C), ddecay, mask=here)
        dbonus = tl.sum(tl.where(live, self_term, 0.0), 0)
        tl.store(_chunk_pointer(dbonus_ptr, 1, channels, C), dbonus, mask=here)


def _carries(sums: Tensor) -> Tensor:
    """Return what enters each chunk from before and from after it, from all chunks' sums.

    Both are (B, chunks, 2, 2, C): for later and for earlier tokens, two values each.
    """
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
        ctx.grid = batch, triton.cdiv(tokens, CHUNK), triton.cdiv(channels, CHANNELS)
        ctx.scalars = tokens, channels, stride, (length - 1) / 2
        inputs = k, v, k.amax(1).float(), decay, bonus, position
        sums, y = decay.new_empty(*ctx.grid[:2], 2, 2, channels), torch.empty_like(v)
        launch, sizes = _forward[ctx.grid], {"T": CHUNK, "C": CHANNELS}
        launch(*inputs, sums, y, *ctx.scalars, **sizes, SUMS=True)
        carries = _carries(sums)
        launch(*inputs, carries, y, *ctx.scalars, **sizes, SUMS=False)
        ctx.save_for_backward(*inputs, carries)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        k, v, carries = inputs[0], inputs[1], inputs[-1]
        grad = grad.contiguous()
        dk, dv, sums = torch.empty_like(k), torch.empty_like(v), torch.empty_like(carries)
        ddecay, dbonus = (carries.new_empty(*ctx.grid[:2], k.shape[2]) for _ in range(2))
        outputs = dk, dv, ddecay, dbonus
        launch, sizes = _backward[ctx.grid], {"T": CHUNK, "C": CHANNELS}
        launch(*inputs, grad, sums, *outputs, *ctx.scalars, **sizes, SUMS=True)
        launch(*inputs, grad, _carries(sums), *outputs, *ctx.scalars, **sizes, SUMS=False)
        return dk, dv, ddecay.sum((0, 1)), dbonus.sum((0, 1)), None, None, None


def biwkv_triton(
    k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, position: Tensor | None, length: int
) -> Tensor:
    """Run the kernels: `biwkv` on decay w / length and bonus exp(u / length), both float32 (C,)."""
    if position is None:
        position = torch.arange(k.shape[1], device=k.device)
    position = position.to(torch.int32).contiguous()
    stride = 0 if position.dim() == 1 else position.shape[1]
    return _BiWKV.apply(k.contiguous(), v.contiguous(), decay, bonus, position, stride, length)
