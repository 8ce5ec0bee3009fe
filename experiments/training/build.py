"""From a configuration to the parts of a run: processes, data, objective, model, cost."""

from __future__ import annotations

import os
from typing import Any

import torch

import backbones
from experiments.config.schema import Config
from experiments.data.dataset import Dataset, create
from experiments.runtime.memory import check_fits, keep_freed_memory
from experiments.training.routes import model_arguments, run_cost
from routing.errors import UserError


def make_accelerator(config: Config) -> Any:
    """Return this run's processes (one, or those of torchrun or Slurm): an `Accelerator`.

    Raises:
        UserError: The batch cannot be split over the processes.
    """
    from accelerate import Accelerator

    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    options: dict[str, Any] = {"cpu": not torch.cuda.is_available()}
    if config.log != "none":
        options.update(log_with=config.log, project_dir=str(config.folder))
    accelerator = Accelerator(**options)
    if accelerator.device.type == "cpu":
        keep_freed_memory()
    world = accelerator.num_processes
    if config.train.batch % world:
        raise UserError(
            f"train.batch={config.train.batch} cannot be split over {world} processes: "
            f"try train.batch={max(1, round(config.train.batch / world)) * world}"
        )
    if config.train.tf32 and torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")
    return accelerator


def make_dataset(config: Config, device: torch.device | str = "cpu") -> Dataset:
    """Return the run's data set."""
    return create(config.data, task=config.task, device=device)


def describe_data(dataset: Dataset) -> dict[str, Any]:
    """Return what sampling needs to know of a data set, JSON-able; it travels with the weights."""
    return {
        "name": dataset.name,
        "shape": list(dataset.shape),
        "num_classes": dataset.num_classes,
        "class_names": list(dataset.class_names),
        "text": list(dataset.text) if dataset.text else None,
        "sigma_data": dataset.sigma_data,
        "fingerprint": dataset.fingerprint,
        **dataset.describe(),
    }


def make_model(config: Config, info: dict[str, Any]) -> backbones.Backbone:
    """Return the model, initialised from the seed alone (the same for every route).

    Raises:
        UserError: Conditioning that the data do not have, options that do not fit, or a model that
            no memory here holds.
    """
    if config.task == "class" and not info["num_classes"]:
        raise UserError(f"task=class: data={info['name']} has no classes; type task=none")
    if config.task == "text" and not info["text"]:
        raise UserError(
            f"task=text: data={info['name']} has no captions; type task=class or data=scenes"
        )
    arguments = model_arguments(config, info)
    world, micro = max(1, int(os.environ.get("WORLD_SIZE", "1"))), config.train.micro_batch
    samples = 1 if micro == "auto" else int(micro or config.train.batch // world)
    check_fits(
        run_cost(config, arguments),
        0 if torch.cuda.is_available() else samples,
        "a smaller size=, backbone.depth=, backbone.width= or train.micro_batch=",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = backbones.create(**arguments)
    model.stack.fp32_after = config.routing.fp32_after
    model.stack.checkpoint = config.routing.checkpoint
    return model


def compile_blocks(model: backbones.Backbone, **options: Any) -> None:
    """Compile each block; all share one cache, with a graph for each number of tokens and scan.

    Args:
        model: Its blocks are compiled in place.
        **options: Of `torch.compile`.
    """
    torch._dynamo.config.recompile_limit = max(8, 4 * model.depth)
    for block in model.stack.blocks:
        block.compile(**options)
