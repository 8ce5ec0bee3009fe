"""What a run does beside training: pictures of the same seeds, scores, the loss curve."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from experiments.config.schema import Config
from experiments.data.dataset import Dataset
from experiments.evaluation.pictures import image_grid, save_gif, save_png
from experiments.evaluation.pipeline import SamplingPipeline
from experiments.evaluation.scoring import score
from experiments.runtime import console
from experiments.runtime.files import atomic_path
from experiments.runtime.run_folder import listed
from experiments.training.state import TrainingState

COLUMNS = 8
# Pictures on the way show that a run learns: half of each row, by Euler's method in few steps.
PREVIEW_COLUMNS, PREVIEW_STEPS = 4, 8


class Evaluation:
    """Samples and scores of a run's EMA weights: every so many steps, and after the last one."""

    def __init__(
        self,
        config: Config,
        dataset: Dataset,
        state: TrainingState,
        folder: Path,
        accelerator: Any,
        console: console.Console,
    ) -> None:
        self.config, self.folder, self.dataset, self.state = config, folder, dataset, state
        self.accelerator, self.console = accelerator, console
        # Refuses to write to a run folder that is gone.
        self.check_folder: Callable[[], None] = lambda: None
        # Seconds that each kind took in this start, where there was something to do.
        self.seconds: dict[Callable[[], bool], list[float]] = {}
        # What is made, and every how many steps; 0: after the last step alone.
        self.every = {self._pictures: config.train.sample_every}
        if config.eval["name"] != "none" and dataset.can_decode:
            self.every[self._scores] = config.eval["every"]

    def due(self) -> list[Callable[[], bool]]:
        """Return what belongs to this step: calls that return False where it is on disk already.

        They are asked again after a restart, so that what a kill cut short is done once and wholly.
        """
        step = self.state.step
        if step >= self.config.train.steps:  # beyond it where fewer are asked for than are saved
            return list(self.every)
        return [make for make, every in self.every.items() if step and every and step % every == 0]

    def run(self, make: Callable[[], bool]) -> None:
        """Do one of the calls that are `due`, and time it."""
        began = time.monotonic()
        if make():
            self.seconds.setdefault(make, []).append(time.monotonic() - began)

    def seconds_left(self, seconds_per_mac: float) -> float:
        """Return how long the evaluations from this step on will take, this step's included.

        A kind that has not been timed yet is predicted from its multiply-accumulates, at a third of
        `seconds_per_mac`, those of a training step: it has no backward pass.
        """
        step, last, total = self.state.step, self.config.train.steps - 1, 0.0
        for make, every in self.every.items():
            count = 1 + (last // every - (step - 1) // every if every and 0 < step <= last else 0)
            if times := self.seconds.get(make):
                total += count * sum(times) / len(times)
            else:
                total += count * self._images[make] * self._image_macs * seconds_per_mac / 3
        return total

    @cached_property
    def _images(self) -> dict[Callable[[], bool], int]:
        """Images that each kind samples."""
        pictures = COLUMNS * self._picture_rows if self.dataset.can_decode else 0
        return {self._pictures: pictures, self._scores: int(self.config.eval.get("samples", 0))}

    @cached_property
    def _image_macs(self) -> float:
        """Multiply-accumulates of one sample, under the run's own sampler and guidance."""
        return SamplingPipeline.make(self.state.model, self.config).cost().macs

    def _pictures(self) -> bool:
        """Write the preview `samples/step-*.png`; at the end `samples/final.png`, `progress.gif`.

        Previews come from a cheap sampler, under the run's guidance; the final picture comes from
        the run's own and repeats their seeds.
        """
        folder, step = self.folder / "samples", self.state.step
        last = step >= self.config.train.steps
        path, final = folder / f"step-{step:08d}.png", folder / "final.png"
        gif = self.folder / "progress.gif"
        if path.exists() and (not last or (final.exists() and gif.exists())):
            return False
        if not self.dataset.can_decode:
            if last:
                self.console.say(f"no sample pictures: {self.dataset.cannot_decode}")
            return False
        steps = min(PREVIEW_STEPS, self.config.sampler.get("steps", PREVIEW_STEPS))
        preview = self._samples(PREVIEW_COLUMNS, {"name": "euler", "steps": steps})
        whole = self._samples(COLUMNS) if last else None
        if not self.accelerator.is_main_process:
            return True
        self.check_folder()
        folder.mkdir(exist_ok=True)
        for old in (final, gif) if last else ():  # of fewer steps: a kill must not leave them
            old.unlink(missing_ok=True)
        save_png(image_grid(preview, columns=PREVIEW_COLUMNS), path)
        if whole is not None:
            save_png(image_grid(whole, columns=COLUMNS), final)
            save_gif(sorted(folder.glob("step-*.png")), gif)
        return True

    @property
    def _picture_rows(self) -> int:
        """Rows of a picture, one per class."""
        classes = self.state.model.num_classes
        return min(classes, 10) if classes else 4

    def _samples(self, columns: int, sampler: Any = None) -> torch.Tensor:
        """Return pictures of fixed seeds from the EMA, one row per class: uint8 (n, 3, H, W)."""
        model, device = self.state.model, self.accelerator.device
        rows = self._picture_rows
        seeds = torch.arange(rows * COLUMNS).view(rows, COLUMNS)[:, :columns].flatten()
        labels = torch.arange(rows).repeat_interleave(columns) if model.num_classes else None
        text = self.dataset.prompts(seeds).text if model.prefix else None
        with self.state.averaged():
            pipeline = SamplingPipeline.make(model, self.config, sampler)
            samples = pipeline.generate(seeds, labels, text, batch=len(seeds), device=device)
        return self.dataset.to_pixels(samples.to(device)).cpu()

    def _scores(self) -> bool:
        """Append this step's scores to `scores.jsonl` unless they stand there whole."""
        path, step = self.folder / "scores.jsonl", self.state.step
        found = [entry for entry in console.read_jsonl(path) if entry.get("step") == step]
        if found and all(map(console.is_score, found)) and len(found) == found[0].get("of"):
            return False
        if found:
            console.cut_jsonl(path, step - 1)
        with self.state.averaged() as model:
            parts = (model, self.config, self.dataset)
            results = score(*parts, step=step, console=self.console)
        if self.accelerator.is_main_process and results:
            self.check_folder()
            entries = [{**entry.to_dict(), "of": len(results)} for entry in results]
            console.append_jsonl(path, entries)
            if self.config.log != "none":
                self.accelerator.log({e["metric"]: e["value"] for e in entries}, step=step)
            text = "  ".join(f"{entry['metric']} {entry['value']:.4g}" for entry in entries)
            self.console.say(f"step {step}: {text}")
        return True


def forget_after(folder: Path, step: int) -> None:
    """Drop checkpoints, lines and pictures beyond `step`, of a lost branch."""
    for later, path in listed(folder):
        if later > step:
            shutil.rmtree(path, ignore_errors=True)
    console.cut_records(folder, step)
    for picture in (folder / "samples").glob("step-*.png"):
        if int(picture.stem.removeprefix("step-")) > step:
            picture.unlink()


def draw_curve(folder: Path) -> str | None:
    """Draw `loss.png` from `metrics.jsonl`; return its name."""
    from matplotlib.figure import Figure

    found = [
        (e["step"], e["loss"]) for e in console.read_metrics(folder) if e.get("loss") is not None
    ]
    if not found:
        return None
    steps, losses = zip(*found, strict=True)
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.subplots()
    if len(steps) < 20:  # a mean over so few lags behind them
        axes.plot(steps, losses, "o-", linewidth=0.8, clip_on=False, label="logged")
    else:
        axes.plot(steps, losses, linewidth=0.8, color="#bbbbbb", label="logged")
        smooth = list(accumulate(losses, lambda mean, loss: 0.7 * mean + 0.3 * loss))
        axes.plot(steps, smooth, linewidth=1.6, label="moving average", color="#0072b2")
    if min(losses) > 0 and max(losses) / min(losses) > 5:
        axes.set_yscale("log")
    axes.set(xlabel="step", ylabel="training loss", xlim=(0, max(steps)))
    axes.set_title(folder.name, fontsize=8)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    with atomic_path(folder / "loss.png") as temporary:
        figure.savefig(temporary, dpi=150)
    return "loss.png"
