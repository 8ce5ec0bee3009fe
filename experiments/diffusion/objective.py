"""Diffusion objectives: noise levels, network inputs, regression targets and estimates of `x0`.

All share the Gaussian path `x_t = alpha(time) x0 + sigma(time) noise`; they differ in how times are
sampled and in what the network predicts. Native time, noise level and the network's time input:

| objective | native time | alpha      | sigma          | scale s | u = sigma / s | network time  |
|-----------|-------------|------------|----------------|---------|---------------|---------------|
| edm       | sigma       | 1          | sigma          | 1       | sigma         | ln(sigma) / 4 |
| flow      | t in [0, 1] | 1 - t      | t              | 1       | t             | 1000 t        |
| ddpm      | step 0..T-1 | sqrt(abar) | sqrt(1 - abar) | alpha   | sigma / alpha | step          |

In `z = x / s` and `u` the probability-flow ODE is `dz/du = (z - D) / u` for all three, so a sampler
is written once. `level = sigma / alpha` is the noise level on which guidance intervals are given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments.diffusion.ddpm_chain import DDPMChain
from experiments.options.objective import OBJECTIVES as OBJECTIVE_OPTIONS
from experiments.options.objective import DDPMOptions, EDMOptions, FlowOptions
from experiments.options.roles import parse_named

Net = Callable[..., Tensor]


class Prediction(NamedTuple):
    """What one evaluation of the network says about the clean image."""

    x0: Tensor  # estimate of the clean image, (B, C, H, W)
    # The learned log-variance as a fraction between its bounds, (B, C, H, W); None without one
    variance: Tensor | None = None


@dataclass
class TrainingPair:
    """What one training step asks of the network.

    Attributes:
        inputs: Network input, `(B, C, H, W)`.
        time: Network time input, `(B,)`.
        target: What the network output is compared with, `(B, C, H, W)`.
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


class Objective:
    """Base class of all objectives; see the table in the module's docstring.

    A new objective defines `times`, `model_time`, `schedule`, `target` and `denoised`; where the
    path is not `x0 + time * noise` also `alpha`, `sigma` and `from_level`.
    """

    out_factor: int = 1  # output channels over input channels (2 with learned variance)

    def __init__(self, options: Any) -> None:
        self.options = options
        self.name: str = options.name
        self.sigma_data: float = options.sigma_data

    # --- the path --------------------------------------------------------------------------------

    def times(self, draws: Any) -> Tensor:
        """Return a native training time for each image, `(B,)`; `draws` is a `routing.Draws`."""
        raise NotImplementedError

    def alpha(self, time: Tensor) -> Tensor:
        """Return the factor of the clean image: 1, it is never scaled."""
        return torch.ones_like(time)

    def sigma(self, time: Tensor) -> Tensor:
        """Return the factor of the noise: the native time itself."""
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

    def coordinate(self, time: Tensor) -> Tensor:
        """Return `u = sigma / s`."""
        return self.sigma(time) / self.scale(time)

    def schedule(self, steps: int, shift: float = 1.0) -> list[float]:
        """Return `steps + 1` native times from pure noise to clean data for a sampler.

        A time `shift` above 1 spends more steps on high noise.
        """
        raise NotImplementedError

    def corrupt(self, x0: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """Return `alpha(time) * x0 + sigma(time) * noise`."""
        return expand(self.alpha(time), x0) * x0 + expand(self.sigma(time), x0) * noise

    # --- the network -----------------------------------------------------------------------------

    def model_time(self, time: Tensor) -> Tensor:
        """Return the network's time input for a native time, `(B,)`."""
        raise NotImplementedError

    def scale_input(self, noisy: Tensor, time: Tensor) -> Tensor:
        """Return the network's image input for a noisy image: the image itself."""
        return noisy

    def target(self, x0: Tensor, noise: Tensor, noisy: Tensor, time: Tensor) -> Tensor:
        """Return what the network learns to predict, `(B, C, H, W)`."""
        raise NotImplementedError

    def denoised(self, output: Tensor, x: Tensor, time: Tensor) -> Tensor:
        """Convert a network output for `x` at native times `(B,)` into an estimate of `x0`."""
        raise NotImplementedError

    def learned_variance(self, output: Tensor, x: Tensor) -> Tensor | None:
        """Return `Prediction.variance` of a network output; None: this objective learns none."""
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
        Times stay in float32 at least: bfloat16 has 8 bits, too few for a step of 1000.

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
            raise ValueError(
                f"objective {self.name} needs {channels} output channels, the network returns "
                f"{output.shape[1]}; learn_sigma of both must agree"
            )
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


def shifted(time: Tensor, shift: float) -> Tensor:
    """Return `s t / (1 + (s - 1) t)`: above 1 it moves times towards noise.

    LightningDiT counts time from noise to data, so its shift 0.3 is 1 / 0.3 here.
    """
    return time if shift == 1.0 else shift * time / (1 + (shift - 1) * time)


class Flow(Objective):
    """Flow matching on SiT's linear path (Ma et al. 2024): `x_t = (1 - t) x0 + t noise`.

    The network predicts the velocity `v = noise - x0`; the native time is t in [0, 1], and t = 1 is
    noise, as in TREAD's rectified flow.
    """

    options: FlowOptions

    def times(self, draws: Any) -> Tensor:
        """Return `sigmoid(N(mean, std^2))` or uniform times, then shifted, `(B,)`."""
        o = self.options
        if o.times == "uniform":
            time = draws.uniform("sigma", 1)[:, 0]
        else:
            time = torch.sigmoid(draws.normal("sigma", 1)[:, 0] * o.std + o.mean)
        return shifted(time, o.shift)

    def alpha(self, time: Tensor) -> Tensor:
        """Return 1 - t."""
        return 1 - time

    def model_time(self, time: Tensor) -> Tensor:
        """Return t times `time_scale`: the embedding's frequencies are made for 0..1000.

        Reversed, it is that of 1 - t: SiT and LightningDiT count from noise to data.
        """
        return (1 - time if self.options.reverse else time) * self.options.time_scale

    def from_level(self, level: Tensor) -> Tensor:
        """Return level / (1 + level)."""
        return torch.where(torch.isinf(level), torch.ones_like(level), level / (1 + level))

    def schedule(self, steps: int, shift: float = 1.0) -> list[float]:
        """Return even times from 1 to 0, shifted."""
        even = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
        return shifted(even, shift).tolist()

    def target(self, x0: Tensor, noise: Tensor, noisy: Tensor, time: Tensor) -> Tensor:
        """Return the velocity noise - x0; reversed, the opposite."""
        return x0 - noise if self.options.reverse else noise - x0

    def denoised(self, output: Tensor, x: Tensor, time: Tensor) -> Tensor:
        """Return x - t v."""
        velocity = -output if self.options.reverse else output
        return x - expand(time, x) * velocity

    def loss_map(self, output: Tensor, pair: TrainingPair) -> Tensor:
        """Return (v_net - v)^2, plus LightningDiT's `1 - cos(v_net, v)` over channels if weighted.

        The cosine term is one number per position, spread evenly over its channels, so that
        the mean over all elements is `mean((v_net - v)^2) + cosine * mean(1 - cos)`.
        """
        loss = super().loss_map(output, pair)
        if self.options.cosine:
            velocity = self.check_output(output, pair.noisy)
            similarity = torch.nn.functional.cosine_similarity(velocity, pair.target, dim=1)
            loss = loss + self.options.cosine * (1 - similarity).unsqueeze(1)
        return loss


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

    `options` is a name, or a mapping or dataclass with the keys of `conf/objective/<name>.yaml`.
    """
    resolved = parse_named(OBJECTIVE_OPTIONS, "objective", options)
    return OBJECTIVES[resolved.name](resolved)
