"""Checks before any work, shared by a run, its dry run and sweeps."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from experiments.config import groups
from experiments.config.guidance import check_guidance_routes
from experiments.config.model import model_arguments, run_cost
from experiments.config.parent import check_parent, split
from experiments.config.schema import Config
from experiments.data.data_options import DataOptions
from experiments.data.registry import parse
from experiments.options.evaluation import PUBLISHED, options_for, plan_scores
from routing.errors import require


def check_ready(config: Config, processes: int, on_gpu: bool) -> DataOptions:
    """Refuse, before any work, what a run would refuse before its first step.

    Args:
        config: The run.
        processes: Number of processes.
        on_gpu: Whether they run on GPUs.

    Returns:
        The options of the data, which have listed a folder of pictures.

    Raises:
        UserError: In one sentence.
    """
    _check_runs_folder(config.paths.runs)
    config.check_processes(processes, on_gpu)
    data = parse(config.data)
    data.check_files()
    info = data.describe()
    model = model_arguments(config, info)
    run_cost(config, model)  # refuses a patch or a decoder that the model cannot have
    if config.init:
        check_parent(config.init, config.objective, model)
    check_sampling(config, model)
    networks = _check_evaluation(config, info)
    _check_weights(config, networks, data)
    require(
        config.log == "none" or importlib.util.find_spec(config.log),
        f"log={config.log} needs a package that is not installed: pip install {config.log} "
        "(or log=none)",
    )
    return data


def _check_runs_folder(runs: str) -> None:
    """Refuse a file where the folder of runs is, or is to be made."""
    folder = Path(runs).expanduser().absolute()
    for path in (folder, *folder.parents):
        if os.path.exists(path):
            require(
                os.path.isdir(path), f"paths.runs={runs}: expected a folder, but {path} is a file"
            )
            return


def check_sampling(config: Config, model: dict[str, Any]) -> None:
    """Refuse a sampler or guidance that the run's model cannot have; `model` is its arguments."""
    guidance = groups.parse("guidance", config.guidance)
    checkpoint = getattr(guidance, "checkpoint", None)
    guidance.check_model(
        conditional=bool(model["num_classes"] or model["text"]),
        null_class_trained=config.train.label_drop > 0,
        routed=bool(guidance.route_of_passes(config.first_route)),
        fused="fuse" in model,
        weak_model=checkpoint is not None and bool(split(checkpoint, "guidance.checkpoint=")),
        channels=model["in_channels"],
    )
    check_guidance_routes(config, guidance, model)
    sampler = groups.parse("sampler", config.sampler)
    objective = groups.parse("objective", config.objective)
    objective.check_times(sampler.steps, sampler.shift)
    sampler.check_objective(objective.name)


def _check_evaluation(config: Config, info: dict[str, Any]) -> set[str]:
    """Refuse scores that the data cannot have; return the feature networks of the run."""
    networks, networks_of_scenes = {config.train.encoder}, []
    if config.train.encoder == "probe":
        networks_of_scenes.append("train.encoder=probe")
    if config.eval["name"] != "none":
        options = options_for(config)
        plan = plan_scores(options, info["name"], config.task != "none", {})
        networks.update(name for name, metrics in plan.items() if metrics)
        if "scenes-probe" in options.features:
            networks_of_scenes.append("eval.features=[scenes-probe]")
        for key in ("reference", "inception_weights", "dinov2_weights"):
            path = config.eval.get(key)
            require(
                not path or Path(path).expanduser().is_file(), f"eval.{key}={path}: no such file"
            )
    height, width = info["shape"][1:]
    # Only their autoencoder knows the size of the images behind latents.
    fits = info["name"] == "latents" or (height, width) == (32, 32)
    require(
        fits or not networks_of_scenes,
        f"{' and '.join(networks_of_scenes)}: expected data of 32x32 pixels such as data=scenes, "
        f"data={info['name']} has {height}x{width}",
    )
    return networks


def _check_weights(config: Config, networks: set[str], data: DataOptions) -> None:
    """Refuse published networks, among these feature networks, that the run could not load."""
    published = networks & PUBLISHED
    # Latents without their autoencoder are trained on, and scored elsewhere.
    if not published or data.undecodable_reason():
        return
    from experiments.evaluation.published_networks import check_weights  # imports torch

    options = options_for(config)
    for name in sorted(published):
        check_weights(name, options, config.paths.cache)
