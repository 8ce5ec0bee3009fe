"""The dry run: prints what would be trained, where and at what cost, and trains nothing."""

from __future__ import annotations

from typing import Any

import yaml

from experiments.config.model import banner_lines, model_arguments, run_cost
from experiments.config.schema import Config
from experiments.preflight import check_ready
from experiments.runtime.console import Console, big
from experiments.runtime.memory import MemoryLimit, check_fits, memory_line, visible_gpus
from experiments.runtime.process_group import process_group


def dry_run(config: Config) -> None:
    """Run the checks of the run, then print what would be trained, where and at what cost.

    With `dry=full` the model is built, its kernels are named and a step is timed, and the whole
    configuration follows.
    """
    on_gpu = bool(visible_gpus())
    check_ready(config, process_group().world_size, on_gpu)
    config.data.check_contents(config.task)
    info = config.data.describe()
    arguments = model_arguments(config, info)
    cost = run_cost(config, arguments)
    train = config.train
    samples = train.micro_batch if isinstance(train.micro_batch, int) else train.batch
    least = 1 if train.micro_batch == "auto" else samples
    warning = ""
    try:
        check_fits(cost, 0 if on_gpu else least)
    except MemoryLimit as error:
        if config.dry == "full":  # which builds the model
            raise
        warning = f"warning     this machine cannot train it: {error}"
    model = None
    precision: str = train.precision
    if config.dry == "full" or precision == "auto":
        from experiments.training import timed_step  # imports torch
    if config.dry == "full":
        model = timed_step.build(config, arguments)
    if precision == "auto":
        chosen = timed_step.resolve_precision(config, timed_step.training_device())
        precision = f"precision auto ({chosen} here)"
    state = "exists: it would be resumed, or has finished" if config.folder.exists() else "new"
    lines = [
        *banner_lines(config, cost, model.describe() if model else []),
        *config.data.contents_lines(config.task),
        *([f"left out    {left_out}"] if (left_out := config.data.left_out()) else []),
        f"{_training_line(config, info)}, {precision}",
    ]
    if train.optimizer == "muon":
        rate = train.lr if train.muon_lr is None else train.muon_lr
        lines.append(f"optimizer   Muon (lr {rate:g}) for linear layers in blocks, AdamW otherwise")
    scores = f"scores      eval={config.eval.name}"
    if not config.eval.enabled and train.final_samples:
        scores += " (sample pictures are another option: train.final_samples=true)"
    lines += [scores, memory_line(cost, samples)]
    if model is not None:
        lines.append(timed_step.time_line(config, model))
    else:
        # Forward and backward: three times the forward's MACs, two floating-point operations each.
        macs = cost.macs_routed if config.resolved_route != "none" else cost.macs_dense
        lines.append(f"compute     {big(6 * macs * train.batch * train.steps)} FLOPs")
    lines.append(f"run         {config.folder}   ({state}; nothing was trained)")
    if model is not None:
        lines += ["", yaml.safe_dump(config.to_dict(), sort_keys=False).rstrip()]
    console = Console()
    console.say("\n".join(lines))
    if warning:
        console.say(warning)
    elif model is None:
        console.say("dry=full adds the whole configuration, the kernels and a timed step")


def _training_line(config: Config, info: dict[str, Any]) -> str:
    """Return steps, data, objective, learning rate and precision."""
    train, objective = config.train, config.objective.name
    prediction = config.objective.network.get("prediction")
    if prediction is not None:  # not the usual one
        objective += f" with {prediction}-prediction"
    shape = "x".join(str(size) for size in info["shape"])
    return (
        f"trains      {train.steps} steps of {train.batch} on {info['name']} ({shape}, "
        f"task {config.task}), {objective}, lr {train.lr:g}"
    )
