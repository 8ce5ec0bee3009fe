"""How a run ends: its results, or the last heartbeat after an error or a signal."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.evaluation import trained_model
from experiments.runtime import records, run_folder
from experiments.runtime.errors import Interrupted
from experiments.runtime.files import atomic_path, atomic_write
from experiments.runtime.locks import locked
from experiments.training.divergence import has_diverged
from experiments.training.step import TrainingStep


@contextlib.contextmanager
def owned_folder(folder: Path, steps: int) -> Iterator[None]:
    """Lock the run folder inside the block; write a last heartbeat when that ends with an error.

    Raises:
        RunFolderError: The run folder is gone; whatever failed, this is why.
    """
    with locked(folder):
        try:
            yield
        except Interrupted as stop:
            status = "stopped" if stop.reason == "SIGINT" else "preempted"
            write_end(folder, status, step=stop.step, steps=steps, error=stop.reason)
            text = f"{stop.reason}: saved step {stop.step}; run the same command again to resume"
            raise Interrupted(stop.reason, stop.step, text) from None
        except KeyboardInterrupt:
            write_end(folder, "stopped", steps=steps, error="SIGINT")
            raise
        except run_folder.RunFolderError:
            raise
        except BaseException as error:
            if run_folder.is_lost(folder):
                raise run_folder.RunFolderError(folder) from error
            write_failure(folder, error, steps)
            raise


def write_failure(folder: Path, error: BaseException, steps: int) -> None:
    """Write the last heartbeat of a run that failed."""
    description = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
    try:
        write_end(folder, "failed", error=description, steps=steps)
    except OSError:
        # A full disk has no room for a second file, but the heartbeat can be overwritten.
        heartbeat = run_folder.read(folder / "status.json") | {"status": "failed"}
        with contextlib.suppress(OSError):
            (folder / "status.json").write_text(json.dumps(heartbeat))


def write_end(folder: Path, status: str, **fields: Any) -> None:
    """Write the last heartbeat of a run, unless its folder is gone: this would make it again."""
    if not run_folder.is_lost(folder):
        records.write_status(folder, status, **fields)


def write_results(training_step: TrainingStep, session_seconds: float) -> None:
    """Write the weights and, last, `summary.json`."""
    config, state, cost = training_step.config, training_step.state, training_step.cost
    folder, step = config.folder, state.step
    weights = state.ema_state_dict()
    trained_model.export(
        folder / "model.safetensors", state.model, weights, config, step, state.info
    )
    scores = {line["metric"]: line["value"] for line in records.read_scores(folder, step)}
    metrics = records.read_metrics(folder)
    last_metrics = (metrics or [{}])[-1]
    summary = {
        "status": "done",
        "name": config.name,
        "hash": config.hash,
        "backbone": config.backbone.name,
        "size": config.size,
        "data": config.data.name,
        "data_fingerprint": state.info["fingerprint"],
        "task": config.task,
        "route": config.resolved_route,
        "scale": config.scale,
        "seed": config.seed,
        "precision": training_step.precision,
        "step": step,
        "params": cost.params,
        "macs_dense": cost.macs_dense,
        "macs_routed": cost.macs_routed,
        "macs_dense_no_attention": cost.macs_dense_no_attention,
        "macs_routed_no_attention": cost.macs_routed_no_attention,
        "macs": state.macs,
        "wall_s": round(state.seconds, 1),
        "session_s": round(session_seconds, 1),
        "images_per_s": last_metrics.get("images_per_s"),
        "loss": last_metrics.get("loss"),
        "skipped": last_metrics.get("skipped"),
        "diverged": has_diverged([line.get("loss") for line in metrics], training_step.least_loss),
        "scores": scores,
    }
    records.write_status(folder, "done", step=step, steps=config.train.steps)
    atomic_write(folder / "summary.json", json.dumps(summary, indent=1))


def draw_curve(folder: Path, say: Callable[[str], object]) -> None:
    """Draw `loss.png`; where that fails, say why in one line: the run has ended and stays done."""
    try:
        _draw_curve(folder)
    # Anything: matplotlib's import reads the user's MPLBACKEND and matplotlibrc, saving needs room.
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        say(f"warning: {folder / 'loss.png'} could not be drawn ({type(error).__name__}: {reason})")


def _draw_curve(folder: Path) -> None:
    """Draw `loss.png` from `metrics.jsonl`."""
    from matplotlib import style
    from matplotlib.figure import Figure

    steps, losses = [], []
    for entry in records.read_metrics(folder):
        if entry.get("loss") is not None:
            steps.append(entry["step"])
            losses.append(entry["loss"])
    if not steps:
        return
    # Not the user's matplotlibrc: with text.usetex, LaTeX refuses the underscores of the name.
    with style.context("default"):
        figure = Figure(figsize=(6, 3.2), layout="constrained")
        axes = figure.subplots()
        if len(steps) < 20:  # a moving average of so few points lags behind them
            axes.plot(steps, losses, "o-", linewidth=0.8, clip_on=False, label="logged")
        else:
            axes.plot(steps, losses, linewidth=0.8, color="#bbbbbb", label="logged")
            smooth = moving_average(losses)
            axes.plot(steps, smooth, linewidth=1.6, label="moving average", color="#0072b2")
        if min(losses) > 0 and max(losses) / min(losses) > 5:
            axes.set_yscale("log")
        axes.set(xlabel="step", ylabel="training loss", xlim=(0, max(steps)))
        axes.set_title(folder.name, fontsize=8)
        axes.legend(frameon=False, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        with atomic_path(folder / "loss.png") as temporary:
            figure.savefig(temporary, dpi=150)


def moving_average(values: Sequence[float], decay: float = 0.7) -> list[float]:
    """Return the exponential moving average; weights sum to 1, so that the first has no excess."""
    averages = []
    total = weight = 0.0
    for value in values:
        total, weight = decay * total + value, decay * weight + 1
        averages.append(total / weight)
    return averages
