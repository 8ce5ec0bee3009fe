"""Training steps as CUDA graphs: one for each route, recorded once and replayed from then on.

A route has a fixed number of tokens, so one graph serves all of its steps. What changes from step
to step (data, noise, times, label drops, selected tokens, the learning rate) is first written into
fixed buffers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from experiments.data.dataset import Batch
from experiments.training.step import TrainingStep
from routing import Draws, Route, Routing

# Steps of a route before it is recorded: kernels are chosen and compiled, moments are allocated.
EAGER = 3


class BufferedDraws:
    """Random numbers in fixed buffers, which `renew` fills with those of another step."""

    def __init__(self, draws: Draws) -> None:
        self.draws = draws
        self.buffers: dict[tuple[Any, ...], Tensor] = {}
        self.shared_draws: BufferedDraws | None = None

    def shared(self) -> BufferedDraws:
        """As in `Draws`."""
        if self.shared_draws is None:
            self.shared_draws = BufferedDraws(self.draws.shared())
        return self.shared_draws

    def uniform(self, *args: Any) -> Tensor:
        """As in `Draws`."""
        return self._buffer("uniform", *args)

    def normal(self, *args: Any) -> Tensor:
        """As in `Draws`."""
        return self._buffer("normal", *args)

    def _buffer(self, kind: str, *args: Any) -> Tensor:
        if (kind, *args) not in self.buffers:
            self.buffers[kind, *args] = getattr(self.draws, kind)(*args).clone()
        return self.buffers[kind, *args]

    def renew(self, draws: Draws) -> None:
        """Write another step's numbers into all buffers."""
        for (kind, *args), buffer in self.buffers.items():
            buffer.copy_(getattr(draws, kind)(*args))
        if self.shared_draws is not None:
            self.shared_draws.renew(draws.shared())


def record(body: Callable[[], None]) -> Callable[[], None]:
    """Record the kernels that `body` launches, without running them; return their replay."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph.replay


def run_on_side_stream(body: Callable[[], None]) -> None:
    """Run `body` as a recording does: not on the default stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        body()
    torch.cuda.current_stream().wait_stream(side)


class RouteGraph:
    """The step under one route: forward, backward, clipping, update and EMA.

    The whole batch goes through the model at once; tensors of the first step become the buffers.
    """

    def __init__(
        self, step: TrainingStep, batch: Batch, draws: Draws, routing: Routing | None
    ) -> None:
        self.step, self.draws = step, BufferedDraws(draws)
        labels = None if batch.y is None else batch.y.clone()
        text = None if batch.text is None else batch.text.clone()
        self.batch = Batch(batch.x.clone(), labels, text)
        buffered: Any = self.draws
        self.routing = routing and dataclasses.replace(routing, draws=buffered)
        self.eager_steps_left = EAGER
        self.replay: Callable[[], None] | None = None

    def body(self) -> None:
        """Run what the graph records."""
        buffered: Any = self.draws
        loss = self.step.batch_loss(self.batch, buffered, self.routing)
        self.step.backward(loss)
        self.step.update(loss.detach())

    def run(self, batch: Batch, draws: Draws) -> None:
        """Take one step on this batch with these random numbers."""
        self.draws.renew(draws)
        for name in ("x", "y", "text"):
            buffer = getattr(self.batch, name)
            if buffer is not None:
                buffer.copy_(getattr(batch, name))
        if self.eager_steps_left:
            self.eager_steps_left -= 1
            run_on_side_stream(self.body)
            return
        if self.replay is None:
            self.replay = record(self.body)
        self.replay()


class GraphedTrainingStep(TrainingStep):
    """The training step with `train.graphs`; the optimizer reads its rate from the device."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.graphs: dict[Route | None, RouteGraph] = {}
        self.state.optimizer.move_rates(self.device)

    def train_on(self, batch: Batch | None) -> None:
        """Replay the graph of this step's route, or prepare it."""
        batch, draws, routing = self.make_batch(torch.arange(self.local_batch), batch)
        route = None if routing is None else routing.route
        if route not in self.graphs:
            self.graphs[route] = RouteGraph(self, batch, draws, routing)
        self.graphs[route].run(batch, draws)
