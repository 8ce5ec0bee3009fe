"""The torch path of `ssd`: whole chunks as matrix products, with its backward pass written out.

Every path from token s to token t carries exp(c_t - c_s), c the running sum of log decays, hence
dL/dc_t = <dy_t, y_t> - <x_t, dx_t>: no gradient of the q x q decays is needed. On a CPU the batch
is walked in blocks that stay in the cache, and everything is read and written where it lies.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from backbones.ops.dispatch import batches, full_precision

# A smaller dt counts as this where its logarithm or a quotient by it is taken.
TINY = 1e-20
# Exponents are clamped: exp is 300 times slower on a CPU where its result is denormal, and a weight
# of e^-60 is as good as none. The upper limit is met by masked entries alone.
LIMIT = 60.0
CACHED = 262144  # Numbers of a block of samples that stay in a CPU's L2 cache.


@functools.lru_cache(maxsize=8)
def _lower(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones(size, size, dtype=dtype, device=device).tril()


class _Chunks:
    """A block of samples cut into m chunks of q tokens: x (m, q, h p), B and C (m, q, N)."""

    def __init__(
        self, packed: Tensor, dt: Tensor, log_decay: Tensor, chunk: int, width: int
    ) -> None:
        self.n, tokens, self.h = dt.shape
        self.q, self.p, self.c = chunk, width, tokens // chunk
        self.x, self.keys, self.queries = self.pieces(packed)
        cum = log_decay.reshape(-1, chunk, self.h).cumsum(1)
        floor = dt.reshape(cum.shape).clamp_min(TINY)
        self.from_start = cum.clamp(min=-LIMIT).exp_()  # (m, q, h)
        self.to_end = (cum[:, -1:] - cum).clamp_(min=-LIMIT).exp_().mul_(floor)
        self.whole = self.from_start[:, -1].view(self.n, self.c, 1, self.h, 1)
        rows = cum.transpose(1, 2).contiguous()
        columns = (floor.log() - cum).transpose(1, 2).contiguous()
        # exp(c_t - c_s) dt_s for s <= t, 0 elsewhere: (m, h, t, s).
        weight = (rows[..., :, None] + columns[..., None, :]).clamp_(-LIMIT, LIMIT).exp_()
        self.weight = weight.mul_(_lower(chunk, packed.dtype, packed.device))

    def pieces(self, packed: Tensor) -> tuple[Tensor, ...]:
        """Views of x, B and C in (n, T, h p + 2 N), cut into chunks."""
        inner = self.h * self.p
        state = (packed.shape[2] - inner) // 2
        return packed.view(-1, self.q, packed.shape[2]).split([inner, state, state], -1)

    def mixing(self, skip: Tensor | None) -> Tensor:
        """(m, h, t, s): what y_t takes of x_s in its chunk, skip included; overwrites weight."""
        scores = torch.bmm(self.queries, self.keys.mT)
        pairs = self.weight.mul_(scores[:, None])
        if skip is not None:
            pairs.diagonal(dim1=-2, dim2=-1).add_(skip[:, None])
        return pairs

    def heads(self, m: Tensor) -> Tensor:
        """View (m, q, h p) as (m, h, q, p)."""
        return m.view(-1, self.q, self.h, self.p).transpose(1, 2)

    def scale(self, m: Tensor, factor: Tensor, out: Tensor | None = None) -> Tensor:
        """Multiply (m, q, h p) by a (m, q, h) factor, into `out` or in place."""
        out = m if out is None else out
        shape = (-1, self.q, self.h, self.p)
        torch.mul(m.view(shape), factor[..., None], out=out.view(shape))
        return out

    def pass_states(self, added: Tensor, reverse: bool = False) -> Tensor:
        """Turn what each chunk adds into what each chunk receives, (m, N, h p)."""
        added_to = added.view(self.n, self.c, -1, self.h, self.p)
        received = torch.empty_like(added_to)
        step, first = (-1, self.c - 1) if reverse else (1, 0)
        received[:, first] = 0
        for i in range(first, self.c - 1 - first, step):
            target = received[:, i + step]
            torch.addcmul(added_to[:, i], received[:, i], self.whole[:, i], out=target)
        return received.view(added.shape)


def _products(a: Tensor, b: Tensor, out: Tensor, add: bool) -> None:
    """Products of (m, h, ., .) into `out`, or added to it.

    On a CPU chunk by chunk, so that heads are read and written where they lie among the tokens.
    """
    if out.device.type == "cpu":
        for left, right, target in zip(a.unbind(), b.unbind(), out.unbind(), strict=True):
            target.baddbmm_(left, right) if add else torch.bmm(left, right, out=target)
    elif add:
        out += torch.matmul(a, b)
    else:
        torch.matmul(a, b, out=out)


def _over_heads(a: Tensor, b: Tensor) -> Tensor:
    """Sum of a b over dim 1, head by head: the products are never all in memory."""
    total = a[:, 0] * b[:, 0]
    for head in range(1, a.shape[1]):
        total.addcmul_(a[:, head], b[:, head])
    return total


def formula(
    packed: Tensor, dt: Tensor, log_decay: Tensor, D: Tensor | None, chunk: int, width: int
) -> Tensor:
    """The same for compilers, which differentiate and fuse it themselves.

    The exponent is masked before exp, never the result: infinity times zero is a NaN backward.
    """
    n, tokens, heads = dt.shape
    cut = packed.view(n, tokens // chunk, chunk, -1)
    state = (packed.shape[2] - heads * width) // 2
    x, keys, queries = cut.split([heads * width, state, state], -1)
    values = x.unflatten(-1, (heads, width)) * dt.view(*cut.shape[:3], heads, 1)
    cum = log_decay.view(*cut.shape[:3], heads).cumsum(2).transpose(2, 3)  # (n, c, h, q)
    upper = torch.ones(chunk, chunk, dtype=torch.bool, device=packed.device).triu(1)
    weight = (cum[..., :, None] - cum[..., None, :]).masked_fill(upper, -torch.inf).exp()
    scores = torch.einsum("ncqk,ncsk->ncqs", queries, keys)
    y = torch.einsum("nchqs,ncqs,ncshp->ncqhp", weight, scores, values)
    to_end = (cum[..., -1:] - cum).exp()
    added = torch.einsum("ncsk,nchs,ncshp->nchkp", keys, to_end, values)
    carried, received = torch.zeros_like(added[:, 0]), []
    for i in range(added.shape[1]):
        received.append(carried)
        carried = added[:, i] + carried * cum[:, i, :, -1, None, None].exp()
    states = torch.stack(received, 1)
    y = (y + torch.einsum("ncqk,nchq,nchkp->ncqhp", queries, cum.exp(), states)).flatten(1, 2)
    if D is not None:
        y = y + D[:, None] * packed[..., : heads * width].unflatten(-1, (-1, width))
    return y


class SSD(torch.autograd.Function):
    """SSD of whole chunks; saves its inputs, its output and the state between chunks."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        packed: Tensor,
        dt: Tensor,
        log_decay: Tensor,
        D: Tensor | None,
        chunk: int,
        width: int,
    ) -> Tensor:
        packed = packed.contiguous()
        y = packed.new_empty(*dt.shape, width)
        states = []
        for part in batches(y, CACHED):
            k = _Chunks(packed[part], dt[part], log_decay[part], chunk, width)
            out = y[part].view(k.x.shape)
            received = k.pass_states(torch.bmm(k.keys.mT, k.scale(k.x, k.to_end, out)))
            k.scale(torch.bmm(k.queries, received, out=out), k.from_start)
            _products(k.mixing(D), k.heads(k.x), k.heads(out), add=True)
            states.append(received)
        ctx.save_for_backward(packed, dt, log_decay, D, y, *states)
        ctx.chunk, ctx.width = chunk, width
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # noqa: D102
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        packed, dt, log_decay, D, y, *states = ctx.saved_tensors
        grad, dpacked = grad.contiguous(), torch.empty_like(packed)
        ddt, dlog = torch.empty_like(dt), torch.empty_like(log_decay)
        dD = None if D is None else torch.zeros_like(D)
        with full_precision(packed):
            for part, received in zip(batches(y, CACHED), states, strict=True):
                k = _Chunks(packed[part], dt[part], log_decay[part], ctx.chunk, ctx.width)
                g = grad[part].view(received.shape[0], ctx.chunk, -1)
                dx, scratch = _backward(k, g, received, dpacked[part])
                per_head = (*dt[part].shape, ctx.width)

                def dot(
                    a: Tensor, b: Tensor, out: Tensor = scratch, shape: tuple[int, ...] = per_head
                ) -> Tensor:
                    return torch.mul(a, b, out=out.view(a.shape)).view(shape).sum(-1)

                through, at = dot(k.x, dx), dot(grad[part], y[part])
                ddt[part] = through / dt[part].clamp_min(TINY)
                if dD is not None:
                    # Only now: the skip is no path through dt.
                    skip = dot(g, k.x)
                    dD += skip.sum((0, 1))
                    at -= skip * D
                    k.heads(dx).addcmul_(k.heads(g), D[:, None, None])
                dlog[part] = (at - through).flip(1).cumsum(1).flip(1)
        return dpacked, ddt, dlog, dD, None, None


def _backward(k: _Chunks, g: Tensor, received: Tensor, dpacked: Tensor) -> tuple[Tensor, Tensor]:
    """Fill dpacked for one block from g (m, q, h p); return dx (no skip) and a scratch tensor."""
    dx, dkeys, dqueries = k.pieces(dpacked)
    scratch = k.scale(g, k.from_start, torch.empty_like(g))
    dstates = k.pass_states(torch.bmm(k.queries.mT, scratch), reverse=True)
    torch.bmm(scratch, received.mT, out=dqueries)
    torch.bmm(k.scale(k.x, k.to_end, scratch), dstates.mT, out=dkeys)
    k.scale(torch.bmm(k.keys, dstates, out=dx), k.to_end)
    dpairs = torch.empty_like(k.weight)
    _products(k.heads(g), k.heads(k.x).mT, dpairs, add=False)
    dscores = _over_heads(dpairs, k.weight)
    dqueries.baddbmm_(dscores, k.keys)
    dkeys.baddbmm_(dscores.mT, k.queries)
    _products(k.mixing(None).mT, k.heads(g), k.heads(dx), add=True)
    return dx, scratch
