"""The base class of objectives (noising path, training pair, estimate of `x0`), and EDM.

`experiments.diffusion.objectives` compares them in a table.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments.options.objective import EDMOptions

Net = Callable[..., Tensor]


class Prediction(NamedTuple):
    """Estimate of the clean image from one evaluation of the network."""

    x0: Tensor  # estimate of the clean image, (B, C, H, W)
    # The learned log-variance as a fraction between its bounds, (B, C, H, W); None without one
    variance: Tensor | None = None


@dataclass
class TrainingPair:
    """Inputs and target of one training step.

    Attributes:
        inputs: Network input, `(B, C, H, W)`.
        time: Network time input, `(B,)`.
        target: Regression target of the network output, `(B, C, H, W)`.
        x0: Clean images, `(B, C, H, W)`.
        noisy: Noisy images `x_t`, before any scaling of the input, `(B, C, H, W)`.
        native_time: The objective's own time, `(B,)`.
        weight: Weight of the squared error, broadcastable to `target`.
    """

    inputs: Tensor
    time: Tensor
    target: Tensor
    x0: Tensor
    noisy: Tensor
    native_time: Tensor
    weight: Tensor | float = 1.0


def expand(time: Tensor, like: Tensor) -> Tensor:
    """Reshape `(B,)` to `(B, 1, ..., 1)` with the dtype and device of `like`."""
    return time.to(like).reshape(-1, *([1] * (like.ndim - 1)))


class Objective(abc.ABC):
    """Base class of all objectives; see the table in `objectives.py`.

    A new objective defines `times`, `model_time`, `schedule`, `target` and `denoised`; where the
    path is not `x0 + time * noise` also `alpha`, `sigma` and `from_level`.
    """

    out_factor: int = 1  # output channels over input channels (2 with learned variance)

    def __init__(self, options: Any) -> None:
        self.options = options
        self.name: str = options.name
        self.sigma_data: float = options.sigma_data

    # --- the path --------------------------------------------------------------------------------

    @abc.abstractmethod
    def times(self, draws: Any) -> Tensor:
        """Return a native training time for each image, `(B,)`; `draws` is a `routing.Draws`."""

    def alpha(self, time: Tensor) -> Tensor:
        """Return the factor of the clean image; 1 by default."""
        return torch.ones_like(time)

    def sigma(self, time: Tensor) -> Tensor:
        """Return the factor of the noise; by default the native time."""
        return time

    def scale(self, time: Tensor) -> Tensor:
        """Return `s`, the scale in which the sampling ODE is `dz/du = (z - D) / u`."""
        return torch.ones_like(time)

    def level(self, time: Tensor) -> Tensor:
        """Return sigma / alpha, infinite at pure noise of flow matching."""
        return self.sigma(time) / self.alpha(time)

    def from_level(self, level: Tensor) -> Tensor:
        """Return the native time at which sigma / alpha is `level` (the inverse of `level`)."""
        return level

    def less_noisy(self, time: Tensor, offset: Tensor) -> Tensor:
        """Return native times `(B,)` whose flow-matching time is smaller by `offset`, 0 at least.

        Flow matching's time of a noise level is level / (1 + level).
        """
        level = self.level(time)
        flow_time = (level / (1 + level) - offset).clamp(min=0)
        return self.from_level(flow_time / (1 - flow_time))

    def coordinate(self, time: Tensor) -> Tensor:
        """Return `u = sigma / s`."""
        return self.sigma(time) / self.scale(time)

    @abc.abstractmethod
    def schedule(self, steps: int, shift: float = 1.0) -> list[float]:
        """Return `steps + 1` native times from pure noise to clean data for a sampler.

        A time `shift` above 1 spends more steps on high noise.
        """

    def corrupt(self, x0: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """Return `alpha(time) * x0 + sigma(time) * noise`."""
        return expand(self.alpha(time), x0) * x0 + expand(self.sigma(time), x0) * noise

    # --- the network -----------------------------------------------------------------------------

    @abc.abstractmethod
    def model_time(self, time: Tensor) -> Tensor:
        """Return the network's time input for a native time, `(B,)`."""

    def scale_input(self, noisy: Tensor, time: Tensor) -> Tensor:
        """Return the network's image input for a noisy image; by default the image itself."""
        return noisy

    @abc.abstractmethod
    def target(self, x0: Tensor, noise: Tensor, noisy: Tensor, time: Tensor) -> Tensor:
        """Return the regression target, `(B, C, H, W)`."""

    @abc.abstractmethod
    def denoised(self, output: Tensor, x: Tensor, time: Tensor) -> Tensor:
        """Convert a network output for `x` at native times `(B,)` into an estimate of `x0`."""

    def learned_variance(self, output: Tensor, x: Tensor) -> Tensor | None:
        """Return `Prediction.variance` of a network output; None if the objective learns none."""
        return None

    def training_pair(self, x0: Tensor, noise: Tensor, time: Tensor) -> TrainingPair:
        """Corrupt `x0` at native times `(B,)`; return the network's inputs and its target."""
        noisy = self.corrupt(x0, noise, time)
        target = self.target(x0, noise, noisy, time)
        inputs, network_time = self.scale_input(noisy, time), self.model_time(time)
        return TrainingPair(inputs, network_time, target, x0, noisy, native_time=time)

    def loss_map(self, output: Tensor, pair: TrainingPair) -> Tensor:
        """Return the weighted squared error of every element, `(B, C, H, W)`."""
        output = self.check_output(output, pair.noisy)
        return pair.weight * (output - pair.target) ** 2

    def predict(self, net: Net, x: Tensor, time: Tensor, **cond: Any) -> Prediction:
        """Evaluate the network once on noisy images `x` at native times `(B,)`.

        Samplers keep their state in float64, networks compute in their `dtype` (default: float32).
        Times stay in float32 at least: bfloat16 has too few digits for steps 0..999.

        Args:
            net: Called as `net(x, t, **cond)`; returns `(B, C * out_factor, H, W)`.
            x: Noisy images, `(B, C, H, W)`.
            time: Native times, `(B,)`.
            **cond: Passed on: `y`, `text`, `routing`, ...
        """
        dtype = getattr(net, "dtype", None)
        dtype = dtype if isinstance(dtype, torch.dtype) else torch.float32
        time_dtype = torch.promote_types(dtype, torch.float32)
        network_time = self.model_time(time).to(device=x.device, dtype=time_dtype)
        output = net(self.scale_input(x, time).to(dtype), network_time, **cond)
        output = self.check_output(output, x)
        return Prediction(self.denoised(output, x, time), self.learned_variance(output, x))

    def check_output(self, output: Tensor, x: Tensor) -> Tensor:
        """Return a network output in the precision of `x`, or its own if that is higher.

        Raises:
            ValueError: The network returns another number of channels than the objective needs.
        """
        channels = x.shape[1] * self.out_factor
        if output.shape[1] != channels:
            problem = f"needs {channels} output channels, the network returns {output.shape[1]}"
            raise ValueError(f"objective {self.name} {problem}; learn_sigma of both must agree")
        dtype = torch.promote_types(torch.promote_types(x.dtype, output.dtype), torch.float32)
        return output.to(dtype)


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
