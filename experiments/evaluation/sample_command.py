"""The work of `experiments/sample.py`: sample from a trained model and write pictures."""

from __future__ import annotations

import argparse
from pathlib import Path

from experiments.evaluation.decoder import create_decoder
from experiments.evaluation.pipeline import SamplingPipeline
from experiments.evaluation.sample_folder import sample_settings, sample_to_folder
from experiments.evaluation.sample_request import (
    SampleRequest,
    parse_captions,
    parse_classes,
    parse_numbers,
    plan_request,
)
from experiments.evaluation.sampling_options import FLAGS, chosen_options, parse_overrides
from experiments.evaluation.trained_model import TrainedModel, load_model
from experiments.options.roles import ConfigError
from experiments.runtime.console import Console
from experiments.runtime.processes import join, world
from routing.errors import require


def sample(args: argparse.Namespace) -> int:
    """Sample as the arguments say, resuming an earlier call; return the exit code."""
    changes = parse_overrides(args.changes, **{flag: getattr(args, flag) for flag in FLAGS})
    seeds = parse_numbers(args.seeds, "--seeds")
    captions = None if args.captions is None else parse_captions(args.captions)
    require(args.batch >= 1, f"--batch {args.batch}: expected 1 or more", ConfigError)
    require(args.pngs >= 0, f"--pngs {args.pngs}: expected 0 or more", ConfigError)
    for kind in ("sampler", "guidance"):
        if "name" in changes[kind]:  # refuse wrong options before loading the model
            chosen_options(kind, {}, changes[kind])
    device = join(args.device)
    rank, processes = world()
    console = Console(quiet=bool(rank))
    loaded = load_model(args.source, args.step, args.weights, device, report=console.say)
    request = _request(loaded, seeds, args.classes, captions)
    config = loaded.config
    pipeline = SamplingPipeline.make(
        loaded.model,
        config,
        chosen_options("sampler", config.sampler, changes["sampler"]),
        chosen_options("guidance", config.guidance, changes["guidance"]),
    )
    decoder = create_decoder(loaded, changes["data"], next(loaded.model.parameters()).device)
    console.say(f"model     {loaded.source} (step {loaded.step}, {args.weights})")
    console.say("\n".join(pipeline.lines()))
    pipeline.batch_progress = console.part_of(args.batch * processes)
    sample_to_folder(
        Path(args.out),
        pipeline,
        request,
        decoder,
        sample_settings(loaded, args.weights, request, changes["data"], pipeline),
        args.batch,
        args.pngs,
        console,
    )
    return 0


def _request(
    loaded: TrainedModel, seeds: list[int], classes: str | None, captions: list[str] | None
) -> SampleRequest:
    """Return the images to make, or refuse conditions that the model does not have."""
    model = loaded.model
    class_names = loaded.info.get("class_names") or ()
    numbers = None if classes is None else parse_classes(classes, model.num_classes, class_names)
    require(
        captions is not None or model.text is None,
        "this model is conditioned on text; give --captions 'one; another'",
        ConfigError,
    )
    require(
        captions is None or model.text is not None,
        "--captions: this model is not conditioned on text; leave them out",
        ConfigError,
    )
    return plan_request(seeds, numbers, captions, class_names)
