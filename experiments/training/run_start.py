"""The first messages, checks and files of a run that starts or resumes."""

from __future__ import annotations

import json

import torch
import yaml

from experiments.config.model import banner_lines
from experiments.data.data_options import contents_lines
from experiments.evaluation import scoring
from experiments.evaluation.pipeline import SamplingPipeline
from experiments.runtime import records
from experiments.runtime.environment import environment
from experiments.runtime.files import atomic_write
from experiments.training.cuda_graphs import GraphedTrainingStep
from experiments.training.loop import Trainer
from experiments.training.precision import record_precision, slow_bf16


def print_start(trainer: Trainer, resumed: bool) -> None:
    """Print model and cost, the run folder, device and sampler, and warnings about them."""
    config, console, step = trainer.config, trainer.console, trainer.training_step
    lines = banner_lines(config, step.cost, trainer.model.describe())
    dataset = trainer.dataset
    lines += contents_lines(dataset.sizes, dataset.class_names, config.task)
    if left_out := config.data.left_out():
        lines.append(f"left out    {left_out}")
    if trainer.state.data_digest:
        lines.append(f"digest      {trainer.state.data_digest[:16]} of the data's files")
    console.say("\n".join(lines))
    status = f"resumed at step {trainer.state.step}"
    if not resumed:
        status = "new; rerun to resume"
        if config.init:
            status += f"; weights from {config.init}"
    console.say(f"run         {trainer.folder}   ({status})")
    device_type, threads = step.device.type, torch.get_num_threads()
    device = f"{trainer.accelerator.num_processes} x {device_type}, {threads} thread"
    if threads > 1:
        device += "s"
    device += f", {step.precision}"
    if config.train.precision == "auto":
        device += " (train.precision=auto)"
    if isinstance(step, GraphedTrainingStep):
        device += ", CUDA graphs"
    if device_type == "cpu" and torch.backends.mps.is_available():
        device += "   (this Mac's GPU is untested: ACCELERATE_TORCH_DEVICE=mps tries it)"
    console.say(f"device      {device}")
    sampling = trainer.evaluation.describe()
    if sampling:
        console.say(f"sampler     {sampling}")
    if config.train.micro_batch == "auto" and step.micro_batch_size < step.local_batch:
        console.say(
            f"micro-batch {step.micro_batch_size}: the largest that fits; {step.local_batch} "
            "samples are accumulated"
        )
    warning = slow_bf16(config, step.device)
    if warning is not None:
        console.say(warning)
    console.say()


def check_evaluation(trainer: Trainer) -> None:
    """Refuse a sampler, guidance or score that this run cannot have, before it trains.

    Scores that lack something (weights, a reference) are announced here as well.
    """
    config, console, dataset = trainer.config, trainer.console, trainer.dataset
    SamplingPipeline.make(trainer.model, config)
    if not config.eval.enabled or trainer.state.step >= config.train.steps:
        return
    if not dataset.can_decode:  # there is still a model to train, and to score elsewhere
        console.say(f"no pictures and no scores in this run: {dataset.cannot_decode}")
        return
    with console.progress("score networks"):
        notes = scoring.check(config, dataset, trainer.training_step.device)
    for note in notes:
        console.once(note)


def write_running(trainer: Trainer) -> None:
    """Write the first heartbeat."""
    records.write_status(
        trainer.folder, "running", step=trainer.state.step, steps=trainer.config.train.steps
    )


def write_start(trainer: Trainer) -> None:
    """Write `config.yaml` and `env.json`; drop what earlier starts wrote beyond this step.

    Nothing is refused from here on: only now may a finished run change.
    """
    config, folder = trainer.config, trainer.folder
    (folder / "summary.json").unlink(missing_ok=True)
    records.cut_records(folder, trainer.state.step)
    atomic_write(folder / "config.yaml", yaml.safe_dump(config.to_dict(), sort_keys=False))
    atomic_write(folder / "env.json", json.dumps(environment(), indent=1))
    record_precision(config, trainer.training_step.precision)
