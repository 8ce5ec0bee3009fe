"""What a dry run tries on this machine: it builds the model, times a step, finds the precision."""

from __future__ import annotations

import timeit
from typing import Any

import torch

import backbones
from experiments.config.schema import Config
from experiments.evaluation.pipeline import SamplingPipeline
from experiments.runtime.console import clock
from experiments.runtime.memory import out_of_memory
from experiments.training.precision import resolve_precision
from routing.rng import Draws
from routing.routed_pass import Routing


def training_device() -> torch.device:
    """Return the device on which a run would train here."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def build(config: Config, arguments: dict[str, Any]) -> backbones.Backbone:
    """Build the model where it will train, since kernels are chosen by the device."""
    model = backbones.create(**arguments).to(training_device())
    SamplingPipeline.make(model, config)
    return model


def time_line(config: Config, model: backbones.Backbone) -> str:
    """Predict the training time from the best of three timed steps on noise."""
    train, device = config.train, model.positions.device.type
    if train.threads:
        torch.set_num_threads(train.threads)
    samples = min(train.batch, 16)
    x = torch.randn(samples, *config.data.describe()["shape"], device=device)
    t = torch.rand(samples, device=device)
    draws = Draws(config.seed, 0, torch.arange(samples), device=device)
    precision = resolve_precision(config, model.positions.device)
    route = config.route_schedule.at(0.0)
    routing = Routing(route, config.routing, draws) if route else None

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
            loss = model(x, t, routing=routing).float().square().mean()
        loss.backward()
        loss.item()

    with out_of_memory(samples):
        seconds = min(timeit.repeat(step, number=1, repeat=3))
    estimate = clock(seconds * train.batch / samples * train.steps)
    return f"time        about {estimate} to train on this machine, from a timed step"
