r"""Selective scan (Mamba-1): one decay per channel and state.

    h_t = exp(gap_t dt_t A) h_{t-1} + dt_t u_t B_t,     y_t = <C_t, h_t> + D u_t

The recurrence is run token by token, but everything else a step needs (the exponentials, the
products) is computed for a few tokens at once, with channels last, so that one step is one
multiply-add on a (N, D) state that stays in the cache. The backward pass keeps one state per few
tokens and recomputes the rest: memory linear in tokens, N / SPAN of an activation.

Written as a loop over autograd operations the same scan is quadratic in tokens: the backward pass
of an index allocates the whole.

Source: Gu and Dao, Mamba (2312.00752), section 3.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from backbones.ops.dispatch import batches, choose, full_precision, kernel_function, work_dtype

SPAN = 16  # Tokens per recomputed piece.


def reference(
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    decay_gap: Tensor | None = None,
) -> Tensor:
    """The recurrence, literally, in float64, token by token. Shapes as `selective_scan`."""
    batch, tokens, _ = u.shape
    us, ds = u.double(), dt.double()
    gap = torch.ones(tokens, device=u.device) if decay_gap is None else decay_gap
    gap = gap.double().expand(batch, tokens)
    state = us.new_zeros(batch, *A.shape)
    out = []
    for t in range(tokens):
        keep = torch.exp((gap[:, t, None] * ds[:, t])[..., None] * A.double())
        state = keep * state + (ds[:, t] * us[:, t])[..., None] * B.double()[:, t, None]
        out.append((state * C.double()[:, t, None]).sum(-1))
    y = torch.stack(out, 1)
    return (y if D is None else y + D.double() * us).to(u.dtype)


def selective_scan(
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    kernel: str = "auto",
    decay_gap: Tensor | None = None,
) -> Tensor:
    """Mamba-1's scan.

    Args:
        u: (B, T, D) inputs.
        dt: (B, T, D) steps after softplus; 0 takes a token out.
        A: (D, N) negative rates.
        B: (B, T, N) input projections.
        C: (B, T, N) output projections.
        D: (D,) skip, or None.
        kernel: auto | torch | reference | mamba-ssm.
        decay_gap: (T,) or (B, T) distances that scale the decay but not the input; None is 1.

    Returns:
        (B, T, D) in u's dtype. Steps, decays and the state are float32 at least.

    Raises:
        KernelError: The kernel asked for cannot run.
    """
    name = choose("selective_scan", kernel, u, functools.partial(kernel_misfit, state=A.shape[1]))
    if name == "reference":
        return reference(u, dt, A, B, C, D, decay_gap)
    if name == "mamba-ssm":
        return _mamba_ssm(u, dt, A, B, C, D, decay_gap)
    dtype = work_dtype(u, dt)
    with full_precision(u):
        u_, dt = u.to(dtype), dt.to(dtype)
        write = dt * u_
        steps = (
            dt if decay_gap is None else dt * decay_gap.to(dtype).expand(dt.shape[:2])[..., None]
        )
        y = _Scan.apply(steps, write, A.to(dtype), B.to(dtype), C.to(dtype))
        if D is not None:
            y = torch.addcmul(y, u_, D.to(dtype))
    return y.to(u.dtype)


def kernel_misfit(kernel: str, state: int) -> str | None:
    """What keeps `kernel` from taking `state` states per channel, or None."""
    return f"state {state} must not exceed 256" if state > 256 else None


def _mamba_ssm(
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    decay_gap: Tensor | None,
) -> Tensor:
    if decay_gap is not None:
        # The kernel has one dt for decay and input: scale it, and take the scale out of the input.
        gap = decay_gap.to(u.dtype).expand(u.shape[:2])[..., None]
        y = _mamba_ssm(u / gap, dt * gap, A, B, C, None, None)
        return y if D is None else y + D.to(u.dtype) * u
    u, dt, B, C = (m.to(u.dtype).transpose(1, 2).contiguous() for m in (u, dt, B, C))
    function = kernel_function("selective_scan", "mamba-ssm")
    return function(u, dt, A.float(), B, C, None if D is None else D.float()).transpose(1, 2)


def _span(
    first: Tensor, steps: Tensor, write: Tensor, rates: Tensor, B: Tensor
) -> tuple[Tensor, Tensor]:
    """Run a piece; returns decays and states, (n, span, N, D) each, from the state before it."""
    # exp is 300 times slower on a CPU where its result is denormal; e^-60 is as good as 0.
    decay = (steps[:, :, None] * rates).clamp_(min=-60.0).exp_()
    states = write[:, :, None] * B[..., None]
    before = first
    for keep, state in zip(decay.unbind(1), states.unbind(1), strict=True):
        before = state.addcmul_(keep, before)
    return decay, states


class _Scan(torch.autograd.Function):
    """y_t = <C_t, h_t>, h_t = exp(steps_t A) h_{t-1} + write_t B_t; saves a state per span."""

    @staticmethod
    def forward(ctx: Any, steps: Tensor, write: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
        batch, tokens, width = write.shape
        rates = A.t().contiguous()  # (N, D): channels last, so that the inner loops are long.
        y = torch.empty_like(write)
        firsts = write.new_zeros(-(-tokens // SPAN), batch, *rates.shape)
        for part in batches(write, 1):  # one sample: its state fits in the cache
            state = firsts[0, part]
            for i, start in enumerate(range(0, tokens, SPAN)):
                span = (part, slice(start, start + SPAN))
                firsts[i, part] = state
                _, states = _span(state, steps[span], write[span], rates, B[span])
                y[span] = torch.matmul(C[span][:, :, None], states)[:, :, 0]
                state = states[:, -1]
        ctx.save_for_backward(steps, write, rates, B, C, firsts)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        steps, write, rates, B, C, firsts = ctx.saved_tensors
        dsteps, dwrite = torch.empty_like(steps), torch.empty_like(write)
        dB, dC, drates = torch.empty_like(B), torch.empty_like(C), torch.zeros_like(rates)
        with full_precision(write):
            for part in batches(write, 1):
                carried = torch.zeros_like(firsts[0, part])
                for i in range(len(firsts) - 1, -1, -1):
                    span = (part, slice(i * SPAN, i * SPAN + SPAN))
                    g, first = grad[span], firsts[i, part]
                    decay, states = _span(first, steps[span], write[span], rates, B[span])
                    dstates = g[:, :, None] * C[span][..., None]
                    keep, each = decay.unbind(1), dstates.unbind(1)
                    each[-1].add_(carried)
                    for t in range(len(each) - 2, -1, -1):
                        each[t].addcmul_(keep[t + 1], each[t + 1])
                    carried = keep[0] * each[0]
                    dC[span] = torch.matmul(states, g[..., None])[..., 0]
                    dB[span] = torch.matmul(dstates, write[span][..., None])[..., 0]
                    dwrite[span] = torch.matmul(B[span][:, :, None], dstates)[:, :, 0]
                    # d/d(log decay) = dh_t * decay_t * h_{t-1}
                    dlog = decay.mul_(dstates)
                    dlog[:, 0] *= first
                    dlog[:, 1:] *= states[:, :-1]
                    dsteps[span] = (dlog * rates).sum(2)
                    drates += dlog.mul_(steps[span][:, :, None]).sum((0, 1))
        return dsteps, dwrite, drates.t(), dB, dC
