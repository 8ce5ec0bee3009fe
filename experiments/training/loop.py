"""The one training loop: a step, logging, saving, what is due, stopping, going back.

    while step < steps:  draw -> corrupt -> predict (routed) -> loss -> clip -> AdamW -> EMA
                         log | save | sample and score what is due | stop if a signal asked

A sample's data, flip, sigma, noise, label drop and token subset are functions of (seed, step, its
index in the global batch) alone: the same after a restart and for any number of processes and
micro-batches.
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments import components as build
from experiments.config.routes import TrainingRoutes, run_cost
from experiments.config.schema import Config
from experiments.data.dataset import Batch, Dataset, Prefetch, SampleOrder
from experiments.diffusion import create_objective
from experiments.runtime import console, memory, signals
from experiments.runtime.command import Interrupted
from experiments.runtime.processes import gather
from experiments.training import checkpoint
from experiments.training.cuda_graphs import GraphedSteps
from experiments.training.loss import make_encoder, training_loss
from experiments.training.precision import resolve_precision
from experiments.training.run_evaluation import Evaluation, forget_after
from experiments.training.state import TrainingState
from routing.errors import UserError
from routing.rng import Draws
from routing.stack import Routing


class Diverged(UserError):
    """Too many steps in a row with a non-finite loss or gradient."""


class Trainer:
    """The parts of one training run, on its own data or these, and the loop over its steps."""

    def __init__(
        self,
        config: Config,
        accelerator: Any,
        console: console.Console,
        dataset: Dataset | None = None,
    ) -> None:
        self.config, self.accelerator, self.console = config, accelerator, console
        self.device, world = accelerator.device, accelerator.num_processes
        # All processes train in the precision of the first.
        self.precision = gather(resolve_precision(config, self.device))[0]
        self.dataset = build.make_dataset(config, self.device) if dataset is None else dataset
        info = build.describe_data(self.dataset)
        self.objective = create_objective(config.objective)
        self.model = build.make_model(config, info).to(self.device)
        self.routes = TrainingRoutes(config, self.model.config)
        self.cost = run_cost(config, self.model.config)
        self.encode = None
        if config.train.encoder != "none":
            self.encode = make_encoder(config, self.dataset, self.model.grid, self.device)
        self.state = TrainingState(self.model, config.train, info)
        self.order = SampleOrder(config.seed, self.dataset.size)
        self.ahead: Iterator[Batch] | None = None
        # Refuses to write to a run folder that is gone; set by a session, which owns the folder.
        self.check_folder: Callable[[], None] = lambda: None
        self.local = config.train.batch // world
        self.first = self.local * accelerator.process_index
        self.net: Any = accelerator.prepare_model(self.model) if world > 1 else self.model
        if config.train.compile == "blocks":
            build.compile_blocks(self.model.stack.blocks)

    # --- one step --------------------------------------------------------------------------------

    def one_step(self) -> None:
        """Take one optimizer step on this process's share of the global batch."""
        self.seed_torch()
        self.set_learning_rate()
        batch = next(self.ahead) if self.ahead is not None else None
        if self.config.train.graphs:
            self.graphed_steps(batch)
            return
        total = torch.zeros((), device=self.device)
        for low, high in self.pieces:
            rows = torch.arange(self.first + low, self.first + high)
            with self.apart() if high < self.local else contextlib.nullcontext():
                loss = self.loss(rows, batch and batch.rows(low, high))
                loss = loss * ((high - low) / self.local)
                self.backward(loss)
            total += loss.detach()
        self.update(total)

    def loss(self, rows: Tensor, batch: Batch | None = None) -> Tensor:
        """Return the mean loss of some rows of the global batch."""
        return self.loss_of(*self.drawn(rows, batch))

    def drawn(self, rows: Tensor, batch: Batch | None) -> tuple[Batch, Draws, Routing | None]:
        """Return these rows of the global batch, unless read ahead, their numbers and routes.

        Rows and sample numbers stay on the CPU: asking a GPU for them would wait for its work.
        """
        draws, step = self.draws(rows), self.state.step
        if batch is None:
            batch = self.dataset.batch(self.samples(step, rows), draws)
        route = self.routes.schedule.at(step / self.config.train.steps)
        return batch, draws, self.routes.every_step.on(route, draws)

    def loss_of(self, batch: Batch, draws: Draws, routing: Routing | None) -> Tensor:
        """Return the mean loss of a batch under these random numbers and routes."""
        train = self.config.train
        bf16 = self.precision == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bf16):
            return training_loss(
                self.net, self.model, self.objective, batch, draws, routing, train, self.encode
            )

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss` to the parameters'."""
        loss.backward()

    def update(self, loss: Tensor) -> None:
        """Apply the gradients unless something is not finite; keep the tally on the device."""
        state, optimizer = self.state, self.state.optimizer
        norm = self.clip()
        if self.accelerator.num_processes > 1:
            loss = self.accelerator.reduce(loss, "mean")
        bad = ~(torch.isfinite(loss) & torch.isfinite(norm))
        optimizer.found_inf = bad.float()  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self.average()
        good, wide = (~bad).to(state.tally), state.tally.dtype
        counted = torch.stack(
            [torch.where(bad, 0.0, loss).to(wide), torch.where(bad, 0.0, norm).to(wide), good]
        )
        state.tally[:3] += counted
        state.tally[3] += 1 - good
        state.tally[4] = (state.tally[4] + 1) * (1 - good)

    def clip(self) -> Tensor:
        """Scale the gradients down to `train.clip`, if any; return their norm before it."""
        return torch.nn.utils.clip_grad_norm_(self.state.params, self.config.train.clip or math.inf)

    @torch.no_grad()
    def average(self) -> None:
        """Move the average towards the weights."""
        # Without no_grad autograd remembers every average of parameters: 25 KB a step, for good.
        torch._foreach_lerp_(self.state.ema, self.state.params, 1 - self.config.train.ema)

    @cached_property
    def graphed_steps(self) -> GraphedSteps:
        """The steps as CUDA graphs, once they are asked for."""
        return GraphedSteps(self)

    def set_learning_rate(self) -> None:
        """Give the optimizer the rate of the step about to be taken."""
        for group in self.state.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):  # where a graph reads it
                group["lr"].fill_(self.learning_rate())
            else:
                group["lr"] = self.learning_rate()

    def learning_rate(self) -> float:
        """Return the rate of the step about to be taken."""
        train, step = self.config.train, self.state.step
        rate = train.lr * min(1.0, (step + 1) / train.warmup) if train.warmup else train.lr
        if train.schedule == "cosine":
            rate *= 0.5 * (1 + math.cos(math.pi * step / train.steps))
        return rate

    # --- what a step is made from ----------------------------------------------------------------

    def draws(self, rows: Tensor, step: int | None = None) -> Draws:
        """Return the random numbers of a step (this one) for these rows of the global batch."""
        seed = self.config.seed + 1_000_003 * self.state.rollbacks
        return Draws(seed, self.state.step if step is None else step, rows, device=self.device)

    def samples(self, step: int, rows: Tensor) -> Tensor:
        """Return which samples stand in these rows of the global batch of `step`."""
        return self.order.lookup(step * self.config.train.batch + rows)

    def read_ahead(self) -> Iterator[Batch]:
        """Return this process's batches from the current step on, read from disk by a thread."""
        rows = self.first + torch.arange(self.local)

        def plan(step: int) -> tuple[Tensor, Draws]:
            return self.samples(step, rows), self.draws(rows, step)

        return iter(Prefetch(self.dataset, plan, self.state.step))

    def seed_torch(self) -> None:
        """Make torch's own generator a function of seed, step and rank as well.

        A block of somebody else's may use it (dropout); whatever scoring drew leaves no trace.
        """
        # The generator itself: torch.manual_seed asks after every kind of device, 1 ms a step.
        on_cpu = self.device.type == "cpu"
        seed = torch.default_generator.manual_seed if on_cpu else torch.manual_seed
        seed(
            (self.config.seed * 65_537 + self.state.step) * 4_099
            + self.state.rollbacks * 257
            + self.accelerator.process_index
        )

    def apart(self) -> Any:
        """Return a context in which gradients are not reduced over processes yet."""
        alone = self.accelerator.num_processes == 1
        return contextlib.nullcontext() if alone else self.accelerator.no_sync(self.net)

    @cached_property
    def pieces(self) -> list[tuple[int, int]]:
        """The [low, high) pieces in which this process takes its share of every batch."""
        asked, local = self.config.train.micro_batch, self.local
        size = local if asked == "auto" else min(local, int(asked or local))
        while asked == "auto" and not self.fits(size):
            if size == 1:
                raise memory.MemoryLimit(memory.ONE)
            size = (size + 1) // 2
        if asked == "auto" and size < local:
            self.console.say(
                f"micro-batch {size}: the largest that fits; {local} samples are accumulated"
            )
        return [(low, min(local, low + size)) for low in range(0, local, size)]

    def fits(self, size: int) -> bool:
        """Return whether `size` samples go through the model at once, on every process."""
        if self.device.type == "cpu":
            # Trying would bring the machine down with swapping: predict instead.
            found = self.cost.training_bytes(size) < 0.8 * memory.available_memory()
        else:
            try:
                with self.apart(), memory.out_of_memory(size):
                    self.backward(self.loss(torch.arange(size)))
                found = True
            except memory.MemoryLimit:
                found = False
            self.state.optimizer.zero_grad()
            gc.collect()
            torch.cuda.empty_cache()
        return all(gather(found))

    # --- the loop --------------------------------------------------------------------------------

    @cached_property
    def folder(self) -> Path:
        """The run folder, whose name takes a moment to work out."""
        return self.config.folder

    @cached_property
    def evaluation(self) -> Evaluation:
        """What is sampled and scored on the way."""
        places = (self.folder, self.accelerator, self.console)
        evaluation = Evaluation(self.config, self.dataset, self.state, *places)
        evaluation.check_folder = self.check_folder
        return evaluation

    def fit(self) -> None:
        """Train to the last step; save, sample and score on the way.

        Raises:
            Interrupted: A signal asked for a stop; everything is saved.
            Diverged: Too many non-finite steps in a row.
        """
        train, state, total = self.config.train, self.state, self.config.train.steps
        self.model.train()
        if self.dataset.reads_disk:
            self.ahead = self.read_ahead()
        with self.console.progress("step", total, state.step) as bar:
            if self.evaluation.due():
                self.evaluate(bar)
            while state.step < total:
                began = time.perf_counter()
                try:
                    self.one_step()
                except (RuntimeError, MemoryError) as error:
                    memory.explain(error, self.pieces[0][1])
                route = self.routes.schedule.at(state.step / total)
                state.macs += self.routes.macs(route) * train.batch
                state.step += 1
                state.seconds += time.perf_counter() - began
                reason = self.agreed_stop()
                if state.step % train.log_every == 0 or state.step == total:
                    self.report(bar)
                saved = state.step % train.save_every == 0 or state.step == total or reason
                if saved:
                    self.save()
                if reason and state.step < total:
                    raise Interrupted(reason, state.step)
                if self.evaluation.due():
                    self.evaluate(bar, saved=bool(saved))

    @cached_property
    def hosts(self) -> Any:
        """The processes as a group that talks from CPU to CPU: no GPU is waited for."""
        return torch.distributed.new_group(backend="gloo")

    def agreed_stop(self) -> str | None:
        """Return the signal that any process got, the same on every process."""
        reason = signals.NOW.reason
        if self.accelerator.num_processes > 1:
            codes = ["", *signals.NAMES]
            code = torch.tensor(codes.index(reason or ""))
            torch.distributed.all_reduce(code, torch.distributed.ReduceOp.MAX, self.hosts)
            reason = codes[int(code)] or None
        return reason

    def evaluate(self, bar: console.Progress, saved: bool = True) -> None:
        """Sample and score what this step asks for and no earlier start has finished.

        A signal is answered between two passes of the sampler: the step is saved, and what was cut
        short is done again by the next start. Several processes answer after it, together.

        Raises:
            Interrupted: A signal asked for a stop; everything is saved.
        """
        began = time.monotonic()
        try:
            with signals.answered(self.accelerator.num_processes == 1):
                for make in self.evaluation.due():
                    self.evaluation.run(make)
        except signals.Asked as asked:
            if not saved:
                self.save()
            raise Interrupted(asked.reason, self.state.step) from None
        bar.paused += time.monotonic() - began

    def report(self, bar: console.Progress) -> None:
        """Write one line of metrics, the heartbeat and the progress; stop a run that diverged."""
        state, train = self.state, self.config.train
        loss, norm, n, bad, streak = state.tally.tolist()
        state.tally[:3] = 0
        if streak > train.max_bad_steps:
            self.diverged(int(streak))
            return
        loss, norm = (loss / n, norm / n) if n else (math.nan, math.nan)
        # REPA's term is no smaller than that: the loss as a whole may be negative.
        least = -train.align_weight if self.encode else 0.0
        if state.mean_loss is not None and loss - least > 4 * (state.mean_loss - least):
            state.spikes += 1
            self.console.say(
                f"loss spike at step {state.step}: {loss:.4g} against a running mean of "
                f"{state.mean_loss:.4g}"
            )
        if n:
            last = state.mean_loss
            state.mean_loss = loss if last is None else 0.9 * last + 0.1 * loss
        rate = state.step * train.batch / max(state.seconds, 1e-9)
        entry = {
            "step": state.step,
            "loss": loss if n else None,
            "lr": float(state.optimizer.param_groups[0]["lr"]),
            "grad_norm": norm if n else None,
            "images_per_s": round(rate, 2),
            "time": round(state.seconds, 3),
            "macs": state.macs,
            "skipped": int(bad),
            "spikes": state.spikes,
        }
        step_s = bar.seconds_per_step(state.step)
        evaluations = self.evaluation.seconds_left(step_s * state.step / max(state.macs, 1.0))
        if self.accelerator.is_main_process:
            self.check_folder()
            eta = step_s * (train.steps - state.step) + evaluations
            progress = {"step": state.step, "steps": train.steps, "eta_s": round(eta)}
            speed = {"images_per_s": entry["images_per_s"]}
            console.append_jsonl(self.folder / "metrics.jsonl", [entry])
            console.write_status(self.folder, "running", **progress, **speed)
        if self.config.log != "none":
            self.accelerator.log({k: v for k, v in entry.items() if v is not None}, step=state.step)
        text = f"loss {loss:.4f}  grad {norm:.2f}  {rate:.0f} img/s"
        if self.device.type == "cuda":
            text += f"  {torch.cuda.max_memory_allocated() / 2**30:.1f} GB"
        text += f"  skipped {int(bad)}" if bad else ""
        bar.update(state.step, text, pending=evaluations)

    # --- saving and going back -------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint (first process) and wait for it."""
        if self.accelerator.is_main_process:
            self.check_folder()
            self.state.save(self.folder, self.config)
        self.accelerator.wait_for_everyone()

    def newest(self, up_to: int | None = None) -> Path | None:
        """Return the newest whole checkpoint, up to a step."""
        with self.accelerator.main_process_first():
            # The first process sets damaged checkpoints aside before the others look.
            return checkpoint.newest(self.folder, self.console.say, up_to)

    def resume(self, up_to: int | None = None) -> bool:
        """Go on from the newest whole checkpoint, up to a step; return whether there was one.

        Raises:
            CheckpointError: It belongs to another configuration; the message says what differs.
        """
        found = self.newest(up_to)
        if found is not None:
            self.state.load(found, self.config.hashed())
            # Graphs write to the moments that they were recorded with.
            self.__dict__.pop("graphed_steps", None)
        return found is not None

    def diverged(self, streak: int) -> None:
        """Roll back if the configuration allows it, else stop with what is known."""
        state, train = self.state, self.config.train
        self.accelerator.wait_for_everyone()
        # Bad steps change no weights, but what leads to them may have: back to before the first.
        before = state.step - streak
        last = self.newest(before)
        if state.rollbacks < train.rollback and last is not None:
            rollbacks, bad_step = state.rollbacks + 1, state.step
            self.resume(before)
            state.rollbacks = rollbacks
            # Only the streak is of the lost branch; the other counts are those of the checkpoint.
            state.tally[4] = 0
            if self.ahead is not None:
                self.ahead = self.read_ahead()
            if self.accelerator.is_main_process:
                forget_after(self.folder, state.step)
            self.accelerator.wait_for_everyone()
            self.console.say(
                f"{streak} non-finite steps up to {bad_step}: back to step {state.step} with "
                "other random numbers"
            )
            return
        what = f"step {state.step}: {streak} steps in a row had a non-finite loss or gradient"
        rows, failed = torch.arange(train.batch), state.step - 1
        draws, samples = self.draws(rows, failed), self.samples(failed, rows)
        values = self.dataset.batch(samples, draws).x
        holes = samples[~torch.isfinite(values).flatten(1).all(dim=1).cpu()].tolist()
        if holes:
            raise Diverged(
                f"{what}, and {len(holes)} of {len(samples)} samples are not finite themselves "
                f"(samples {', '.join(map(str, holes[:8]))}...): the data hold NaN or infinity; "
                "make them again, or take these samples out"
            )
        times = self.objective.times(draws)
        raise Diverged(
            f"{what} (times {float(times.min()):.4g} to {float(times.max()):.4g}, samples "
            f"{samples[:8].tolist()}...); last good checkpoint: {last or 'none'}; "
            f"try train.lr={train.lr / 3:.1g} or train.clip=1"
        )
