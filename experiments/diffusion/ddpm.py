"""DDPM as DiT trains it, and its Markov chain: noise levels, reverse steps, variational bound.

Ho et al. 2020 for the process; Nichol & Dhariwal 2021 ("improved DDPM") for the learned variance
(Equation 15) and the bound that trains it. Steps are 0..T-1; -1 means clean data.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from experiments.diffusion.objective import Objective, TrainingPair, expand
from experiments.options.objective import DDPMOptions
from routing.rng import widest


class DDPM(Objective):
    """DDPM as DiT trains it: linear betas, epsilon prediction, optionally a learned variance.

    The native time is the step 0..T-1, and -1 means clean data.

    Attributes:
        betas: Variance added in each step, `(T,)`.
        abar: Cumulative product of 1 - beta, `(T,)`.
    """

    options: DDPMOptions

    def __init__(self, options: DDPMOptions) -> None:
        super().__init__(options)
        self.out_factor = 2 if options.learn_sigma else 1
        self.betas = torch.linspace(
            options.beta_start, options.beta_end, options.steps, dtype=torch.float64
        )
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

    def times(self, draws: Any) -> Tensor:
        """Return uniform steps 0..T-1 as floats, `(B,)`."""
        uniform = draws.uniform("sigma", 1)[:, 0]
        return (uniform * self.options.steps).floor().clamp(max=self.options.steps - 1)

    def level(self, time: Tensor) -> Tensor:
        """Return sigma / alpha; 0 for clean data (a negative step)."""
        table = self._table("log_level", time.device)
        low = time.floor().clamp(0, self.options.steps - 2).long()
        fraction = time.to(table) - low
        log_level = table[low] + fraction * (table[low + 1] - table[low])
        level = torch.where(time < 0, torch.zeros_like(log_level), log_level.exp())
        return level.to(torch.promote_types(time.dtype, torch.float32))

    def alpha(self, time: Tensor) -> Tensor:
        """Return sqrt(abar)."""
        return 1 / (1 + self.level(time) ** 2).sqrt()

    def sigma(self, time: Tensor) -> Tensor:
        """Return sqrt(1 - abar)."""
        level = self.level(time)
        return level / (1 + level**2).sqrt()

    def scale(self, time: Tensor) -> Tensor:
        """Return alpha: x / alpha is the variance-exploding image."""
        return self.alpha(time)

    def model_time(self, time: Tensor) -> Tensor:
        """Return the step itself."""
        return time

    def from_level(self, level: Tensor) -> Tensor:
        """Return the fractional step of a noise level, clamped to 0..T-1."""
        table = self._table("log_level", level.device)
        log_level = level.to(table).log().clamp(table[0], table[-1])
        low = (torch.searchsorted(table, log_level, right=True) - 1).clamp(0, len(table) - 2)
        step = low + (log_level - table[low]) / (table[low + 1] - table[low])
        return step.to(torch.promote_types(level.dtype, torch.float32))

    def schedule(self, steps: int, shift: float = 1.0) -> list[float]:
        """Return `steps` evenly spaced steps from T-1 to 0 (DiT's respacing), then -1."""
        self.options.check_times(steps, shift)
        even = torch.linspace(self.options.steps - 1, 0, steps, dtype=torch.float64).round()
        return [*even.tolist(), -1.0]

    def target(self, x0: Tensor, noise: Tensor, noisy: Tensor, time: Tensor) -> Tensor:
        """Return the noise (epsilon)."""
        return noise

    def denoised(self, output: Tensor, x: Tensor, time: Tensor) -> Tensor:
        """Return (x - sigma epsilon) / alpha; `output` may contain the learned variance."""
        epsilon = output[:, : x.shape[1]]
        return (x - expand(self.sigma(time), x) * epsilon) / expand(self.alpha(time), x)

    def learned_variance(self, output: Tensor, x: Tensor) -> Tensor | None:
        """Return the fraction between the bounds of the log-variance, from -1..1 to 0..1."""
        return (output[:, x.shape[1] :] + 1) / 2 if self.options.learn_sigma else None

    def loss_map(self, output: Tensor, pair: TrainingPair) -> Tensor:
        """Return (epsilon_net - noise)^2 (Ho et al., Equation 14), plus the weighted bound L_vlb.

        L_hybrid = L_simple + vlb L_vlb (improved DDPM, Equation 16). The bound trains only the
        learned variance: it sees the mean without gradient. L_vlb is the term of one step, in bits,
        which improved DDPM weights by T / 1000: 1 for its 1000 steps.
        """
        output, noisy, time = self.check_output(output, pair.noisy), pair.noisy, pair.native_time
        loss = (output[:, : noisy.shape[1]] - pair.target) ** 2
        fraction = self.learned_variance(output, noisy)
        if fraction is not None and self.options.vlb:
            clean = self.denoised(output, noisy, time).detach()
            loss = loss + self.options.vlb * self.bound(pair.x0, noisy, clean, fraction, time)
        return loss

    def posterior(self, x: Tensor, x0: Tensor, time: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mean of q(x_{k-1} | x_k, x0) and the log of its smallest and largest variance.

        Ho et al., Equation 7. The smallest is beta-tilde, clipped at step 0 to that of step 1; the
        largest is beta. The mean is `(B, C, H, W)`, the others `(B, 1, 1, 1)`.
        """
        steps, device = time.long(), time.device
        beta = self._table("betas", device)[steps]
        abar = self._table("abar", device)[steps]
        previous_abar = self._table("previous_abar", device)[steps]
        low = self._table("log_posterior_variance", device)[steps]
        from_x0 = beta * previous_abar.sqrt() / (1 - abar)
        from_x = (1 - beta).sqrt() * (1 - previous_abar) / (1 - abar)
        mean = expand(from_x0, x) * x0 + expand(from_x, x) * x
        return mean, expand(low, x), expand(beta.log(), x)

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
        return torch.where(expand(time, x) == 0, likelihood, divergence) / math.log(2)

    def _table(self, name: str, device: torch.device) -> Tensor:
        """Return a table on a device, copied once: a copy in every step would stall a GPU."""
        key = name, device
        if key not in self._device_tables:
            self._device_tables[key] = getattr(self, name).to(device=device, dtype=widest(device))
        return self._device_tables[key]


def discretised_nll(x: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Return -ln P of 8-bit values in [-1, 1] under a Gaussian (Ho et al., Equation 13)."""
    scale = torch.exp(-log_std)
    upper = torch.special.ndtr(scale * (x - mean + 1 / 255))
    lower = torch.special.ndtr(scale * (x - mean - 1 / 255))
    upper = torch.where(x > 0.999, torch.ones_like(upper), upper)
    lower = torch.where(x < -0.999, torch.zeros_like(lower), lower)
    return -(upper - lower).clamp(min=1e-12).log()
