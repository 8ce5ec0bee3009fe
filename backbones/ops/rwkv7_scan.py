r"""RWKV-7's scan: a matrix state that also forgets along one direction and rewrites it.

    S_t = diag(exp(g_t)) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T,    y_t = r_t^T S_t

Source: Peng et al., RWKV-7 (arXiv 2503.14456). Inside a chunk the reads u_t = a_t^T S_{t-1} depend
on each other through a strictly lower triangular matrix, so one triangular solve gives all of them
(the WY form of DeltaNet, arXiv 2406.06484). A token with k = a = b = 0 and g = 0 leaves no trace.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backbones.ops.dispatch import choose, full_precision, probe, work_dtype
from backbones.ops.matrix_state import CHUNK, FLOOR, Decay, cut, join


def reference(r: Tensor, g: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The recurrence, literally, in float64, token by token. Shapes as `rwkv7`."""
    read, decay, keys, values, look, put = (x.double() for x in (r, g.clamp(min=FLOOR), k, v, a, b))
    state = torch.zeros(*k.shape[:1], *k.shape[2:], v.shape[-1], dtype=torch.float64)
    out = []
    for t in range(r.shape[1]):
        found = (look[:, t, :, :, None] * state).sum(-2, keepdim=True)
        state = decay[:, t].exp()[..., None] * state + put[:, t, :, :, None] * found
        state = state + keys[:, t, :, :, None] * values[:, t, :, None, :]
        out.append((read[:, t, :, :, None] * state).sum(-2))
    return torch.stack(out, 1).to(v.dtype)


def rwkv7(
    r: Tensor,
    g: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    chunk: int = CHUNK,
    kernel: str = "auto",
) -> Tensor:
    """RWKV-7's time mixing.

    Args:
        r: Receptances (B, T, H, K).
        g: Log decays (B, T, H, K), at most 0; clamped at -10.
        k: Keys (B, T, H, K).
        v: Values (B, T, H, V).
        a: Where to look in the state (B, T, H, K): the negative of a unit key.
        b: Where to put what was found (B, T, H, K): the unit key times a rate in 0..1.
        chunk: Tokens of one chunk; need not divide T. At most 16 keeps float32 finite.
        kernel: auto | torch | reference | fla.

    Returns:
        (B, T, H, V) in v's dtype; computed in float32 at least.

    Raises:
        KernelError: The kernel asked for cannot run.
    """
    name = choose("rwkv7", kernel, v)
    if name == "reference":
        return reference(r, g, k, v, a, b)
    if name == "fla":
        same = [x.to(v.dtype) for x in (r, g.clamp(min=FLOOR), k, v, a, b)]
        function: Any = probe("rwkv7", "fla").function
        return function(*same, scale=1.0)[0]
    dtype = work_dtype(r, g, k, v, a, b)
    with full_precision(v):
        y = _chunked(*(cut(x.to(dtype), chunk) for x in (r, g, k, v, a, b)))
    return join(y, r.shape[1]).to(v.dtype)


def _chunked(r: Tensor, g: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    decay = Decay(g)
    # u = A_b u + A_k v + a S_0, so that u = (I - A_b)^-1 (a S_0 + A_k v).
    known = torch.cat([a * decay.before.exp(), decay.pairs(a, k, strict=True) @ v], dim=-1)
    system = torch.eye(g.shape[-2], dtype=g.dtype, device=g.device) - decay.pairs(a, b, strict=True)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    from_state, from_chunk = solved.split([a.shape[-1], v.shape[-1]], dim=-1)
    end_b, fade = decay.to_end(b).mT, decay.total.exp().mT
    written = decay.to_end(k).mT @ v
    state, starts, found = torch.zeros_like(written[:, :, 0]), [], []
    for n in range(g.shape[2]):
        starts.append(state)
        found.append(from_state[:, :, n] @ state + from_chunk[:, :, n])
        state = fade[:, :, n] * state + end_b[:, :, n] @ found[-1] + written[:, :, n]
    inside = decay.pairs(r, k, strict=False) @ v
    inside = inside + decay.pairs(r, b, strict=False) @ torch.stack(found, 2)
    return inside + (r * decay.upto.exp()) @ torch.stack(starts, 2)
