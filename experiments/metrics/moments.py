"""First and second moments of features, in one pass and across processes.

Features arrive in batches and on several ranks; what a Frechet distance needs of them is only their
number `n`, mean `mu` and covariance `sigma`. The scatter about the mean is kept, not sums of
squares, so that nothing cancels, and two collections merge exactly (Chan, Golub, LeVeque 1979):

    mean = mean_a + d * n_b / n,   scatter = scatter_a + scatter_b + d d^T * n_a n_b / n,   d =
    mean_b - mean_a
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from routing.errors import UserError


class Moments:
    """Streaming mean and covariance of rows, in float64.

    Args:
        dim: Length of a feature vector.
        device: Where the sums live; a device without float64 (MPS) is replaced by the CPU.
    """

    def __init__(self, dim: int, device: torch.device | str | None = None) -> None:
        device = torch.device(device or "cpu")
        if device.type == "mps":
            device = torch.device("cpu")
        self.n = 0
        self.mean = torch.zeros(dim, dtype=torch.float64, device=device)
        self.scatter = torch.zeros(dim, dim, dtype=torch.float64, device=device)

    @property
    def dim(self) -> int:
        """Length of a feature vector."""
        return self.mean.shape[0]

    def update(self, rows: Tensor) -> Moments:
        """Take in feature vectors, with shape `(B, dim)`; returns itself."""
        if rows.ndim != 2 or rows.shape[1] != self.dim:
            raise UserError(
                f"features of shape {tuple(rows.shape)} do not fit moments of {self.dim} features; "
                "expected one row per image, all from the same feature extractor"
            )
        if not len(rows):
            return self
        rows = rows.detach().to(self.mean.device, torch.float64)
        mean = rows.mean(dim=0)
        centred = rows - mean
        self._merge(len(rows), mean, centred.T @ centred)
        return self

    def merge(self, other: Moments) -> Moments:
        """Take in another collection's moments (another rank's, another file's); returns itself."""
        if other.n:
            self._merge(other.n, other.mean.to(self.mean), other.scatter.to(self.scatter))
        return self

    def _merge(self, n: int, mean: Tensor, scatter: Tensor) -> None:
        total = self.n + n
        shift = mean - self.mean
        self.scatter += scatter + torch.outer(shift, shift) * (self.n * n / total)
        self.mean += shift * (n / total)
        self.n = total

    def pack(self) -> Tensor:
        """Return everything as one float64 vector of length `1 + dim + dim^2`, for a collective."""
        count = self.mean.new_tensor([float(self.n)])
        return torch.cat([count, self.mean, self.scatter.flatten()])

    @classmethod
    def unpack(cls, packed: Tensor, dim: int) -> Moments:
        """Return the moments that `pack` wrote."""
        self = cls(dim, packed.device)
        self.n = round(packed[0].item())
        self.mean = packed[1 : 1 + dim].clone()
        self.scatter = packed[1 + dim :].reshape(dim, dim).clone()
        return self

    def finish(self) -> tuple[np.ndarray, np.ndarray]:
        """Return mean `(dim,)` and unbiased covariance `(dim, dim)` as float64 arrays.

        Raises:
            UserError: With fewer than two samples there is no covariance.
        """
        if self.n < 2:
            raise UserError(
                f"a covariance needs at least 2 images, got {self.n}; ask for more samples"
            )
        sigma = self.scatter / (self.n - 1)
        return self.mean.cpu().numpy(), ((sigma + sigma.T) / 2).cpu().numpy()
