"""What a run does beside training: pictures of the same seeds, scores, the loss curve."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from experiments.runtime import console
from experiments.runtime.files import atomic_path
from experiments.training import checkpoint

if TYPE_CHECKING:
    from experiments.training.loop import Run

COLUMNS = 8


def due(run: Run) -> None:
    """Sample and score what is due at this step and not on disk yet.

    It is asked again after a restart, so that what a kill cut short is done once and wholly.
    """
    step, train = run.step, run.config.train
    last = step == train.steps
    if step and (last or (train.sample_every and step % train.sample_every == 0)):
        pictures(run, last)
    every = run.config.eval["every"]
    if run.config.eval["name"] == "none" or not run.dataset.can_decode:
        return
    if step and (last or (every and step % every == 0)):
        scores(run)


def forget_after(run: Run) -> None:
    """Drop what stands after the current step: lines, pictures and checkpoints of a lost branch."""
    checkpoint.drop_after(run.folder, run.step)
    console.cut_records(run.folder, run.step)
    for picture in (run.folder / "samples").glob("step-*.png"):
        if int(picture.stem.removeprefix("step-")) > run.step:
            picture.unlink()


def pictures(run: Run, last: bool) -> None:
    """Write `samples/step-*.png`, and at the end `samples/final.png` and `progress.gif`."""
    folder = run.folder / "samples"
    path = folder / f"step-{run.step:08d}.png"
    final = folder / "final.png"
    if path.exists() and (not last or (final.exists() and (run.folder / "progress.gif").exists())):
        return
    if not run.dataset.can_decode:
        if last:
            run.console.say(f"no sample pictures: {run.dataset.cannot_decode}")
        return
    from experiments.sampling.pictures import image_grid, save_gif, save_png

    images = sample_grid(run)
    if not run.accelerator.is_main_process:
        return
    picture = image_grid(images, columns=COLUMNS)
    folder.mkdir(exist_ok=True)
    save_png(picture, path)
    if last:
        save_png(picture, final)
        frames = sorted(folder.glob("step-*.png"))
        save_gif(frames, run.folder / "progress.gif")


def sample_grid(run: Run) -> torch.Tensor:
    """Return pictures of fixed seeds from the EMA, one row per class: uint8 (n, 3, H, W)."""
    from experiments.sampling.pipeline import SamplingPipeline

    classes = run.model.num_classes
    rows = min(classes, 10) if classes else 4
    count = rows * COLUMNS
    seeds = torch.arange(count)
    labels = torch.arange(rows).repeat_interleave(COLUMNS) if classes else None
    text = run.dataset.prompts(torch.arange(count)).text if run.model.prefix else None
    with run.averaged() as model:
        pipeline = SamplingPipeline.make(model, run.config)
        samples = pipeline.generate(seeds, labels, text, batch=count, device=run.device)
    return run.dataset.to_pixels(samples.to(run.device)).cpu()


def scores(run: Run) -> None:
    """Append this step's scores to `scores.jsonl` unless they stand there whole."""
    from experiments.metrics.scoring import score

    path = run.folder / "scores.jsonl"
    found = [entry for entry in console.read_jsonl(path) if entry.get("step") == run.step]
    if found and all(map(console.is_score, found)) and len(found) == found[0].get("of"):
        return
    if found:
        console.cut_jsonl(path, run.step - 1)
    with run.averaged() as model:
        results = score(
            model,
            run.config,
            run.dataset,
            step=run.step,
            samples=run.config.eval["samples"],
            accelerator=run.accelerator,
            console=run.console,
        )
    if run.accelerator.is_main_process and results:
        entries = [{**entry.to_dict(), "of": len(results)} for entry in results]
        console.append_jsonl(path, entries)
        if run.config.log != "none":
            run.accelerator.log({e["metric"]: e["value"] for e in entries}, step=run.step)
        text = "  ".join(f"{entry['metric']} {entry['value']:.4g}" for entry in entries)
        run.console.say(f"step {console.grouped(run.step)}: {text}")


def draw_curve(folder: Path) -> str | None:
    """Draw `loss.png` from `metrics.jsonl`; return its name."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    entries = [e for e in console.read_metrics(folder) if e.get("loss") is not None]
    if not entries:
        return None
    steps, losses = [e["step"] for e in entries], [e["loss"] for e in entries]
    smooth, mean = [], None
    for loss in losses:
        mean = loss if mean is None else 0.7 * mean + 0.3 * loss
        smooth.append(mean)
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, losses, color="#bbbbbb", linewidth=0.8, label="logged")
    dot = "o" if len(steps) == 1 else None  # a line through one point is invisible
    axes.plot(
        steps,
        smooth,
        marker=dot,
        clip_on=dot is None,
        color="#0072b2",
        linewidth=1.6,
        label="moving average",
    )
    if min(losses) > 0 and max(losses) / min(losses) > 5:
        axes.set_yscale("log")
    axes.set(xlabel="step", ylabel="training loss", xlim=(0, max(steps)))
    axes.set_title(folder.name, fontsize=8)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    with atomic_path(folder / "loss.png") as temporary:
        figure.savefig(temporary, dpi=150)
    return "loss.png"
