"""Checks before any work, shared by a run, its dry run and sweeps; and what a dry run prints."""

from __future__ import annotations

import timeit
from pathlib import Path
from typing import Any

import yaml

from backbones.cost import Cost
from experiments.config import routes
from experiments.config.parent import check_parent, split
from experiments.config.schema import Config
from experiments.data import data_options
from experiments.options.evaluation import options_for, plan_scores
from experiments.options.guidance import GUIDANCE
from experiments.options.objective import OBJECTIVES
from experiments.options.roles import ConfigError, parse_named
from experiments.options.sampler import SAMPLERS
from experiments.runtime import console
from experiments.runtime.memory import PROCESS_BYTES, check_fits, out_of_memory, visible_gpus
from experiments.runtime.process_group import process_group


def check_ready(config: Config, processes: int, on_gpu: bool) -> None:
    """Refuse, before any work, what a run would refuse before its first step.

    Args:
        config: The run.
        processes: Number of processes.
        on_gpu: Whether they run on GPUs.

    Raises:
        UserError: In one sentence.
    """
    config.check_processes(processes, on_gpu)
    data_options.parse(config.data).check_files()
    info = data_options.describe(config.data)
    model = routes.model_arguments(config, info)
    routes.run_cost(config, model)  # refuses a patch or a decoder that the model cannot have
    if config.init:
        check_parent(config.init, config.objective, model)
    _check_sampling(config, model)
    _check_evaluation(config, info)
    console.check_tracker(config.log)


def _check_sampling(config: Config, model: dict[str, Any]) -> None:
    guidance = parse_named(GUIDANCE, "guidance", config.guidance)
    checkpoint = getattr(guidance, "checkpoint", None)
    guidance.check_model(
        conditional=bool(model["num_classes"] or model["text"]),
        null_class_trained=config.train.label_drop > 0,
        routed=bool(routes.guided_route(config, guidance)),
        fused="fuse" in model,
        weak_model=checkpoint is not None and bool(split(checkpoint, "guidance.checkpoint=")),
        channels=model["in_channels"],
    )
    routes.check_guided(config, guidance, model)
    sampler = parse_named(SAMPLERS, "sampler", config.sampler)
    objective = parse_named(OBJECTIVES, "objective", config.objective)
    objective.check_times(sampler.steps, sampler.shift)
    sampler.check_objective(objective.name)


def _check_evaluation(config: Config, info: dict[str, Any]) -> None:
    networks_of_scenes = []
    if config.train.encoder == "probe":
        networks_of_scenes.append("train.encoder=probe")
    if config.eval["name"] != "none":
        options = options_for(config)
        plan_scores(options, info["name"], config.task != "none", {})
        if "scenes-probe" in options.features:
            networks_of_scenes.append("eval.features=[scenes-probe]")
        for key in ("reference", "inception_weights", "dinov2_weights"):
            path = config.eval.get(key)
            if path and not Path(path).expanduser().is_file():
                raise ConfigError(f"eval.{key}={path}: no such file")
    height, width = info["shape"][1:]
    # Only their autoencoder knows the size of the images behind latents.
    if networks_of_scenes and info["name"] != "latents" and (height, width) != (32, 32):
        raise ConfigError(
            f"{networks_of_scenes[0]}: expected data of 32x32 pixels such as data=scenes, "
            f"data={info['name']} has {height}x{width}"
        )


def dry_run(config: Config) -> None:
    """Print what would be trained, where and at what cost; then run the checks of the run.

    With `dry=full` the model is built, its kernels are named and a step is timed, and the whole
    configuration follows.
    """
    info = data_options.describe(config.data)
    arguments = routes.model_arguments(config, info)
    cost = routes.run_cost(config, arguments)
    train = config.train
    model = _build(config, arguments) if config.dry == "full" else None
    shape = "x".join(str(size) for size in info["shape"])
    samples = train.micro_batch if isinstance(train.micro_batch, int) else train.batch
    state = "exists: it would be resumed, or has finished" if config.folder.exists() else "new"
    lines = [
        *routes.banner_lines(config, cost, model.describe() if model else []),
        f"trains      {train.steps} steps of {train.batch} on {info['name']} ({shape}, "
        f"task {config.task}), {config.objective['name']}, lr {train.lr:g}, {train.precision}; "
        f"scored by eval={config.eval['name']}",
        _memory_line(cost, samples),
    ]
    if model is not None:
        lines.append(_timed_line(config, model))
    else:
        # Forward and backward: three times the forward's MACs, two floating-point operations each.
        macs = cost.macs_routed if config.resolved_route != "none" else cost.macs_dense
        lines.append(f"compute     {console.big(6 * macs * train.batch * train.steps)} FLOPs")
    lines.append(f"run         {config.folder}   ({state}; nothing was trained)")
    if model is not None:
        lines += ["", yaml.safe_dump(config.to_dict(), sort_keys=False).rstrip()]
    print("\n".join(lines))
    on_gpu = bool(visible_gpus())
    check_ready(config, process_group().world_size, on_gpu)
    data_options.parse(config.data).check_contents(config.task)
    least = 1 if train.micro_batch == "auto" else samples
    check_fits(cost, 0 if on_gpu else least)
    if model is None:
        print("dry=full adds the whole configuration, the kernels and a timed step")


def _memory_line(cost: Cost, samples: int) -> str:
    """Predict the peak memory of a training step: on the GPU, or of the process on a CPU."""
    state = cost.training_bytes(0) / 2**30
    peak, process = cost.training_bytes(samples) / 2**30, PROCESS_BYTES / 2**30
    parts = f"{state:.3g} GB of weights, gradients, moments and EMA, the rest activations"
    if visible_gpus():
        return f"memory      about {peak:.3g} GB of the GPU at the peak: {parts}"
    return (
        f"memory      about {peak + process:.3g} GB at the peak: {process:.3g} GB for Python, "
        f"PyTorch and data, {parts}"
    )


def _build(config: Config, arguments: dict[str, Any]) -> Any:
    """Build the model where it will train, since kernels are chosen by the device."""
    import torch

    import backbones
    from experiments.evaluation.pipeline import SamplingPipeline

    model = backbones.create(**arguments).to("cuda" if torch.cuda.is_available() else "cpu")
    SamplingPipeline.make(model, config)
    return model


def _timed_line(config: Config, model: Any) -> str:
    """Predict the training time from the best of three timed steps on noise."""
    import torch

    from routing.rng import Draws

    train, device = config.train, model.positions.device.type
    if train.threads:
        torch.set_num_threads(train.threads)
    samples = min(train.batch, 16)
    x = torch.randn(samples, *data_options.describe(config.data)["shape"], device=device)
    t = torch.rand(samples, device=device)
    draws = Draws(config.seed, 0, torch.arange(samples), device=device)
    training_routes = routes.TrainingRoutes(config)
    routing = training_routes.every_step.on(training_routes.schedule.at(0.0), draws)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=train.precision == "bf16"):
            loss = model(x, t, routing=routing).float().square().mean()
        loss.backward()
        loss.item()

    with out_of_memory(samples):
        seconds = min(timeit.repeat(step, number=1, repeat=3))
    estimate = console.clock(seconds * train.batch / samples * train.steps)
    return f"time        about {estimate} to train on this machine, from a timed step"
