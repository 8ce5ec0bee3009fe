"""Checks before any work, shared by a run, its dry run and sweeps."""

from __future__ import annotations

import glob
import importlib.util
import os
import shlex
from pathlib import Path
from typing import Any

from experiments.config.guidance import check_guidance_routes
from experiments.config.identity import with_paths_replaced
from experiments.config.model import model_arguments, run_cost
from experiments.config.parent import check_parent, split
from experiments.config.schema import Config
from experiments.options.evaluation import PUBLISHED, options_for, plan_scores
from experiments.runtime import run_folder
from routing.errors import UserError, require


def check_ready(config: Config, processes: int, on_gpu: bool) -> None:
    """Refuse, before any work, what a run would refuse before its first step.

    Args:
        config: The run.
        processes: Number of processes.
        on_gpu: Whether they run on GPUs.

    Raises:
        UserError: In one sentence.
    """
    _check_runs_folder(config.paths.runs)
    _check_former_name(config)
    config.check_processes(processes, on_gpu)
    config.data.check_files()
    info = config.data.describe()
    model = model_arguments(config, info)
    run_cost(config, model)  # refuses a patch or a decoder that the model cannot have
    if config.init:
        check_parent(config.init, config.objective, model)
    check_sampling(config, model)
    networks = _check_evaluation(config, info)
    _check_weights(config, networks)
    require(
        config.log == "none" or importlib.util.find_spec(config.log),
        f"log={config.log} needs a package that is not installed: pip install {config.log} "
        "(or log=none)",
    )


def _check_runs_folder(runs: str) -> None:
    """Refuse a file where the folder of runs is, or is to be made."""
    folder = Path(runs).expanduser().absolute()
    for path in (folder, *folder.parents):
        if os.path.exists(path):
            require(
                os.path.isdir(path), f"paths.runs={runs}: expected a folder, but {path} is a file"
            )
            return


def _check_former_name(config: Config) -> None:
    """Refuse to train a run anew that an earlier version trained under another name.

    Names held the paths of data and references as they were typed.
    """
    has_paths = config.hashed["data_fingerprint"] != "embedded" or config.eval.path_fingerprints()
    if not has_paths or config.folder.exists():
        return
    former = []
    model, _, _ = config.name.rpartition("-")
    for folder in sorted(config.folder.parent.glob(f"{glob.escape(model)}-????????")):
        for step, checkpoint in run_folder.listed(folder)[-1:]:
            saved = run_folder.read(checkpoint / "state.json").get("hashed") or {}
            if with_paths_replaced(saved, config, config.hashed) == config.hashed:
                former.append((step, folder))
    if former:
        step, folder = max(former)
        raise UserError(
            f"{folder} is this run, at step {step}, under the name of an earlier version, which "
            f"held the paths of the data as typed: mv {shlex.quote(str(folder))} "
            f"{shlex.quote(str(config.folder))} carries it on; move it elsewhere to train anew"
        )


def check_sampling(config: Config, model: dict[str, Any]) -> None:
    """Refuse a sampler or guidance that the run's model cannot have; `model` is its arguments."""
    guidance = config.guidance
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
    config.objective.check_times(config.sampler.steps, config.sampler.shift)
    config.sampler.check_objective(config.objective.name)


def _check_evaluation(config: Config, info: dict[str, Any]) -> set[str]:
    """Refuse scores that the data cannot have; return the feature networks of the run."""
    networks, networks_of_scenes = {config.train.encoder}, []
    if config.train.encoder == "probe":
        networks_of_scenes.append("train.encoder=probe")
    if config.eval.enabled:
        options = options_for(config)
        plan = plan_scores(options, info["name"], config.task != "none", {})
        networks.update(name for name, metrics in plan.items() if metrics)
        if "scenes-probe" in options.features:
            networks_of_scenes.append("eval.features=[scenes-probe]")
        for key in ("reference", "inception_weights", "dinov2_weights"):
            path = getattr(config.eval, key)
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


def _check_weights(config: Config, networks: set[str]) -> None:
    """Refuse published networks, among these feature networks, that the run could not load."""
    published = networks & PUBLISHED
    # Latents without their autoencoder are trained on, and scored elsewhere.
    if not published or config.data.undecodable_reason():
        return
    from experiments.evaluation.published_networks import check_weights  # imports torch

    options = options_for(config)
    for name in sorted(published):
        check_weights(name, options, config.paths.cache)
