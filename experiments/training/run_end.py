"""How a run ends: its results, or the last heartbeat after an error or a signal."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.evaluation import trained_model
from experiments.runtime import records, run_folder
from experiments.runtime.errors import Interrupted
from experiments.runtime.files import atomic_write
from experiments.runtime.locks import locked
from experiments.training.run_files import draw_curve
from experiments.training.step import TrainingStep


@contextlib.contextmanager
def owned_folder(folder: Path, steps: int) -> Iterator[None]:
    """Lock the run folder inside the block; write a last heartbeat when that ends with an error."""
    with locked(folder), record_end(folder, steps):
        yield


@contextlib.contextmanager
def record_end(folder: Path, steps: int) -> Iterator[None]:
    """Write a last heartbeat when the block ends with an error.

    Raises:
        RunFolderError: The run folder is gone; whatever failed, this is why.
    """
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
            raise run_folder.lost(folder) from error
        description = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        try:
            write_end(folder, "failed", error=description, steps=steps)
        except OSError:
            # A full disk has no room for a second file, but the heartbeat can be overwritten.
            heartbeat = run_folder.read(folder / "status.json") | {"status": "failed"}
            with contextlib.suppress(OSError):
                (folder / "status.json").write_text(json.dumps(heartbeat))
        raise


def write_end(folder: Path, status: str, **fields: Any) -> None:
    """Write the last heartbeat of a run, unless its folder is gone: this would make it again."""
    if not run_folder.is_lost(folder):
        records.write_status(folder, status, **fields)


def write_results(training_step: TrainingStep, session_seconds: float) -> None:
    """Write the weights, the loss curve and, last, `summary.json`."""
    config, state, cost = training_step.config, training_step.state, training_step.routes.cost
    folder, step = config.folder, state.step
    weights = state.ema_state_dict()
    trained_model.export(
        folder / "model.safetensors", state.model, weights, config, step, state.info
    )
    loss_curve = draw_curve(folder)
    scores = {}
    for line in filter(records.is_score, records.read_jsonl(folder / "scores.jsonl")):
        if line.get("step") == step:
            scores[line["metric"]] = line["value"]
    last_metrics = (records.read_metrics(folder) or [{}])[-1]
    summary = {
        "status": "done",
        "name": config.name,
        "hash": config.hash,
        "backbone": config.backbone["name"],
        "size": config.size,
        "data": config.data["name"],
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
        "scores": scores,
        "loss_curve": loss_curve,
    }
    records.write_status(folder, "done", step=step, steps=config.train.steps)
    atomic_write(folder / "summary.json", json.dumps(summary, indent=1))
