"""From a configuration to the parts of a run: processes, data, objective, model, cost."""

from __future__ import annotations

import os
from typing import Any

import torch

import backbones
from experiments.config.model import model_arguments, run_cost
from experiments.config.schema import Config
from experiments.data.dataset import Dataset, Device, create
from experiments.runtime.memory import check_fits
from experiments.runtime.process_group import process_group
from experiments.runtime.processes import check_accelerate_device, leave_at_exit
from routing.errors import UserError


def make_accelerator(config: Config) -> Any:
    """Return this run's processes (one, or those of torchrun or Slurm): an `Accelerator`."""
    from accelerate import Accelerator, DistributedDataParallelKwargs

    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    # train.precision alone decides, whatever `accelerate config` wrote down on this machine.
    options: dict[str, Any] = {"cpu": not torch.cuda.is_available(), "mixed_precision": "no"}
    # Gradients are views of the buckets that are reduced, which saves a copy of all of them.
    options["kwargs_handlers"] = [DistributedDataParallelKwargs(gradient_as_bucket_view=True)]
    if config.log != "none":
        options.update(log_with=config.log, project_dir=str(config.folder))
    check_accelerate_device()
    leave_at_exit()
    if config.train.graphs is True and torch.cuda.is_available() and process_group().world_size > 1:
        # As PyTorch documents for DDP in a CUDA graph; read when the process group is created.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    accelerator = Accelerator(**options)
    if config.train.tf32 and torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")
    return accelerator


def open_tracker(config: Config, accelerator: Any) -> None:
    """Open the run in the experiment tracker of `log`."""
    if config.log == "none":
        return
    values = {}
    for key, value in config.to_dict().items():
        values[key] = value if isinstance(value, (int, float, str, bool)) else str(value)
    options = {
        "wandb": {"name": config.name, "dir": str(config.folder)},
        "trackio": {"name": config.name},
    }
    try:
        accelerator.init_trackers(
            "tread-suite", config=values, init_kwargs={config.log: options.get(config.log, {})}
        )
    except Exception as error:
        # Each service fails in its own way: no key, no network, another version.
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(
            f"log={config.log} did not start ({reason}); fix this, or type log=none: the run "
            "folder has the same numbers"
        ) from error


def make_dataset(config: Config, device: Device = "cpu") -> Dataset:
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
    """Return the model, initialised from the seed alone (the same for every route)."""
    arguments = model_arguments(config, info)
    world, micro = process_group().world_size, config.train.micro_batch
    samples = 1 if micro == "auto" else int(micro or config.train.batch // world)
    check_fits(run_cost(config, arguments), 0 if torch.cuda.is_available() else samples)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = backbones.create(**arguments)
    if config.train.residual == "bf16":
        model.residual = torch.bfloat16
    model.stack.fp32_after = config.routing.fp32_after
    model.stack.checkpoint = config.routing.checkpoint
    return model


def compile_blocks(blocks: Any, **options: Any) -> None:
    """Compile each block; all share one cache, with a graph for each number of tokens and scan."""
    if next(blocks.parameters()).device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            get_cpp_compiler()  # fails here without one, not in the first step
        except OSError as error:  # a CXX that is there and may not be run
            raise RuntimeError(f"No working C++ compiler: {error}") from error
    torch._dynamo.config.recompile_limit = max(8, 4 * len(blocks))
    for block in blocks:
        block.compile(**options)
