"""`--help` and `dry=true` of the main command."""

from __future__ import annotations

from typing import Any

from experiments.config.compose import options_of
from experiments.config.schema import CONF, GROUPS, Config
from experiments.data.specs import describe
from experiments.runtime import console
from experiments.training.routes import TrainingRoutes, model_arguments, run_cost

HEAD = """\
Train a diffusion model whose tokens skip blocks (TREAD), sample from it, score it.

  python experiments/run.py backbone=mamba route=2-8           digits, minutes on a laptop
  python experiments/run.py backbone=rwkv route=2-8@0.75 scale=small
  python experiments/run.py backbone=dit size=XL/2 route=auto scale=paper data.path=LATENTS

The same command again resumes the run, or says that it is done. dry=true prints what would be
trained.
"""

ROUTES = """\
Routes: blocks from a start to an end, both inclusive, counted from 0.
  none            every block sees every token
  2-8             half of the tokens skip blocks 2..8
  2-8@0.75        three quarters skip
  auto            2--4: from block 2 to the fourth from the end, the paper's guideline
  2--4            a negative end counts from the last block
  '0-4+6-9'       one after the other
  2-8/0.9:none    another route from a share of the steps on: here dense for the last tenth
"""

AFTER = """\
Other commands, each with --help:
  experiments/sample.py     images from a run or an exported file
  experiments/evaluate.py   scores of any checkpoint
  experiments/prepare.py    images to latents
  experiments/bench.py      speed of this machine
  python -m sweeps          many runs, on Slurm or here
  python -m analysis        tables, figures and a report from run folders
"""


def help_text() -> str:
    """Return the help: examples, groups, keys with defaults and reasons, route grammar."""
    groups = [f"  {group + '=':<12}{' | '.join(options_of(group)) or '(none)'}" for group in GROUPS]
    lines = (CONF / "config.yaml").read_text().splitlines()
    # From the first plain key on: the defaults list above it is Hydra's business.
    start = lines.index("seed: 0")
    keys = [f"  {line}".rstrip() for line in lines[start:]]
    about = "Keys, their defaults before the scale sets its own, type key=value or group.key=value:"
    files = "Groups (each has keys of its own: experiments/conf/<group>/<name>.yaml):"
    return "\n".join([HEAD, files, *groups, "", ROUTES, about, *keys, "", AFTER])


def facts(config: Config) -> tuple[dict[str, Any], Any]:
    """Return a run's model arguments and cost, without its data and without building it."""
    arguments = model_arguments(config, describe(config.data))
    return arguments, run_cost(config, arguments)


def dry_text(config: Config) -> str:
    """Return config, parameters, FLOPs, predicted memory and time, and the run folder."""
    import torch
    import yaml

    import backbones
    from experiments.training.session import banner_lines

    arguments, cost = facts(config)
    with torch.device("meta"):
        kernels = backbones.create(**arguments).describe()
    train = config.train
    # Forward and backward: three times the forward's MACs, two floating-point operations each.
    work = (
        6
        * (cost.macs_routed if config.resolved_route != "none" else cost.macs_dense)
        * train.batch
        * train.steps
    )
    pieces = train.micro_batch if isinstance(train.micro_batch, int) else train.batch
    state, memory = cost.training_bytes(0), cost.training_bytes(pieces)
    lines = [
        yaml.safe_dump(config.to_dict(), sort_keys=False).rstrip(),
        "",
        *banner_lines(config, cost, kernels),
        f"memory      about {memory / 2**30:.3g} GB at the peak: {state / 2**30:.3g} GB of "
        "weights, gradients, moments and EMA,"
        " the rest activations",
        _time_line(config, arguments, work),
        f"run         {config.folder}   (nothing was trained: dry=true)",
    ]
    return "\n".join(lines)


def _time_line(config: Config, arguments: dict[str, Any], work: float) -> str:
    """Predict the training time: from a timed step where one takes a moment, else from FLOPs."""
    import torch

    from experiments.runtime.memory import keep_freed_memory

    train = config.train
    if not torch.cuda.is_available():
        keep_freed_memory()  # as the run will
    if train.threads:
        torch.set_num_threads(train.threads)
    peak = matmul_flops()
    by_flops = 2 * work / peak
    how = (
        f"{console.big(work)} FLOPs at half of the {console.big(peak)}FLOP/s of its matmuls "
        "just now"
    )
    samples = min(train.batch, 16)
    if by_flops / train.steps * samples / train.batch > 1.0:
        return f"time        about {console.clock(by_flops)} to train on this machine: {how}"
    # Small tensors never come near the peak: time what will run.
    step = step_seconds(config, arguments, samples) * train.batch / samples
    return (
        f"time        about {console.clock(step * train.steps)} to train on this machine, by a "
        f"timed step; {how} would take {console.clock(by_flops)}"
    )


def step_seconds(config: Config, arguments: dict[str, Any], samples: int) -> float:
    """Time the forward and backward pass of a few samples of noise, routed as the run starts."""
    import time

    import torch

    import backbones
    from routing.rng import Draws

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = backbones.create(**arguments).to(device)
    x = torch.randn(samples, *describe(config.data)["shape"], device=device)
    t = torch.rand(samples, device=device)
    routes, best = TrainingRoutes(config), float("inf")
    for step in range(3):
        start = time.perf_counter()
        draws = Draws(config.seed, step, torch.arange(samples, device=device), device=device)
        with torch.autocast(device, torch.bfloat16, enabled=config.train.precision == "bf16"):
            loss = model(x, t, routing=routes.training(draws, 0.0)).float().square().mean()
        loss.backward()
        loss.item()
        best = min(best, time.perf_counter() - start)
    return best


def matmul_flops() -> float:
    """Measure the FLOP/s of fp32 matmuls on this device (a fraction of a second)."""
    import time

    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    side = 4096 if device == "cuda" else 768
    a = torch.randn(side, side, device=device)
    best = 0.0
    for _ in range(6):
        start = time.perf_counter()
        (a @ a).sum().item()
        best = max(best, 2 * side**3 / (time.perf_counter() - start))
    return best
