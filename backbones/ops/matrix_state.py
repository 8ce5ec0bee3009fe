r"""Scans with a matrix state and a decay per key channel, cut in chunks (GLA, RWKV-6, RWKV-7).

With log decays g <= 0 and their running sum c inside a chunk, a term from token s reaches token t
by exp(c_t - c_s). Split around the middle m of the chunk, exp(c_t - m) exp(m - c_s), it is a matrix
product. Both factors stay finite because log decays are clamped at `FLOOR`: over half a chunk the
exponent is at most 80, and exp(-10) a token is no memory anyway.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

FLOOR = -10.0
CHUNK = 16


def cut(x: Tensor, chunk: int) -> Tensor:
    """Cut (B, T, H, K) into chunks (B, H, n, chunk, K); zeros fill the last one."""
    x = x.transpose(1, 2)
    short = -x.shape[2] % chunk
    x = F.pad(x, (0, 0, 0, short)) if short else x
    return x.unflatten(2, (-1, chunk))


def join(x: Tensor, tokens: int) -> Tensor:
    """Undo `cut` for the first `tokens` tokens: (B, H, n, chunk, K) -> (B, T, H, K)."""
    return x.flatten(2, 3)[:, :, :tokens].transpose(1, 2)


class Decay:
    """Running sums of the log decays of one call, and the factors made of them.

    Args:
        g: Log decays (B, H, n, Q, K), at most 0.
    """

    def __init__(self, g: Tensor) -> None:
        g = g.clamp(min=FLOOR)
        self.upto = g.cumsum(-2)
        self.before = self.upto - g
        self.middle = self.upto[..., g.shape[-2] // 2 - 1 : g.shape[-2] // 2, :]
        self.total = self.upto[..., -1:, :]

    def pairs(self, q: Tensor, k: Tensor, strict: bool) -> Tensor:
        """Return (..., Q, Q): <q_t, k_s> under the decay from s to t.

        Args:
            q: Rows (B, H, n, Q, K).
            k: Columns (B, H, n, Q, K).
            strict: Only s < t, decayed up to t - 1; else s <= t, decayed up to t.
        """
        sums = self.before if strict else self.upto
        scores = (q * (sums - self.middle).exp()) @ (k * (self.middle - self.upto).exp()).mT
        size = scores.shape[-1]
        late = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(0 if strict else 1)
        return scores.masked_fill(late, 0.0)

    def to_end(self, k: Tensor) -> Tensor:
        """Return what is left of k (B, H, n, Q, K) at the end of its chunk."""
        return k * (self.total - self.upto).exp()


def carry(total: Tensor, written: Tensor) -> Tensor:
    """Return the state at the start of every chunk, (B, H, n, K, V), zero at the first.

    Args:
        total: Log decay over each chunk (B, H, n, 1, K).
        written: What each chunk adds to the state at its end (B, H, n, K, V).
    """
    state, states = torch.zeros_like(written[:, :, 0]), []
    for fade, new in zip(total.exp().mT.unbind(2), written.unbind(2), strict=True):
        states.append(state)
        state = fade * state + new
    return torch.stack(states, 2)
