"""Training steps as CUDA graphs: one for each route, recorded once and replayed from then on.

A route has one static number of tokens, so one graph serves all of its steps. What changes from
step to step (data, noise, times, label drops, which tokens stay, the learning rate) is written into
fixed buffers first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partialmethod
from typing import Any

import torch
from torch import Tensor

from experiments.data.dataset import Batch
from routing.rng import Draws
from routing.route import Route
from routing.stack import Routing

# Steps of a route that run before it is recorded: kernels are chosen and compiled, moments made.
EAGER = 3


class BufferedDraws:
    """Random numbers in fixed buffers, which `renew` fills with those of another step."""

    def __init__(self, draws: Draws) -> None:
        self.draws = draws
        self.kept: dict[tuple[Any, ...], Tensor] = {}
        self.one_row: BufferedDraws | None = None

    def shared(self) -> BufferedDraws:
        """As in `Draws`."""
        if self.one_row is None:
            self.one_row = BufferedDraws(self.draws.shared())
        return self.one_row

    def _buffer(self, kind: str, *args: Any) -> Tensor:
        if (kind, *args) not in self.kept:
            self.kept[kind, *args] = getattr(self.draws, kind)(*args).clone()
        return self.kept[kind, *args]

    # As in `Draws`.
    uniform = partialmethod(_buffer, "uniform")
    normal = partialmethod(_buffer, "normal")

    def renew(self, draws: Draws) -> None:
        """Write another step's numbers into all buffers."""
        for (kind, *args), buffer in self.kept.items():
            buffer.copy_(getattr(draws, kind)(*args))
        if self.one_row is not None:
            self.one_row.renew(draws.shared())


def record(body: Callable[[], None]) -> Callable[[], None]:
    """Record what `body` launches, without running it; the result launches it again."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph.replay


def beside(body: Callable[[], None]) -> None:
    """Run `body` on a stream of its own, as a recording will: on the default one it cannot."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        body()
    torch.cuda.current_stream().wait_stream(side)


class RouteStep:
    """The step under one route: forward, backward, clipping, update and average.

    The whole batch goes through the model at once; tensors of the first become the buffers.
    """

    def __init__(self, trainer: Any, batch: Batch, draws: Draws, routing: Routing | None) -> None:
        self.trainer, self.draws = trainer, BufferedDraws(draws)
        y, text = (t if t is None else t.clone() for t in (batch.y, batch.text))
        self.batch = Batch(batch.x.clone(), y, text)
        fixed: Any = self.draws
        self.routing = routing and dataclasses.replace(routing, draws=fixed)
        self.left = EAGER
        self.replay: Callable[[], None] | None = None

    def body(self) -> None:
        """What the graph holds."""
        loss = self.trainer.loss_of(self.batch, self.draws, self.routing)
        self.trainer.backward(loss)
        self.trainer.update(loss.detach())

    def __call__(self, batch: Batch, draws: Draws) -> None:
        """Take one step on this batch with these numbers."""
        self.draws.renew(draws)
        for name in ("x", "y", "text"):
            buffer, value = getattr(self.batch, name), getattr(batch, name)
            if buffer is not None:
                buffer.copy_(value)
        if self.left:
            self.left -= 1
            beside(self.body)
            return
        if self.replay is None:
            self.replay = record(self.body)
        self.replay()


class GraphedSteps:
    """The trainer's step with `train.graphs`: call it with the batch that was read ahead, or None.

    From now on the optimizer takes its learning rate from the device.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.steps: dict[Route | None, RouteStep] = {}
        for group in trainer.state.optimizer.param_groups:
            group["capturable"] = trainer.device.type == "cuda"
            group["lr"] = torch.as_tensor(group["lr"], device=trainer.device)

    def __call__(self, batch: Batch | None) -> None:
        """Take one step."""
        trainer = self.trainer
        batch, draws, routing = trainer.drawn(torch.arange(trainer.local), batch)
        route = None if routing is None else routing.route
        if route not in self.steps:
            self.steps[route] = RouteStep(trainer, batch, draws, routing)
        self.steps[route](batch, draws)
