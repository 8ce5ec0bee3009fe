"""EDM: preconditioned denoising (Karras et al. 2022)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from experiments.diffusion.objective import Objective, expand
from experiments.options.objective import EDMOptions


class EDM(Objective):
    """Preconditioned denoising; the native time is sigma.

    `D(x, sigma) = c_skip x + c_out F(c_in x, c_noise)` (Equation 7) with
    `ln sigma ~ N(p_mean, p_std^2)` (Table 1). Minimising `lambda |D - x0|^2` (Equation 2) is
    regressing F onto `(x0 - c_skip x) / c_out` with weight `lambda c_out^2 = 1`.
    """

    options: EDMOptions

    def times(self, draws: Any) -> Tensor:
        """Return log-normal noise levels, `(B,)`."""
        normal = draws.normal("sigma", 1)[:, 0]
        return (normal * self.options.p_std + self.options.p_mean).exp()

    def model_time(self, time: Tensor) -> Tensor:
        """Return `c_noise = ln(sigma) / 4` (Table 1)."""
        return time.log() / 4

    def less_noisy(self, time: Tensor, offset: Tensor) -> Tensor:
        """As the base class, but not below sigma_min: the network's time is ln(sigma) / 4."""
        return super().less_noisy(time, offset).clamp(min=self.options.sigma_min)

    def schedule(self, steps: int, shift: float = 1.0) -> list[float]:
        """Return sigma_max .. sigma_min, even in sigma^(1/rho), then 0 (Equation 5)."""
        o = self.options
        high, low = o.sigma_max ** (1 / o.rho), o.sigma_min ** (1 / o.rho)
        ramp = torch.linspace(0, 1, steps, dtype=torch.float64)
        o.check_times(steps, shift)
        return [*((high + ramp * (low - high)) ** o.rho).tolist(), 0.0]

    def preconditioning(self, sigma: Tensor, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return `c_skip`, `c_out` and `c_in` for sigma `(B,)`, each `(B, 1, 1, 1)` (Table 1)."""
        sigma = expand(sigma, like)
        total = (sigma**2 + self.sigma_data**2).sqrt()
        return (self.sigma_data / total) ** 2, sigma * self.sigma_data / total, 1 / total

    def scale_input(self, noisy: Tensor, time: Tensor) -> Tensor:
        """Return `c_in x`."""
        _, _, c_in = self.preconditioning(time, noisy)
        return c_in * noisy

    def target(self, x0: Tensor, noise: Tensor, noisy: Tensor, time: Tensor) -> Tensor:
        """Return `(x0 - c_skip x) / c_out`."""
        c_skip, c_out, _ = self.preconditioning(time, noisy)
        return (x0 - c_skip * noisy) / c_out

    def denoised(self, output: Tensor, x: Tensor, time: Tensor) -> Tensor:
        """Return `D(x, sigma) = c_skip x + c_out F` (Equation 7)."""
        c_skip, c_out, _ = self.preconditioning(time, x)
        return c_skip * x + c_out * output
