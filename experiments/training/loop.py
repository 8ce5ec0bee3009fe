"""The training loop: step, log, save, evaluate, stop on a signal, roll back."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from experiments.config.schema import Config
from experiments.runtime import run_folder, signals
from experiments.runtime.checkpoint_files import newest
from experiments.runtime.console import Console, Progress
from experiments.runtime.errors import Interrupted
from experiments.training.build import build_step
from experiments.training.data_digest import data_digest
from experiments.training.divergence import roll_back
from experiments.training.metrics import MetricsLog
from experiments.training.run_evaluation import Evaluation


class Trainer:
    """Trains one model on one data set.

    Args:
        config: The run's configuration.
        accelerator: `accelerate.Accelerator`: device, processes, trackers.
        console: Where messages and progress go.
        owns_folder: This process has locked the run folder: every write first checks that the
            folder is still there.
    """

    def __init__(
        self, config: Config, accelerator: Any, console: Console, owns_folder: bool = False
    ) -> None:
        self.config, self.accelerator, self.console = config, accelerator, console
        self.folder = config.folder
        self.owns_folder = owns_folder
        step = self.training_step = build_step(config, accelerator, say=console.say)
        self.dataset, self.model, self.state = step.dataset, step.model, step.state
        self.state.data_digest = data_digest(config, accelerator, console)
        self.metrics = MetricsLog(step, console)
        self.evaluation = Evaluation(step, console, self.check_folder)
        self.cpu_group: Any = None
        if accelerator.num_processes > 1:
            # The processes talk about signals from CPU to CPU: no GPU is waited for.
            self.cpu_group = torch.distributed.new_group(backend="gloo")

    def fit(self, steps: int | None = None) -> None:
        """Train to step `steps` (default: `train.steps`); log, save and evaluate on the way.

        Raises:
            Interrupted: A signal asked for a stop; everything is saved.
            Diverged: Too many non-finite steps in a row.
        """
        train, state = self.config.train, self.state
        total = train.steps if steps is None else steps
        self.model.train()
        if self.dataset.reads_disk:
            self.training_step.start_prefetch()
        with self.console.progress("step", total, count=lambda: state.step) as progress:
            if self.evaluation.due():  # cut short by the end of an earlier process
                self.evaluate(progress)
            first_step = state.step + 1
            while state.step < total:
                start_time = time.perf_counter()
                self.training_step.run()
                state.macs += self.training_step.batch_macs()  # of the step just taken
                state.step += 1
                state.seconds += time.perf_counter() - start_time
                if state.step == first_step:
                    progress.leave_out(state.step)

                stop_reason = self.stop_requested()
                if state.step % train.log_every == 0 or state.step == total:
                    self.report(progress)
                is_last = state.step == total  # unless the report has rolled back
                is_saved = state.step % train.save_every == 0 or is_last or stop_reason is not None
                if is_saved:
                    self.save()
                if stop_reason is not None and state.step < total:
                    raise Interrupted(stop_reason, state.step)
                interval = self.evaluation.interval
                if is_last or (interval and state.step % interval == 0):
                    self.evaluate(progress, is_saved)

    def stop_requested(self) -> str | None:
        """Return the signal that any process received, the same on every process."""
        reason = signals.STATE.reason
        if self.cpu_group is not None:
            names = ["", *signals.NAMES]
            code = torch.tensor(names.index(reason or ""))
            torch.distributed.all_reduce(code, torch.distributed.ReduceOp.MAX, self.cpu_group)
            reason = names[int(code)] or None
        return reason

    def evaluate(self, progress: Progress, is_saved: bool = True) -> None:
        """Sample and score what is due at this step and not on disk yet.

        A single process stops between two passes of the sampler when a signal asks for it: the
        step is saved, and the next start repeats the evaluation. Several processes stop together
        after the evaluation.

        Raises:
            Interrupted: A signal asked for a stop; everything is saved.
        """
        start_time = time.monotonic()
        self.training_step.release()
        try:
            with signals.interruptible(self.accelerator.num_processes == 1):
                self.evaluation.run_due()
        except signals.StopRequested as signal:
            if not is_saved:
                self.save()
            raise Interrupted(signal.reason, self.state.step) from None
        progress.paused += time.monotonic() - start_time

    def report(self, progress: Progress) -> None:
        """Write one line of metrics, the heartbeat and the progress bar.

        Raises:
            Diverged: Too many non-finite steps in a row, and no roll-back is left.
        """
        averages = self.metrics.take_averages()
        if averages.bad_streak > self.config.train.max_bad_steps:
            # Bad steps change no weights, but the steps before them may have caused them.
            checkpoint = self.newest_checkpoint(self.state.step - averages.bad_streak)
            roll_back(self.training_step, averages.bad_streak, checkpoint, self.console.say)
            return
        step_seconds = progress.seconds_per_step(self.state.step)
        seconds_per_mac = step_seconds * self.state.step / max(self.state.macs, 1.0)
        evaluation_seconds = self.evaluation.seconds_left(seconds_per_mac)
        if self.accelerator.is_main_process:
            self.check_folder()
        self.metrics.write(averages, progress, step_seconds, evaluation_seconds)

    def save(self) -> None:
        """Write a checkpoint (first process) and wait for it."""
        if self.accelerator.is_main_process:
            self.check_folder()
            self.state.save(self.folder, self.config)
        self.accelerator.wait_for_everyone()

    def resume(self) -> bool:
        """Load the newest intact checkpoint; return whether there was one.

        Raises:
            CheckpointError: It belongs to another configuration; the message says what differs.
        """
        checkpoint = self.newest_checkpoint()
        if checkpoint is not None:
            self.state.load(checkpoint, self.config)
        return checkpoint is not None

    def newest_checkpoint(self, up_to: int | None = None) -> Path | None:
        """Return the newest intact checkpoint, of no later step than `up_to`."""
        with self.accelerator.main_process_first():
            # The first process sets damaged checkpoints aside before the others look.
            return newest(self.folder, self.console.say, up_to)

    def check_folder(self) -> None:
        """Refuse to write to a run folder that was deleted, renamed or replaced.

        Raises:
            RunFolderError: It is not where this run writes.
        """
        if self.owns_folder:
            run_folder.check_present(self.folder)
