"""Metrics of the training loop: `metrics.jsonl`, the heartbeat, the tracker, the progress bar."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from experiments.runtime import console as log
from experiments.runtime import records
from experiments.training.step import TrainingStep


class Averages(NamedTuple):
    """Means over the finite steps since the last line, and counts of non-finite ones."""

    loss: float | None  # None: no step was finite
    grad_norm: float | None
    skipped: int  # non-finite steps of the whole run
    bad_streak: int  # non-finite steps in a row, up to the last one


class MetricsLog:
    """Writes the metrics of a run every `train.log_every` steps."""

    def __init__(self, step: TrainingStep, console: log.Console) -> None:
        self.config, self.accelerator, self.console = step.config, step.accelerator, console
        self.state, self.folder = step.state, step.config.folder
        self.min_loss = step.least_loss

    def take_averages(self) -> Averages:
        """Read the tally of the steps since the last call, and reset their sums."""
        tally = self.state.tally
        loss, grad_norm, count, skipped, bad_streak = tally.values.tolist()
        tally.reset_sums()
        if not count:
            return Averages(None, None, int(skipped), int(bad_streak))
        return Averages(loss / count, grad_norm / count, int(skipped), int(bad_streak))

    def write(
        self,
        averages: Averages,
        progress: log.Progress,
        step_seconds: float,
        evaluation_seconds: float,
    ) -> None:
        """Write one line of metrics, the heartbeat and the progress bar.

        Args:
            averages: Of the steps since the last line.
            progress: The progress bar.
            step_seconds: Duration of the last steps each, without evaluations and kernel builds.
            evaluation_seconds: Predicted duration of the evaluations to come.
        """
        state, train = self.state, self.config.train
        self.count_spike(averages.loss)
        images_per_s = train.batch / max(step_seconds, 1e-9)
        entry = {
            "step": state.step,
            "loss": averages.loss,
            "lr": float(state.optimizers[0].param_groups[0]["lr"]),
            "grad_norm": averages.grad_norm,
            "images_per_s": round(images_per_s, 2),
            "time": round(state.seconds, 3),
            "macs": state.macs,
            "skipped": averages.skipped,
            "spikes": state.spikes,
        }
        if self.accelerator.is_main_process:
            records.append_jsonl(self.folder / "metrics.jsonl", [entry])
            records.write_status(
                self.folder,
                "running",
                step=state.step,
                steps=train.steps,
                eta_s=round(step_seconds * (train.steps - state.step) + evaluation_seconds),
                images_per_s=entry["images_per_s"],
            )
        if self.config.log != "none":
            logged = {key: value for key, value in entry.items() if value is not None}
            self.accelerator.log(logged, step=state.step)
        progress.update(state.step, self.text(averages, images_per_s), pending=evaluation_seconds)

    def count_spike(self, loss: float | None) -> None:
        """Compare the loss with its running mean, and update that."""
        state = self.state
        if loss is None:
            return
        if state.mean_loss is None:
            state.mean_loss = loss
            return
        if loss - self.min_loss > 4 * (state.mean_loss - self.min_loss):
            state.spikes += 1
            self.console.say(
                f"loss spike at step {state.step}: {loss:.4g} against a running mean of "
                f"{state.mean_loss:.4g}"
            )
        state.mean_loss = 0.9 * state.mean_loss + 0.1 * loss

    def text(self, averages: Averages, images_per_s: float) -> str:
        """Return the text of the progress bar."""
        loss = math.nan if averages.loss is None else averages.loss
        grad_norm = math.nan if averages.grad_norm is None else averages.grad_norm
        text = f"loss {loss:.4f}  grad {grad_norm:.2f}  {images_per_s:.0f} img/s"
        if self.state.tally.values.is_cuda:
            text += f"  {torch.cuda.max_memory_allocated() / 2**30:.1f} GB"
        if averages.skipped:
            text += f"  skipped {averages.skipped}"
        return text
