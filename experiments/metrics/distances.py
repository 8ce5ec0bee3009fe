"""What is computed from feature vectors themselves: neighbours, kernels, class probabilities."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from experiments.metrics.metric_names import MetricError

_ROWS = 4096  # rows of a distance matrix at a time: 4096 x 50K float32 are 800 MB


def _blocks(a: Tensor, b: Tensor) -> list[Tensor]:
    """Split `a` so that its distances to all of `b` fit into memory."""
    return list(a.split(max(1, min(_ROWS, 2**28 // max(1, len(b))))))


def radii(rows: Tensor, neighbours: int) -> Tensor:
    """Return the distance of each row to its k-th nearest other row, with shape `(N,)`.

    Args:
        rows: Feature vectors, with shape `(N, d)`.
        neighbours: k.

    Raises:
        MetricError: There are not more than k rows.
    """
    if len(rows) <= neighbours:
        raise MetricError(
            f"precision and recall with {neighbours} neighbours need more images than that, "
            f"got {len(rows)}"
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

    Args:
        samples: Features of the samples, with shape `(N, d)`.
        reference: Features of real images, with shape `(M, d)`.
        neighbours: k.
    """
    centre = reference.mean(dim=0)
    # Distances are computed through products: far from the origin they would lose their digits.
    samples, reference = samples - centre, reference - centre
    precision = inside(samples, reference, radii(reference, neighbours))
    recall = inside(reference, samples, radii(samples, neighbours))
    return precision, recall


def inception_score(logits: Tensor, split_size: int = 5000) -> float:
    """Return exp of the mean KL of class probabilities to their average (Salimans et al. 2016).

    Args:
        logits: With shape `(N, classes)`.
        split_size: The score is the mean over consecutive splits of this many images, as in ADM.
    """
    scores = []
    for part in logits.double().split(split_size):
        log_p = part.log_softmax(dim=1)
        log_q = torch.logsumexp(log_p, dim=0) - np.log(len(part))
        scores.append((log_p.exp() * (log_p - log_q)).sum(dim=1).mean().exp())
    return torch.stack(scores).mean().item()


def kernel_distance(
    samples: Tensor, reference: Tensor, subsets: int = 100, subset_size: int = 1000, seed: int = 0
) -> float:
    """Return KID (Binkowski et al. 2018): unbiased squared MMD with the kernel `(x.y / d + 1)^3`.

    Args:
        samples: Features of the samples, with shape `(N, d)`.
        reference: Features of real images, with shape `(M, d)`.
        subsets: Number of random subsets that are averaged.
        subset_size: Images in each; at most as many as there are.
        seed: Of the subsets.
    """
    size = min(subset_size, len(samples), len(reference))
    if size < 2:
        raise MetricError(f"a kernel distance needs at least 2 images on both sides, got {size}")
    a, b = samples.double().cpu(), reference.double().cpu()
    rng = np.random.default_rng(seed)
    total = 0.0
    for _ in range(subsets):
        x = a[torch.from_numpy(rng.choice(len(a), size, replace=False))]
        y = b[torch.from_numpy(rng.choice(len(b), size, replace=False))]
        xx, yy, xy = _kernel(x, x), _kernel(y, y), _kernel(x, y)
        own = xx.sum() - xx.trace() + yy.sum() - yy.trace()
        total += (own / (size * (size - 1)) - 2 * xy.mean()).item()
    return total / subsets


def _kernel(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y.T / x.shape[1] + 1) ** 3


def nearest(rows: Tensor, others: Tensor, skip_self: bool = False) -> Tensor:
    """Return the distance of each row to its nearest among `others`, with shape `(N,)`, in float64.

    Args:
        rows: With shape `(N, d)`.
        others: With shape `(M, d)`.
        skip_self: `rows` are `others`: leave out each row itself.
    """
    found = []
    start = 0
    for x in _blocks(rows, others):
        distance = torch.cdist(x, others)
        if skip_self:
            index = torch.arange(len(x), device=x.device)
            distance[index, start + index] = torch.inf
        start += len(x)
        # The search may round, the distance of a copy must be exactly 0: it is computed again from
        # the difference.
        found.append((x.double() - others[distance.argmin(dim=1)].double()).norm(dim=1))
    return torch.cat(found)


def memorisation(samples: Tensor, train: Tensor, heldout: Tensor) -> tuple[float, float]:
    """Return how near samples are to training images relative to held-out ones.

    The ratio is the mean distance to the nearest training image over the mean distance to the
    nearest held-out one: 0 for copies of the training set. Since the two sets differ in size,
    images that were never seen do not get exactly 1; the second number is what the held-out images
    get themselves (each against the others), and is what to compare with.

    Args:
        samples: With shape `(N, d)`, features or pixels.
        train: With shape `(T, d)`.
        heldout: With shape `(H, d)`, at least two rows.
    """
    if len(heldout) < 2 or not len(train):
        raise MetricError(
            "memorisation compares with training and held-out images, "
            f"got {len(train)} and {len(heldout)}"
        )
    ratio = nearest(samples, train).mean() / nearest(samples, heldout).mean().clamp_min(1e-12)
    fresh = nearest(heldout, train).mean() / nearest(
        heldout, heldout, skip_self=True
    ).mean().clamp_min(1e-12)
    return ratio.item(), fresh.item()
