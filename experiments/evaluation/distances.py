"""Metrics on feature vectors.

Frechet distances (FD, FID, sFID) between Gaussians, from moments that are collected in one pass and
across processes; precision and recall, Inception Score, kernel distance and memorisation from the
feature vectors themselves.
"""

from __future__ import annotations

import warnings

import numpy as np
import torch
from torch import Tensor

from experiments.options.evaluation import MetricError
from routing.errors import require
from routing.rng import widest

_ROWS = 4096  # rows of a distance matrix at a time: 4096 x 50K float32 are 800 MB


class Moments:
    """Streaming mean and covariance of rows, in float64.

    The scatter about the mean is kept, not sums of squares, so that nothing cancels, and two
    collections merge exactly (Chan, Golub, LeVeque 1979), with d = mean_b - mean_a:

        mean = mean_a + d * n_b / n,   scatter = scatter_a + scatter_b + d d^T * n_a n_b / n

    The sums of `dim` features live on `device`; one without float64 (MPS) is replaced by the CPU.
    """

    def __init__(self, dim: int, device: torch.device | str | None = None) -> None:
        device = torch.device(device or "cpu")
        if widest(device) != torch.float64:
            device = torch.device("cpu")
        self.n = 0
        self.mean = torch.zeros(dim, dtype=torch.float64, device=device)
        self.scatter = torch.zeros(dim, dim, dtype=torch.float64, device=device)

    @property
    def dim(self) -> int:
        """Length of a feature vector."""
        return self.mean.shape[0]

    def update(self, rows: Tensor) -> Moments:
        """Add feature vectors `(B, dim)`; returns itself."""
        require(
            rows.ndim == 2 and rows.shape[1] == self.dim,
            f"features of shape {tuple(rows.shape)} do not fit moments of {self.dim} features; "
            "expected one row per image, all from the same feature extractor",
        )
        if not len(rows):
            return self
        rows = rows.detach().to(self.mean.device, torch.float64)
        mean = rows.mean(dim=0)
        centred = rows - mean
        self.merge_parts(len(rows), mean, centred.T @ centred)
        return self

    def merge_parts(self, n: int, mean: Tensor, scatter: Tensor) -> None:
        """Add n rows with this mean `(dim,)` and scatter about it `(dim, dim)`."""
        total = self.n + n
        shift = mean - self.mean
        self.scatter += scatter + torch.outer(shift, shift) * (self.n * n / total)
        self.mean += shift * (n / total)
        self.n = total

    def finish(self) -> tuple[np.ndarray, np.ndarray]:
        """Return mean `(dim,)` and unbiased covariance `(dim, dim)` as float64 arrays.

        Raises:
            UserError: With fewer than two samples there is no covariance.
        """
        require(
            self.n >= 2, f"a covariance needs at least 2 images, got {self.n}: use more samples"
        )
        sigma = self.scatter / (self.n - 1)
        return self.mean.cpu().numpy(), ((sigma + sigma.T) / 2).cpu().numpy()


class SingularCovarianceWarning(UserWarning):
    """A covariance is not of full rank: usually fewer samples than features."""


def frechet_distance(
    mu1: np.ndarray, sigma1: np.ndarray, mu2: np.ndarray, sigma2: np.ndarray
) -> float:
    """Return the squared Frechet distance of two Gaussians, of means `(d,)`, covariances `(d, d)`.

        FD = |mu_1 - mu_2|^2 + tr(S_1) + tr(S_2) - 2 tr((S_1 S_2)^(1/2))
        (Dowson and Landau 1982; Heusel et al. 2017)

    The last trace is the sum of the square roots of the eigenvalues of `S_1^(1/2) S_2 S_1^(1/2)`,
    which is symmetric and has the eigenvalues of `S_1 S_2`. Two symmetric eigenproblems are four
    times as fast as a general matrix square root (scipy.linalg.sqrtm) at 2048 features, and their
    results are real.

    Warns of a singular covariance: the distance of the two Gaussians is still exact, but as an
    estimate from few samples it is biased upwards.

    Raises:
        UserError: Shapes differ, or a number is not finite.
    """
    arrays = [np.asarray(a, dtype=np.float64) for a in (mu1, sigma1, mu2, sigma2)]
    mu1, sigma1, mu2, sigma2 = arrays
    d = mu1.size
    require(
        [a.shape for a in arrays] == [(d,), (d, d), (d,), (d, d)],
        f"moments of {mu1.size} and {mu2.size} features cannot be compared; "
        "both must come from the same feature extractor",
    )
    require(
        all(np.isfinite(a).all() for a in arrays),
        "the features hold NaN or infinite numbers; the samples or the reference are broken",
    )
    values, vectors = np.linalg.eigh((sigma1 + sigma1.T) / 2)
    values2 = np.linalg.eigvalsh((sigma2 + sigma2.T) / 2)
    rank1, rank2 = np.count_nonzero(_clean(values)), np.count_nonzero(_clean(values2))
    if min(rank1, rank2) < d:
        warnings.warn(
            f"covariances of rank {rank1} and {rank2} in {d} features are singular: "
            "the Frechet distance is biased; use more samples than features",
            SingularCovarianceWarning,
            stacklevel=2,
        )
    root = (vectors * np.sqrt(_clean(values))) @ vectors.T
    product = root @ sigma2 @ root
    cross = np.sqrt(_clean(np.linalg.eigvalsh((product + product.T) / 2))).sum()
    shift = mu1 - mu2
    distance = float(shift @ shift + np.trace(sigma1) + np.trace(sigma2) - 2 * cross)
    # Rounding may give a tiny negative number for equal Gaussians.
    return max(distance, 0.0)


def _clean(values: np.ndarray) -> np.ndarray:
    """Set eigenvalues at the level of rounding errors to zero: their roots would not be small."""
    noise = len(values) * np.finfo(np.float64).eps * max(float(values.max(initial=0.0)), 0.0)
    return np.where(values > noise, values, 0.0)


def _blocks(a: Tensor, b: Tensor) -> list[Tensor]:
    """Split `a` so that its distances to all of `b` fit into memory."""
    return list(a.split(max(1, min(_ROWS, 2**28 // max(1, len(b))))))


def radii(rows: Tensor, neighbours: int) -> Tensor:
    """Return the distance of each row `(N, d)` to its k-th nearest other row, with shape `(N,)`."""
    require(
        len(rows) > neighbours,
        f"precision and recall with {neighbours} neighbours need more images than that, "
        f"got {len(rows)}",
        MetricError,
    )
    # The nearest is the row itself.
    return torch.cat(
        [torch.cdist(x, rows).kthvalue(neighbours + 1, dim=1).values for x in _blocks(rows, rows)]
    )


def inside(rows: Tensor, centres: Tensor, radius: Tensor) -> float:
    """Return the share of `rows` that lie in a ball around any of `centres`."""
    hits = [(torch.cdist(x, centres) <= radius).any(dim=1) for x in _blocks(rows, centres)]
    return torch.cat(hits).double().mean().item()


def precision_recall(
    samples: Tensor, reference: Tensor, neighbours: int = 3
) -> tuple[float, float]:
    """Return improved precision and recall (Kynkaanniemi et al. 2019).

    `samples` `(N, d)` and `reference` `(M, d)` are features; `neighbours` is k. In a classifier's
    features noise may lie near real images: a high precision means little if FD is also large.
    """
    centre = reference.mean(dim=0)
    # cdist uses matrix products, which lose precision far from the origin.
    samples, reference = samples - centre, reference - centre
    precision = inside(samples, reference, radii(reference, neighbours))
    recall = inside(reference, samples, radii(samples, neighbours))
    return precision, recall


def inception_score(logits: Tensor, split_size: int = 5000) -> float:
    """Return exp of the mean KL of class probabilities to their average (Salimans et al. 2016).

    Of logits `(N, classes)`; the mean over consecutive splits of `split_size` images, as in ADM.
    """
    scores = []
    for part in logits.double().split(split_size):
        log_p = part.log_softmax(dim=1)
        log_q = torch.logsumexp(log_p, dim=0) - np.log(len(part))
        scores.append((log_p.exp() * (log_p - log_q)).sum(dim=1).mean().exp())
    return torch.stack(scores).mean().item()


def kernel_distance(
    samples: Tensor, reference: Tensor, subsets: int = 100, subset_size: int = 1000
) -> float:
    """Return KID (Binkowski et al. 2018): unbiased squared MMD with the kernel `(x.y / d + 1)^3`.

    `samples` `(N, d)` and `reference` `(M, d)` are features. It is the mean over random subsets,
    of `subset_size` images or as many as there are.
    """
    size = min(subset_size, len(samples), len(reference))
    require(
        size >= 2,
        f"a kernel distance needs at least 2 images on both sides, got {size}",
        MetricError,
    )
    a, b = samples.cpu().double(), reference.cpu().double()
    rng = np.random.default_rng(0)
    total = 0.0
    for _ in range(subsets):
        x = a[torch.from_numpy(rng.choice(len(a), size, replace=False))]
        y = b[torch.from_numpy(rng.choice(len(b), size, replace=False))]
        xx, yy, xy = _kernel(x, x), _kernel(y, y), _kernel(x, y)
        # Unbiased: without the pairs of an image with itself.
        within = xx.sum() - xx.trace() + yy.sum() - yy.trace()
        total += (within / (size * (size - 1)) - 2 * xy.mean()).item()
    return total / subsets


def _kernel(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y.T / x.shape[1] + 1) ** 3


def nearest(rows: Tensor, candidates: Tensor, skip_self: bool = False) -> Tensor:
    """Return the distance of each row `(N, d)` to its nearest candidate, `(N,)` in float64.

    With `skip_self`, `rows` are the candidates, and each row itself is left out.
    """
    distances, start = [], 0
    for x in _blocks(rows, candidates):
        distance = torch.cdist(x, candidates)
        if skip_self:
            index = torch.arange(len(x), device=x.device)
            distance[index, start + index] = torch.inf
        start += len(x)
        # cdist rounds, but the distance of a copy must be exactly 0, so it is computed again from
        # the difference.
        neighbour = candidates[distance.argmin(dim=1)]
        distances.append((x.double() - neighbour.double()).norm(dim=1))
    return torch.cat(distances)


def memorisation(samples: Tensor, train: Tensor, heldout: Tensor) -> tuple[float, float]:
    """Return the NN-distance ratio of samples, and that of held-out images to compare it with.

    The ratio is the mean distance to the nearest training image over the mean distance to the
    nearest held-out one: 0 for copies of the training set. Since the two sets differ in size,
    unseen images do not have exactly 1; the second number is the ratio of the held-out images
    themselves (each against the rest).

    All are features or pixels: `samples` `(N, d)`, `train` `(T, d)`, `heldout` `(H, d)`.
    """
    require(
        len(heldout) >= 2 and len(train),
        "memorisation compares with training and held-out images, "
        f"got {len(train)} and {len(heldout)}",
        MetricError,
    )
    to_heldout = nearest(samples, heldout).mean().clamp_min(1e-12)
    ratio = nearest(samples, train).mean() / to_heldout
    among_heldout = nearest(heldout, heldout, skip_self=True).mean().clamp_min(1e-12)
    heldout_ratio = nearest(heldout, train).mean() / among_heldout
    return ratio.item(), heldout_ratio.item()
