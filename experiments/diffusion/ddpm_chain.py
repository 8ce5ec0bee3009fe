"""The Markov chain of DDPM: its noise levels, its reverse steps and their variational bound.

Ho et al. 2020 for the process; Nichol & Dhariwal 2021 ("improved DDPM") for the learned variance
(Equation 15) and the bound that trains it. Steps are 0..T-1; -1 means clean data.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from routing.rng import widest


class DDPMChain:
    """Linear betas from `beta_start` to `beta_end` over `steps` steps, and quantities derived.

    Attributes:
        betas: Variance added in each step, `(T,)`.
        abar: Cumulative product of 1 - beta, `(T,)`.
    """

    def __init__(self, beta_start: float, beta_end: float, steps: int) -> None:
        self.steps = steps
        self.betas = torch.linspace(beta_start, beta_end, steps, dtype=torch.float64)
        self.abar = torch.cumprod(1 - self.betas, 0)
        # ln(sigma / alpha), increasing; float steps interpolate it, so that any level has a time.
        self.log_level = 0.5 * (torch.log1p(-self.abar) - self.abar.log())
        self.previous_abar = torch.cat((torch.ones(1, dtype=torch.float64), self.abar[:-1]))
        posterior_variance = self.betas * (1 - self.previous_abar) / (1 - self.abar)
        # Step 0 has no variance left; its logarithm is clipped to that of step 1.
        self.log_posterior_variance = torch.cat(
            (posterior_variance[1:2], posterior_variance[1:])
        ).log()
        self._device_tables: dict[tuple[str, torch.device], Tensor] = {}

    def level(self, time: Tensor) -> Tensor:
        """Return sigma / alpha at steps `(B,)`; 0 for clean data (a negative step)."""
        table = self.table("log_level", time.device)
        low = time.floor().clamp(0, self.steps - 2).long()
        fraction = time.to(table) - low
        log_level = table[low] + fraction * (table[low + 1] - table[low])
        level = torch.where(time < 0, torch.zeros_like(log_level), log_level.exp())
        return level.to(torch.promote_types(time.dtype, torch.float32))

    def from_level(self, level: Tensor) -> Tensor:
        """Return the fractional step of a noise level, clamped to 0..T-1."""
        table = self.table("log_level", level.device)
        log_level = level.to(table).log().clamp(table[0], table[-1])
        low = (torch.searchsorted(table, log_level, right=True) - 1).clamp(0, len(table) - 2)
        step = low + (log_level - table[low]) / (table[low + 1] - table[low])
        return step.to(torch.promote_types(level.dtype, torch.float32))

    def posterior(self, x: Tensor, x0: Tensor, time: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mean of q(x_{k-1} | x_k, x0) and the log of its smallest and largest variance.

        Ho et al., Equation 7. The smallest is beta-tilde, clipped at step 0 to that of step 1; the
        largest is beta. The mean is `(B, C, H, W)`, the others `(B, 1, 1, 1)`.
        """
        steps, device = time.long(), time.device
        beta = self.table("betas", device)[steps]
        abar = self.table("abar", device)[steps]
        previous_abar = self.table("previous_abar", device)[steps]
        low = self.table("log_posterior_variance", device)[steps]
        from_x0 = beta * previous_abar.sqrt() / (1 - abar)
        from_x = (1 - beta).sqrt() * (1 - previous_abar) / (1 - abar)
        mean = per_image(from_x0, x) * x0 + per_image(from_x, x) * x
        return mean, per_image(low, x), per_image(beta.log(), x)

    def bound(self, x0: Tensor, x: Tensor, clean: Tensor, fraction: Tensor, time: Tensor) -> Tensor:
        """Return one term of the variational bound in bits per element, `(B, C, H, W)`.

        Args:
            x0: Clean images.
            x: Noisy images at steps `time`.
            clean: The network's estimate of `x0`.
            fraction: Where the learned log-variance lies between its bounds, in [0, 1].
            time: Steps, `(B,)`.
        """
        mean, low, high = self.posterior(x, x0, time)
        predicted_mean, _, _ = self.posterior(x, clean, time)
        log_variance = fraction * high + (1 - fraction) * low
        gap = (mean - predicted_mean) ** 2 * torch.exp(-log_variance)
        divergence = 0.5 * (log_variance - low - 1 + torch.exp(low - log_variance) + gap)
        # The last step has no posterior to match: the likelihood of an 8-bit value, as in Ho et al.
        likelihood = discretised_nll(x0, predicted_mean, 0.5 * log_variance)
        return torch.where(per_image(time, x) == 0, likelihood, divergence) / math.log(2)

    def table(self, name: str, device: torch.device) -> Tensor:
        """Return a table on a device, copied once: a copy in every step would stall a GPU."""
        key = name, device
        if key not in self._device_tables:
            self._device_tables[key] = getattr(self, name).to(device=device, dtype=widest(device))
        return self._device_tables[key]


def per_image(values: Tensor, x: Tensor) -> Tensor:
    """Reshape `(B,)` to `(B, 1, 1, 1)` with the dtype and device of `x`."""
    return values.to(x)[:, None, None, None]


def discretised_nll(x: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Return -ln P of 8-bit values in [-1, 1] under a Gaussian (Ho et al., Equation 13)."""
    scale = torch.exp(-log_std)
    upper = torch.special.ndtr(scale * (x - mean + 1 / 255))
    lower = torch.special.ndtr(scale * (x - mean - 1 / 255))
    upper = torch.where(x > 0.999, torch.ones_like(upper), upper)
    lower = torch.where(x < -0.999, torch.zeros_like(lower), lower)
    return -(upper - lower).clamp(min=1e-12).log()
