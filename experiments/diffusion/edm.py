"""EDM: preconditioned denoising (Karras et al. 2022, "Elucidating the Design Space").

`D(x, sigma) = c_skip x + c_out F(c_in x, c_noise)`, and the loss is
`lambda(sigma) |D - x0|^2` with `ln sigma ~ N(p_mean, p_std^2)`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from experiments.diffusion.diffusion_options import DiffusionError, EDMOptions
from experiments.diffusion.objective import Net, Objective, Prediction, call, expand


class EDM(Objective):
    """EDM's preconditioning, noise distribution and weights; the native time is sigma."""

    name = "edm"

    def __init__(self, options: EDMOptions | None = None) -> None:
        self.options = options or EDMOptions()
        self.sigma_data = self.options.sigma_data

    def times(self, draws: Any) -> Tensor:
        """Return log-normal noise levels, `(B,)`."""
        normal = draws.normal("sigma", 1)[:, 0]
        return (normal * self.options.p_std + self.options.p_mean).exp()

    def alpha(self, time: Tensor) -> Tensor:
        """Return 1: the image is never scaled."""
        return torch.ones_like(time)

    def sigma(self, time: Tensor) -> Tensor:
        """Return the native time itself."""
        return time

    def scale(self, time: Tensor) -> Tensor:
        """Return 1."""
        return torch.ones_like(time)

    def model_time(self, time: Tensor) -> Tensor:
        """Return `c_noise = ln(sigma) / 4` (Table 1)."""
        return time.log() / 4

    def from_level(self, level: Tensor) -> Tensor:
        """Return sigma: alpha is 1."""
        return level

    def weight(self, time: Tensor) -> Tensor:
        """Return lambda = (sigma^2 + sigma_data^2) / (sigma sigma_data)^2 (Table 1)."""
        return (time**2 + self.sigma_data**2) / (time * self.sigma_data) ** 2

    def schedule(self, steps: int, shift: float = 1.0) -> list[float]:
        """Return sigma_max .. sigma_min, even in sigma^(1/rho), then 0 (Equation 5).

        Raises:
            DiffusionError: For a time shift, which belongs to flow matching.
        """
        o = self.options
        high, low = o.sigma_max ** (1 / o.rho), o.sigma_min ** (1 / o.rho)
        ramp = torch.linspace(0, 1, steps, dtype=torch.float64)
        sigmas = (high + ramp * (low - high)) ** o.rho
        if shift != 1.0:
            raise DiffusionError(
                f"sampler.shift={shift}: objective edm spaces its noise levels by objective.rho; "
                "use shift=1, or objective=flow"
            )
        return [*sigmas.tolist(), 0.0]

    def predict(self, net: Net, x: Tensor, time: Tensor, **cond: Any) -> Prediction:
        """Return D(x, sigma) (Equation 7 and Table 1)."""
        sigma, data = expand(time, x), self.sigma_data
        total = (sigma**2 + data**2).sqrt()
        output = call(net, x / total, self.model_time(time), **cond)
        skip, out = (data / total) ** 2, sigma * data / total
        return Prediction(skip * x + out * self.check_output(output, x))

    def loss(self, net: Net, x0: Tensor, noise: Tensor, time: Tensor, **cond: Any) -> Tensor:
        """Return lambda(sigma) (D - x0)^2, `(B, C, H, W)` (Equation 2)."""
        denoised = self.denoise(net, self.corrupt(x0, noise, time), time, **cond)
        return expand(self.weight(time), x0) * (denoised - x0) ** 2
