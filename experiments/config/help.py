"""`--help` and `dry=true` of the main command."""

from __future__ import annotations

import textwrap
import timeit
from pathlib import Path
from typing import Any

import yaml

from backbones.cost import Cost
from experiments.config import routes
from experiments.config.compose import options_of, outside_node
from experiments.config.parent import check_parent, split
from experiments.config.schema import CONF, GROUPS, Config
from experiments.data import data_options
from experiments.options.diffusion import options_of as diffusion_options
from experiments.options.evaluation import MetricError, options_for, plan_scores
from experiments.options.fields import ConfigError
from experiments.runtime import console
from experiments.runtime.memory import PROCESS_BYTES, check_fits, out_of_memory, visible_gpus
from experiments.runtime.process_group import process_group
from routing.errors import one_of, suggest

HEAD = """\
Train a diffusion model whose tokens skip blocks (TREAD), sample, score.

  python experiments/run.py backbone=mamba route=2-8   minutes on a laptop
  python experiments/run.py backbone=rwkv route=2-8@0.75 scale=small
  python experiments/run.py backbone=dit size=XL/2 route=auto scale=paper \\
      data.path=LATENTS

The same command again resumes the run, or says that it is done. --dry-run or
dry=true prints what would be trained, where and at what cost.
"""

ROUTES = """\
Routes: blocks from a start to an end, both inclusive, counted from 0.
  none            every block sees every token
  2-8             half of the tokens skip blocks 2..8
  2-8@0.75        three quarters skip
  auto            2--4: from block 2 to the fourth from the end, the paper's
                  guideline
  2--4            a negative end counts from the last block
  '0-4+6-9'       one after the other
  2-8/0.9:none    another route from a share of the steps on: here dense for the
                  last tenth
"""

_BRANCHES = {"route": "routing", "train": "train", "paths": "paths"}

AFTER = """\
Other commands, each with --help:
  experiments/sample.py     images from a run or an exported file
  experiments/evaluate.py   scores of any checkpoint
  experiments/export.py     weights as one small file
  experiments/prepare.py    images to latents
  experiments/bench.py      speed of this machine
  python -m sweeps          many runs, on Slurm or here
  python -m analysis        tables, figures and a report from run folders
"""


def help_text(word: str = "") -> str:
    """Return the help: an overview, a section (`sections`), one name's (data=digits), or all."""
    name, _, value = word.partition("=")
    if name in GROUPS and value:
        one_of(f"--help {name}", value, options_of(name), ConfigError)
        return _option(name, value)
    parts, name = sections(), name.split(".")[0]
    if name in parts:
        return parts[name]
    if word == "all":
        return "\n".join([overview(), *(parts[key] for key in _BRANCHES)])
    if word and "=" not in word:
        guess = suggest(word, parts)
        raise ConfigError(f"no --help {word}{guess}; expected {', '.join(parts)} or all")
    return overview()


def overview() -> str:
    """Return what there is, on a screen or two: examples, groups, the first keys, sections."""
    lines = (f"  {group + '=':<12}{' | '.join(options_of(group))}" for group in GROUPS)
    groups = [textwrap.fill(line, 80, subsequent_indent=" " * 14) for line in lines]
    blocks = _key_blocks()
    return "\n".join(
        [
            HEAD,
            "Groups, type group=name; --help data lists their keys, --help data=digits one's:",
            *groups,
            "\nKeys, their defaults before the scale sets its own, type key=value:",
            *(line for name in ("seed", "log") for line in _reflowed(blocks[name])),
            "\nMore keys: --help route, --help train, --help paths, or all of them: --help all\n",
            AFTER,
        ]
    )


def sections() -> dict[str, str]:
    """Return the text of every section by its name: route, train, paths, and each group."""
    found, blocks = {}, _key_blocks()
    for name, key in _BRANCHES.items():
        about = f"Keys, their defaults before the scale sets its own, type {key}.KEY=value:"
        lines = [about, *_reflowed(blocks[key]), ""]
        found[name] = "\n".join([ROUTES, *lines] if name == "route" else lines)
    return found | {
        group: "\n".join(_option(group, name) for name in options_of(group)) for group in GROUPS
    }


def _option(group: str, name: str) -> str:
    file = CONF / group / f"{name}.yaml"
    if file.exists():
        lines = file.read_text().splitlines()
    else:
        lines = yaml.safe_dump(outside_node(name), sort_keys=False).splitlines()
    return "\n".join([f"{group}={name}", *_reflowed(lines), ""])


def _key_blocks() -> dict[str, list[str]]:
    """Return the lines of config.yaml by the first key of each block."""
    text = (CONF / "config.yaml").read_text()
    # From the first plain key on: the defaults list above it is Hydra's business.
    blocks = text[text.index("seed: 0") :].strip().split("\n\n")
    lines = [block.splitlines() for block in blocks]
    return {next(x for x in block if x[0] != "#").split(":")[0]: block for block in lines}


def _reflowed(lines: list[str]) -> list[str]:
    """Return lines of YAML for 80 columns: indented, comments joined, folded, above their keys."""
    made: list[str] = []
    for line in lines:
        if line.startswith(("name:", "# @package")):  # said above already, and Hydra's business
            made += [""] * bool(made)
            continue
        key, mark, comment = line.partition("# ")
        if mark and made and made[-1].startswith(f"  {key}# ") and not key.strip():
            made[-1] += f" {comment}"
        elif key.strip() and mark:
            indent = key[: len(key) - len(key.lstrip())]
            made += [f"  {indent}# {comment}", f"  {key.rstrip()}"]
        else:
            made.append(f"  {line}".rstrip())
    return [
        textwrap.fill(
            line, 80, subsequent_indent=line[: line.find("# ") + 2], break_on_hyphens=False
        )
        if line.lstrip().startswith("# ")
        else line
        for line in made
    ]


def check_ready(config: Config, processes: int, on_gpu: bool) -> None:
    """Refuse what so many processes, on GPUs or not, would refuse before their first step."""
    config.check_processes(processes, on_gpu)
    data_options.parse(config.data).check_files()
    info = data_options.describe(config.data)
    model = routes.model_arguments(config, info)
    routes.run_cost(config, model)  # which refuses a patch or a decoder that the model cannot have
    if config.init:
        check_parent(config.init, config.objective, model)
    guidance = diffusion_options("guidance", config.guidance)
    checkpoint = getattr(guidance, "checkpoint", None)
    guidance.check(
        conditional=bool(model["num_classes"] or model["text"]),
        null_seen=config.train.label_drop > 0,
        routed=bool(routes.guided_route(config, guidance)),
        fused="fuse" in model,
        weak=checkpoint is not None and bool(split(checkpoint, "guidance.checkpoint=")),
        channels=model["in_channels"],
    )
    routes.check_guided(config, guidance, model)
    sampler = diffusion_options("sampler", config.sampler)
    diffusion_options("objective", config.objective).check_times(sampler.steps, sampler.shift)
    sampler.check_objective(config.objective["name"])
    scored = config.eval["name"] != "none"
    readers = {"train.encoder=probe": config.train.encoder == "probe"}
    if scored:
        options = options_for(config)
        plan_scores(options, info["name"], config.task != "none", {})
        readers["eval.features=[scenes-probe]"] = "scenes-probe" in options.features
    console.check_tracker(config.log)
    for key in ("reference", "inception_weights", "dinov2_weights"):
        path = config.eval.get(key)
        if path and scored and not Path(path).expanduser().is_file():
            raise MetricError(f"eval.{key}={path}: no such file")
    # How large the pictures of latents are, their autoencoder knows.
    height, width = info["shape"][1:]
    for key in (key for key, reads in readers.items() if reads and info["name"] != "latents"):
        if (height, width) != (32, 32):
            raise ConfigError(
                f"{key}: that network reads pictures of 32x32, and those of data={info['name']} "
                f"are {height}x{width}; take data=scenes, or another one"
            )


def dry_run(config: Config) -> None:
    """Print what would be trained, where and at what cost; then refuse what the run would refuse.

    It needs no torch, so that it answers at once, unless there is a latent store to read. With
    `dry=full` it does: the parts are built, the kernels named and a step timed, and the whole
    configuration follows.
    """
    info = data_options.describe(config.data)
    arguments = routes.model_arguments(config, info)
    cost = routes.run_cost(config, arguments)
    train, kernels = config.train, list[str]()
    if full := config.dry == "full":
        import torch

        import backbones
        from experiments.evaluation.pipeline import SamplingPipeline

        # Where it will train: kernels are chosen by the device.
        model = backbones.create(**arguments).to("cuda" if torch.cuda.is_available() else "cpu")
        SamplingPipeline.make(model, config)
        kernels = model.describe()
    # Forward and backward: three times the forward's MACs, two floating-point operations each.
    macs = cost.macs_routed if config.resolved_route != "none" else cost.macs_dense
    work = 6 * macs * train.batch * train.steps
    shape = "x".join(map(str, info["shape"]))
    pieces = train.micro_batch if isinstance(train.micro_batch, int) else train.batch
    known = "there already: it goes on, or is done" if config.folder.exists() else "new"
    lines = [
        *routes.banner_lines(config, cost, kernels),
        f"trains      {train.steps} steps of {train.batch} on {info['name']} ({shape}, "
        f"task {config.task}), {config.objective['name']}, lr {train.lr:g}, {train.precision}; "
        f"scored by eval={config.eval['name']}",
        memory_line(cost, pieces),
        timed_line(config, model) if full else f"compute     {console.big(work)} FLOPs",
        f"run         {config.folder}   ({known}; nothing was trained)",
        *(["", yaml.safe_dump(config.to_dict(), sort_keys=False).rstrip()] if full else []),
    ]
    print("\n".join(lines))
    on_gpu = bool(visible_gpus())
    check_ready(config, process_group().world_size, on_gpu)
    data_options.parse(config.data).check_contents(config.task)
    least = 1 if train.micro_batch == "auto" else pieces
    check_fits(cost, 0 if on_gpu else least)
    if not full:
        print("dry=full adds the whole configuration, the kernels and a timed step")


def memory_line(cost: Cost, samples: int) -> str:
    """Predict the peak memory of a training step: on the GPU, or of the process on a CPU."""
    state = cost.training_bytes(0) / 2**30
    peak, process = cost.training_bytes(samples) / 2**30, PROCESS_BYTES / 2**30
    parts = f"{state:.3g} GB of weights, gradients, moments and EMA, the rest activations"
    if visible_gpus():
        return f"memory      about {peak:.3g} GB of the GPU at the peak: {parts}"
    return (
        f"memory      about {peak + process:.3g} GB at the peak: {process:.3g} GB for Python, "
        f"PyTorch and data, {parts}"
    )


def timed_line(config: Config, model: Any) -> str:
    """Predict the training time from a timed step: some samples of noise, forward and back.

    They are routed as the run starts; the best of three counts.
    """
    import torch

    from experiments.training.precision import resolve_precision
    from routing.rng import Draws

    train, device = config.train, model.positions.device.type
    bf16 = resolve_precision(config, model.positions.device) == "bf16"
    if train.threads:
        torch.set_num_threads(train.threads)
    samples = min(train.batch, 16)
    x = torch.randn(samples, *data_options.describe(config.data)["shape"], device=device)
    t = torch.rand(samples, device=device)
    draws = Draws(config.seed, 0, torch.arange(samples), device=device)
    made = routes.TrainingRoutes(config)
    routing = made.every_step.on(made.schedule.at(0.0), draws)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            loss = model(x, t, routing=routing).float().square().mean()
        loss.backward()
        loss.item()

    with out_of_memory(samples):
        best = min(timeit.repeat(step, number=1, repeat=3))
    took = console.clock(best * train.batch / samples * train.steps)
    return f"time        about {took} to train on this machine, by a timed step"
