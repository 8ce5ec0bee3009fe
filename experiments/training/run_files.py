"""Files of a run: drop those of later steps on a roll-back, draw the loss curve."""

from __future__ import annotations

import shutil
from itertools import accumulate
from pathlib import Path

from experiments.runtime import records
from experiments.runtime.files import atomic_path
from experiments.runtime.run_folder import listed


def forget_after(folder: Path, step: int) -> None:
    """Delete checkpoints, metrics, scores and pictures of steps after `step` (roll-back)."""
    for checkpoint_step, path in listed(folder):
        if checkpoint_step > step:
            shutil.rmtree(path, ignore_errors=True)
    records.cut_records(folder, step)
    for picture in (folder / "samples").glob("step-*.png"):
        if int(picture.stem.removeprefix("step-")) > step:
            picture.unlink()


def draw_curve(folder: Path) -> str | None:
    """Draw `loss.png` from `metrics.jsonl`; return its name."""
    from matplotlib.figure import Figure

    steps, losses = [], []
    for entry in records.read_metrics(folder):
        if entry.get("loss") is not None:
            steps.append(entry["step"])
            losses.append(entry["loss"])
    if not steps:
        return None
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.subplots()
    if len(steps) < 20:  # a moving average of so few points lags behind them
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
