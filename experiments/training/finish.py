"""The files that a finished run writes: weights, loss curve and, last, `summary.json`."""

from __future__ import annotations

import json

from backbones import Cost
from experiments.config.schema import Config
from experiments.evaluation import trained_model
from experiments.runtime import records
from experiments.runtime.files import atomic_write
from experiments.training.run_files import draw_curve
from experiments.training.state import TrainingState


def finish(
    config: Config, state: TrainingState, cost: Cost, session_seconds: float, precision: str
) -> None:
    """Write the weights, the loss curve and, last, `summary.json`."""
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
        "precision": precision,
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
