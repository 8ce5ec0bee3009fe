"""Evaluations of a run: sample pictures of fixed seeds, scores, the loss curve."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from experiments.evaluation.headline import one_line
from experiments.evaluation.heldout_loss import NOISY_INPUTS
from experiments.evaluation.pictures import image_grid, save_gif, save_png
from experiments.evaluation.pipeline import SamplingPipeline
from experiments.evaluation.sampling_options import describe_options
from experiments.evaluation.scoring import score
from experiments.runtime import console, records
from experiments.training.step import TrainingStep

COLUMNS = 8
# Previews show that a run learns: half of each row, by Euler's method in few steps.
PREVIEW_COLUMNS, PREVIEW_STEPS = 4, 8
PICTURES, SCORES = "pictures", "scores"
# What an evaluation of pictures consists of: a preview, and after the last step a final picture.
PREVIEW, FINAL = "preview", "final samples"


class Evaluation:
    """Samples and scores of a run's EMA weights: every so many steps, and after the last one.

    Args:
        step: Has the run's configuration, data and state.
        console: Where messages go.
        check_folder: Called before each write; raises if the run folder is gone.
    """

    def __init__(
        self, step: TrainingStep, console: console.Console, check_folder: Callable[[], None]
    ) -> None:
        config, dataset = step.config, step.dataset
        self.config, self.dataset, self.state = config, dataset, step.state
        self.folder = config.folder
        self.accelerator, self.console, self.check_folder = step.accelerator, console, check_folder
        # Kinds of evaluation and every how many steps; 0: after the last step only.
        self.intervals = {PICTURES: config.train.sample_every}
        if config.eval.enabled and dataset.can_decode:
            self.intervals[SCORES] = config.eval.every
        # An evaluation is due at multiples of this only (0: at none), and after the last step.
        self.interval = math.gcd(*self.intervals.values())
        # Durations in this process, where there was something to do.
        self.seconds: dict[str, list[float]] = {PREVIEW: [], FINAL: [], SCORES: []}

    def describe(self) -> str:
        """Return the samplers and the guidance of pictures and scores; empty without either."""
        if not self.dataset.can_decode or not (self._has_previews or SCORES in self.intervals):
            return ""
        guidance = self.config.guidance
        guided = "unguided" if guidance.name == "none" else describe_options(guidance)
        text = f"{describe_options(self.config.sampler)}, {guided}"
        if self._has_previews:
            preview = self._preview_sampler
            text += f" (previews: {preview['name']} steps={preview['steps']})"
        return text

    def due(self) -> list[str]:
        """Return the kinds of evaluation that belong to the current step.

        `run_due` skips what is on disk already: after a restart, everything that a kill cut short
        is done once and completely.
        """
        step = self.state.step
        if step >= self.config.train.steps:  # beyond it where more were trained before
            return list(self.intervals)
        due = []
        for kind, interval in self.intervals.items():
            if step and interval and step % interval == 0:
                due.append(kind)
        return due

    def run_due(self) -> None:
        """Do the evaluations of the current step that are not on disk yet, and time them."""
        for kind in self.due():
            if kind == PICTURES:
                self._pictures()
                continue
            start_time = time.monotonic()
            if self._scores():
                self.seconds[SCORES].append(time.monotonic() - start_time)

    def seconds_left(self, seconds_per_mac: float) -> float:
        """Return how long the evaluations from this step on will take, this step's included.

        A kind that has not been timed yet is predicted from its multiply-accumulates, at a third of
        `seconds_per_mac`, those of a training step: it has no backward pass.
        """
        step, last_step, total = self.state.step, self.config.train.steps - 1, 0.0
        for kind, interval in self.intervals.items():
            count = 1  # after the last step
            if interval and 0 < step <= last_step:
                count += last_step // interval - (step - 1) // interval
            if kind == PICTURES and self.config.train.final_samples:
                total += self._mean_seconds(FINAL, seconds_per_mac)
            if kind == SCORES or self._has_previews:
                part = PREVIEW if kind == PICTURES else SCORES
                total += count * self._mean_seconds(part, seconds_per_mac)
        return total

    def _mean_seconds(self, part: str, seconds_per_mac: float) -> float:
        """Return the mean duration of this part of an evaluation so far, or its prediction."""
        durations = self.seconds[part]
        if durations:
            return sum(durations) / len(durations)
        return self._macs[part] * seconds_per_mac / 3

    @cached_property
    def _macs(self) -> dict[str, float]:
        """Multiply-accumulates of each part of an evaluation, all of them dense passes."""
        model, config = self.state.model, self.config
        final = SamplingPipeline.make(model, config).cost()
        preview = SamplingPipeline.make(model, config, self._preview_sampler).cost()
        rows = self._picture_rows if self.dataset.can_decode else 0
        metrics, scores = config.eval.metrics, 0.0
        if set(metrics) - {"heldout_loss"}:  # which needs no samples
            scores += config.eval.samples * final.macs
        if "heldout_loss" in metrics:
            # A dense and a routed pass of each image, about as expensive.
            scores += 2 * NOISY_INPUTS * final.macs / max(1, final.passes)
        return {
            PREVIEW: PREVIEW_COLUMNS * rows * preview.macs,
            FINAL: COLUMNS * rows * final.macs,
            SCORES: scores,
        }

    @property
    def _preview_sampler(self) -> dict[str, Any]:
        steps = min(PREVIEW_STEPS, self.config.sampler.steps)
        return {"name": "euler", "steps": steps}

    def _pictures(self) -> None:
        """Write the preview `samples/step-*.png`; at the end `samples/final.png`, `progress.gif`.

        Previews come from a cheap sampler, under the run's guidance; the final picture comes from
        the run's own sampler with the same seeds. Those that exist already stay.
        """
        folder, step = self.folder / "samples", self.state.step
        is_last = step >= self.config.train.steps
        with_final = is_last and self.config.train.final_samples
        preview_path, final_path = folder / f"step-{step:08d}.png", folder / "final.png"
        gif_path = self.folder / "progress.gif"
        needed_paths = [preview_path] if self._has_previews else []
        if is_last and self._has_previews:
            needed_paths.append(gif_path)
        if with_final:
            needed_paths.append(final_path)
        elif is_last and self.accelerator.is_main_process:
            final_path.unlink(missing_ok=True)  # from an earlier step
        if all(path.exists() for path in needed_paths):
            return
        if not self.dataset.can_decode:
            if is_last:
                self.console.say(f"no sample pictures: {self.dataset.cannot_decode}")
            return
        preview = self._samples(PREVIEW, PREVIEW_COLUMNS, self._preview_sampler)
        final = self._samples(FINAL, COLUMNS) if with_final else None
        if not self.accelerator.is_main_process:
            return
        self.check_folder()
        folder.mkdir(exist_ok=True)
        if is_last:  # pictures of fewer steps: a kill from here on must not leave them
            final_path.unlink(missing_ok=True)
            gif_path.unlink(missing_ok=True)
        save_png(image_grid(preview, columns=PREVIEW_COLUMNS), preview_path)
        if final is not None:
            save_png(image_grid(final, columns=COLUMNS), final_path)
        if is_last:
            save_gif(sorted(folder.glob("step-*.png")), gif_path)

    @property
    def _has_previews(self) -> bool:
        """Whether this run writes previews: on request, and always beside a final picture."""
        return self.config.train.sample_every > 0 or self.config.train.final_samples

    @property
    def _picture_rows(self) -> int:
        """Rows of a picture, one per class."""
        classes = self.state.model.num_classes
        return min(classes, 10) if classes else 4

    def _samples(self, part: str, columns: int, sampler: Any = None) -> torch.Tensor:
        """Return pictures of fixed seeds from the EMA, one row per class: uint8 (n, 3, H, W).

        The time that this takes counts for `part`, which is also what the progress display says.
        """
        start_time = time.monotonic()
        model, device = self.state.model, self.accelerator.device
        rows = self._picture_rows
        seeds = torch.arange(rows * COLUMNS).view(rows, COLUMNS)[:, :columns].flatten()
        labels = torch.arange(rows).repeat_interleave(columns) if model.num_classes else None
        text = self.dataset.prompts(seeds).text if model.text is not None else None
        with self.state.ema_weights(), self.console.progress(part):
            pipeline = SamplingPipeline.make(model, self.config, sampler)
            pipeline.batch_progress = self.console.part_of(1)
            samples = pipeline.generate(seeds, labels, text, batch=len(seeds), device=device)
            pictures = self.dataset.to_pixels(samples.to(device)).cpu()
        self.seconds[part].append(time.monotonic() - start_time)
        return pictures

    def _scores(self) -> bool:
        """Append this step's scores to `scores.jsonl`; return False if all are there already."""
        path, step = self.folder / "scores.jsonl", self.state.step
        # Rank 0 decides, and truncates the file: other ranks may see an older version of it, and
        # all have to agree, since scoring is a collective call.
        is_done = self.accelerator.is_main_process and self._are_scores_complete(path)
        if self.accelerator.gather(torch.tensor([is_done], device=self.accelerator.device))[0]:
            return False
        with self.state.ema_weights() as model:
            scores = score(model, self.config, self.dataset, step=step, console=self.console)
        if self.accelerator.is_main_process and scores:
            self.check_folder()
            self._write_scores(path, [entry.to_dict() for entry in scores])
        return True

    def _are_scores_complete(self, path: Path) -> bool:
        """Return whether this step's scores are on disk; remove them if only some are."""
        step = self.state.step
        previous = [entry for entry in records.read_jsonl(path) if entry.get("step") == step]
        intact = all(map(records.is_score, previous))
        if previous and intact and len(previous) == previous[0].get("of"):
            return True
        if previous:
            records.cut_jsonl(path, step - 1)
        return False

    def _write_scores(self, path: Path, scores: list[dict[str, Any]]) -> None:
        step = self.state.step
        records.append_jsonl(path, [{**entry, "of": len(scores)} for entry in scores])
        if self.config.log != "none":
            values = {entry["metric"]: entry["value"] for entry in scores}
            self.accelerator.log(values, step=step)
        if step < self.config.train.steps:  # those of the last step are shown as a table
            self.console.say(f"step {step}:  {one_line(scores)}")
