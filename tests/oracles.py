"""Data with a known density, so that the best possible network is known in closed form."""

from __future__ import annotations

import torch
from torch import Tensor

from experiments.diffusion.objective import Objective


class Mixture:
    """Gaussian components in C dimensions: weights (M,), means (M, C), covariances (M, C, C)."""

    def __init__(self, weights, means, covariances) -> None:
        as_double = lambda v: torch.as_tensor(v, dtype=torch.float64)  # noqa: E731
        self.weights, self.means = as_double(weights), as_double(means)
        self.covariances = as_double(covariances)

    @property
    def mean(self) -> Tensor:
        return self.weights @ self.means

    @property
    def covariance(self) -> Tensor:
        centred = self.means - self.mean
        spread = torch.einsum("m,mi,mj->ij", self.weights, centred, centred)
        return spread + torch.einsum("m,mij->ij", self.weights, self.covariances)

    def denoise(self, x: Tensor, alpha: float, sigma: float) -> Tensor:
        """E[x0 | x] for x = alpha x0 + sigma noise, (B, C, 1, 1)."""
        flat = x.flatten(1)
        eye = torch.eye(flat.shape[1], dtype=flat.dtype)
        logs, means = [], []
        for weight, mean, cov in zip(self.weights, self.means, self.covariances, strict=True):
            total = alpha**2 * cov + sigma**2 * eye
            gap = flat - alpha * mean
            solved = torch.linalg.solve(total, gap.T).T
            logs.append(weight.log() - 0.5 * ((gap * solved).sum(1) + torch.logdet(total)))
            means.append(mean + alpha * solved @ cov)
        share = torch.softmax(torch.stack(logs, 1), 1)
        return (share.unsqueeze(-1) * torch.stack(means, 1)).sum(1).reshape(x.shape)


class Oracle:
    """The network that an objective would learn from a mixture; it undoes the conversions itself."""

    dtype = torch.float64
    num_classes = 0
    config: dict = {"input_size": 1}

    def __init__(self, objective: Objective, data: Mixture) -> None:
        self.objective, self.data = objective, data
        self.in_channels = data.means.shape[1]

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        name, o = self.objective.name, self.objective
        assert (t == t[0]).all()
        if name == "edm":
            sigma = float((4 * t[0]).exp())
            total = (sigma**2 + o.sigma_data**2) ** 0.5
            clean = self.data.denoise(x * total, 1.0, sigma)
            skip, out = o.sigma_data**2 / total**2, sigma * o.sigma_data / total
            return (clean - skip * x * total) / out
        if name == "flow":
            time = float(t[0]) / o.options.time_scale
            return (x - self.data.denoise(x, 1 - time, time)) / time
        native = torch.as_tensor(t[:1], dtype=torch.float64)
        alpha, sigma = float(o.alpha(native)), float(o.sigma(native))
        return (x - alpha * self.data.denoise(x, alpha, sigma)) / sigma


def denoiser(objective: Objective, net):
    """Return what a sampler calls: a network's estimate of the clean images."""

    def denoise(x, time, step=0, evaluation=0):
        return objective.predict(net, x, torch.full((len(x),), time, dtype=torch.float64))

    return denoise


def loss_map(objective: Objective, net, x0: Tensor, noise: Tensor, time: Tensor, **cond) -> Tensor:
    """Return the objective's loss of every element for a network called once."""
    pair = objective.training_pair(x0, noise, time)
    return objective.loss_map(net(pair.inputs, pair.time, **cond), pair)


GAUSSIAN = Mixture([1.0], [[0.3, -0.2]], [[[0.25, 0.12], [0.12, 0.16]]])
MIXTURE = Mixture([0.3, 0.7], [[-1.0, 0.5], [0.6, -0.4]], [[[0.04, 0.0], [0.0, 0.02]], [[0.03, 0.01], [0.01, 0.05]]])
