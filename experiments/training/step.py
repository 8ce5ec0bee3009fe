"""One training step.

    sample a batch -> corrupt -> predict (routed) -> loss -> backward -> clip -> optimizer -> EMA

A sample's data, flip, sigma, noise, label drop and token subset are functions of (seed, step, its
index in the global batch) alone: the same after a restart and for any number of processes and
micro-batches.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments.config.model import route_macs, run_cost
from experiments.config.schema import Config
from experiments.data.dataset import Batch, Dataset, SampleOrder
from experiments.data.prefetch import Prefetch
from experiments.diffusion.objectives import create_objective
from experiments.runtime import memory
from experiments.training.alignment import create_alignment
from experiments.training.loss import reduce_loss
from experiments.training.state import TrainingState
from routing import Draws, Route, Routing


class MicroBatch(NamedTuple):
    """What one forward and backward pass of a step takes."""

    batch: Batch
    draws: Draws
    routing: Routing | None
    share: float = 1.0  # of the step's samples
    is_last: bool = True  # of the step: with several processes, gradients are reduced in its pass


class TrainingStep:
    """Takes optimizer steps on this process's rows of the global batch.

    Args:
        config: The run's configuration.
        accelerator: `accelerate.Accelerator`: device, processes.
        dataset: The run's data.
        state: Model, EMA, optimizer and counters, which the steps change.
        precision: fp32 or bf16.
    """

    def __init__(
        self,
        config: Config,
        accelerator: Any,
        dataset: Dataset,
        state: TrainingState,
        precision: str,
    ) -> None:
        self.config, self.accelerator, self.precision = config, accelerator, precision
        self.dataset, self.state, self.model = dataset, state, state.model
        self.device = accelerator.device
        self.objective = create_objective(config.objective)
        self.cost = run_cost(config, self.model.config)
        self.macs = route_macs(config, self.model.config)
        self.order = SampleOrder(config.seed, dataset.size)
        # REPA or SRA
        self.alignment = create_alignment(config, dataset, state, self.objective)
        # REPA's term is at least minus its weight: the loss as a whole may be negative.
        self.least_loss = -config.train.align_weight if self.alignment is not None else 0.0
        self.distributed = accelerator.num_processes > 1
        self.net: Any = self.wrap_model()
        self.local_batch = config.train.batch // accelerator.num_processes
        self.first_row = self.local_batch * accelerator.process_index
        self.micro_batch_size = self.local_batch
        self.prefetched: Iterator[Batch] | None = None

    def run(self) -> None:
        """Take one optimizer step.

        Raises:
            MemoryLimit: Out of memory; the message names a micro-batch to try.
        """
        self.seed_torch()
        self.set_learning_rate()
        try:
            self.train_on(self.micro_batches())
        except (RuntimeError, MemoryError) as error:
            memory.explain(error, self.micro_batch_size)

    def set_learning_rate(self) -> None:
        """Set the learning rate for this step: a linear warm-up, then constant or a cosine."""
        train, step = self.config.train, self.state.step
        for optimizer in self.state.optimizers:
            for group in optimizer.param_groups:
                rate = group["peak_lr"]
                if train.warmup:
                    rate *= min(1.0, (step + 1) / train.warmup)
                if train.schedule == "cosine":
                    rate *= 0.5 * (1 + math.cos(math.pi * step / train.steps))
                if isinstance(group["lr"], Tensor):  # where a CUDA graph reads it
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Split this process's batch of the step into micro-batches."""
        # Rows stay on the CPU: reading them from a GPU would wait for its work.
        rows = torch.arange(self.first_row, self.first_row + self.local_batch)
        if self.prefetched is None:
            batch = self.dataset.batch(self.samples(self.state.step, rows), self.draws(rows))
        else:
            batch = next(self.prefetched)
        route = self.route()
        for start in range(0, self.local_batch, self.micro_batch_size):
            end = min(self.local_batch, start + self.micro_batch_size)
            draws = self.draws(rows[start:end])
            routing = Routing(route, self.config.routing, draws) if route else None
            share, is_last = (end - start) / self.local_batch, end == self.local_batch
            yield MicroBatch(batch.rows(start, end), draws, routing, share, is_last)

    def train_on(self, micro_batches: Iterable[MicroBatch]) -> None:
        """Accumulate the gradients of micro-batches and apply them."""
        total_loss = torch.zeros((), device=self.device)
        for micro_batch in micro_batches:
            with contextlib.nullcontext() if micro_batch.is_last else self.no_sync():
                loss = self.loss(micro_batch) * micro_batch.share
                self.backward(loss)
            total_loss += loss.detach()
        self.update(total_loss)

    def loss(self, micro_batch: MicroBatch) -> Tensor:
        """Return the mean loss of a micro-batch.

        The streams `sigma`, `noise`, `drop` and `teacher` of its random numbers are used here, the
        model uses the rest.
        """
        batch, draws, routing, *_ = micro_batch
        train, model = self.config.train, self.model
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            dropped = draws.uniform("drop", 1)[:, 0] < train.label_drop
            conditions = model.conditions(batch.y, batch.text, dropped)
            time = self.objective.times(draws)
            noise = draws.normal("noise", tuple(batch.x.shape[1:]))
            pair = self.objective.training_pair(batch.x, noise, time)
            inputs = pair.inputs.to(model.dtype)
            output = self.net(inputs, pair.time, **conditions, routing=routing, return_output=True)

            loss_map = self.objective.loss_map(output.sample, pair)
            if output.kept is None and train.loss == "plain":
                loss = loss_map.mean()
            else:  # permanently dropped tokens (MaskDiT), or one loss per route
                loss = reduce_loss(loss_map, output, pair, self.objective, model, train)
            if self.alignment is not None:
                loss = loss + train.align_weight * self.alignment(
                    output, batch.x, noise, time, conditions, draws
                )
        return loss

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss` to those of the parameters."""
        loss.backward()

    def update(self, loss: Tensor) -> None:
        """Apply the gradients, unless loss or gradients are not finite, and update EMA and tally.

        Everything stays on the device: no step waits for a GPU.
        """
        state = self.state
        clip = self.config.train.clip
        if clip is None:  # the norm alone: clipping to infinity would multiply every gradient by 1
            grads = [param.grad for param in state.params if param.grad is not None]
            grad_norm = torch.nn.utils.get_total_norm(grads)
        else:
            grad_norm = torch.nn.utils.clip_grad_norm_(state.params, clip)
        if self.distributed:
            loss = self.accelerator.reduce(loss, "mean")
        bad = ~(torch.isfinite(loss) & torch.isfinite(grad_norm))
        for optimizer in state.optimizers:
            optimizer.found_inf = bad.float()  # type: ignore[attr-defined]
            optimizer.step()  # changes nothing where `found_inf` is 1
            optimizer.zero_grad(set_to_none=True)
        # Without no_grad the EMA would carry an autograd history that grows by 25 KB a step.
        with torch.no_grad():
            torch._foreach_lerp_(state.ema, state.params, 1 - self.config.train.ema)
        tally = state.tally
        tally.loss += torch.where(bad, 0.0, loss)
        tally.grad_norm += torch.where(bad, 0.0, grad_norm)
        tally.finite_steps += ~bad
        tally.bad_steps += bad
        tally.bad_streak.add_(1).mul_(bad)

    # --- randomness, data, processes -------------------------------------------------------------

    def route(self) -> Route:
        """Return the route of this step; it is `none` for a dense one."""
        return self.config.route_schedule.at(self.state.step / self.config.train.steps)

    def batch_macs(self) -> float:
        """Return the forward MACs of this step's global batch on its route."""
        return self.macs(self.route()) * self.config.train.batch

    def draws(self, rows: Tensor, step: int | None = None) -> Draws:
        """Return the random numbers of a step (default: this one) for rows of the global batch."""
        seed = self.config.seed + 1_000_003 * self.state.rollbacks
        return Draws(seed, self.state.step if step is None else step, rows, device=self.device)

    def samples(self, step: int, rows: Tensor) -> Tensor:
        """Return the sample numbers in these rows of the global batch of `step`."""
        return self.order.lookup(step * self.config.train.batch + rows)

    def start_prefetch(self) -> None:
        """Start a thread that reads this process's batches from the current step on."""
        rows = self.first_row + torch.arange(self.local_batch)

        def plan(step: int) -> tuple[Tensor, Draws]:
            return self.samples(step, rows), self.draws(rows, step)

        self.prefetched = iter(Prefetch(self.dataset, plan, self.state.step))

    def seed_torch(self) -> None:
        """Seed torch's own generator from seed, step and rank.

        An external block may use it (dropout), and evaluations must not affect training.
        """
        # The generator itself: torch.manual_seed queries every kind of device, 1 ms a step.
        on_cpu = self.device.type == "cpu"
        seed = torch.default_generator.manual_seed if on_cpu else torch.manual_seed
        seed(
            (self.config.seed * 65_537 + self.state.step) * 4_099
            + self.state.rollbacks * 257
            + self.accelerator.process_index
        )

    def wrap_model(self) -> Any:
        """Return the model, with several processes in DDP."""
        return self.accelerator.prepare_model(self.model) if self.distributed else self.model

    def no_sync(self) -> Any:
        """Return a context in which gradients are not reduced over processes."""
        return self.accelerator.no_sync(self.net) if self.distributed else contextlib.nullcontext()

    def release(self) -> None:
        """Free the memory that only steps need (CUDA graphs), before an evaluation."""
