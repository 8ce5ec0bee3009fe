"""A training step as one CUDA graph: drawn outside, replayed inside.

A route has one static number of tokens, so one graph serves all of its steps; what changes from
step to step (noise, times, label drops, which tokens stay) is written into fixed buffers first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from experiments.benchmark.step_times import LABEL_DROP, Step
from routing.rng import Draws
from routing.route import keep_count
from routing.stack import Routing


class GraphedStep:
    """Replays a `Step`.

    Args:
        step: On a CUDA device, made with graphs=true (its optimizer is capturable).
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self.noise = torch.empty_like(step.latents)
        self.time = torch.empty(len(step.latents), device=step.device)
        self.labels = step.labels.clone()
        grid = step.model.grid
        self.keep = [keep_count(grid[0] * grid[1], s.rate) for s in step.route.segments]
        batch = len(step.latents)
        self.ids = [torch.zeros(batch, k, dtype=torch.long, device=step.device) for k in self.keep]
        self.draw()
        self.graph = self._capture()

    @torch.no_grad()
    def draw(self) -> None:
        """Fill the buffers for the next step."""
        step = self.step
        draws = Draws(0, step.count, step.rows, device=step.device)
        self.time.copy_(step.objective.times(draws))
        self.noise.copy_(draws.normal("noise", tuple(step.latents.shape[1:])))
        drop = draws.uniform("drop", 1)[:, 0] < LABEL_DROP
        self.labels.copy_(torch.where(drop, step.model.num_classes, step.labels))
        for k, (buffer, keep) in enumerate(zip(self.ids, self.keep, strict=True)):
            buffer.copy_(step.selection.ids(draws, k, step.model.grid, keep, None))
        step.count += 1

    def body(self) -> Tensor:
        """What the graph holds: forward, backward, clipping, update."""
        step = self.step
        routing: Any = Routing(step.route, ids=self.ids) if step.route else None
        half = step.o.precision == "bf16"
        with torch.autocast(step.device.type, torch.bfloat16, enabled=half):
            loss = step.objective.loss(
                step.model, step.latents, self.noise, self.time, y=self.labels, routing=routing
            )
        mean = loss.float().mean()
        mean.backward()
        torch.nn.utils.clip_grad_norm_(step.update.params, 1.0)
        step.update.optimizer.step()
        step.update.average()
        # Kept, not dropped: the graph writes into these buffers again.
        for p in step.update.params:
            p.grad.zero_()
        return mean.detach()

    def _capture(self) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.body()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.loss = self.body()
        return graph

    def __call__(self) -> None:
        """Draw and replay."""
        self.draw()
        self.graph.replay()
