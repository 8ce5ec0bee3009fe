"""What the network learns: noise levels, corruption, target and the way back to a clean image.

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

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments.options.diffusion import DDPMOptions, EDMOptions, FlowOptions, options_of
from routing.rng import widest

Net = Callable[..., Tensor]


class Prediction(NamedTuple):
    """The estimate that one pass makes."""

    x0: Tensor  # of the clean image, (B, C, H, W)
    # Where between the two bounds of the reverse step the learned log-variance lies, in [0, 1],
    # (B, C, H, W); None without learned variance
    variance: Tensor | None = None


def expand(time: Tensor, like: Tensor) -> Tensor:
    """Reshape `(B,)` to `(B, 1, ..., 1)` with the dtype and device of `like`."""
    return time.to(like).reshape(-1, *([1] * (like.ndim - 1)))


class Objective:
    """Base of all objectives; see the table in the module's docstring."""

    #: How many times its input channels the network must return (2 with learned variance).
    out_factor: int = 1

    def __init__(self, options: Any) -> None:
        self.options = options
        self.name: str = options.name
        self.sigma_data: float = options.sigma_data

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

    def model_time(self, time: Tensor) -> Tensor:
        """Return the network's time input for a native time, `(B,)`."""
        raise NotImplementedError

    def schedule(self, steps: int, shift: float = 1.0) -> list[float]:
        """Return `steps + 1` native times from pure noise to clean data for a sampler.

        A time `shift` above 1 spends more steps on high noise.
        """
        raise NotImplementedError

    def from_level(self, level: Tensor) -> Tensor:
        """Return the native time at which sigma / alpha is `level` (the inverse of `level`)."""
        return level

    def predict(self, net: Net, x: Tensor, time: Tensor, **cond: Any) -> Prediction:
        """Evaluate the network once, at native times `(B,)`."""
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

    def call(self, net: Net, x: Tensor, time: Tensor, **cond: Any) -> Tensor:
        """Run the network in its own precision and return its output in that of `x`.

        Samplers keep their state in float64; networks in another precision than float32 have a
        `dtype` attribute. Times stay in float32 at least: bfloat16 has 8 bits, too few for a step
        of 1000.

        Raises:
            ValueError: If the network returns another number of channels than the objective needs.
        """
        dtype = getattr(net, "dtype", None)
        dtype = dtype if isinstance(dtype, torch.dtype) else torch.float32
        time_dtype = torch.promote_types(dtype, torch.float32)
        times = self.model_time(time).to(device=x.device, dtype=time_dtype)
        output = net(x.to(dtype), times, **cond)
        if output.shape[1] != x.shape[1] * self.out_factor:
            raise ValueError(
                f"objective {self.name} needs {x.shape[1] * self.out_factor} output channels, "
                f"the network returns {output.shape[1]}; learn_sigma of both must agree"
            )
        wide = torch.promote_types(x.dtype, torch.float32)
        return output if output.dtype == x.dtype else output.to(wide)


class EDM(Objective):
    """EDM (Karras et al. 2022): preconditioned denoising; the native time is sigma.

    `D(x, sigma) = c_skip x + c_out F(c_in x, c_noise)` (Equation 7), the loss is
    `lambda(sigma) |D - x0|^2` (Equation 2) with `ln sigma ~ N(p_mean, p_std^2)` (Table 1).
    """

    options: EDMOptions

    def times(self, draws: Any) -> Tensor:
        """Return log-normal noise levels, `(B,)`."""
        normal = draws.normal("sigma", 1)[:, 0]
        return (normal * self.options.p_std + self.options.p_mean).exp()

    def model_time(self, time: Tensor) -> Tensor:
        """Return `c_noise = ln(sigma) / 4` (Table 1)."""
        return time.log() / 4

    def weight(self, time: Tensor) -> Tensor:
        """Return lambda = (sigma^2 + sigma_data^2) / (sigma sigma_data)^2 (Table 1)."""
        return (time**2 + self.sigma_data**2) / (time * self.sigma_data) ** 2

    def schedule(self, steps: int, shift: float = 1.0) -> list[float]:
        """Return sigma_max .. sigma_min, even in sigma^(1/rho), then 0 (Equation 5)."""
        o = self.options
        high, low = o.sigma_max ** (1 / o.rho), o.sigma_min ** (1 / o.rho)
        ramp = torch.linspace(0, 1, steps, dtype=torch.float64)
        o.check_times(steps, shift)
        return [*((high + ramp * (low - high)) ** o.rho).tolist(), 0.0]

    def predict(self, net: Net, x: Tensor, time: Tensor, **cond: Any) -> Prediction:
        """Return D(x, sigma) (Equation 7 and Table 1)."""
        sigma, data = expand(time, x), self.sigma_data
        total = (sigma**2 + data**2).sqrt()
        output = self.call(net, x / total, time, **cond)
        skip, out = (data / total) ** 2, sigma * data / total
        return Prediction(skip * x + out * output)

    def loss(self, net: Net, x0: Tensor, noise: Tensor, time: Tensor, **cond: Any) -> Tensor:
        """Return lambda(sigma) (D - x0)^2, `(B, C, H, W)` (Equation 2)."""
        denoised = self.denoise(net, self.corrupt(x0, noise, time), time, **cond)
        return expand(self.weight(time), x0) * (denoised - x0) ** 2


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

    def predict(self, net: Net, x: Tensor, time: Tensor, **cond: Any) -> Prediction:
        """Return x - t v."""
        velocity = self._velocity(net, x, time, cond)
        return Prediction(x - expand(time, x) * velocity)

    def _velocity(self, net: Net, x: Tensor, time: Tensor, cond: dict[str, Any]) -> Tensor:
        """Return noise - x0 as the network sees it; reversed, it predicts the opposite."""
        found = self.call(net, x, time, **cond)
        return -found if self.options.reverse else found

    def loss(self, net: Net, x0: Tensor, noise: Tensor, time: Tensor, **cond: Any) -> Tensor:
        """Return (v_net - v)^2, plus LightningDiT's `1 - cos(v_net, v)` over channels if weighted.

        The cosine term is one number per position, spread evenly over its channels, so that
        the mean over all elements is `mean((v_net - v)^2) + cosine * mean(1 - cos)`.
        """
        x = self.corrupt(x0, noise, time)
        velocity = self._velocity(net, x, time, cond)
        target = noise - x0
        loss = (velocity - target) ** 2
        if self.options.cosine:
            similarity = torch.nn.functional.cosine_similarity(velocity, target, dim=1)
            loss = loss + self.options.cosine * (1 - similarity).unsqueeze(1)
        return loss


class DDPM(Objective):
    """DDPM as DiT trains it: linear betas, epsilon prediction, optionally a learned variance.

    Ho et al. 2020 for the process, Nichol & Dhariwal 2021 ("improved DDPM") for the learned
    variance (Equation 15) and the hybrid loss `L_simple + L_vlb`. The native time is the step
    0..T-1; -1 means clean data.
    """

    options: DDPMOptions

    def __init__(self, options: DDPMOptions) -> None:
        super().__init__(options)
        self.out_factor = 2 if options.learn_sigma else 1
        ends = options.beta_start, options.beta_end
        self.betas = torch.linspace(*ends, options.steps, dtype=torch.float64)
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

    def predict(self, net: Net, x: Tensor, time: Tensor, **cond: Any) -> Prediction:
        """Return (x - sigma epsilon) / alpha, and the fraction of a learned variance."""
        epsilon, variance = self._split(self.call(net, x, time, **cond), x)
        return Prediction(self._clean(x, epsilon, time), variance)

    def loss(self, net: Net, x0: Tensor, noise: Tensor, time: Tensor, **cond: Any) -> Tensor:
        """Return (epsilon_net - noise)^2 (Ho et al., Equation 14), plus the weighted bound L_vlb.

        L_hybrid = L_simple + vlb L_vlb (improved DDPM, Equation 16). The bound trains only the
        learned variance: it sees the mean without gradient. L_vlb is the term of one step, in bits,
        which improved DDPM weights by T / 1000: 1 for its 1000 steps.
        """
        x = self.corrupt(x0, noise, time)
        epsilon, fraction = self._split(self.call(net, x, time, **cond), x)
        loss = (epsilon - noise) ** 2
        if fraction is not None and self.options.vlb:
            clean = self._clean(x, epsilon, time).detach()
            loss = loss + self.options.vlb * self.bound(x0, x, clean, fraction, time)
        return loss

    def bound(self, x0: Tensor, x: Tensor, clean: Tensor, fraction: Tensor, time: Tensor) -> Tensor:
        """Return one term of the variational bound in bits per element, `(B, C, H, W)`.

        `clean` is the network's estimate of `x0` from `x` at steps `time`, and `fraction` where the
        learned log-variance lies between its bounds, in [0, 1].
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

        Ho et al., Equation 7. The smallest is beta-tilde, clipped at step 0 to that of step 1; the
        largest is beta.
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
            self._moved[key] = getattr(self, name).to(device=device, dtype=widest(device))
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


def create_objective(options: Any = None) -> Objective:
    """Return the objective that `options` names.

    `options` is a name, or a mapping or dataclass with the keys of `conf/objective/<name>.yaml`.
    """
    resolved = options_of("objective", options)
    return {"edm": EDM, "flow": Flow, "ddpm": DDPM}[resolved.name](resolved)
