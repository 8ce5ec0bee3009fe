r"""RWKV-6's scan: a matrix state, a decay per key channel that depends on the token, and a bonus.

    y_t = r_t^T (S_{t-1} + diag(u) k_t v_t^T),    S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T

Source: Peng et al., Eagle and Finch (arXiv 2404.05892). A token with k = 0 and g = 0 leaves no
trace.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backbones.ops.dispatch import choose, full_precision, probe, work_dtype
from backbones.ops.matrix_state import CHUNK, FLOOR, Decay, carry, cut, join


def reference(r: Tensor, k: Tensor, v: Tensor, g: Tensor, u: Tensor) -> Tensor:
    """The recurrence, literally, in float64, token by token. Shapes as `rwkv6`."""
    reads, keys, values, decay = (x.double() for x in (r, k, v, g.clamp(min=FLOOR)))
    state = torch.zeros(*k.shape[:1], *k.shape[2:], v.shape[-1], dtype=torch.float64)
    out = []
    for t in range(r.shape[1]):
        write = keys[:, t, :, :, None] * values[:, t, :, None, :]
        seen = state + u.double()[..., None] * write
        out.append((reads[:, t, :, :, None] * seen).sum(-2))
        state = decay[:, t].exp()[..., None] * state + write
    return torch.stack(out, 1).to(v.dtype)


def rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    u: Tensor,
    chunk: int = CHUNK,
    kernel: str = "auto",
) -> Tensor:
    """RWKV-6's time mixing.

    Args:
        r: Receptances (B, T, H, K).
        k: Keys (B, T, H, K).
        v: Values (B, T, H, V).
        g: Log decays (B, T, H, K), at most 0; clamped at -10.
        u: Bonus of the token itself (H, K).
        chunk: Tokens of one chunk; need not divide T. At most 16 keeps float32 finite.
        kernel: auto | torch | reference | fla.

    Returns:
        (B, T, H, V) in v's dtype; computed in float32 at least.

    Raises:
        KernelError: The kernel asked for cannot run.
    """
    name = choose("rwkv6", kernel, v)
    if name == "reference":
        return reference(r, k, v, g, u)
    if name == "fla":
        floor = g.float().clamp(min=FLOOR)
        same = (x.to(v.dtype) for x in (r, k))
        function: Any = probe("rwkv6", "fla").function
        return function(*same, v, floor, u.float(), scale=1.0)[0]
    dtype = work_dtype(r, k, v, g)
    with full_precision(v):
        rs, ks, vs, gs = (cut(x.to(dtype), chunk) for x in (r, k, v, g))
        decay = Decay(gs)
        states = carry(decay.total, decay.to_end(ks).mT @ vs)
        y = decay.pairs(rs, ks, strict=True) @ vs + (rs * decay.before.exp()) @ states
        own = (rs * ks * u.to(dtype)[:, None, None]).sum(-1, keepdim=True)
        y = y + own * vs
    return join(y, r.shape[1]).to(v.dtype)
