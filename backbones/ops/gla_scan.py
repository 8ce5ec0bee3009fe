r"""Gated linear attention: a scan with a matrix state and a decay per key channel.

    S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T,    y_t = q_t^T S_t

Source: Yang et al., Gated Linear Attention (arXiv 2312.06635). A token with k = 0 and g = 0 leaves
no trace, so the scan over present tokens is the dense one with the absent ones masked.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backbones.ops.dispatch import choose, full_precision, probe, work_dtype
from backbones.ops.matrix_state import CHUNK, FLOOR, Decay, carry, cut, join


def reference(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """The recurrence, literally, in float64, token by token. Shapes as `gla`."""
    queries, keys, values, decay = (x.double() for x in (q, k, v, g.clamp(min=FLOOR)))
    state = torch.zeros(*k.shape[:1], *k.shape[2:], v.shape[-1], dtype=torch.float64)
    out = []
    for t in range(q.shape[1]):
        write = keys[:, t, :, :, None] * values[:, t, :, None, :]
        state = decay[:, t].exp()[..., None] * state + write
        out.append((queries[:, t, :, :, None] * state).sum(-2))
    return torch.stack(out, 1).to(v.dtype)


def gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, chunk: int = CHUNK, kernel: str = "auto"
) -> Tensor:
    """Gated linear attention, without a scale.

    Args:
        q: Queries (B, T, H, K).
        k: Keys (B, T, H, K).
        v: Values (B, T, H, V).
        g: Log decays (B, T, H, K), at most 0; clamped at -10.
        chunk: Tokens of one chunk; need not divide T. At most 16 keeps float32 finite.
        kernel: auto | torch | reference | fla.

    Returns:
        (B, T, H, V) in v's dtype; computed in float32 at least.

    Raises:
        KernelError: The kernel asked for cannot run.
    """
    name = choose("gla", kernel, v)
    if name == "reference":
        return reference(q, k, v, g)
    if name == "fla":
        floor = g.float().clamp(min=FLOOR)
        same = (x.to(v.dtype) for x in (q, k))
        function: Any = probe("gla", "fla").function
        return function(*same, v, floor, scale=1.0)[0]
    dtype = work_dtype(q, k, v, g)
    with full_precision(v):
        qs, ks, vs, gs = (cut(x.to(dtype), chunk) for x in (q, k, v, g))
        decay = Decay(gs)
        states = carry(decay.total, decay.to_end(ks).mT @ vs)
        y = decay.pairs(qs, ks, strict=False) @ vs + (qs * decay.upto.exp()) @ states
    return join(y, q.shape[1]).to(v.dtype)
