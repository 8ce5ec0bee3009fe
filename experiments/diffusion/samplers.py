"""From noise to data: samplers that need nothing but a denoiser.

All work in `z = x / s`, `u = sigma / s` (objective.py), where the probability-flow ODE of every
objective is `dz/du = (z - D) / u`. A sampler integrates it on the objective's own grid of times.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from experiments.diffusion.objective import Objective, Prediction
from experiments.options.diffusion import (
    ChurnOptions,
    DDIMOptions,
    DDPMSamplerOptions,
    SamplerOptions,
    SDEOptions,
    options_of,
)

#: `denoise(x, time, step, evaluation)`; times are native to the objective.
Denoise = Callable[[Tensor, float, int, int], Prediction]
#: `noise(i, x)`: fresh standard normal like `x`, the i-th of this run; seeded per image.
Noise = Callable[[int, Tensor], Tensor]


class Sampler:
    """Base of all samplers; each follows the path of an objective."""

    def __init__(self, options: SamplerOptions, objective: Objective) -> None:
        self.options = options
        self.objective = objective
        self.times = objective.schedule(options.steps, options.shift)
        self.alpha, self.sigma = _numbers(objective.alpha), _numbers(objective.sigma)
        self.scale, self.u = _numbers(objective.scale), _numbers(objective.coordinate)

    @property
    def steps(self) -> int:
        """Number of intervals."""
        return len(self.times) - 1

    def evaluations(self) -> list[tuple[int, float]]:
        """Return (step, native time) of every evaluation of the denoiser, in order."""
        found = []

        def denoise(x: Tensor, time: float, step: int, evaluation: int) -> Prediction:
            found.append((step, time))
            return Prediction(x)

        self.sample(denoise, torch.zeros(1, dtype=torch.float64), lambda i, x: x)
        return found

    def start(self, noise: Tensor) -> Tensor:
        """Return the noisy image at the first time, from standard normal `noise`."""
        return noise * self.sigma(self.times[0])

    def sample(self, denoise: Denoise, x: Tensor, noise: Noise) -> Tensor:
        """Walk from `x` at the first time, `start(noise)` `(B, C, H, W)`, to data in its dtype."""
        for i in range(self.steps):
            x = self.step(denoise, x, i, noise)
        return x

    def step(self, denoise: Denoise, x: Tensor, i: int, noise: Noise) -> Tensor:
        """Go from time `i` to the next one."""
        raise NotImplementedError

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


def _numbers(function: Callable[[Tensor], Tensor]) -> Callable[[float], float]:
    """Return a function of an objective for plain times: every batch asks for the same few."""

    @cache
    def number(time: float) -> float:
        return float(function(torch.tensor(time, dtype=torch.float64)))

    return number


class Euler(Sampler):
    """Euler's method: order 1. With ddpm times this is DDIM."""

    def step(self, denoise: Denoise, x: Tensor, i: int, noise: Noise) -> Tensor:
        """Follow the slope at the first of both times."""
        time, after = self.times[i : i + 2]
        x0 = denoise(x, time, i, i).x0
        return self._move(x, self._slope(x, x0, time), time, after)


class Heun(Sampler):
    """Heun's method (EDM, Algorithm 1), order 2; Euler last, as the slope at u = 0 is 0 / 0."""

    def step(self, denoise: Denoise, x: Tensor, i: int, noise: Noise) -> Tensor:
        """Average the slopes at both ends."""
        return self._step(denoise, x, i, self.times[i])

    def _step(self, denoise: Denoise, x: Tensor, i: int, time: float) -> Tensor:
        """Take step `i` from `time` on."""
        after = self.times[i + 1]
        first = self._slope(x, denoise(x, time, i, 2 * i).x0, time)
        guess = self._move(x, first, time, after)
        if i == self.steps - 1:
            return guess
        second = self._slope(guess, denoise(guess, after, i, 2 * i + 1).x0, after)
        return self._move(x, (first + second) / 2, time, after)


class Churn(Heun):
    """EDM's Algorithm 2: raise the noise level by a factor 1 + gamma, then a Heun step."""

    options: ChurnOptions

    def __init__(self, options: ChurnOptions, objective: Objective) -> None:
        super().__init__(options, objective)
        self.level, self.from_level = _numbers(objective.level), _numbers(objective.from_level)

    def step(self, denoise: Denoise, x: Tensor, i: int, noise: Noise) -> Tensor:
        """Renoise, then Heun."""
        o, time = self.options, self.times[i]
        if o.churn and o.churn_min <= (level := self.level(time)) <= o.churn_max:
            before, gamma = time, min(o.churn / self.steps, math.sqrt(2) - 1)
            time = self.from_level(level * (1 + gamma))
            ratio = self.alpha(time) / self.alpha(before)
            extra = self.sigma(time) ** 2 - (ratio * self.sigma(before)) ** 2
            x = ratio * x + o.churn_noise * math.sqrt(max(extra, 0.0)) * noise(i, x)
        return self._step(denoise, x, i, time)


class SDE(Sampler):
    """Euler-Maruyama on `dz = [(z - D)/u] du + lambda score du_reverse + sqrt(2 lambda) dW`.

    Any lambda(u) >= 0 keeps the marginals (SiT, Equation 5). Here it is, for a step of length h in
    u, `lambda = min(strength * form(u), u^2 / h)`, in the last step `strength * form(u)`.
    The score in z is `(a D - z) / u^2`, with `a = alpha / s`. The last step has no noise: it is one
    of the ODE (`last=euler`), or of this drift with its score (`mean`, SiT's default). That score
    is as large as 1 / u, so that the other objectives, whose last u is tiny, take `euler`.
    """

    options: SDEOptions

    def __init__(self, options: SDEOptions, objective: Objective) -> None:
        super().__init__(options, objective)
        self.last = options.last if objective.name == "flow" else "euler"
        if options.last_step and objective.name == "flow" and self.steps > 1:
            # SiT: even steps down to a last, larger one (its last_step_size).
            body = objective.schedule(self.steps - 1, options.shift)
            span = 1 - options.last_step
            self.times = [options.last_step + span * t for t in body] + [0.0]

    def step(self, denoise: Denoise, x: Tensor, i: int, noise: Noise) -> Tensor:
        """Take one stochastic step; the last is without noise."""
        time, after = self.times[i : i + 2]
        x0, last = denoise(x, time, i, i).x0, i == self.steps - 1
        if last and self.last == "euler":
            return self._move(x, self._slope(x, x0, time), time, after)
        u, scale = self.u(time), self.scale(time)
        length, share = u - self.u(after), self.alpha(time) / scale
        form = {"sigma": u, "constant": 1.0, "decreasing": min(u, 1.0) ** 2}[self.options.diffusion]
        rate = self.options.strength * form
        if not last:
            # No step follows the score beyond the prediction: an explicit one would be unstable.
            rate = min(rate, u**2 / length)
        score = (share * x0 - x / scale) / u**2
        z = x / scale - length * self._slope(x, x0, time) + length * rate * score
        if not last:
            z = z + math.sqrt(2 * rate * length) * noise(i, x)
        return z * self.scale(after)


class Ancestral(Sampler):
    """DDPM's ancestral sampling on the objective's grid, learned variance where there is one."""

    options: DDPMSamplerOptions

    def step(self, denoise: Denoise, x: Tensor, i: int, noise: Noise) -> Tensor:
        """Draw from the Gaussian reverse step; the last step returns its mean."""
        time, after = self.times[i : i + 2]
        x0, fraction = denoise(x, time, i, i)
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
        x0 = denoise(x, time, i, i).x0
        epsilon = (x - self.alpha(time) * x0) / self.sigma(time)
        _, small, _ = self._posterior(x, x0, time, after)
        spread = self.options.eta**2 * small
        kept = math.sqrt(max(self.sigma(after) ** 2 - spread, 0.0))
        x = self.alpha(after) * x0 + kept * epsilon
        return x + math.sqrt(spread) * noise(i, x) if spread else x


SAMPLERS: dict[str, type[Sampler]] = {
    "euler": Euler,
    "heun": Heun,
    "churn": Churn,
    "sde": SDE,
    "ddpm": Ancestral,
    "ddim": DDIM,
}


def create_sampler(options: Any, objective: Objective) -> Sampler:
    """Return the sampler that `options` names, on the grid of the model's `objective`.

    `options` is a name, or a mapping or dataclass with the keys of `conf/sampler/<name>.yaml`.
    """
    resolved = options_of("sampler", options)
    return SAMPLERS[resolved.name](resolved, objective)
