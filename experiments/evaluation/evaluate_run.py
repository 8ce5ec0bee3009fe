"""Sample from a run and score the samples, or write reference statistics of its data."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from experiments.components import make_dataset
from experiments.evaluation.evaluation_record import (
    EVAL_FLAGS,
    SAMPLING_FLAGS,
    Record,
    print_scores,
    refuse_flags,
    sampling_settings,
    write_reference,
)
from experiments.evaluation.images import process_batches
from experiments.evaluation.pipeline import SamplingPipeline
from experiments.evaluation.sampling_options import chosen_options, parse_overrides
from experiments.evaluation.scoring import cache_of, sample_and_score
from experiments.evaluation.trained_model import load_model
from experiments.options.evaluation import EvalOptions, MetricError, options_for
from experiments.runtime.console import Console
from experiments.runtime.processes import gather, world

# Data options that decide which samples a run was trained on.
_SPLIT_OPTIONS = {"held_out", "split_seed", "test_fraction"}


def evaluate_run(
    args: argparse.Namespace, source: Path, device: torch.device, console: Console
) -> int:
    """Score a run folder or exported weights, once for each guidance; return the exit code."""
    refuse_flags(args, ["data"], " is for images; a run is compared with its own data")
    if not args.write_reference:
        reason = " is for --write-reference: scores compare with the held-out split"
        refuse_flags(args, ["split"], reason)
    if args.write_samples and len(args.guidance or ()) > 1:
        raise MetricError("--write-samples takes the samples of one --guidance; give one")
    changes = parse_overrides(args.changes, sampler=args.sampler, steps=args.steps)
    guidance_changes = []
    for choice in args.guidance or [None]:
        guidance_changes.append(parse_overrides(args.changes, guidance=choice)["guidance"])
    loaded = load_model(source, args.step, args.weights or "ema", device, report=console.say)
    _check_split(loaded.config.data, changes["data"])
    config = dataclasses.replace(loaded.config, data={**loaded.config.data, **changes["data"]})
    dataset = make_dataset(config, device)
    options = options_for(config, **{name: getattr(args, name) for name in EVAL_FLAGS})
    if args.write_samples and set(options.metrics) == {"heldout_loss"}:
        raise MetricError("--write-samples: heldout_loss draws no samples; add another metric")
    if args.write_reference:
        reason = ": --write-reference takes the whole split of the data"
        other_overrides = [text for text in args.changes if not text.startswith("data.")]
        refuse_flags(args, ["samples", *SAMPLING_FLAGS], reason, other_overrides)
        cache, split = args.cache or cache_of(config), args.split or "test"
        images, title = process_batches(dataset, split), f"{dataset.name}-{split}"
        return write_reference(args, options, dataset, cache, images, title, device, console)
    sampler = chosen_options("sampler", config.sampler, changes["sampler"])
    guidances = [chosen_options("guidance", config.guidance, values) for values in guidance_changes]
    settings: dict[str, Any] = {
        "source": str(source),
        "step": loaded.step,
        "kind": args.weights or "ema",
    }
    if changes["data"]:
        settings["data"] = changes["data"]
    folder = args.out or (source if source.is_dir() else source.parent) / "evaluations"
    for guidance in guidances:
        pipeline = SamplingPipeline.make(loaded.model, config, sampler, guidance)
        _score_pipeline(args, pipeline, config, dataset, options, settings, folder, console)
    return 0


def _check_split(data: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
    """Refuse data options that would hold out samples that the run was trained on."""
    for key in changes.keys() & _SPLIT_OPTIONS & {"held_out", *data}:
        value, trained = changes[key], data.get(key) or 0
        is_smaller_split = key == "held_out" and isinstance(value, int) and value < trained
        if value != trained and not is_smaller_split:
            raise MetricError(
                f"data.{key}={value}: the run was trained with {trained}, on samples that another "
                "split holds out; leave it out, or give others as data.test=FOLDER"
            )


def _score_pipeline(
    args: argparse.Namespace,
    pipeline: SamplingPipeline,
    config: Any,
    dataset: Any,
    options: EvalOptions,
    settings: Mapping[str, Any],
    folder: Path,
    console: Console,
) -> None:
    """Score one guidance and write its record, unless an earlier call did."""
    title = f"step-{settings['step']:08d}"
    settings = {**settings, **sampling_settings(pipeline)}
    record = Record.create(folder, title, settings, options)
    # Broadcast rank 0's decision: only rank 0 may have written the file just now.
    scored_before = gather(record.path.is_file())[0]
    if scored_before and not (args.write_samples or args.keep_samples):
        console.say(f"record      {record.path}  (scored before; delete it to score again)")
        return
    scores, store = sample_and_score(
        pipeline,
        config,
        dataset,
        options,
        step=settings["step"],
        cache=args.cache,
        out=folder / "samples",
        identity=settings["weights"] + settings.get("weaker", ""),
        console=console,
    )
    print_scores(title, scores, console)
    record.write(scores, console)
    assert store is not None, "samples are kept until they are scored"
    if world()[0]:
        return
    if args.write_samples:
        store.write_npz(options.samples, args.write_samples)
        console.say(f"samples     {args.write_samples}")
    if not args.keep_samples:
        store.remove()
