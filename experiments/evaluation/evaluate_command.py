"""The work of `experiments/evaluate.py`: score a run, or images."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from experiments.evaluation.evaluate_images import evaluate_images
from experiments.evaluation.evaluate_run import evaluate_run
from experiments.options.evaluation import MetricError
from experiments.runtime.console import Console
from experiments.runtime.files import check_replaceable
from experiments.runtime.processes import join, world
from routing.errors import require, suggest


def evaluate(args: argparse.Namespace) -> int:
    """Score what the arguments name, print a table and write the record; return the exit code."""
    source = Path(args.source).expanduser()
    if not source.exists():
        siblings = [path.name for path in source.parent.iterdir()] if source.parent.is_dir() else []
        raise MetricError(
            f"{source} does not exist: expected a run folder, a model.safetensors, "
            f"a folder of pictures or an .npz{suggest(source.name, siblings)}"
        )
    require(
        not args.reference or Path(args.reference).expanduser().is_file(),
        f"--reference {args.reference}: no such file; expected an .npz",
        MetricError,
    )
    args.metrics, args.features = split_names(args.metrics), split_names(args.features)
    require(
        "fid" not in (args.metrics or ()),
        "--metrics fid: type fd, which is FID with --features inception-adm",
        MetricError,
    )
    for path in (args.write_reference, args.write_samples):
        if path is not None:
            check_replaceable(path)  # before minutes of work
    device = torch.device(join())
    console = Console(quiet=bool(world()[0]))
    if _is_run(source):
        return evaluate_run(args, source, device, console)
    return evaluate_images(args, source, device, console)


def split_names(values: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return names typed as `fd,is` or `fd is`, or None for none."""
    if values is None:
        return None
    return tuple(name for name in ",".join(values).split(",") if name)


def _is_run(source: Path) -> bool:
    """Return whether a path is a run folder or exported weights."""
    if source.suffix == ".safetensors":
        return True
    return (source / "config.yaml").exists() or (source / "checkpoints").exists()
