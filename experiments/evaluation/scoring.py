"""Scores of a model: sample, extract features, compare with the reference.

    conditions and seeds -> generate -> pixels -> features -> moments and rows (merged over
    processes) -> scores

Samples are scored batch by batch and discarded (or kept on disk, to be resumed): 50,000 of them
need no more memory than one batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.config.schema import Config
from experiments.evaluation.heldout_loss import HeldOut, heldout_scores, missing_loss
from experiments.evaluation.meters import create_meters
from experiments.evaluation.pipeline import SamplingPipeline
from experiments.evaluation.sample_batches import (
    ImageBatch,
    SampleStore,
    open_store,
    sample_batches,
)
from experiments.evaluation.sampling_options import describe_options
from experiments.options.evaluation import EvalOptions, Score, options_for
from experiments.runtime.console import Console
from experiments.runtime.files import default_cache
from experiments.runtime.processes import gather_rows, world


def cache_of(config: Config) -> Path:
    """Return the run's cache folder; by default the user's."""
    return Path(config.paths.cache).expanduser() if config.paths.cache else default_cache()


def check(config: Config, dataset: Any, device: torch.device | str = "cpu") -> list[str]:
    """Load networks and references of a run's scores, so that they fail before training.

    Returns:
        Lines for the log, such as the classifier's accuracy on held-out images.
    """
    labelled = config.task != "none"
    meters = create_meters(options_for(config), dataset, cache_of(config), device, labelled)
    return [meter.note for meter in meters if meter.note]


def score(
    model: Any,
    config: Config,
    dataset: Any,
    *,
    step: int | None = None,
    console: Console | None = None,
    **changes: Any,
) -> list[Score]:
    """Sample from a run's model and measure; a collective call.

    The model is scored with the weights it holds: load the EMA's first. `step` is their training
    step, for the record; `changes` are fields of `EvalOptions` in place of the run's own.
    """
    options = options_for(config, **changes)
    pipeline = SamplingPipeline.make(model, config)
    scores, _ = sample_and_score(pipeline, config, dataset, options, step=step, console=console)
    return scores


def sample_and_score(
    pipeline: SamplingPipeline,
    config: Config,
    dataset: Any,
    options: EvalOptions,
    *,
    step: int | None = None,
    cache: Path | None = None,
    out: Path | None = None,
    identity: str = "",
    console: Console | None = None,
) -> tuple[list[Score], SampleStore | None]:
    """Sample and measure; a collective call.

    Args:
        pipeline: The model, and how it is sampled.
        config: The run.
        dataset: The run's data set.
        options: What is measured.
        step: Training step of the weights, for the record.
        cache: Folder of trained networks, weights and references; by default the run's.
        out: Folder below which samples are kept, so that an interrupted call can be resumed.
        identity: Checksum of the weights; samples of other weights are not reused.
        console: Shows progress.

    Returns:
        The scores, and the store of the samples where they are kept.
    """
    device, console = next(pipeline.model.parameters()).device, console or Console(quiet=True)
    labelled, cache = config.task != "none", cache or cache_of(config)
    with console.progress("score networks"):
        meters = create_meters(options, dataset, cache, device, labelled)
    without_loss = missing_loss(options.metrics, dataset)
    for note in [*(meter.note for meter in meters), without_loss]:
        if note:
            console.once(note)
    sampling = {
        "guidance": describe_options(pipeline.guidance.options),
        "sampler": describe_options(pipeline.sampler.options),
    }
    store = None
    if out is not None:
        settings: dict[str, Any] = {**sampling, "weights": identity, "step": step}
        settings["objective"] = config.composed["objective"]
        settings["data"] = dataset.pixels_fingerprint
        store = open_store(out, options, settings)
    cost = pipeline.cost()
    record = {**sampling, "seed": options.seed, "step": step, "macs_per_sample": cost.macs}
    pipeline.batch_progress = console.part_of(options.batch * world()[1])
    # The held-out loss alone needs no samples.
    batches = sample_batches(pipeline, dataset, options, device, store) if meters else ()
    scores = measure(meters, batches, options.samples, console, "samples for scores", **record)
    if "heldout_loss" in options.metrics and not without_loss:
        heldout = HeldOut(pipeline.model, config, dataset, pipeline.objective, device)
        scores += heldout_scores(heldout, options.batch, console, **record)
    return scores, store


def measure(
    meters: Sequence[Any],
    batches: Iterable[ImageBatch],
    total: int,
    console: Console,
    title: str,
    **record: Any,
) -> list[Score]:
    """Return the scores of `total` images over all processes; a collective call.

    Args:
        meters: What is measured.
        batches: This process's part of the images, with requested classes and captions.
        total: Number of images over all processes.
        console: Shows progress.
        title: What the progress bar says.
        record: Further fields of the scores.
    """
    processes = world()[1]
    done, labels = 0, []
    with console.progress(title, total) as bar:
        for images, batch_labels, captions in batches:
            for meter in meters:
                meter.update(images, batch_labels, captions)
            if batch_labels is not None:
                labels.append(batch_labels)
            done += len(images)
            # All processes are about equally fast, so one bar stands for all.
            bar.update(min(total, done * processes))
    all_labels = gather_rows(torch.cat(labels)) if labels else None
    scores = []
    with console.progress("distances"):
        for meter in meters:
            scores += meter.results(all_labels, **record)
    return scores
