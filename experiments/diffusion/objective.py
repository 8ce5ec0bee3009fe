"""Diffusion objectives: noise levels, network inputs, regression targets and estimates of `x0`.

All share the Gaussian path `x_t = alpha(time) x0 + sigma(time) noise`; they differ in how times are
sampled and in what the network predicts. Native time, noise level and the network's time input:

| objective | native time | alpha      | sigma          | scale s | u = sigma / s | network time  |
|-----------|-------------|------------|----------------|---------|---------------|---------------|
| edm       | sigma       | 1          | sigma          | 1       | sigma         | ln(sigma) / 4 |
| flow      | t in [0, 1] | 1 - t      | t noise_scale  | 1       | sigma         | 1000 t        |
| ddpm      | step 0..T-1 | sqrt(abar) | sqrt(1 - abar) | alpha   | sigma / alpha | step          |

In `z = x / s` and `u` the probability-flow ODE is `dz/du = (z - D) / u` for all three, so a sampler
is written once. `level = sigma / alpha` is the noise level on which guidance intervals are given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from experiments.diffusion.ddpm_chain import DDPMChain
from experiments.diffusion.flow import Flow, shifted
from experiments.diffusion.objective_base import Objective, Prediction, TrainingPair, expand
from experiments.options.objective import OBJECTIVES as OBJECTIVE_OPTIONS
from experiments.options.objective import DDPMOptions, EDMOptions
from experiments.options.roles import parse_named

__all__ = [
    "DDPM",
    "EDM",
    "OBJECTIVES",
    "Flow",
    "Objective",
    "Prediction",
    "TrainingPair",
    "create_objective",
    "expand",
    "shifted",
]


class EDM(Objective):
    """EDM (Karras et al. 2022): preconditioned denoising; the native time is sigma.

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
        """As for every objective, but not below sigma_min: ln(0) is no time of the network."""
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


class DDPM(Objective):
    """DDPM as DiT trains it: linear betas, epsilon prediction, optionally a learned variance.

    The process and the learned variance are those of `ddpm_chain`; the native time is the step
    0..T-1, and -1 means clean data.
    """

    options: DDPMOptions

    def __init__(self, options: DDPMOptions) -> None:
        super().__init__(options)
        self.out_factor = 2 if options.learn_sigma else 1
        self.chain = DDPMChain(options.beta_start, options.beta_end, options.steps)

    def times(self, draws: Any) -> Tensor:
        """Return uniform steps 0..T-1 as floats, `(B,)`."""
        uniform = draws.uniform("sigma", 1)[:, 0]
        return (uniform * self.options.steps).floor().clamp(max=self.options.steps - 1)

    def level(self, time: Tensor) -> Tensor:
        """Return sigma / alpha; 0 for clean data (a negative step)."""
        return self.chain.level(time)

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
        return self.chain.from_level(level)

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
            loss = loss + self.options.vlb * self.chain.bound(pair.x0, noisy, clean, fraction, time)
        return loss


OBJECTIVES: dict[str, type[Objective]] = {"edm": EDM, "flow": Flow, "ddpm": DDPM}


def create_objective(options: Any = None) -> Objective:
    """Return the objective that `options` names.

    `options` is a name, or a mapping or dataclass with the keys of `objective.`.
    """
    resolved = parse_named(OBJECTIVE_OPTIONS, "objective", options)
    return OBJECTIVES[resolved.name](resolved)
