r"""State space dual (Mamba-2): a scan with one scalar decay per head, as chunked matrix products.

    S_t = exp(gap_t dt_t A) S_{t-1} + dt_t B_t x_t^T,     y_t = C_t^T S_t + D x_t

Inside a chunk of Q tokens y = (C B^T o decay) x is a masked matrix product; between chunks only the
state is passed on, so time and memory are linear in tokens. The exponent is masked before exp,
never the result: with Mamba-2's own initialisation a chunk of 64 reaches exp(100), and infinity
times zero is a NaN in the backward pass.

The backward pass is written out. Every path from s to t carries exp(c_t - c_s) with c the running
sum of log decays, hence dL/dc_t = <dy_t, y_t> - <x_t, dx_t>: no gradient of the Q x Q decays is
needed.

Source: Dao and Gu, Transformers are SSMs (2405.21060), section 6.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from backbones.ops.dispatch import choose, full_precision, probe, work_dtype

# A smaller dt counts as this where its logarithm or a quotient by it is taken.
TINY = 1e-20


def reference(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    decay_gap: Tensor | None = None,
) -> Tensor:
    """The recurrence, literally, in float64, token by token. Shapes as `ssd`."""
    batch, tokens, heads, width = x.shape
    repeat = heads // B.shape[2]
    xs, ds, decay = x.double(), dt.double(), A.double()
    keys, queries = (m.double().repeat_interleave(repeat, 2) for m in (B, C))
    gap = torch.ones(tokens, device=x.device) if decay_gap is None else decay_gap
    gap = gap.double().expand(batch, tokens)
    state = xs.new_zeros(batch, heads, B.shape[3], width)
    out = []
    for t in range(tokens):
        keep = torch.exp(gap[:, t, None] * ds[:, t] * decay)
        write = torch.einsum("bh,bhn,bhp->bhnp", ds[:, t], keys[:, t], xs[:, t])
        state = keep[..., None, None] * state + write
        out.append(torch.einsum("bhn,bhnp->bhp", queries[:, t], state))
    y = torch.stack(out, 1)
    if D is not None:
        y = y + D.double()[:, None] * xs
    return y.to(x.dtype)


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    chunk: int = 64,
    kernel: str = "auto",
    decay_gap: Tensor | None = None,
) -> Tensor:
    """Mamba-2's scan.

    Args:
        x: (B, T, H, P) inputs of H heads of width P.
        dt: (B, T, H) steps after softplus; 0 takes a token out (no decay, no write).
        A: (H,) negative rates.
        B: (B, T, G, N) input projections; H is a multiple of G.
        C: (B, T, G, N) output projections.
        D: (H,) skip, or None.
        chunk: Tokens per chunk; need not divide T.
        kernel: auto | torch | reference | mamba-ssm | fla.
        decay_gap: (T,) or (B, T) distances that scale the decay but not the input; None is 1.

    Returns:
        (B, T, H, P) in x's dtype. dt, decays, their sums and the state are float32 at least.

    Raises:
        KernelError: The kernel asked for cannot run.
    """
    name = choose(
        "ssd", kernel, x, functools.partial(kernel_misfit, headdim=x.shape[3], state=B.shape[3])
    )
    if name == "reference":
        return reference(x, dt, A, B, C, D, decay_gap)
    if name == "mamba-ssm":
        return _mamba_ssm(x, dt, A, B, C, D, chunk, decay_gap)
    if name == "fla":
        return _fla(x, dt, A, B, C, D, decay_gap)
    dtype = work_dtype(x, dt)
    with full_precision(x):
        dt = dt.to(dtype)
        steps = (
            dt if decay_gap is None else dt * decay_gap.to(dtype).expand(dt.shape[:2])[..., None]
        )
        log_decay = steps * A.to(dtype)
        y = _chunked(
            x.to(dtype),
            dt,
            log_decay,
            B.to(dtype),
            C.to(dtype),
            None if D is None else D.to(dtype),
            chunk,
        )
    return y.to(x.dtype)


def kernel_misfit(kernel: str, headdim: int, state: int) -> str | None:
    """What keeps `kernel` from taking heads of width `headdim` with `state` states, or None.

    Triton's tiles and their 16-byte loads want multiples of 8; fla's chunk kernels stop at 256.
    """
    if headdim % 8 or state % 8:
        return f"head width {headdim} and state {state} must be multiples of 8"
    if kernel == "fla" and max(headdim, state) > 256:
        return f"head width {headdim} and state {state} must not exceed 256"
    return None


def _mamba_ssm(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    chunk: int,
    decay_gap: Tensor | None,
) -> Tensor:
    dt = dt.float()
    if decay_gap is not None:
        # The kernel has one dt for decay and input: scale it, and take the scale out of the input.
        gap = decay_gap.float().expand(dt.shape[:2])[..., None]
        skip = None if D is None else D.to(x.dtype)[:, None] * x
        y = _mamba_ssm(x / gap[..., None].to(x.dtype), dt * gap, A, B, C, None, chunk, None)
        return y if skip is None else y + skip
    size = 1 << max(4, (min(chunk, x.shape[1]) - 1).bit_length())
    B, C = B.to(x.dtype), C.to(x.dtype)
    function = probe("ssd", "mamba-ssm").function
    return function(x, dt, A.float(), B, C, size, D=None if D is None else D.float())


def _fla(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    decay_gap: Tensor | None,
) -> Tensor:
    dt = dt.float()
    steps = dt if decay_gap is None else dt * decay_gap.float().expand(dt.shape[:2])[..., None]
    repeat = x.shape[2] // B.shape[2]
    keys, queries = (m.to(x.dtype).repeat_interleave(repeat, 2) for m in (B, C))
    values = (x * dt[..., None]).to(x.dtype)
    y, _ = probe("ssd", "fla").function(queries, keys, values, steps * A.float(), scale=1.0)
    return y if D is None else y + D.to(x.dtype)[:, None] * x


def _chunked(
    x: Tensor, dt: Tensor, log_decay: Tensor, B: Tensor, C: Tensor, D: Tensor | None, chunk: int
) -> Tensor:
    tokens = x.shape[1]
    chunk = min(chunk, max(8, 1 << (tokens - 1).bit_length()))
    if missing := -tokens % chunk:
        # dt = 0 makes padding exact: no decay, no write.
        x, B, C = (F.pad(m, (0, 0, 0, 0, 0, missing)) for m in (x, B, C))
        dt, log_decay = (F.pad(m, (0, 0, 0, missing)) for m in (dt, log_decay))
    y = _SSD.apply(x.contiguous(), dt, log_decay, B, C, D, chunk)
    return y[:, :tokens] if missing else y


def _parts(x: Tensor) -> list[slice]:
    """Blocks of the batch: what fits in the L2 cache on the CPU, everything on a device."""
    if x.device.type != "cpu":
        return [slice(0, len(x))]
    step = max(1, 262144 // math.prod(x.shape[1:]))
    return [slice(i, i + step) for i in range(0, len(x), step)]


class _Chunks:
    """A block of n samples cut into c chunks of q tokens; g groups of r heads of width p."""

    def __init__(
        self, x: Tensor, dt: Tensor, log_decay: Tensor, B: Tensor, C: Tensor, chunk: int
    ) -> None:
        n, tokens, heads, width = x.shape
        groups, state = B.shape[2:]
        self.n, self.c, self.q, self.g, self.r = n, tokens // chunk, chunk, groups, heads // groups
        self.p, self.state = width, state
        cum = log_decay.view(n, self.c, chunk, heads).cumsum(2)
        floor = dt.view(cum.shape).clamp_min(TINY)
        self.from_start = cum.exp()  # (n, c, q, h)
        self.to_end = (cum[:, :, -1:] - cum).exp_().mul_(floor)
        self.whole = cum[:, :, -1].exp()  # (n, c, h)
        rows = cum.transpose(2, 3).contiguous()
        columns = (floor.log() - cum).transpose(2, 3).contiguous()
        # exp(c_t - c_s) dt_s for s <= t, 0 elsewhere: (n, c, h, t, s), and (n c g, r, t, s) for the
        # products.
        mask = torch.full((chunk, chunk), -torch.inf, dtype=x.dtype, device=x.device).triu_(1)
        weight = (rows[..., :, None] + columns[..., None, :]).add_(mask).exp_()
        self.weight = weight.view(n * self.c * groups, self.r, chunk, chunk)
        self.keys, self.queries = (self.grouped(m) for m in (B, C))

    def grouped(self, m: Tensor) -> Tensor:
        """Turn (n, T, G or H, k) into (n c g, q, r k); a view if G is 1."""
        split = m.reshape(self.n, self.c, self.q, self.g, -1)
        return split.transpose(2, 3).reshape(self.n * self.c * self.g, self.q, -1)

    def ungrouped(self, m: Tensor, last: int) -> Tensor:
        """Undo `grouped`; returns (n, T, -1, last)."""
        split = m.view(self.n, self.c, self.g, self.q, -1).transpose(2, 3)
        return split.reshape(self.n, self.c * self.q, -1, last)

    def by_head(self, m: Tensor) -> Tensor:
        """Turn grouped (n c g, q, r p) into contiguous (n c g r, q, p)."""
        split = m.view(-1, self.q, self.r, self.p).transpose(1, 2)
        return split.reshape(-1, self.q, self.p)

    def scaled(self, m: Tensor, scale: Tensor) -> Tensor:
        """Multiply grouped m by a (n, c, q, h) factor per token and head."""
        factor = self.grouped(scale[..., None].flatten(1, 2))
        return (m.view(-1, self.q, self.r, self.p) * factor[..., None]).view(m.shape)

    def add_heads(self, m: Tensor, by_head: Tensor) -> Tensor:
        """Add (n c g r, q, p) to grouped m in place."""
        m.view(-1, self.q, self.r, self.p).add_(
            by_head.view(-1, self.r, self.q, self.p).transpose(1, 2)
        )
        return m

    def pass_states(self, states: Tensor, reverse: bool = False) -> Tensor:
        """Turn what each chunk adds into what each chunk receives (n c g, N, r p), in place."""
        s = states.view(self.n, self.c, self.g, self.state, self.r, self.p)
        keep = self.whole.view(self.n, self.c, self.g, 1, self.r, 1)
        carried = torch.zeros_like(s[:, 0])
        for i in range(self.c - 1, -1, -1) if reverse else range(self.c):
            own = s[:, i].clone()
            s[:, i] = carried
            carried = own.addcmul_(carried, keep[:, i])
        return states


class _SSD(torch.autograd.Function):
    """SSD of whole chunks; saves its inputs, its output and the state between chunks."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        x: Tensor,
        dt: Tensor,
        log_decay: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        chunk: int,
    ) -> Tensor:
        y = torch.empty_like(x)
        states = []
        for part in _parts(x):
            k = _Chunks(x[part], dt[part], log_decay[part], B[part], C[part], chunk)
            xs = k.grouped(x[part])
            received = k.pass_states(torch.bmm(k.keys.mT, k.scaled(xs, k.to_end)))
            out = k.scaled(torch.bmm(k.queries, received), k.from_start)
            scores = torch.bmm(k.queries, k.keys.mT)
            inside = torch.bmm(k.weight.mul_(scores[:, None]).flatten(0, 1), k.by_head(xs))
            y[part] = k.ungrouped(k.add_heads(out, inside), k.p)
            if D is not None:
                y[part].addcmul_(x[part], D[:, None])
            states.append(received)
        ctx.save_for_backward(x, dt, log_decay, B, C, D, y, *states)
        ctx.chunk = chunk
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, dt, log_decay, B, C, D, y, *states = ctx.saved_tensors
        dx, ddt, dlog = torch.empty_like(x), torch.empty_like(dt), torch.empty_like(log_decay)
        dB, dC = torch.empty_like(B), torch.empty_like(C)
        dD = None if D is None else torch.zeros_like(D)
        with full_precision(x):
            for part, received in zip(_parts(x), states, strict=True):
                k = _Chunks(x[part], dt[part], log_decay[part], B[part], C[part], ctx.chunk)
                g, xs = k.grouped(grad[part]), k.grouped(x[part])
                dx[part], dB[part], dC[part] = _block_backward(k, g, xs, received)
                through = (x[part] * dx[part]).sum(-1)
                ddt[part] = through / dt[part].clamp_min(TINY)
                at = (grad[part] * y[part]).sum(-1)
                if dD is not None:
                    skip = (grad[part] * x[part]).sum(-1)
                    dD += skip.sum((0, 1))
                    at -= skip * D
                    dx[part].addcmul_(grad[part], D[:, None])
                dlog[part] = (at - through).flip(1).cumsum(1).flip(1)
        return dx, ddt, dlog, dB, dC, dD, None


def _block_backward(
    k: _Chunks, g: Tensor, xs: Tensor, received: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x (without the skip), B and C of one block; g and xs grouped (n c g, q, r p)."""
    g_out, x_in = k.scaled(g, k.from_start), k.scaled(xs, k.to_end)
    dstates = k.pass_states(torch.bmm(k.queries.mT, g_out), reverse=True)
    dqueries = torch.bmm(g_out, received.mT)
    dkeys = torch.bmm(x_in, dstates.mT)
    dxs = k.scaled(torch.bmm(k.keys, dstates), k.to_end)
    g_heads, x_heads = k.by_head(g), k.by_head(xs)
    dpairs = torch.bmm(g_heads, x_heads.mT).view(k.weight.shape)
    dscores = (dpairs * k.weight).sum(1)
    dqueries.baddbmm_(dscores, k.keys)
    dkeys.baddbmm_(dscores.mT, k.queries)
    scores = torch.bmm(k.queries, k.keys.mT)
    inside = torch.bmm(k.weight.mul_(scores[:, None]).flatten(0, 1).mT, g_heads)
    dxs = k.add_heads(dxs, inside)
    return k.ungrouped(dxs, k.p), k.ungrouped(dkeys, k.state), k.ungrouped(dqueries, k.state)
