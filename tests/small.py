"""Runs small enough for a test: four narrow blocks on real digits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from experiments.config.compose import load
from experiments.config.schema import Config

ROOT = Path(__file__).resolve().parents[1]

SMALL = (
    "data=digits",
    "backbone.depth=4",
    "backbone.width=32",
    "train.batch=8",
    "train.warmup=2",
    "train.log_every=2",
    "train.save_every=3",
    "train.sample_every=0",
    "train.final_samples=false",
    "train.steps=6",
    "sampler.steps=2",
    "eval=none",
)


def overrides(runs: Path, *more: str) -> list[str]:
    """Return the overrides of a small run below `runs`; later ones win."""
    words = [*SMALL, f"paths.runs={runs}", *more]
    return list({word.partition("=")[0]: word for word in words}.values())


def small(runs: Path, *more: str) -> Config:
    """Return the configuration of a small run below `runs`."""
    return load(overrides(runs, *more))


def make_model_and_data(config: Config):
    """Return a run's model and data set; an untrained model answers zero, this one does not."""
    import torch

    from experiments import components

    dataset = components.make_dataset(config)
    model = components.make_model(config, components.describe_data(dataset))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model, dataset


def random_backbone(family="dit", depth=4, **options):
    """Return a narrow model with random weights everywhere, so that labels and tokens matter."""
    import torch

    import backbones

    torch.manual_seed(0)
    options = {"num_classes": 5, "in_channels": 2, "input_size": 4, **options}
    model = backbones.create(family, "T/1", depth=depth, width=32, heads=2, **options)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    return model.eval()


def command(*arguments: str) -> list[str]:
    """Return the real command line of a run."""
    return [sys.executable, str(ROOT / "experiments" / "run.py"), *arguments]


def two_ranks(*words: str) -> list[str]:
    """Return the command that starts a script on two ranks."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *words]


def run(*arguments: str, timeout: float = 300, **options) -> subprocess.CompletedProcess:
    """Run the real command and return what it printed."""
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=timeout, **options)
