"""Flow matching with the linear path of SiT (Ma et al. 2024): `x_t = (1 - t) x0 + t noise`.

The network predicts the velocity `v = noise - x0`. `t = 1` is noise, as in TREAD's rectified flow.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from experiments.diffusion.diffusion_options import FlowOptions
from experiments.diffusion.objective import Net, Objective, Prediction, call, expand


def shifted(time: Tensor, shift: float) -> Tensor:
    """Return `s t / (1 + (s - 1) t)`: above 1 it moves times towards noise.

    LightningDiT counts time from noise to data, so its shift 0.3 is 1 / 0.3 here.
    """
    return time if shift == 1.0 else shift * time / (1 + (shift - 1) * time)


class Flow(Objective):
    """Velocity prediction on the linear path; the native time is t in [0, 1]."""

    name = "flow"

    def __init__(self, options: FlowOptions | None = None) -> None:
        self.options = options or FlowOptions()
        self.sigma_data = self.options.sigma_data

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
        """Return t."""
        return time

    def scale(self, time: Tensor) -> Tensor:
        """Return 1: the velocity (x - D) / t is already the derivative in t."""
        return torch.ones_like(time)

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
        found = self.check_output(call(net, x, self.model_time(time), **cond), x)
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
