r"""RWKV-7's scan: a matrix state with a decay per key channel, computed in chunks.

Peng et al., Goose (arXiv 2503.14456): the state decays, is rewritten along one direction, and a
value is added:

    S_t = diag(exp(g_t)) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T,    y_t = r_t^T S_t

A token with k = a = b = 0 and g = 0 has no effect, so the scan over present tokens equals the dense
one with the absent ones masked. Without a and b, `reference` also serves Mamba's scans.

With log decays g <= 0 and their running sum c inside a chunk, a term from token s reaches token t
by exp(c_t - c_s). Split around the middle m of the chunk, exp(c_t - m) exp(m - c_s), it is a matrix
product. Both factors stay finite because log decays are clamped at `FLOOR`: over half a chunk the
exponent is at most 80, and a decay of exp(-10) per token keeps nothing anyway.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from backbones.ops.dispatch import choose, full_precision, kernel_function, work_dtype

FLOOR = -10.0
CHUNK = 16


def cut(x: Tensor, chunk: int) -> Tensor:
    """Split (B, T, H, K) into chunks (B, H, n, chunk, K); the last one is padded with zeros."""
    x = x.transpose(1, 2)
    short = -x.shape[2] % chunk
    x = F.pad(x, (0, 0, 0, short)) if short else x
    return x.unflatten(2, (-1, chunk))


class Decay:
    """Running sums of log decays g (B, H, n, Q, K), at most 0, and the factors from them."""

    def __init__(self, g: Tensor) -> None:
        g = g.clamp(min=FLOOR)
        self.upto = g.cumsum(-2)
        self.before = self.upto - g
        half = max(1, g.shape[-2] // 2)
        self.middle = self.upto[..., half - 1 : half, :]
        self.total = self.upto[..., -1:, :]

    def pairs(self, q: Tensor, k: Tensor, strict: bool) -> Tensor:
        """Return (..., Q, Q), of q and k (B, H, n, Q, K): <q_t, k_s> under the decay from s to t.

        `strict` takes only s < t, decayed up to t - 1; else it is s <= t, decayed up to t.
        """
        sums = self.before if strict else self.upto
        scores = (q * (sums - self.middle).exp()) @ (k * (self.middle - self.upto).exp()).mT
        size = scores.shape[-1]
        late = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(0 if strict else 1)
        return scores.masked_fill(late, 0.0)

    def to_end(self, k: Tensor) -> Tensor:
        """Return k (B, H, n, Q, K) decayed to the end of its chunk."""
        return k * (self.total - self.upto).exp()


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    a: Tensor | None = None,
    b: Tensor | None = None,
    floor: float = FLOOR,
) -> Tensor:
    """The recurrence in float64, token by token; without a and b nothing is rewritten.

    Log decays g are (B, T, H, K), or (B, T, H, 1) for all channels of a head, clamped at `floor`.
    """
    reads, keys, values, decay = (x.double() for x in (q, k, v, g.clamp(min=floor)))
    state = keys.new_zeros(*k.shape[:1], *k.shape[2:], v.shape[-1])
    out = []
    for t in range(q.shape[1]):
        write = keys[:, t, :, :, None] * values[:, t, :, None, :]
        after = decay[:, t].exp()[..., None] * state
        if a is not None and b is not None:
            retrieved = (a.double()[:, t, :, :, None] * state).sum(-2, keepdim=True)
            after = after + b.double()[:, t, :, :, None] * retrieved
        state = after + write
        out.append((reads[:, t, :, :, None] * state).sum(-2))
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
        a: Direction that is read from the state (B, T, H, K): the negative of a unit key.
        b: Direction where that is written back (B, T, H, K): the unit key times a rate in 0..1.
        chunk: Tokens of one chunk; need not divide T. At most 16 keeps float32 finite.
        kernel: auto | torch | reference | fla.

    Returns:
        (B, T, H, V) in v's dtype; computed in float32 at least.

    Raises:
        KernelError: The requested kernel cannot run.
    """
    name = choose("rwkv7", kernel, [v])
    if name == "reference":
        return reference(r, k, v, g, a=a, b=b)
    if name == "fla":
        same = [x.to(v.dtype) for x in (r, g.clamp(min=FLOOR), k, v, a, b)]
        return kernel_function("rwkv7", "fla")(*same, scale=1.0)[0]
    dtype = work_dtype(r, g, k, v, a, b)
    with full_precision(v):
        y = _rwkv7_chunks(*(cut(x.to(dtype), chunk) for x in (r, g, k, v, a, b)))
    return y.flatten(2, 3)[:, :, : r.shape[1]].transpose(1, 2).to(v.dtype)


def _rwkv7_chunks(r: Tensor, g: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    # Inside a chunk the reads u_t = a_t^T S_{t-1} depend on each other through a strictly lower
    # triangular matrix, so one triangular solve gives all of them (the WY form of DeltaNet, arXiv
    # 2406.06484).
    decay = Decay(g)
    # u = A_b u + A_k v + a S_0, so that u = (I - A_b)^-1 (a S_0 + A_k v).
    right_side = torch.cat([a * decay.before.exp(), decay.pairs(a, k, strict=True) @ v], dim=-1)
    system = torch.eye(g.shape[-2], dtype=g.dtype, device=g.device) - decay.pairs(a, b, strict=True)
    solved = torch.linalg.solve_triangular(system, right_side, upper=False, unitriangular=True)
    from_state, from_chunk = solved.split([a.shape[-1], v.shape[-1]], dim=-1)
    end_b, fade = decay.to_end(b).mT, decay.total.exp().mT
    written = decay.to_end(k).mT @ v
    state, starts, retrieved = torch.zeros_like(written[:, :, 0]), [], []
    for n in range(g.shape[2]):
        starts.append(state)
        retrieved.append(from_state[:, :, n] @ state + from_chunk[:, :, n])
        state = fade[:, :, n] * state + end_b[:, :, n] @ retrieved[-1] + written[:, :, n]
    inside = decay.pairs(r, k, strict=False) @ v
    inside = inside + decay.pairs(r, b, strict=False) @ torch.stack(retrieved, 2)
    return inside + (r * decay.upto.exp()) @ torch.stack(starts, 2)
