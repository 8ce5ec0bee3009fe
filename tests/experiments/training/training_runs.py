"""Runs in this process for the tests of training."""

import torch
from safetensors.torch import load_file

from experiments import components
from experiments.runtime.console import Console
from experiments.training.loop import Trainer
from experiments.training.step import TrainingStep


def weights(folder):
    """Return the exported weights of a run."""
    return load_file(folder / "model.safetensors")


def equal_tensors(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def after_each_step(monkeypatch, look):
    """Call `look(training_step)` after each training step."""
    run = TrainingStep.run
    monkeypatch.setattr(TrainingStep, "run", lambda step: (run(step), look(step)))


def first_loss(run):
    """Return the loss of a run's first micro-batch."""
    return run.training_step.loss(next(run.training_step.micro_batches()))


def make_run(config):
    return Trainer(config, components.make_accelerator(config), Console(quiet=True))


def perturbed(run):
    """Give a run random weights everywhere and another EMA: its gates are zero at first, and hide the rest."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter, average in zip(run.state.params, run.state.ema, strict=True):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
            average.copy_(parameter + 0.05 * torch.randn(parameter.shape, generator=generator))
    return run


def alignment_term(step):
    """Return the first step's weighted alignment loss, and of its pass the output, the data and the random numbers."""
    micro_batch = next(step.micro_batches())
    outputs, net, alignment = [], step.net, step.alignment
    step.net = lambda *args, **options: outputs.append(net(*args, **options)) or outputs[-1]
    loss = step.loss(micro_batch)
    step.net, step.alignment = net, None
    plain = step.loss(micro_batch)
    step.alignment = alignment
    return float((loss - plain).detach()), outputs[0], micro_batch.batch, micro_batch.draws
