r"""Bidirectional WKV (Vision-RWKV's attention), over true distances.

With positions p, decay d = w / L and bonus u / L (L: tokens of the whole sequence, present or not),

    y_t = N_t / D_t,   N_t = sum_{s != t} exp(k_s - d (|p_t - p_s| - 1)) v_s  +  exp(k_t + u / L)
    v_t,   D_t the same without v.

Both sums are one linear operator K, applied to (e^k v) and to e^k. Because |d| |p_t - p_s| <= |w|
the kernel factors without overflow, exp(-d (p_t - p_s - 1)) = exp(-d (p_t - c - 1/2)) exp(d (p_s -
c + 1/2)), so K is a prefix sum and a suffix sum between two scalings: linear in tokens, no loop
over them. All terms are positive for D, so nothing cancels. K is symmetric: the backward pass
applies the same K to the gradients.

Sources: Duan et al., Vision-RWKV (2403.02308), eq. 2; Fei et al., Diffusion-RWKV (2404.04478).
    Decay over true gaps: ours.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from backbones.ops.dispatch import (
    KernelError,
    batches,
    choose,
    full_precision,
    kernel_function,
    work_dtype,
)

# |w| beyond this would overflow float32 in the factors; e^-60 is no weight at all.
MAX_DECAY = 60.0
# Tokens that one triangular matrix product sums on the CPU; measured best of 16, 32 and 64.
BLOCK = 16
CACHED = 131072  # Numbers of a block of samples that stay in a CPU's L2 cache.


def reference(
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    position: Tensor | None = None,
    length: int | None = None,
) -> Tensor:
    """The definition in float64, with all (B, T, T, C) weights written out. Shapes as `biwkv`."""
    length = length or k.shape[1]
    p = torch.arange(k.shape[1], device=k.device) if position is None else position
    p = p.double().expand(k.shape[0], -1)
    distance = (p[:, :, None] - p[:, None, :]).abs()[..., None]  # (B, T, T, 1)
    exponent = k.double()[:, None] - w.double() / length * (distance - 1)
    own = k.double()[:, None] + u.double() / length
    same = torch.eye(k.shape[1], dtype=torch.bool, device=k.device)[None, :, :, None]
    weight = torch.softmax(torch.where(same, own, exponent), dim=2)
    return torch.einsum("btsc,bsc->btc", weight, v.double()).to(v.dtype)


def biwkv(
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    position: Tensor | None = None,
    length: int | None = None,
    kernel: str = "auto",
) -> Tensor:
    """Bidirectional WKV of Vision-RWKV with decay over true distances.

    Args:
        k: (B, T, C) keys; -inf takes a token out of every sum.
        v: (B, T, C) values.
        w: (C,) decay over the whole length; negative values grow with distance. Clamped to +-60.
        u: (C,) bonus of the token itself.
        position: (T,) or (B, T) integer positions below `length`, ascending; None: 0..T-1 (rank
            distance, the released form if `length` is None too).
        length: The normaliser L; by default T.
        kernel: auto | torch | reference | triton | native.

    Returns:
        (B, T, C) in v's dtype. Computed in float32 at least.

    Raises:
        KernelError: The kernel cannot run, or `length` is smaller than the number of tokens.
    """
    length = k.shape[1] if length is None else length
    if length < k.shape[1]:
        raise KernelError(
            f"biwkv: length {length} is smaller than the {k.shape[1]} tokens; pass the full length"
        )
    name = choose("biwkv", kernel, k)
    if name == "reference":
        return reference(k, v, w, u, position, length)
    dtype = work_dtype(k, v)
    decay = w.to(dtype).clamp(-MAX_DECAY, MAX_DECAY) / length
    bonus = torch.exp(u.to(dtype) / length)
    if name == "triton":
        return kernel_function("biwkv", "triton")(k, v, decay, bonus, position, length)
    if name == "native" and dtype == torch.float32:
        tokens = (k, v) if k.dtype == v.dtype else (k.float(), v.float())
        mixed = torch.ops.tread.biwkv(*tokens, decay, bonus, position, length)
        return mixed.to(v.dtype)
    run = _formula if torch.compiler.is_compiling() else _BiWKV.apply
    with full_precision(k):
        out = run(k.to(dtype), v.to(dtype), decay, bonus, position, length)
    return out.to(v.dtype)


def _formula(
    k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, position: Tensor | None, length: int
) -> Tensor:
    """The two sums for compilers, which differentiate and fuse them themselves."""
    up, down, _ = _scalings(decay, position, k.shape[1], length)
    e = torch.exp(k - k.amax(1, keepdim=True).detach())
    z = torch.stack((e * v, e), dim=2)
    before = F.pad(torch.cumsum(up * z, 1)[:, :-1], (0, 0, 0, 0, 1, 0)) * down
    after = torch.cumsum((down * z).flip(1), 1)[:, :-1]
    after = F.pad(after, (0, 0, 0, 0, 1, 0)).flip(1) * up
    above, below = (before + after + bonus * z).unbind(2)
    return above / below


def _scalings(
    decay: Tensor, position: Tensor | None, tokens: int, length: int, samples: slice = slice(None)
) -> tuple[Tensor, Tensor, Tensor]:
    """Return exp((p + 1/2) d) and exp((1/2 - p) d) as (1 or n, T, 1, C), and p as (1 or n, T).

    Positions p of these samples' tokens count from the centre of the sequence.
    """
    whole = torch.arange(tokens, device=decay.device) if position is None else position
    p = (whole[None] if whole.dim() == 1 else whole[samples]).to(decay.dtype) - (length - 1) / 2
    place = p[..., None, None]
    return torch.exp((place + 0.5) * decay), torch.exp((0.5 - place) * decay), p


@functools.lru_cache(maxsize=8)
def _triangle(size: int, upper: bool, dtype: torch.dtype) -> Tensor:
    ones = torch.ones(size, size, dtype=dtype)
    return ones.triu(1) if upper else ones.tril(-1)


def _sums(x: Tensor, reverse: bool) -> Tensor:
    """Exclusive prefix (or suffix) sums of (n, T, ...) along dim 1, without any subtraction."""
    n, tokens = x.shape[:2]
    if x.device.type != "cpu" or tokens % BLOCK:
        flipped = x.flip(1) if reverse else x
        out = torch.zeros_like(x)
        torch.cumsum(flipped[:, :-1], 1, out=out[:, 1:]) if tokens > 1 else None
        return out.flip(1) if reverse else out
    # torch's cumsum along a middle dim runs at 0.3 G/s on a CPU; a triangular product per 16 tokens
    # is five times faster.
    blocks = x.view(n * tokens // BLOCK, BLOCK, -1)
    triangle = _triangle(BLOCK, reverse, x.dtype)
    out = torch.bmm(triangle.expand(len(blocks), BLOCK, BLOCK), blocks)
    edge = 0 if reverse else BLOCK - 1
    total = (out[:, edge] + blocks[:, edge]).view(n, tokens // BLOCK, -1)
    steps = range(total.shape[1] - 2, -1, -1) if reverse else range(1, total.shape[1])
    for i in steps:
        total[:, i] += total[:, i + 1 if reverse else i - 1]
    out = out.view(n, tokens // BLOCK, BLOCK, -1)
    if reverse:
        out[:, :-1] += total[:, 1:, None]
    else:
        out[:, 1:] += total[:, :-1, None]
    return out.view(x.shape)


def _halves(z: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """What earlier tokens and what later tokens add at each token; z is (n, T, 2, C)."""
    return _sums(up * z, reverse=False).mul_(down), _sums(down * z, reverse=True).mul_(up)


class _BiWKV(torch.autograd.Function):
    """K applied to (e^k v, e^k), divided; saves its output and two tensors of that size."""

    @staticmethod
    def forward(
        ctx: Any,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        bonus: Tensor,
        position: Tensor | None,
        length: int,
    ) -> Tensor:
        top = k.amax(1, keepdim=True)
        y, below, slope = torch.empty_like(v), torch.empty_like(v), torch.empty_like(v)
        for part in batches(k, CACHED):
            up, down, _ = _scalings(decay, position, k.shape[1], length, part)
            e = torch.exp(k[part] - top[part])
            z = torch.stack((e * v[part], e), dim=2)
            before, after = _halves(z, up, down)
            total = after.add_(before).addcmul_(z, bonus)
            torch.div(total[:, :, 0], total[:, :, 1], out=y[part])
            below[part] = total[:, :, 1]
            # (before_N - y before_D) / D: all that the decay's gradient needs of the forward sums.
            torch.addcmul(before[:, :, 0], y[part], before[:, :, 1], value=-1, out=slope[part])
            slope[part] /= total[:, :, 1]
        ctx.save_for_backward(k, v, top, y, below, slope, decay, bonus, position)
        ctx.length = length
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        k, v, top, y, below, slope, decay, bonus, position = ctx.saved_tensors
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        ddecay, dbonus = torch.zeros_like(decay), torch.zeros_like(bonus)
        with full_precision(k):
            for part in batches(k, CACHED):
                up, down, p = _scalings(decay, position, k.shape[1], ctx.length, part)
                g = grad[part]
                z = k.new_empty(*g.shape[:2], 2, g.shape[2])
                a = torch.div(g, below[part], out=z[:, :, 0])
                torch.mul(a, y[part], out=z[:, :, 1]).neg_()
                before, after = _halves(z, up, down)
                e = torch.exp(k[part] - top[part])
                change = before - after
                total = after.add_(before).addcmul_(z, bonus)
                torch.mul(e, total[:, :, 0], out=dv[part])
                torch.addcmul(total[:, :, 1], v[part], total[:, :, 0], out=dk[part]).mul_(e)
                own = (v[part] - y[part]).mul_(a).mul_(e)
                self_weight = own.sum((0, 1))
                dbonus += self_weight
                # d/dd of exp(-d (|p_t - p_s| - 1)), with p_t - p_s split into the two tokens' own
                # positions.
                moment = torch.addcmul(change[:, :, 1], v[part], change[:, :, 0]).mul_(e)
                moment.addcmul_(g, slope[part], value=2).addcmul_(own, bonus)
                ddecay -= (moment * p[..., None]).sum((0, 1)) + bonus * self_weight
        return dk, dv, ddecay, dbonus, None, None
