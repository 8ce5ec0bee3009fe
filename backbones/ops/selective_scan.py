r"""Selective scan (Mamba-1): one decay per channel and state.

    h_t = exp(gap_t dt_t A) h_{t-1} + dt_t u_t B_t,     y_t = <C_t, h_t> + D u_t

The recurrence runs token by token; exponentials and products are computed for a span of tokens at
once, with channels last, so that one step is one multiply-add on an (N, D) state. The backward pass
stores one state per span and recomputes the rest: memory is linear in tokens, N / SPAN of an
activation.

Source: Gu and Dao, Mamba (2312.00752), section 3.
"""

from typing import Any

import torch
from torch import Tensor

from backbones.ops import matrix_state
from backbones.ops.dispatch import choose, full_precision, kernel_function, work_dtype

SPAN = 8  # Tokens computed at once.


def reference(
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    decay_gap: Tensor | None = None,
) -> Tensor:
    """The recurrence in float64, token by token: linear attention with a head per channel."""
    steps = dt.double() if decay_gap is None else dt.double() * decay_gap[..., None]
    keys, queries = (m.double()[:, :, None].expand(-1, -1, len(A), -1) for m in (B, C))
    values = (dt.double() * u.double())[..., None]
    log_decay = steps[..., None] * A.double()
    y = matrix_state.reference(queries, keys, values, log_decay, floor=-torch.inf)[..., 0]
    return (y if D is None else y + D.double() * u.double()).to(u.dtype)


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
        KernelError: The requested kernel cannot run.
    """
    state = A.shape[1]
    misfit = f"state {state} must not exceed 256" if state > 256 else None
    name = choose("selective_scan", kernel, [u], lambda kernel: misfit)
    if name == "reference":
        return reference(u, dt, A, B, C, D, decay_gap)
    dtype = work_dtype(u, dt)
    gap = None if decay_gap is None else decay_gap.to(dtype).expand(dt.shape[:2])[..., None]
    with full_precision(u):
        dt = dt.to(dtype)
        steps, write = dt if gap is None else dt * gap, dt * u.to(dtype)
        if name == "mamba-ssm":
            # It has one dt for decay and input: scale it, and divide the input by the scale.
            even = u if gap is None else u / gap
            inner = (even, steps, B, C)
            x, step, b, c = (m.to(u.dtype).transpose(1, 2).contiguous() for m in inner)
            y = kernel_function("selective_scan", name)(x, step, A.float(), b, c).mT
        else:
            y = _spans(steps, write, A.to(dtype), B.to(dtype), C.to(dtype))
        if D is not None:
            y = torch.addcmul(y.to(dtype), u.to(dtype), D.to(dtype))
    return y.to(u.dtype)


def _spans(steps: Tensor, write: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """The torch path: y_t = <C_t, h_t>, h_t = exp(steps_t A) h_{t-1} + write_t B_t."""
    rates = A.t().contiguous()  # (N, D): channels last, so that inner loops are long.
    state, pieces = write.new_zeros(len(write), *rates.shape), []
    for span in zip(*(m.split(SPAN, 1) for m in (steps, write, B, C)), strict=True):
        piece, state = _Span.apply(state, rates, *span)
        pieces.append(piece)
    return torch.cat(pieces, 1)


def _states(first: Tensor, rates: Tensor, *span: Tensor) -> tuple[Tensor, Tensor]:
    """Return a span's decays and states, (B, span, N, D) each, from the state before it."""
    steps, write, B = span
    # exp is 300 times slower on a CPU where its result is denormal; e^-60 is negligible.
    decay = (steps[:, :, None] * rates).clamp_(min=-60.0).exp_()
    states, before = write[:, :, None] * B[..., None], first
    for keep, state in zip(decay.unbind(1), states.unbind(1), strict=True):
        before = state.addcmul_(keep, before)
    return decay, states


class _Span(torch.autograd.Function):
    """A span's y (B, span, D) and the state (B, N, D) after it, from the one before."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, rates: Tensor, *span: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(first, rates, *span)
        _, states = _states(first, rates, *span[:3])
        return (span[3][:, :, None] @ states)[:, :, 0], states[:, -1].clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, after: Tensor) -> tuple[Tensor, ...]:
        first, rates, steps, write, B, C = ctx.saved_tensors
        with full_precision(grad):
            decay, states = _states(first, rates, steps, write, B)
            dstates = grad[:, :, None] * C[..., None]
            for keep, state in zip(decay.unbind(1)[::-1], dstates.unbind(1)[::-1], strict=True):
                after = keep * state.add_(after)
            dB, dC = (dstates @ write[..., None])[..., 0], (states @ grad[..., None])[..., 0]
            # d/d(log decay) = dh_t * decay_t * h_{t-1}
            dlog = decay.mul_(dstates)
            dlog[:, 0] *= first
            dlog[:, 1:] *= states[:, :-1]
            drates = (dlog * steps[:, :, None]).sum((0, 1))
            dwrite = (B[:, :, None] @ dstates)[:, :, 0]
            return after, drates, (dlog * rates).sum(2), dwrite, dB, dC
