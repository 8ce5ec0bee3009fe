"""DDPM as DiT trains it: 1000 linear betas, epsilon prediction, optionally a learned variance.

Ho et al. 2020 for the process, Nichol & Dhariwal 2021 ("improved DDPM") for the learned variance
and the hybrid loss `L_simple + L_vlb`. The native time is the step 0..T-1; -1 means clean data.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from experiments.diffusion.diffusion_options import DDPMOptions, DiffusionError
from experiments.diffusion.objective import Net, Objective, Prediction, call, expand


class DDPM(Objective):
    """Discrete-time epsilon prediction."""

    name = "ddpm"

    def __init__(self, options: DDPMOptions | None = None) -> None:
        self.options = options or DDPMOptions()
        self.sigma_data = self.options.sigma_data
        self.out_factor = 2 if self.options.learn_sigma else 1
        o = self.options
        self.betas = torch.linspace(o.beta_start, o.beta_end, o.steps, dtype=torch.float64)
        self.abar = torch.cumprod(1 - self.betas, 0)
        # ln(sigma / alpha), increasing; float steps interpolate it, so that any level has a time.
        self.log_level = 0.5 * (torch.log1p(-self.abar) - self.abar.log())
        self.before = torch.cat((torch.ones(1, dtype=torch.float64), self.abar[:-1]))
        tilde = self.betas * (1 - self.before) / (1 - self.abar)
        # Step 0 has no variance left; its logarithm is clipped to that of step 1.
        self.log_tilde = torch.cat((tilde[1:2], tilde[1:])).log()
        self._moved: dict[tuple[str, torch.device], Tensor] = {}

    def times(self, draws: Any) -> Tensor:
        """Return uniform steps 0..T-1 as floats, `(B,)`."""
        uniform = draws.uniform("sigma", 1)[:, 0]
        return (uniform * self.options.steps).floor().clamp(max=self.options.steps - 1)

    def level(self, time: Tensor) -> Tensor:
        """Return sigma / alpha; 0 for clean data (a negative step)."""
        table = self._table("log_level", time.device)
        low = time.floor().clamp(0, self.options.steps - 2).long()
        fraction = time.to(torch.float64) - low
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

    def coordinate(self, time: Tensor) -> Tensor:
        """Return sigma / alpha."""
        return self.level(time)

    def model_time(self, time: Tensor) -> Tensor:
        """Return the step itself."""
        return time

    def from_level(self, level: Tensor) -> Tensor:
        """Return the fractional step of a noise level, clamped to 0..T-1."""
        table = self._table("log_level", level.device)
        log_level = level.to(torch.float64).log().clamp(table[0], table[-1])
        low = (torch.searchsorted(table, log_level, right=True) - 1).clamp(0, len(table) - 2)
        step = low + (log_level - table[low]) / (table[low + 1] - table[low])
        return step.to(torch.promote_types(level.dtype, torch.float32))

    def schedule(self, steps: int, shift: float = 1.0) -> list[float]:
        """Return `steps` evenly spaced steps from T-1 to 0 (DiT's respacing), then -1.

        Raises:
            DiffusionError: If there are more sampling than training steps, or a time shift is set.
        """
        total = self.options.steps
        if steps > total:
            raise DiffusionError(
                f"sampler.steps={steps}: objective ddpm was trained with {total} steps; "
                f"use sampler.steps={total} or fewer"
            )
        if shift != 1.0:
            raise DiffusionError(
                f"sampler.shift={shift}: objective ddpm has discrete steps; use shift=1"
            )
        even = torch.linspace(total - 1, 0, steps, dtype=torch.float64).round()
        return [*even.tolist(), -1.0]

    def predict(self, net: Net, x: Tensor, time: Tensor, **cond: Any) -> Prediction:
        """Return (x - sigma epsilon) / alpha, and the fraction of a learned variance."""
        output = self.check_output(call(net, x, self.model_time(time), **cond), x)
        epsilon, variance = self._split(output, x)
        return Prediction(self._clean(x, epsilon, time), variance)

    def loss(self, net: Net, x0: Tensor, noise: Tensor, time: Tensor, **cond: Any) -> Tensor:
        """Return (epsilon_net - noise)^2, plus the variational bound with a learned variance.

        The bound trains only the variance: it sees the mean without gradient (improved DDPM, 4).
        Divided by T and weighted `1000 / T * 1e-3 * T = 1`, it is the per-step term in bits.
        """
        x = self.corrupt(x0, noise, time)
        output = self.check_output(call(net, x, self.model_time(time), **cond), x)
        epsilon, fraction = self._split(output, x)
        loss = (epsilon - noise) ** 2
        if fraction is not None and self.options.vlb:
            clean = self._clean(x, epsilon, time).detach()
            loss = loss + self.options.vlb * self.bound(x0, x, clean, fraction, time)
        return loss

    def bound(self, x0: Tensor, x: Tensor, clean: Tensor, fraction: Tensor, time: Tensor) -> Tensor:
        """Return one term of the variational bound in bits per element, `(B, C, H, W)`.

        Args:
            x0: Clean images.
            x: Noisy images at `time`.
            clean: The network's estimate of `x0`.
            fraction: Where the learned log-variance lies between its bounds, in [0, 1].
            time: Integer steps, `(B,)`.
        """
        mean, low, high = self.posterior(x, x0, time)
        guess, _, _ = self.posterior(x, clean, time)
        log_variance = fraction * high + (1 - fraction) * low
        gap = (mean - guess) ** 2 * torch.exp(-log_variance)
        divergence = 0.5 * (log_variance - low - 1 + torch.exp(low - log_variance) + gap)
        # The last step has no posterior to match: the likelihood of an 8-bit value, as in Ho et al.
        likelihood = discretised_nll(x0, guess, 0.5 * log_variance)
        return torch.where(expand(time, x) == 0, likelihood, divergence) / math.log(2)

    def posterior(self, x: Tensor, x0: Tensor, time: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mean of q(x_{k-1} | x_k, x0) and the log of its smallest and largest variance.

        The smallest is beta-tilde, clipped at step 0 to that of step 1; the largest is beta.
        """
        names = ("betas", "abar", "before", "log_tilde")
        beta, abar, before, low = (self._table(n, time.device)[time.long()] for n in names)
        from_x0 = beta * before.sqrt() / (1 - abar)
        from_x = (1 - beta).sqrt() * (1 - before) / (1 - abar)
        mean = expand(from_x0, x) * x0 + expand(from_x, x) * x
        return mean, expand(low, x), expand(beta.log(), x)

    def _table(self, name: str, device: torch.device) -> Tensor:
        """Return a table on a device: moved once, because a copy in every step stalls a GPU."""
        key = name, device
        if key not in self._moved:
            # Apple's GPUs have no float64.
            dtype = torch.float32 if device.type == "mps" else torch.float64
            self._moved[key] = getattr(self, name).to(device=device, dtype=dtype)
        return self._moved[key]

    def _split(self, output: Tensor, x: Tensor) -> tuple[Tensor, Tensor | None]:
        if not self.options.learn_sigma:
            return output, None
        epsilon, raw = output.split(x.shape[1], dim=1)
        return epsilon, (raw + 1) / 2

    def _clean(self, x: Tensor, epsilon: Tensor, time: Tensor) -> Tensor:
        return (x - expand(self.sigma(time), x) * epsilon) / expand(self.alpha(time), x)


def discretised_nll(x: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Return -ln P of 8-bit values in [-1, 1] under a Gaussian (Ho et al., Equation 13)."""
    scale = torch.exp(-log_std)
    upper = torch.special.ndtr(scale * (x - mean + 1 / 255))
    lower = torch.special.ndtr(scale * (x - mean - 1 / 255))
    upper = torch.where(x > 0.999, torch.ones_like(upper), upper)
    lower = torch.where(x < -0.999, torch.zeros_like(lower), lower)
    return -(upper - lower).clamp(min=1e-12).log()
