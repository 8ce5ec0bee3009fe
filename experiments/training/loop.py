"""The one training loop.

    while step < steps:  draw -> corrupt -> predict (routed) -> loss -> clip -> AdamW -> EMA
                         log | save | sample and score what is due | stop if a signal asked

A sample's data, flip, sigma, noise, label drop and token subset are functions of (seed, step, its
index in the
global batch) alone: the same after a restart and for any number of processes and micro-batches.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from experiments.data import Prefetch
from experiments.runtime import console, signals
from experiments.runtime.command import Interrupted
from experiments.runtime.memory import micro_batches, out_of_memory
from experiments.training import checkpoint, evaluation
from experiments.training.loss import training_loss
from experiments.training.state import State
from routing.errors import UserError
from routing.rng import Draws

if TYPE_CHECKING:
    from experiments.config.schema import Config
    from experiments.data import Batch


class Diverged(UserError):
    """Too many steps in a row with a non-finite loss or gradient."""


class Run(State):
    """One training run: the loop over the state that a checkpoint holds."""

    # --- one step --------------------------------------------------------------------------------

    def learning_rate(self) -> float:
        """Return the rate of the step about to be taken."""
        train = self.config.train
        rate = train.lr * min(1.0, (self.step + 1) / train.warmup) if train.warmup else train.lr
        if train.schedule == "cosine":
            rate *= 0.5 * (1 + math.cos(math.pi * self.step / train.steps))
        return rate

    def draws(self, rows: Tensor, step: int | None = None) -> Draws:
        """Return the random numbers of a step (this one) for these rows of the global batch."""
        seed = self.config.seed + 1_000_003 * self.salt
        return Draws(seed, self.step if step is None else step, rows, device=self.device)

    def one_step(self) -> None:
        """Take one optimizer step on this process's share of the global batch."""
        config, world = self.config.train, self.accelerator.num_processes
        # Torch's own generator, which a block of somebody else's may use (dropout), is a function
        # of seed, step and rank as well: whatever scoring drew from it leaves no trace.
        # The generator itself: torch.manual_seed asks after every kind of device, 1 ms a step.
        seed = (
            torch.default_generator.manual_seed if self.device.type == "cpu" else torch.manual_seed
        )
        seed(
            (self.config.seed * 65_537 + self.step) * 4_099
            + self.salt * 257
            + self.accelerator.process_index
        )
        local = config.batch // world
        first = local * self.accelerator.process_index
        pieces = micro_batches(self, local)
        total = torch.zeros((), device=self.device)
        whole = next(self.ahead) if self.ahead is not None else None
        for position, (low, high) in enumerate(pieces):
            rows = torch.arange(first + low, first + high, device=self.device)
            last = position == len(pieces) - 1
            sync = (
                contextlib.nullcontext()
                if last or world == 1
                else self.accelerator.no_sync(self.net)
            )
            with sync:
                loss = self.loss(rows, whole and whole.rows(low, high)) * ((high - low) / local)
                loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.params, config.clip or math.inf)
        self.update(self.reduce(total), norm)

    def samples(self, step: int, rows: Tensor) -> Tensor:
        """Return which samples stand in these rows of the global batch of `step`."""
        return self.order.lookup(step * self.config.train.batch + rows.cpu())

    def read_ahead(self) -> Iterator[Batch]:
        """Return this process's batches from the current step on, read from disk by a thread."""
        local = self.config.train.batch // self.accelerator.num_processes
        rows = local * self.accelerator.process_index + torch.arange(local)
        return iter(
            Prefetch(
                self.dataset,
                lambda step: (self.samples(step, rows), self.draws(rows, step)),
                self.step,
            )
        )

    def loss(self, rows: Tensor, batch: Batch | None = None) -> Tensor:
        """Return the mean loss of some rows of the global batch, which may have been read ahead."""
        train = self.config.train
        draws = self.draws(rows)
        if batch is None:
            batch = self.dataset.batch(self.samples(self.step, rows), draws)
        routing = self.routes.training(draws, self.step / train.steps)
        bf16 = train.precision == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bf16):
            return training_loss(
                self.net, self.model, self.objective, batch, draws, routing, train, self.encode
            )

    def update(self, loss: Tensor, norm: Tensor) -> None:
        """Apply the gradients unless something is not finite; keep the tally on the device."""
        bad = ~(torch.isfinite(loss) & torch.isfinite(norm))
        self.optimizer.found_inf = bad.float()  # type: ignore[attr-defined]
        self.optimizer.grad_scale = None  # type: ignore[attr-defined]
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        # Without this autograd remembers every average of parameters: 25 KB a step, for good.
        with torch.no_grad():
            torch._foreach_lerp_(self.ema, self.params, 1 - self.config.train.ema)
        good = (~bad).double()
        counted = torch.stack(
            [torch.where(bad, 0.0, loss).double(), torch.where(bad, 0.0, norm).double(), good]
        )
        self.tally[:3] += counted
        self.tally[3] += 1 - good
        self.tally[4] = (self.tally[4] + 1) * (1 - good)

    def reduce(self, value: Tensor) -> Tensor:
        """Return the mean over processes."""
        return (
            self.accelerator.reduce(value, "mean") if self.accelerator.num_processes > 1 else value
        )

    # --- the loop --------------------------------------------------------------------------------

    def fit(self) -> None:
        """Train to the last step; save, sample and score on the way.

        Raises:
            Interrupted: A signal asked for a stop; everything is saved.
            Diverged: Too many non-finite steps in a row.
        """
        train, total = self.config.train, self.config.train.steps
        self.model.train()
        if self.dataset.reads_disk:
            self.ahead = self.read_ahead()
        with self.console.progress("step", total, self.step) as bar:
            self.due(bar)
            while self.step < total:
                began = time.perf_counter()
                try:
                    self.one_step()
                except RuntimeError as error:
                    out_of_memory(error, self.config, self.accelerator.num_processes)
                    raise
                self.step += 1
                self.macs += self.routes.macs((self.step - 1) / total) * train.batch
                self.seconds += time.perf_counter() - began
                reason = self.agreed_stop()
                if self.step % train.log_every == 0 or self.step == total:
                    self.report(bar)
                saved = self.step % train.save_every == 0 or self.step == total or reason
                if saved:
                    self.save()
                if reason and self.step < total:
                    raise Interrupted(reason, self.step)
                self.due(bar, saved=bool(saved))

    def agreed_stop(self) -> str | None:
        """Return the signal that any process got, the same on every process."""
        reason = signals.requested()
        if self.accelerator.num_processes > 1:
            codes = ["", *signals.NAMES]
            mine = torch.tensor([codes.index(reason or "")], device=self.device)
            reason = codes[int(self.accelerator.gather(mine).max())] or None
        return reason

    def report(self, bar: console.Progress) -> None:
        """Write one line of metrics, the heartbeat and the progress; stop a run that diverged."""
        loss, norm, n, bad, streak = self.tally.tolist()
        self.tally[:3] = 0
        if streak > self.config.train.max_bad_steps:
            self.diverged(int(streak))
            return
        loss, norm = (loss / n, norm / n) if n else (float("nan"), float("nan"))
        if self.mean_loss is not None and loss > 4 * self.mean_loss:
            self.spikes += 1
            self.console.say(
                f"loss spike at step {self.step}: {loss:.4g} against a running mean of "
                f"{self.mean_loss:.4g}"
            )
        if n:
            self.mean_loss = loss if self.mean_loss is None else 0.9 * self.mean_loss + 0.1 * loss
        rate = self.step * self.config.train.batch / max(self.seconds, 1e-9)
        entry = {
            "step": self.step,
            "loss": loss if n else None,
            "lr": self.optimizer.param_groups[0]["lr"],
            "grad_norm": norm if n else None,
            "images_per_s": round(rate, 2),
            "time": round(self.seconds, 3),
            "macs": self.macs,
            "skipped": int(bad),
            "spikes": self.spikes,
        }
        eta = self.seconds / self.step * (self.config.train.steps - self.step)
        if self.accelerator.is_main_process:
            console.append_jsonl(self.folder / "metrics.jsonl", [entry])
            console.write_status(
                self.folder,
                "running",
                step=self.step,
                steps=self.config.train.steps,
                eta_s=round(eta),
                images_per_s=entry["images_per_s"],
            )
        if self.config.log != "none":
            self.accelerator.log({k: v for k, v in entry.items() if v is not None}, step=self.step)
        memory = (
            f"  {torch.cuda.max_memory_allocated() / 2**30:.1f} GB"
            if self.device.type == "cuda"
            else ""
        )
        skipped = f"  skipped {int(bad)}" if bad else ""
        bar.update(
            self.step, f"loss {loss:.4f}  grad {norm:.2f}  {rate:.0f} img/s{memory}{skipped}"
        )

    def diverged(self, streak: int) -> None:
        """Roll back if the configuration allows it, else stop with what is known."""
        self.accelerator.wait_for_everyone()
        # Bad steps change no weights, but what leads to them may have: back to before the first.
        before = self.step - streak
        last = checkpoint.newest(self.folder, self.console.say, before)
        if self.salt < self.config.train.rollback and last is not None:
            salt, bad_step = self.salt + 1, self.step
            self.resume(before)
            self.salt = salt
            # Only the streak is of the lost branch; the other counts are those of the checkpoint.
            self.tally[4] = 0
            if self.ahead is not None:
                self.ahead = self.read_ahead()
            if self.accelerator.is_main_process:
                evaluation.forget_after(self)
            self.accelerator.wait_for_everyone()
            self.console.say(
                f"{streak} non-finite steps up to {bad_step}: back to step {self.step} with "
                "other random numbers"
            )
            return
        rows, failed = torch.arange(self.config.train.batch), self.step - 1
        draws, samples = self.draws(rows.to(self.device), failed), self.samples(failed, rows)
        values = self.dataset.batch(samples, draws).x
        holes = samples[~torch.isfinite(values).flatten(1).all(dim=1).cpu()].tolist()
        if holes:
            raise Diverged(
                f"step {self.step}: {streak} steps in a row had a non-finite loss or gradient, and "
                f"{len(holes)} of {len(samples)} samples are not finite themselves (samples "
                f"{', '.join(map(str, holes[:8]))}...): the data hold NaN or infinity; make them "
                "again, or take these samples out"
            )
        times = self.objective.times(draws)
        raise Diverged(
            f"step {self.step}: {streak} steps in a row had a non-finite loss or gradient (times "
            f"{float(times.min()):.4g} to "
            f"{float(times.max()):.4g}, samples {samples[:8].tolist()}...); last good checkpoint: "
            f"{last or 'none'}; "
            f"try train.lr={self.config.train.lr / 3:.1g} or train.clip=1"
        )

    def due(self, bar: console.Progress, saved: bool = True) -> None:
        """Sample and score what this step asks for and no earlier start has finished.

        A signal is answered between two passes of the sampler: the step is saved, and what was cut
        short is done again by the next start. Several processes answer after it, together.

        Raises:
            Interrupted: A signal asked for a stop; everything is saved.
        """
        began = time.monotonic()
        try:
            with signals.answered(self.accelerator.num_processes == 1):
                evaluation.due(self)
        except signals.Asked as asked:
            if not saved:
                self.save()
            raise Interrupted(asked.reason, self.step) from None
        bar.pause(time.monotonic() - began)


def train(config: Config, *, quiet: bool = False) -> Path:
    """Train `config`, or go on where an earlier start stopped; return the run folder.

    Args:
        config: A checked configuration (`experiments.config.load`).
        quiet: Print nothing.

    Raises:
        UserError: Anything a user can mend, in one sentence.
        Interrupted: Stopped by a signal, after saving.
    """
    from experiments.training import session

    return session.run(config, quiet=quiet)
