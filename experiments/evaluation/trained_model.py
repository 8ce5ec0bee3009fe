"""Trained models: the weights file of a finished run, and models loaded from runs and files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from backbones import Backbone
from backbones.ops import native
from backbones.parsing import json_of
from backbones.sizes import BackboneError
from backbones.weights.files import read_safetensors, save_tensors
from experiments.config.schema import Config
from experiments.runtime.checkpoint_files import (
    FORMAT,
    IO_ERRORS,
    MALFORMED,
    CheckpointError,
    read,
    reason,
    unreadable,
    verify,
)
from experiments.runtime.files import atomic_path
from experiments.runtime.run_folder import listed, open_folder
from routing.errors import UserError, require


@dataclass(frozen=True)
class TrainedModel:
    """A model ready for sampling."""

    model: Backbone  # in eval mode, on the device asked for
    config: Config  # the run's configuration
    step: int  # optimizer steps of the weights
    source: str  # the file or checkpoint they were loaded from
    info: dict[str, Any]  # description of the data set: shape, classes, ... (`describe_data`)


def export(
    path: Path,
    model: Backbone,
    weights: Mapping[str, torch.Tensor],
    config: Config,
    step: int,
    info: Mapping[str, Any],
) -> None:
    """Write `model.safetensors`: weights, with config and model arguments as metadata.

    Raises:
        CheckpointError: The file cannot be written, for example because the disk is full.
    """
    metadata = {
        "format": FORMAT,
        "config": json.dumps(config.to_dict()),
        "model": json.dumps(model.config),
        "data": json.dumps(dict(info)),
        "step": json.dumps(step),
    }
    with atomic_path(path) as temporary:
        try:
            save_tensors(temporary, weights, metadata)
        except IO_ERRORS as error:
            raise CheckpointError(
                f"could not write {path} ({reason(error)}); every checkpoint is intact: free some "
                "space and run the same command again to resume"
            ) from error


def load_model(
    source: str | os.PathLike[str],
    step: int | None = None,
    weights: str = "ema",
    device: str | torch.device | None = None,
    report: Callable[[str], None] | None = None,
) -> TrainedModel:
    """Load a model from a run folder, one of its checkpoints or an exported file.

    Args:
        source: A run folder or a `.safetensors` file written by `export`.
        step: A checkpoint's step; None takes the exported weights, or the newest checkpoint.
        weights: `ema` or `raw` (the optimizer's own; checkpoints only).
        device: Where to put the model; None: CUDA where there is one, else the CPU.
        report: Gets lines about the build of the CPU kernels, which begins here if need be.

    Raises:
        CheckpointError: No such path or step (existing steps are listed), or another format.
    """
    require(weights in ("ema", "raw"), f"weights={weights}: expected ema or raw", CheckpointError)
    path = Path(source).expanduser()
    require(
        path.exists(),
        f"{path} does not exist: give a run folder (runs/...) or a model.safetensors file",
        CheckpointError,
    )
    on_cpu = device is None and not torch.cuda.is_available() or str(device) == "cpu"
    if report is not None and on_cpu:
        native.start_build(report)  # while the weights are read
    wants_export = step is None and weights == "ema"
    if path.is_dir():
        open_folder(path)
        exported_path = path / "model.safetensors"
        if wants_export and exported_path.is_file():
            return _read_export(exported_path, device)
        return _read_checkpoint(path, step, weights, device)
    require(
        wants_export,
        f"{path} is one set of EMA weights: give the run folder to choose a step or raw weights",
        CheckpointError,
    )
    return _read_export(path, device)


def _read_export(path: Path, device: Any) -> TrainedModel:
    try:
        tensors, metadata = read_safetensors(path)
    except BackboneError as error:
        raise CheckpointError(str(error)) from error
    require(
        metadata.get("format") == FORMAT,
        f"{path} has no {FORMAT} metadata: expected weights that this suite exported "
        "(other projects' weights load through backbones.import_weights)",
        CheckpointError,
    )
    state = {}
    try:
        for key in ("config", "model", "data", "step"):
            state[key] = json_of(metadata[key], key)
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"the metadata of {path} is damaged ({error})") from error
    return build_model(state, tensors, str(path), device)


def _read_checkpoint(run: Path, step: int | None, weights: str, device: Any) -> TrainedModel:
    path = _verified_checkpoint(run, step)
    tensors, state = read(path)
    prefix = "ema." if weights == "ema" else "model."
    model_tensors = {}
    for name, tensor in tensors.items():
        if name.startswith(prefix):
            model_tensors[name.removeprefix(prefix)] = tensor
    return build_model(state, model_tensors, str(path), device)


def _verified_checkpoint(run: Path, step: int | None) -> Path:
    """Return the checkpoint of `step`, or the newest one that verifies."""
    try:
        checkpoints = dict(listed(run))
    except OSError as error:
        raise unreadable(run / "checkpoints", error) from error
    if not checkpoints:
        files = " or ".join(sorted(path.name for path in run.glob("*.safetensors"))[:3])
        hint = f", or {files} in it" if files else ""
        raise CheckpointError(
            f"{run} has no checkpoints: pass the folder of a run that has saved one{hint}"
        )
    steps = ", ".join(map(str, checkpoints))
    require(
        step is None or step in checkpoints,
        f"{run} has no checkpoint of step {step}; choose another --step: there are {steps}",
        CheckpointError,
    )
    candidates = [checkpoints[step]] if step is not None else list(reversed(checkpoints.values()))
    problems = []
    for path in candidates:
        problem = verify(path)
        if problem is None:
            return path
        problems.append(problem)
    name = "no checkpoint verifies, the newest" if step is None else f"checkpoint {step}"
    raise CheckpointError(
        f"{run}: {name} is damaged ({problems[0]}); choose another --step: there are {steps}"
    )


def build_model(
    state: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], source: str, device: Any
) -> TrainedModel:
    """Build a model from its description and weights; `source` names both in errors.

    Raises:
        CheckpointError: Description and weights do not fit, weights are not finite, or the device
            cannot be used.
    """
    try:
        config = Config.from_dict(state["config"])
        info, step = dict(state["data"]), int(state["step"])
        if not all(isinstance(name, str) for name in info.get("class_names") or ()):
            raise TypeError("class_names holds no names")
        model = Backbone.from_tensors(dict(state["model"]), tensors, source)
    except UserError as error:
        raise CheckpointError(str(error)) from error
    except MALFORMED as error:
        raise CheckpointError(f"{source} does not describe its model ({error!r})") from error
    for name, parameter in model.named_parameters():
        require(
            torch.isfinite(parameter).all(),
            f"{source} holds weights that are not finite ({name}): the run diverged; take an "
            "earlier step of it, or another run",
            CheckpointError,
        )
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1).to(device).item()  # fails on `meta`, whose tensors have no data
        model = model.to(device)
    except (RuntimeError, AssertionError) as error:
        message = " ".join(str(error).split("\n")[0].split())
        raise CheckpointError(f"device={device} cannot be used ({message}): try cpu") from error
    return TrainedModel(model.eval(), config, step, source, info)
