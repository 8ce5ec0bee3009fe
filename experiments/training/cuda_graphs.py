"""Training steps as CUDA graphs: one for each route, recorded once and replayed from then on.

A route has a fixed number of tokens, so one graph serves all of its steps. What changes from step
to step (data, noise, times, label drops, selected tokens, the learning rate) is first written into
fixed buffers.

A graph keeps the memory of its step, so there is at most one: the stages of a schedule follow each
other, and each records its own. It is dropped for an evaluation, which needs the memory, and
recorded again afterwards.

With several processes the graph contains DDP's all-reduces. PyTorch asks for three things ("CUDA
semantics", usage with DistributedDataParallel): no asynchronous error handling in NCCL (see
`make_accelerator`), DDP built on a side stream, and eleven steps before a recording.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from experiments.config.schema import Config
from experiments.data.dataset import Batch
from experiments.training.optimizer import move_rates
from experiments.training.step import MicroBatch, TrainingStep
from routing import Draws, Route
from routing.errors import UserError

# Steps of a route before it is recorded: kernels are chosen and compiled, moments are allocated.
EAGER = 3
# With DDP, which times its first ten iterations with events that the host waits for.
EAGER_WITH_DDP = 11
# Afterwards DDP times one iteration in so many: none of a run, since it might be a recorded one.
_NEVER = 2**31 - 1
# A schedule with more routes spends too many of its steps on recording.
MOST_ROUTES = 8
# Points of a run at which its distinct routes are counted, about.
_COUNTED_STEPS = 1000


def reason_against(config: Config, processes: int) -> str | None:
    """Return why the steps of a run cannot be CUDA graphs, None if nothing is known against it."""
    if processes > 1 and config.train.graphs == "auto":
        return (
            f"there are {processes} processes, and graphs have not been tested on several GPUs "
            "(train.graphs=true uses them nevertheless)"
        )
    if config.routing.random_end:
        return "routing.random_end=true draws another route for each step"
    steps = config.train.steps
    routes = set()
    for step in range(0, steps, max(1, steps // _COUNTED_STEPS)):
        routes.add(config.route_schedule.at(step / steps))
    if len(routes) > MOST_ROUTES:
        return f"the schedule has more than {MOST_ROUTES} routes, and each needs its own graph"
    return None


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


def record(body: Callable[[], None], stream: torch.cuda.Stream) -> Callable[[], None]:
    """Record the kernels that `body` launches, without running them; return their replay."""
    graph = torch.cuda.CUDAGraph()
    current_stream = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, stream=stream):
            body()
    finally:  # torch leaves its own stream set where a recording fails
        torch.cuda.set_stream(current_stream)
    return graph.replay


def create_side_stream() -> torch.cuda.Stream:
    """Return a stream for what must not run on the default one: recordings and steps before."""
    return torch.cuda.Stream()


@contextlib.contextmanager
def on_side_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """Run the block on `stream`: after the current stream's work, and before what follows on it."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def in_buffers(micro_batch: MicroBatch) -> MicroBatch:
    """Return a copy of the first step's micro-batch, in tensors that later steps are written to."""
    x, y, text = micro_batch.batch.x, micro_batch.batch.y, micro_batch.batch.text
    labels = None if y is None else y.clone()
    batch = Batch(x.clone(), labels, None if text is None else text.clone())
    draws: Any = BufferedDraws(micro_batch.draws)  # has the methods of `Draws`
    routing = micro_batch.routing and dataclasses.replace(micro_batch.routing, draws=draws)
    return micro_batch._replace(batch=batch, draws=draws, routing=routing)


def renew(buffers: MicroBatch, micro_batch: MicroBatch) -> None:
    """Write another step's data and random numbers into the buffers of a micro-batch."""
    draws: Any = buffers.draws
    draws.renew(micro_batch.draws)
    for name in ("x", "y", "text"):
        buffer = getattr(buffers.batch, name)
        if buffer is not None:
            buffer.copy_(getattr(micro_batch.batch, name))


class RecordingError(Exception):
    """A step contains what a CUDA graph cannot record."""


class RouteGraph:
    """The step under one route: all micro-batches, then clipping, update and EMA."""

    def __init__(
        self, step: GraphedTrainingStep, route: Route | None, micro_batches: list[MicroBatch]
    ) -> None:
        self.step, self.route, self.micro_batches = step, route, micro_batches
        # What the graph records: the step without graphs.
        self.body = partial(TrainingStep.train_on, step, micro_batches)
        self.eager_steps_left = EAGER_WITH_DDP if step.distributed else EAGER
        self.replay: Callable[[], None] | None = None

    def run(self) -> None:
        """Take one step on what the buffers hold.

        Raises:
            RecordingError: The step cannot be recorded; it has not been taken.
        """
        if self.eager_steps_left:
            self.eager_steps_left -= 1
            with on_side_stream(self.step.side_stream):
                self.body()
            return
        if self.replay is None:
            try:
                self.replay = record(self.body, self.step.side_stream)
            except RuntimeError as error:
                raise RecordingError(" ".join(str(error).split())[:200]) from error
        self.replay()


class GraphedTrainingStep(TrainingStep):
    """The training step with `train.graphs`; the optimizer reads its rate from the device.

    Attributes:
        graph: The graph of the latest route.
        side_stream: The stream of recordings and of the steps before them; DDP is built on it.
        recordable: False after a recording failed: the steps then run without graphs.
    """

    def __init__(self, *args: Any, say: Callable[[str], None] = print) -> None:
        self.side_stream = create_side_stream()
        super().__init__(*args)
        self.say = say
        self.graph: RouteGraph | None = None
        self.recordable = True
        move_rates(self.state.optimizers, self.device)

    def wrap_model(self) -> Any:
        """Return the model, with several processes in DDP that is built on the side stream."""
        if not self.distributed:
            return self.model
        with on_side_stream(self.side_stream):
            net = super().wrap_model()
        net._set_ddp_runtime_logging_sample_rate(_NEVER)
        return net

    def train_on(self, micro_batches: Iterable[MicroBatch]) -> None:
        """Replay the graph of this step's route, or prepare it.

        Raises:
            UserError: It cannot be recorded, with several processes.
        """
        if not self.recordable:
            super().train_on(micro_batches)
            return
        micro_batches = list(micro_batches)
        routing = micro_batches[0].routing
        route = None if routing is None else routing.route
        if self.graph is None or self.graph.route != route:
            self.graph = None  # its memory is free before the next one takes its own
            self.graph = RouteGraph(self, route, list(map(in_buffers, micro_batches)))
        for buffers, micro_batch in zip(self.graph.micro_batches, micro_batches, strict=True):
            renew(buffers, micro_batch)
        try:
            self.graph.run()
        except RecordingError as error:
            if self.distributed:  # DDP would wait forever for the gradients of the recording
                raise UserError(
                    "train.graphs=true: this step of several processes cannot be recorded "
                    f"({error}); type train.graphs=false, which resumes the run without graphs"
                ) from error
            self.say(f"CUDA graphs off: this step cannot be recorded ({error})")
            self.recordable = False
            self.release()
            for optimizer in self.state.optimizers:
                optimizer.zero_grad(set_to_none=True)  # those of the recording hold no numbers
            super().train_on(micro_batches)

    def release(self) -> None:
        """Drop the graph; the next steps record it again."""
        self.graph = None
