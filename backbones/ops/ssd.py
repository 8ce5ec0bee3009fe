r"""State space dual (Mamba-2): a scan with one scalar decay per head, as chunked matrix products.

    S_t = exp(gap_t dt_t A) S_{t-1} + dt_t B_t x_t^T,     y_t = C_t^T S_t + D x_t

Inside a chunk of Q tokens y = (C B^T o decay) x is a masked matrix product; between chunks only the
state is passed on, so time and memory are linear in tokens. The exponent is masked before exp,
not after it: with Mamba-2's own initialisation a chunk of 64 reaches exp(100), and infinity times
zero is NaN in the backward pass.

Source: Dao and Gu, Transformers are SSMs (2405.21060), section 6.
"""

import functools
from typing import NamedTuple

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

    x is (B, T, H, P), B and C are (B, T, 1, N); the rest as for `ssd`.
    """
    steps = dt.double() if decay_gap is None else dt.double() * decay_gap[..., None]
    keys, queries = (m.double().expand(-1, -1, x.shape[2], -1) for m in (B, C))
    values = dt.double()[..., None] * x.double()
    log_decay = (steps * A.double())[..., None]
    y = matrix_state.reference(queries, keys, values, log_decay, floor=-torch.inf)
    return (y if D is None else y + D.double()[:, None] * x.double()).to(x.dtype)


def ssd(
    xbc: Tensor,
    dt: Tensor,
    A: Tensor,
    D: Tensor | None,
    decay_gap: Tensor | None,
    width: int,
    chunk: int = 64,
    kernel: str = "auto",
) -> Tensor:
    """Mamba-2's scan with x, B and C side by side, as a mixer's projection has them.

    Args:
        xbc: (B, T, H P + 2 N) inputs of H heads of width P, then input and output projections of
            N states, one for all heads.
        dt: (B, T, H) steps after softplus; 0 takes a token out (no decay, no write).
        A: (H,) negative rates.
        D: (H,) skip, or None.
        decay_gap: (T,) or (B, T) distances that scale the decay but not the input; None is 1.
        width: P.
        chunk: Tokens per chunk; need not divide T. mamba-ssm's kernel takes at least 2 N.
        kernel: auto | torch | reference | mamba-ssm | fla | native.

    Returns:
        (B, T, H, P) in the type of `xbc`. dt, decays, their sums and the state are float32 at
        least.

    Raises:
        KernelError: The requested kernel cannot run.
    """
    state = (xbc.shape[2] - dt.shape[2] * width) // 2
    fits = functools.partial(kernel_misfit, headdim=width, state=state)
    tensors = [xbc, dt] if D is None else [xbc, dt, D]
    implementation = _IMPLEMENTATIONS[choose("ssd", kernel, tensors, fits)]
    return implementation(_Inputs(xbc, dt, A, D, decay_gap, width, chunk))


def chunk_length(chunk: int, state: int, tokens: int) -> int:
    """Return the tokens of a chunk for mamba-ssm's kernel: a power of two, at least 16.

    Between chunks it writes and reads a float32 state of N numbers per channel. With 2 N tokens per
    chunk that is as much memory traffic as x in bfloat16, and as many products inside chunks as
    with the state; so a smaller `chunk` is raised to 2 N.
    """
    length = min(max(chunk, 2 * state), tokens)
    return 1 << max(4, (length - 1).bit_length())


class _Inputs(NamedTuple):
    """The arguments of `ssd`."""

    xbc: Tensor
    dt: Tensor
    A: Tensor
    D: Tensor | None
    decay_gap: Tensor | None
    width: int
    chunk: int

    def split(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return x (B, T, H, P), B and C (B, T, 1, N)."""
        inner = self.dt.shape[2] * self.width
        state = (self.xbc.shape[2] - inner) // 2
        x, keys, queries = self.xbc.split([inner, state, state], -1)
        return x.unflatten(-1, (-1, self.width)), keys.unsqueeze(2), queries.unsqueeze(2)

    def steps(self) -> tuple[Tensor, Tensor]:
        """Return dt in float32 at least, and dt times the gap before each token: (B, T, H) each."""
        dt, gap = self.dt.to(work_dtype(self.xbc, self.dt)), self.decay_gap
        return dt, dt if gap is None else dt * gap.to(dt.dtype).expand(dt.shape[:2])[..., None]

    def add_skip(self, y: Tensor, x: Tensor) -> Tensor:
        """Return y + D x, for kernels that have not added it."""
        return y if self.D is None else torch.addcmul(y, x, self.D.to(x.dtype)[:, None])


def _by_reference(inputs: _Inputs) -> Tensor:
    x, keys, queries = inputs.split()
    return reference(x, inputs.dt, inputs.A, keys, queries, inputs.D, inputs.decay_gap)


def _by_mamba_ssm(inputs: _Inputs) -> Tensor:
    """The Triton kernels of mamba-ssm; they also add D x, unless gaps require a rescaled x."""
    (x, keys, queries), (dt, steps) = inputs.split(), inputs.steps()
    length = chunk_length(inputs.chunk, keys.shape[3], x.shape[1])
    scan = kernel_function("ssd", "mamba-ssm")
    rates, gap, skip = inputs.A.float(), inputs.decay_gap, inputs.D
    if gap is None:
        skip = None if skip is None else skip.float()
        return scan(x, dt, rates, keys, queries, length, D=skip)
    # The kernel has one dt for decay and input: scale it, and divide the input by the scale.
    even = x / gap.to(x.dtype).expand(x.shape[:2])[..., None, None]
    return inputs.add_skip(scan(even, steps, rates, keys, queries, length), x)


def _by_fla(inputs: _Inputs) -> Tensor:
    """The kernels of fla for gated linear attention, in chunks of 64 tokens."""
    (x, keys, queries), (dt, steps) = inputs.split(), inputs.steps()
    keys, queries = (m.expand(-1, -1, dt.shape[2], -1).contiguous() for m in (keys, queries))
    values = (x * dt[..., None]).to(x.dtype)
    log_decay = steps * inputs.A.to(dt.dtype)
    y, _ = kernel_function("ssd", "fla")(queries, keys, values, log_decay, scale=1.0)
    return inputs.add_skip(y, x)


def _by_native(inputs: _Inputs) -> Tensor:
    """The CPU kernel of `native.cpp`, in float32 whatever the type of the tokens."""
    return torch.ops.tread.ssd(
        inputs.xbc, inputs.dt, inputs.A, inputs.D, inputs.decay_gap, inputs.width
    )


def _by_torch(inputs: _Inputs) -> Tensor:
    """The torch path: chunks as matrix products, in float32 at least."""
    xbc = inputs.xbc
    with full_precision(xbc):
        dt, steps = inputs.steps()
        skip = None if inputs.D is None else inputs.D.to(dt.dtype)
        log_decay = steps * inputs.A.to(dt.dtype)
        arguments = (xbc.to(dt.dtype), dt, log_decay, skip, inputs.chunk, inputs.width)
        if native.bypassed():
            return _chunked(*arguments).to(xbc.dtype)
        # Recomputed in the backward pass: its intermediates are 1.7 times what a block saves.
        y = checkpoint(_chunked, *arguments, use_reentrant=False, preserve_rng_state=False)
        return y.to(xbc.dtype)


_IMPLEMENTATIONS = {
    "reference": _by_reference,
    "mamba-ssm": _by_mamba_ssm,
    "fla": _by_fla,
    "native": _by_native,
    "torch": _by_torch,
}


def kernel_misfit(kernel: str, headdim: int, state: int) -> str | None:
    """Return why `kernel` does not take heads of width `headdim` with `state` states, or None.

    Triton's tiles with 16-byte loads, and native's tiles, need multiples of 8; fla's chunk kernels
    are limited to 256.
    """
    if headdim % 8 or state % 8:
        return f"head width {headdim} and state {state} must be multiples of 8"
    if kernel == "fla" and max(headdim, state) > 256:
        return f"head width {headdim} and state {state} must not exceed 256"
    return None


def _chunked(
    xbc: Tensor, dt: Tensor, log_decay: Tensor, D: Tensor | None, chunk: int, width: int
) -> Tensor:
    """The scan in chunks; shapes as in `ssd`, log decays as dt.

    Exponents are clamped: exp is 300 times slower on a CPU where its result is denormal, and a
    weight of e^-60 is negligible.
    """
    tokens, heads = dt.shape[1:]
    chunk = min(chunk, max(8, 1 << (tokens - 1).bit_length()))
    if xbc.device.type == "cpu":
        # Work inside chunks grows with their length, work between them with the head width.
        chunk = min(chunk, max(32, width))
    # dt = 0 makes padding exact: no decay, no write.
    missing = -tokens % chunk
    if missing:
        xbc, dt, log_decay = (F.pad(m, (0, 0, 0, missing)) for m in (xbc, dt, log_decay))
    xbc, dt, log_decay = (m.unflatten(1, (-1, chunk)) for m in (xbc, dt, log_decay))
    inner = heads * width
    state = (xbc.shape[3] - inner) // 2
    x, keys, queries = xbc.split([inner, state, state], -1)
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
