"""Score a folder of pictures or an .npz, or write reference statistics of them."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.data.dataset import create
from experiments.evaluation.evaluation_record import (
    EVAL_FLAGS,
    SAMPLING_FLAGS,
    Record,
    print_scores,
    refuse_flags,
    write_reference,
)
from experiments.evaluation.images import GRID, Images
from experiments.evaluation.meters import create_meters
from experiments.evaluation.sampling_options import parse_overrides
from experiments.evaluation.scoring import measure
from experiments.options.evaluation import MetricError, options_for_images
from experiments.runtime.console import Console
from experiments.runtime.files import default_cache
from experiments.runtime.processes import share


def evaluate_images(
    args: argparse.Namespace, source: Path, device: torch.device, console: Console
) -> int:
    """Score the images at `source`; return the exit code."""
    data_overrides = []
    if args.data is not None:
        data_overrides = [text for text in args.changes if text.startswith("data.")]
    other_overrides = [text for text in args.changes if text not in data_overrides]
    reason = f" is for sampling from a run, and {source} holds images"
    refuse_flags(args, [*SAMPLING_FLAGS, "split"], reason, other_overrides)
    if "heldout_loss" in (args.metrics or ()):
        raise MetricError(f"heldout_loss is a model's own loss, and {source} holds images")
    images = Images(source)
    if images.path != source:
        console.say(f"images      {images.path}")
    elif (source / GRID).is_file():
        console.say(f"left out    {GRID}, under which sample.py shows its images together")
    n = images.n if args.samples is None else args.samples
    if n > images.n:
        raise MetricError(
            f"{source} holds {images.n} images, fewer than --samples {n}; "
            f"type --samples {images.n} or make more"
        )
    data = {**parse_overrides(data_overrides)["data"], "name": args.data}
    dataset = None if args.data is None else create(data, device=device)
    flags = {name: getattr(args, name) for name in EVAL_FLAGS}
    options = options_for_images(args.data, **{**flags, "samples": n})
    cache = args.cache or default_cache()
    batches = images.batches(share(n))
    if args.write_reference:
        return write_reference(args, options, dataset, cache, batches, source.name, device, console)
    labels = images.labels()
    meters = create_meters(options, dataset, cache, device, labelled=labels is not None)
    labelled_batches = _with_labels(batches, labels, share(n).start)
    scores = measure(meters, labelled_batches, n, console, "score", source=str(source))
    settings: dict[str, Any] = {"source": str(source), "data": args.data}
    if data_overrides:
        settings["data"] = data
    print_scores(source.stem, scores, console)
    if args.out is not None:
        Record.create(args.out, source.stem, settings, options).write(scores, console)
    return 0


def _with_labels(
    batches: Iterable[Tensor], labels: Tensor | None, start: int
) -> Iterator[tuple[Tensor, Tensor | None, None]]:
    """Yield images, their classes if known, and no captions; numbers start at `start`."""
    for images in batches:
        stop = start + len(images)
        yield images, None if labels is None else labels[start:stop], None
        start = stop
