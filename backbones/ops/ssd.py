r"""State space dual (Mamba-2): a scan with one scalar decay per head, as chunked matrix products.

    S_t = exp(gap_t dt_t A) S_{t-1} + dt_t B_t x_t^T,     y_t = C_t^T S_t + D x_t

Inside a chunk of Q tokens y = (C B^T o decay) x is a masked matrix product; between chunks only the
state is passed on, so time and memory are linear in tokens. The exponent is masked before exp,
never the result: with Mamba-2's own initialisation a chunk of 64 reaches exp(100), and infinity
times zero is a NaN in the backward pass.

Source: Dao and Gu, Transformers are SSMs (2405.21060), section 6.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from backbones.ops import matrix_state, native
from backbones.ops.dispatch import choose, full_precision, kernel_function, work_dtype

LIMIT = 60.0  # Of exponents.


def reference(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    decay_gap: Tensor | None = None,
) -> Tensor:
    """The recurrence in float64, token by token, as gated linear attention.

    x is (B, T, H, P), B and C are (B, T, 1, N); the rest as for `ssd_packed`.
    """
    steps = dt.double() if decay_gap is None else dt.double() * decay_gap[..., None]
    keys, queries = (m.double().expand(-1, -1, x.shape[2], -1) for m in (B, C))
    values = dt.double()[..., None] * x.double()
    log_decay = (steps * A.double())[..., None]
    y = matrix_state.reference(queries, keys, values, log_decay, floor=-torch.inf)
    return (y if D is None else y + D.double()[:, None] * x.double()).to(x.dtype)


def ssd_packed(
    packed: Tensor,
    dt: Tensor,
    A: Tensor,
    D: Tensor | None = None,
    chunk: int = 64,
    kernel: str = "auto",
    decay_gap: Tensor | None = None,
    *,
    width: int,
) -> Tensor:
    """Mamba-2's scan with x, B and C side by side, as a mixer's projection has them.

    Args:
        packed: (B, T, H P + 2 N) inputs of H heads of width P, then input and output projections of
            N states, one for all heads.
        dt: (B, T, H) steps after softplus; 0 takes a token out (no decay, no write).
        A: (H,) negative rates.
        D: (H,) skip, or None.
        chunk: Tokens per chunk; need not divide T.
        kernel: auto | torch | reference | mamba-ssm | fla | native.
        decay_gap: (T,) or (B, T) distances that scale the decay but not the input; None is 1.
        width: P.

    Returns:
        (B, T, H, P) in the type of `packed`. dt, decays, their sums and the state are float32 at
        least.

    Raises:
        KernelError: The kernel asked for cannot run.
    """
    inner = dt.shape[2] * width
    state = (packed.shape[2] - inner) // 2
    fits = functools.partial(kernel_misfit, headdim=width, state=state)
    name = choose("ssd", kernel, packed, fits)
    if name == "native" and dt.dtype != torch.float64:
        return _native(packed, dt, A, D, decay_gap, width)
    x, B, C = packed.split([inner, state, state], -1)
    x, B, C = x.unflatten(-1, (-1, width)), B.unsqueeze(2), C.unsqueeze(2)
    if name == "reference":
        return reference(x, dt, A, B, C, D, decay_gap)
    dtype = work_dtype(packed, dt)
    gap = None if decay_gap is None else decay_gap.to(dtype).expand(dt.shape[:2])[..., None]
    with full_precision(packed):
        dt = dt.to(dtype)
        steps = dt if gap is None else dt * gap
        log_decay = steps * A.to(dtype)
    if name in ("torch", "native"):
        return _torch(packed, dt, log_decay, D, chunk, width)
    if name == "fla":
        keys, queries = (m.expand(-1, -1, dt.shape[2], -1).contiguous() for m in (B, C))
        values = (x * dt[..., None]).to(x.dtype)
        y, _ = kernel_function("ssd", "fla")(queries, keys, values, log_decay, scale=1.0)
    else:
        # The kernel has one dt for decay and input: scale it, and take the scale out of the input.
        even = x if gap is None else x / gap[..., None].to(x.dtype)
        size = 1 << max(4, (min(chunk, x.shape[1]) - 1).bit_length())
        y = kernel_function("ssd", "mamba-ssm")(even, steps, A.float(), B, C, size)
    return y if D is None else torch.addcmul(y, x, D.to(x.dtype)[:, None])


def _native(
    packed: Tensor, dt: Tensor, A: Tensor, D: Tensor | None, decay_gap: Tensor | None, width: int
) -> Tensor:
    """The CPU kernel, in float32; arguments as for `ssd_packed`."""
    with torch.autocast("cpu", enabled=False):
        dt = dt.float()
        steps = dt
        if decay_gap is not None:
            steps = dt * decay_gap.float().expand(dt.shape[:2])[..., None]
        log_decay = steps * A.float()
        return torch.ops.tread.ssd(packed, dt, log_decay, None if D is None else D.float(), width)


def _torch(
    packed: Tensor, dt: Tensor, log_decay: Tensor, D: Tensor | None, chunk: int, width: int
) -> Tensor:
    """The torch path, in the type of dt (B, T, H) and of its log decays; the rest as above."""
    with full_precision(packed):
        skip = None if D is None else D.to(dt.dtype)
        arguments = (packed.to(dt.dtype), dt, log_decay, skip, chunk, width)
        if native.bypassed():
            return _chunked(*arguments).to(packed.dtype)
        # Computed again on the way back: all that it makes is 1.7 times what a block keeps.
        y = checkpoint(_chunked, *arguments, use_reentrant=False, preserve_rng_state=False)
        return y.to(packed.dtype)


def kernel_misfit(kernel: str, headdim: int, state: int) -> str | None:
    """What keeps `kernel` from taking heads of width `headdim` with `state` states, or None.

    Triton's tiles and their 16-byte loads want multiples of 8, as do native's tiles; fla's chunk
    kernels stop at 256.
    """
    if headdim % 8 or state % 8:
        return f"head width {headdim} and state {state} must be multiples of 8"
    if kernel == "fla" and max(headdim, state) > 256:
        return f"head width {headdim} and state {state} must not exceed 256"
    return None


def _chunked(
    packed: Tensor, dt: Tensor, log_decay: Tensor, D: Tensor | None, chunk: int, width: int
) -> Tensor:
    """The torch path: whole chunks as matrix products; shapes as `ssd_packed`.

    Exponents are clamped: exp is 300 times slower on a CPU where its result is denormal, and a
    weight of e^-60 is as good as none.
    """
    tokens, heads = dt.shape[1:]
    chunk = min(chunk, max(8, 1 << (tokens - 1).bit_length()))
    if packed.device.type == "cpu":
        # Work inside a chunk grows with its length, work between chunks with the head's width.
        chunk = min(chunk, max(32, width))
    # dt = 0 makes padding exact: no decay, no write.
    missing = -tokens % chunk
    if missing:
        packed, dt, log_decay = (F.pad(m, (0, 0, 0, missing)) for m in (packed, dt, log_decay))
    packed, dt, log_decay = (m.unflatten(1, (-1, chunk)) for m in (packed, dt, log_decay))
    inner = heads * width
    state = (packed.shape[3] - inner) // 2
    x, keys, queries = packed.split([inner, state, state], -1)
    x = x.unflatten(-1, (heads, width))  # (n, c, q, h, p): n samples of c chunks of q tokens
    values = x * dt[..., None]
    cum = log_decay.cumsum(2)
    rows = cum.transpose(2, 3)  # (n, c, h, q)
    weight = (rows[..., :, None] - rows[..., None, :]).clamp(-LIMIT, 0.0).exp().tril()
    pairs = weight * (queries @ keys.mT)[:, :, None]
    y = (pairs @ values.transpose(2, 3)).transpose(2, 3)
    to_end = (cum[:, :, -1:] - cum).clamp(min=-LIMIT).exp()[..., None]
    added = keys.mT @ (values * to_end).flatten(3)  # (n, c, N, h p)
    from_start = cum.clamp(min=-LIMIT).exp()
    chunk_decay = from_start[:, :, -1:].repeat_interleave(width, -1)
    received = [torch.zeros_like(added[:, 0])]
    for new, keep in zip(added.unbind(1)[:-1], chunk_decay.unbind(1), strict=False):
        received.append(torch.addcmul(new, keep, received[-1]))
    passed = (queries @ torch.stack(received, 1)).unflatten(-1, (heads, width))
    y = torch.addcmul(y, passed, from_start[..., None])
    y = y if D is None else torch.addcmul(y, x, D[:, None])
    return y.flatten(1, 2)[:, :tokens]
