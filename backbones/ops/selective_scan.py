r"""Selective scan (Mamba-1): one decay per channel and state.

    h_t = exp(gap_t dt_t A) h_{t-1} + dt_t u_t B_t,     y_t = <C_t, h_t> + D u_t

The recurrence is run token by token, but everything else a step needs (the exponentials, the
products) is computed for a few tokens at once, with channels last, so that one step is one
multiply-add on a (N, D) state. The backward pass keeps one state per few tokens and recomputes the
rest: memory linear in tokens, N / SPAN of an activation.

Source: Gu and Dao, Mamba (2312.00752), section 3.
"""

import functools

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from backbones.ops.dispatch import choose, full_precision, kernel_function, work_dtype

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
        rates = A.to(dtype).t().contiguous()  # (N, D): channels last, so that inner loops are long.
        state, pieces = write.new_zeros(len(write), *rates.shape), []
        spans = (m.split(SPAN, 1) for m in (steps, write, B.to(dtype), C.to(dtype)))
        for step, new, b, c in zip(*spans, strict=True):
            piece, state = checkpoint(
                _span, state, step, new, rates, b, c, use_reentrant=False, preserve_rng_state=False
            )
            pieces.append(piece)
        y = torch.cat(pieces, 1)
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
    state: Tensor, steps: Tensor, write: Tensor, rates: Tensor, B: Tensor, C: Tensor
) -> tuple[Tensor, Tensor]:
    """Run a piece from the state (B, N, D) before it; return y (B, span, D) and the state after."""
    # exp is 300 times slower on a CPU where its result is denormal; e^-60 is as good as 0.
    decay = (steps[:, :, None] * rates).clamp(min=-60.0).exp()
    states = []
    for keep, new in zip(
        decay.unbind(1), (write[:, :, None] * B[..., None]).unbind(1), strict=True
    ):
        state = torch.addcmul(new, keep, state)
        states.append(state)
    return (C[:, :, None] @ torch.stack(states, 1))[:, :, 0], state
