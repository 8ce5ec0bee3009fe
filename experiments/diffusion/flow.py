"""Flow matching on the linear path, with v-, x- and epsilon-prediction.

`x_t = (1 - t) x0 + t e` with `e = noise_scale * noise`; t = 1 is noise, and the velocity is
`v = dx_t/dt = e - x0`. Whatever the network predicts, the loss is on the velocity (Li and He, "Back
to Basics: Let Denoising Generative Models Denoise", JiT, arXiv 2511.13720, Table 1), with
`c = clamp`:

| prediction | network output | velocity of an output F   | weight of the squared error |
|------------|----------------|---------------------------|-----------------------------|
| v          | e - x0         | F                         | 1                           |
| x          | x0             | (x_t - F) / max(t, c)     | 1 / max(t, c)^2             |
| eps        | e              | (F - x_t) / max(1 - t, c) | 1 / max(1 - t, c)^2         |

JiT counts time from noise to data: its t is 1 - t here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from experiments.diffusion.objective import Objective, TrainingPair, expand
from experiments.options.objective import FlowOptions


def shifted(time: Tensor, shift: float) -> Tensor:
    """Return `s t / (1 + (s - 1) t)`: above 1 it moves times towards noise.

    LightningDiT counts time from noise to data, so its shift 0.3 is 1 / 0.3 here.
    """
    return time if shift == 1.0 else shift * time / (1 + (shift - 1) * time)


class Flow(Objective):
    """Flow matching on SiT's linear path (Ma et al. 2024): `x_t = (1 - t) x0 + t noise`.

    The network predicts the velocity `v = noise - x0`, or with `prediction` the image or the noise
    (the table above); the native time is t in [0, 1], and t = 1 is noise, as in TREAD's rectified
    flow.
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

    def sigma(self, time: Tensor) -> Tensor:
        """Return t times the noise scale."""
        return time * self.options.noise_scale

    def model_time(self, time: Tensor) -> Tensor:
        """Return t times `time_scale`: the embedding's frequencies are made for 0..1000.

        Reversed, it is that of 1 - t: SiT, LightningDiT and JiT count from noise to data.
        """
        return (1 - time if self.options.reverse else time) * self.options.time_scale

    def from_level(self, level: Tensor) -> Tensor:
        """Return level / (noise_scale + level)."""
        time = level / (self.options.noise_scale + level)
        return torch.where(torch.isinf(level), torch.ones_like(level), time)

    def less_noisy(self, time: Tensor, offset: Tensor) -> Tensor:
        """Return t - offset, 0 at least."""
        return (time - offset).clamp(min=0)

    def schedule(self, steps: int, shift: float = 1.0) -> list[float]:
        """Return even times from 1 to 0, shifted."""
        even = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
        return shifted(even, shift).tolist()

    def target(self, x0: Tensor, noise: Tensor, noisy: Tensor, time: Tensor) -> Tensor:
        """Return the velocity e - x0 (reversed, the opposite), the image x0 or the noise e."""
        if self.options.prediction == "x":
            return x0
        noise = noise * self.options.noise_scale
        if self.options.prediction == "eps":
            return noise
        return x0 - noise if self.options.reverse else noise - x0

    def training_pair(self, x0: Tensor, noise: Tensor, time: Tensor) -> TrainingPair:
        """As the base class, with the weight that makes it a squared error of the velocity."""
        pair = super().training_pair(x0, noise, time)
        if self.options.prediction != "v":
            pair.weight = 1 / self._divisor(x0, time) ** 2
        return pair

    def velocity(self, output: Tensor, x: Tensor, time: Tensor) -> Tensor:
        """Return the velocity that a network output for `x` at times `(B,)` stands for."""
        if self.options.prediction == "v":
            return -output if self.options.reverse else output
        difference = x - output if self.options.prediction == "x" else output - x
        return difference / self._divisor(x, time)

    def _divisor(self, like: Tensor, time: Tensor) -> Tensor:
        """Return max(t, clamp) for x-prediction and max(1 - t, clamp) for epsilon-prediction."""
        remaining = time if self.options.prediction == "x" else 1 - time
        return expand(remaining, like).clamp(min=self.options.clamp)

    def denoised(self, output: Tensor, x: Tensor, time: Tensor) -> Tensor:
        """Return x - t v: for x-prediction the output itself, where t is not below `clamp`."""
        return x - expand(time, x) * self.velocity(output, x, time)

    def loss_map(self, output: Tensor, pair: TrainingPair) -> Tensor:
        """Return (v_net - v)^2, plus LightningDiT's `1 - cos(v_net, v)` over channels if weighted.

        The cosine term is one number per position, spread evenly over its channels, so that
        the mean over all elements is `mean((v_net - v)^2) + cosine * mean(1 - cos)`.
        """
        loss = super().loss_map(output, pair)
        if self.options.cosine:
            output = self.check_output(output, pair.noisy)
            velocity = self.velocity(output, pair.noisy, pair.native_time)
            target = self.velocity(pair.target, pair.noisy, pair.native_time)
            similarity = torch.nn.functional.cosine_similarity(velocity, target, dim=1)
            loss = loss + self.options.cosine * (1 - similarity).unsqueeze(1)
        return loss
