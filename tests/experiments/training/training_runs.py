"""Runs in this process for the tests of training."""

import torch
from small import small

from experiments import components
from experiments.runtime import run_folder
from experiments.runtime.console import Console
from experiments.training.loop import Trainer


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
    batch, draws, routing, *_ = next(step.micro_batches())
    outputs, net, alignment = [], step.net, step.alignment
    step.net = lambda *args, **options: outputs.append(net(*args, **options)) or outputs[-1]
    loss = step.batch_loss(batch, draws, routing)
    step.net, step.alignment = net, None
    plain = step.batch_loss(batch, draws, routing)
    step.alignment = alignment
    return float((loss - plain).detach()), outputs[0], batch, draws


def assert_resumes_bit_for_bit(folder, words):
    """Compare a run of six steps with one that stopped after three and was resumed; return the first."""
    straight = make_run(small(folder / "straight", *words))
    straight.fit()
    stopped = make_run(small(folder / "stopped", *words))
    stopped.fit(3)
    resumed = make_run(small(folder / "stopped", *words))
    resumed.state.load(run_folder.step_folder(resumed.folder, 3), resumed.config.hashed())
    resumed.fit()
    assert resumed.state.step == straight.state.step == 6
    expected = straight.state.params + straight.state.ema
    for one, other in zip(expected, resumed.state.params + resumed.state.ema, strict=True):
        assert torch.equal(one, other)
    return straight
