"""What the network learns: corruption, target and the way back to a clean image.

Every objective is a Gaussian path `x_t = alpha(time) * x0 + sigma(time) * noise`. A table converts
between its native time, the noise level and the network's input:

| objective | native time | alpha      | sigma          | scale s | u = sigma / s | model time    |
|-----------|-------------|------------|----------------|---------|---------------|---------------|
| edm       | sigma       | 1          | sigma          | 1       | sigma         | ln(sigma) / 4 |
| flow      | t in [0, 1] | 1 - t      | t              | 1       | t             | 1000 t        |
| ddpm      | step 0..T-1 | sqrt(abar) | sqrt(1 - abar) | alpha   | sigma / alpha | step          |

In `z = x / s` and `u` the probability-flow ODE is `dz/du = (z - D) / u` for all three, so a sampler
is written once. `level = sigma / alpha` is the noise level on which guidance intervals are given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments.diffusion.diffusion_options import options_of

Net = Callable[..., Tensor]


class Prediction(NamedTuple):
    """What a pass says about an image.

    Attributes:
        x0: Estimate of the clean image, `(B, C, H, W)`.
        variance: Where between the two bounds of the reverse step the learned log-variance lies,
            in [0, 1], `(B, C, H, W)`; None without learned variance.
    """

    x0: Tensor
    variance: Tensor | None = None


def expand(time: Tensor, like: Tensor) -> Tensor:
    """Reshape `(B,)` to `(B, 1, ..., 1)` with the dtype and device of `like`."""
    return time.to(like).reshape(-1, *([1] * (like.ndim - 1)))


class Objective:
    """Base of all objectives; see the table in the module's docstring."""

    name: str
    sigma_data: float
    #: How many times its input channels the network must return (2 with learned variance).
    out_factor: int = 1

    def times(self, draws: Any) -> Tensor:
        """Return a native training time for each image, `(B,)`; `draws` is a `routing.Draws`."""
        raise NotImplementedError

    def alpha(self, time: Tensor) -> Tensor:
        """Return the factor of the clean image."""
        raise NotImplementedError

    def sigma(self, time: Tensor) -> Tensor:
        """Return the factor of the noise."""
        raise NotImplementedError

    def scale(self, time: Tensor) -> Tensor:
        """Return `s`, the scale in which the sampling ODE is `dz/du = (z - D) / u`."""
        raise NotImplementedError

    def model_time(self, time: Tensor) -> Tensor:
        """Return the network's time input for a native time, `(B,)`."""
        raise NotImplementedError

    def schedule(self, steps: int, shift: float = 1.0) -> list[float]:
        """Return `steps + 1` native times from pure noise to clean data for a sampler.

        Args:
            steps: Number of intervals.
            shift: Time shift; above 1 spends more steps on high noise.
        """
        raise NotImplementedError

    def from_level(self, level: Tensor) -> Tensor:
        """Return the native time at which sigma / alpha is `level` (the inverse of `level`)."""
        raise NotImplementedError

    def predict(self, net: Net, x: Tensor, time: Tensor, **cond: Any) -> Prediction:
        """Ask the network once, at native times `(B,)`."""
        raise NotImplementedError

    def loss(self, net: Net, x0: Tensor, noise: Tensor, time: Tensor, **cond: Any) -> Tensor:
        """Return the weighted loss of every element, `(B, C, H, W)`; its mean is trained on.

        Args:
            net: Called as `net(x, t, **cond)`; returns `(B, C * out_factor, H, W)`.
            x0: Clean images, `(B, C, H, W)`.
            noise: Standard normal, like `x0`.
            time: Native times, `(B,)`.
            **cond: Passed on: `y`, `text`, `routing`, ...
        """
        raise NotImplementedError

    def level(self, time: Tensor) -> Tensor:
        """Return sigma / alpha, infinite at pure noise of flow matching."""
        return self.sigma(time) / self.alpha(time)

    def coordinate(self, time: Tensor) -> Tensor:
        """Return `u = sigma / s`."""
        return self.sigma(time) / self.scale(time)

    def corrupt(self, x0: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """Return `alpha(time) * x0 + sigma(time) * noise`."""
        return expand(self.alpha(time), x0) * x0 + expand(self.sigma(time), x0) * noise

    def denoise(self, net: Net, x: Tensor, time: Tensor, **cond: Any) -> Tensor:
        """Return the estimate of the clean image, `(B, C, H, W)`."""
        return self.predict(net, x, time, **cond).x0

    def check_output(self, output: Tensor, x: Tensor) -> Tensor:
        """Return `output` if it has the channels this objective needs.

        Raises:
            ValueError: If the network returns another number of channels.
        """
        if output.shape[1] != x.shape[1] * self.out_factor:
            raise ValueError(
                f"objective {self.name} needs {x.shape[1] * self.out_factor} output channels, "
                f"the network returns {output.shape[1]}; learn_sigma of both must agree"
            )
        return output


def call(net: Net, x: Tensor, time: Tensor, **cond: Any) -> Tensor:
    """Run the network in its own precision and return its output in that of `x`.

    Samplers keep their state in float64; networks say otherwise by a `dtype` attribute. Times stay
    in float32 at least: bfloat16 has 8 bits, too few for a step of 1000.
    """
    dtype = getattr(net, "dtype", None)
    dtype = dtype if isinstance(dtype, torch.dtype) else torch.float32
    time = time.to(device=x.device, dtype=torch.promote_types(dtype, torch.float32))
    out = net(x.to(dtype), time, **cond)
    return out if out.dtype == x.dtype else out.to(torch.promote_types(x.dtype, torch.float32))


def create_objective(options: Any = None) -> Objective:
    """Return the objective that `options` names.

    Args:
        options: A name, a mapping or dataclass with the keys of `conf/objective/<name>.yaml`.
    """
    from experiments.diffusion.ddpm import DDPM
    from experiments.diffusion.edm import EDM
    from experiments.diffusion.flow import Flow

    resolved = options_of("objective", options)
    return {"edm": EDM, "flow": Flow, "ddpm": DDPM}[resolved.name](resolved)
