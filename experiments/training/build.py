"""From a configuration to a training step: data, model, state, precision and micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from experiments import components
from experiments.config.schema import Config
from experiments.data.dataset import Dataset
from experiments.runtime.processes import gather
from experiments.training.cuda_graphs import GraphedTrainingStep, reason_against
from experiments.training.micro_batch import set_micro_batch_size
from experiments.training.precision import resolve_precision
from experiments.training.state import TrainingState
from experiments.training.step import TrainingStep


def build_step(
    config: Config,
    accelerator: Any,
    dataset: Dataset | None = None,
    say: Callable[[str], None] = print,
) -> TrainingStep:
    """Return the training step of a run, at its initialisation.

    Args:
        config: The run's configuration.
        accelerator: `accelerate.Accelerator`: device, processes.
        dataset: Data in place of the run's own (benchmarks).
        say: Prints a line, where CUDA graphs cannot be used.
    """
    device = accelerator.device
    if dataset is None:
        dataset = components.make_dataset(config, device)
    info = components.describe_data(dataset)
    model = components.make_model(config, info).to(device)
    state = TrainingState(model, config.train, info)
    # All processes train in the precision of the first.
    precision = gather(resolve_precision(config, device))[0]
    step = create_step(config, accelerator, dataset, state, precision, say=say)
    if config.train.compile == "blocks":
        components.compile_blocks(model.stack.blocks)
        if step.alignment is not None and step.alignment.blocks is not None:
            components.compile_blocks(step.alignment.blocks)
    set_micro_batch_size(step)
    return step


def create_step(
    config: Config,
    accelerator: Any,
    dataset: Dataset,
    state: TrainingState,
    precision: str,
    say: Callable[[str], None] = print,
) -> TrainingStep:
    """Return the training step that `train.graphs` asks for.

    `auto` means graphs on CUDA with one process. Where graphs are asked for and cannot be recorded,
    `say` gets one line with the reason, and the steps run without.
    """
    option, processes = config.train.graphs, accelerator.num_processes
    if option is False or (option == "auto" and accelerator.device.type != "cuda"):
        return TrainingStep(config, accelerator, dataset, state, precision)
    reason = reason_against(config, processes)
    if reason is not None:
        say(f"CUDA graphs off: {reason}")
        return TrainingStep(config, accelerator, dataset, state, precision)
    if processes > 1:
        say("train.graphs=true with several processes has not been tested on several GPUs")
    return GraphedTrainingStep(config, accelerator, dataset, state, precision, say=say)
