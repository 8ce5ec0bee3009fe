"""Samplers: from noise to data with nothing but a denoiser.

All work in `z = x / s`, `u = sigma / s` (objectives.py), where the probability-flow ODE of every
objective is `dz/du = (z - D) / u`. A sampler integrates it on the objective's own grid of times.
"""

from __future__ import annotations

import abc
import math
import pkgutil
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from experiments.diffusion.objective import Objective, Prediction
from experiments.options.roles import parse_named
from experiments.options.sampler import (
    SAMPLERS,
    ChurnOptions,
    DDIMOptions,
    DDPMSamplerOptions,
    SamplerOptions,
    SDEOptions,
)

#: `denoise(x, time)`; times are native to the objective.
Denoise = Callable[[Tensor, float], Prediction]
#: `denoise(x, time, step, evaluation)`: both are counted from 0 over one trajectory.
CountedDenoise = Callable[[Tensor, float, int, int], Prediction]
#: `noise(i, x)`: fresh standard normal like `x`, the i-th of this run; seeded per image.
Noise = Callable[[int, Tensor], Tensor]


class Sampler(abc.ABC):
    """Base of all samplers; each follows the path of an objective."""

    def __init__(self, options: SamplerOptions, objective: Objective) -> None:
        self.options = options
        self.objective = objective
        self.times = objective.schedule(options.steps, options.shift)
        self.alpha, self.sigma = _of_float(objective.alpha), _of_float(objective.sigma)
        self.scale, self.u = _of_float(objective.scale), _of_float(objective.coordinate)

    @property
    def steps(self) -> int:
        """Number of intervals."""
        return len(self.times) - 1

    def evaluations(self) -> list[tuple[int, float]]:
        """Return (step, native time) of every evaluation of the denoiser, in order."""
        evaluations = []

        def record(x: Tensor, time: float, step: int, evaluation: int) -> Prediction:
            evaluations.append((step, time))
            return Prediction(x)

        self.sample(record, torch.zeros(1, dtype=torch.float64), lambda i, x: x)
        return evaluations

    def start(self, noise: Tensor) -> Tensor:
        """Return the noisy image at the first time, from standard normal `noise`."""
        return noise * self.sigma(self.times[0])

    def sample(self, denoise: CountedDenoise, x: Tensor, noise: Noise) -> Tensor:
        """Integrate from `x` at the first time, `start(noise)` `(B, C, H, W)`, to data.

        The evaluations of `denoise` are counted here; a sampler's `step` calls `denoise(x, time)`.
        """
        step, evaluation = 0, 0

        def counted(x: Tensor, time: float) -> Prediction:
            nonlocal evaluation
            prediction = denoise(x, time, step, evaluation)
            evaluation += 1
            return prediction

        for step in range(self.steps):
            x = self.step(counted, x, step, noise)
        return x

    @abc.abstractmethod
    def step(self, denoise: Denoise, x: Tensor, i: int, noise: Noise) -> Tensor:
        """Go from time `i` to the next one."""

    def _slope(self, x: Tensor, x0: Tensor, time: float) -> Tensor:
        """Return dz/du at `time`."""
        return (x / self.scale(time) - x0) / self.u(time)

    def _move(self, x: Tensor, slope: Tensor, time: float, after: float) -> Tensor:
        """Follow `slope` from `time` to `after` in z and u; returns x at `after`."""
        z = x / self.scale(time) + (self.u(after) - self.u(time)) * slope
        return z * self.scale(after)

    def _posterior(
        self, x: Tensor, x0: Tensor, time: float, after: float
    ) -> tuple[Tensor, float, float]:
        """Return mean and (smallest, largest) variance of q(x_after | x_time, x0), as DDPM's."""
        a_t, a_s = self.alpha(time), self.alpha(after)
        v_t, v_s = self.sigma(time) ** 2, self.sigma(after) ** 2
        ratio = a_t / a_s
        fresh = max(v_t - ratio**2 * v_s, 0.0)
        mean = (ratio * v_s / v_t) * x + (a_s * fresh / v_t) * x0
        return mean, fresh * v_s / v_t, fresh


def _of_float(function: Callable[[Tensor], Tensor]) -> Callable[[float], float]:
    """Wrap a function of time tensors for float times, cached: all batches use the same times."""

    @cache
    def number(time: float) -> float:
        return float(function(torch.tensor(time, dtype=torch.float64)))

    return number


class Euler(Sampler):
    """Euler's method: order 1. With ddpm times this is DDIM."""

    def step(self, denoise: Denoise, x: Tensor, i: int, noise: Noise) -> Tensor:
        """Follow the slope at the start of the interval."""
        time, after = self.times[i : i + 2]
        x0 = denoise(x, time).x0
        return self._move(x, self._slope(x, x0, time), time, after)


class TwoStage(Sampler):
    """A Runge-Kutta method of order 2 with two evaluations a step, at its start and at `node`.

    The last step is Euler's, as the slope at u = 0 is 0 / 0.
    """

    #: Where the second evaluation is: 0 is the start of the interval of times, 1 its end.
    node: ClassVar[float]

    def step(self, denoise: Denoise, x: Tensor, i: int, noise: Noise) -> Tensor:
        """Follow a weighted mean of the two slopes."""
        return self._step(denoise, x, i, self.times[i])

    def _step(self, denoise: Denoise, x: Tensor, i: int, time: float) -> Tensor:
        """Take step `i` from `time` on."""
        after = self.times[i + 1]
        first = self._slope(x, denoise(x, time).x0, time)
        if i == self.steps - 1:
            return self._move(x, first, time, after)
        between = (1 - self.node) * time + self.node * after
        guess = self._move(x, first, time, between)
        second = self._slope(guess, denoise(guess, between).x0, between)
        # Order 2 needs the weight 1 / (2 node) of the node in u, in which the ODE is solved. It is
        # another share of the interval than in time where u is not linear in time, as with ddpm.
        share = (self.u(between) - self.u(time)) / (self.u(after) - self.u(time))
        weight = 1 / (2 * share)
        return self._move(x, (1 - weight) * first + weight * second, time, after)


class Heun(TwoStage):
    """Heun's method (EDM, Algorithm 1): the mean of the slopes at both ends."""

    node = 1.0


class Churn(Heun):
    """EDM's Algorithm 2: raise the noise level by a factor 1 + gamma, then a Heun step."""

    options: ChurnOptions

    def __init__(self, options: ChurnOptions, objective: Objective) -> None:
        super().__init__(options, objective)
        self.level, self.from_level = _of_float(objective.level), _of_float(objective.from_level)

    def step(self, denoise: Denoise, x: Tensor, i: int, noise: Noise) -> Tensor:
        """Renoise, then Heun."""
        o, time = self.options, self.times[i]
        level = self.level(time)
        if o.churn and o.churn_min <= level <= o.churn_max:
            before, gamma = time, min(o.churn / self.steps, math.sqrt(2) - 1)
            time = self.from_level(level * (1 + gamma))
            ratio = self.alpha(time) / self.alpha(before)
            extra = self.sigma(time) ** 2 - (ratio * self.sigma(before)) ** 2
            x = ratio * x + o.churn_noise * math.sqrt(max(extra, 0.0)) * noise(i, x)
        return self._step(denoise, x, i, time)


# SiT's SBDM coefficient is infinite at pure noise, so SiT's code starts this much later.
_SBDM_START = 1e-3


class SDE(Sampler):
    """Euler-Maruyama on the reverse SDE; with objective=flow it is SiT's sampler.

    For a step of length h in u it is `dz = -h [(z - D) / u - w score] + sqrt(2 w h) noise` with the
    score in z, `(a D - z) / u^2` where `a = alpha / s`. Any w >= 0 keeps the marginals (SiT,
    Equation 5). Here w is `strength` times one of SiT's forms (`diffusion_coefficient`).

    The last step has no noise. It is a step of the ODE (`last=euler`), a step of the drift above
    with its score (`mean`, SiT's default), or the estimate of the clean image (`tweedie`; on SiT's
    linear path `euler` ends there too).

    The grids of the other objectives get so close to the data that an explicit step along a score
    of size 1 / u would be unstable: there w is at most u^2 / h, and the last step is the ODE's.
    """

    options: SDEOptions

    def __init__(self, options: SDEOptions, objective: Objective) -> None:
        super().__init__(options, objective)
        options.check_objective(objective.name)
        self.is_flow = objective.name == "flow"
        if options.last_step and self.is_flow and self.steps > 1:
            # SiT: even steps down to a last, larger one (its last_step_size).
            body = objective.schedule(self.steps - 1, options.shift)
            span = 1 - options.last_step
            self.times = [options.last_step + span * t for t in body] + [0.0]
        if options.diffusion == "SBDM":
            # Even steps from there, as in SiT, unless they are shifted.
            first, last = self.times[0], self.times[-2]
            share = (first - _SBDM_START - last) / (first - last) if first > last else 1.0
            body = [last + share * (time - last) for time in self.times[:-1]]
            self.times = [*body, 0.0]

    def start(self, noise: Tensor) -> Tensor:
        """Return the noisy image at the first time: pure noise, also where SBDM starts later."""
        return noise * self.sigma(1.0) if self.is_flow else super().start(noise)

    def step(self, denoise: Denoise, x: Tensor, i: int, noise: Noise) -> Tensor:
        """Take one stochastic step; the last one adds no noise."""
        time, after = self.times[i : i + 2]
        x0, is_last = denoise(x, time).x0, i == self.steps - 1
        if is_last and self.options.last == "tweedie":
            return x0
        if is_last and self.options.last == "euler":
            return self._move(x, self._slope(x, x0, time), time, after)
        u, scale = self.u(time), self.scale(time)
        length, share = u - self.u(after), self.alpha(time) / scale
        if self.is_flow:
            # SiT's forms are for noise of scale 1; u grows with the scale.
            form, strength = self.options.diffusion, self.options.strength
            rate = self.sigma(1.0) * diffusion_coefficient(form, strength, time)
        else:
            rate = min(self.options.strength * u, u**2 / length)
        score = (share * x0 - x / scale) / u**2
        z = x / scale - length * self._slope(x, x0, time) + length * rate * score
        if not is_last:
            z = z + math.sqrt(2 * rate * length) * noise(i, x)
        return z * self.scale(after)


def diffusion_coefficient(form: str, norm: float, time: float) -> float:
    """Return w(t) of SiT's code on its linear path, at flow time t (1 is noise).

    SiT counts s = 1 - t from noise to data, so that its sigma is t and cos(pi s) is -cos(pi t).
    """
    if form == "constant":
        return norm
    if form == "SBDM":
        return norm * time / (1 - time)
    if form in ("sigma", "linear"):  # 1 - s, both of them
        return norm * time
    if form == "decreasing":
        return (1 - norm * math.cos(math.pi * time)) ** 2 / 4
    return norm * math.sin(math.pi * time) ** 2  # increasing-decreasing


class Ancestral(Sampler):
    """DDPM's ancestral sampling on the objective's grid, with the learned variance if any."""

    options: DDPMSamplerOptions

    def step(self, denoise: Denoise, x: Tensor, i: int, noise: Noise) -> Tensor:
        """Draw from the Gaussian reverse step; the last step returns its mean."""
        time, after = self.times[i : i + 2]
        x0, fraction = denoise(x, time)
        mean, small, large = self._posterior(x, x0, time, after)
        if i == self.steps - 1:
            return mean
        if self.options.variance == "learned" and fraction is not None:
            log = fraction * math.log(large) + (1 - fraction) * math.log(small)
            return mean + torch.exp(log / 2) * noise(i, x)
        variance = large if self.options.variance == "large" else small
        return mean + math.sqrt(variance) * noise(i, x)


class DDIM(Sampler):
    """DDIM, Equation 12: `eta` scales the noise between the ODE and ancestral sampling."""

    options: DDIMOptions

    def step(self, denoise: Denoise, x: Tensor, i: int, noise: Noise) -> Tensor:
        """Move along the predicted noise and add `eta` of the posterior's noise."""
        time, after = self.times[i : i + 2]
        x0 = denoise(x, time).x0
        epsilon = (x - self.alpha(time) * x0) / self.sigma(time)
        _, small, _ = self._posterior(x, x0, time, after)
        spread = self.options.eta**2 * small
        remaining_sigma = math.sqrt(max(self.sigma(after) ** 2 - spread, 0.0))
        x = self.alpha(after) * x0 + remaining_sigma * epsilon
        return x + math.sqrt(spread) * noise(i, x) if spread else x


def create_sampler(options: Any, objective: Objective) -> Sampler:
    """Return the sampler that `options` names, on the grid of the model's `objective`.

    `options` is a name, or a mapping or dataclass with the keys of `sampler.`.
    """
    resolved = parse_named(SAMPLERS, "sampler", options)
    sampler: Sampler = pkgutil.resolve_name(resolved.SAMPLER)(resolved, objective)
    return sampler
