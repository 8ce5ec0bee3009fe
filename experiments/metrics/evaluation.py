"""What `experiments/evaluate.py` does once its arguments are read."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from experiments import log, scoring
from experiments.files import atomic_write
from experiments.metrics import prepare, reference, sampled, splits
from experiments.metrics.classifier import checksum
from experiments.metrics.collect import collect
from experiments.metrics.distributed import main_first, share, world
from experiments.metrics.elsewhere import Images
from experiments.metrics.features import create_features
from experiments.metrics.names import MetricError, Score
from experiments.metrics.options import EvalOptions, defaults_for
from routing.errors import suggest


def evaluate(arguments: argparse.Namespace) -> int:
    """Score what the arguments name, print a table and write the record; return the exit code."""
    source = Path(arguments.source).expanduser()
    if not source.exists():
        siblings = [p.name for p in source.parent.iterdir()] if source.parent.is_dir() else []
        raise MetricError(
            f"{source} does not exist: expected a run folder, a model.safetensors, "
            f"a folder of pictures or an .npz{suggest(source.name, siblings)}"
        )
    for name in ("metrics", "features"):
        setattr(arguments, name, split_names(getattr(arguments, name)))
    device = _processes()
    console = log.Console(quiet=bool(world()[0]))
    run = source.suffix == ".safetensors" or (
        source.is_dir()
        and ((source / "config.yaml").is_file() or (source / "checkpoints").is_dir())
    )
    if run:
        return _run(arguments, source, device, console)
    return _images(arguments, source, device, console)


def split_names(values: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return names given as `fd,is` or `fd is`, or None for none."""
    if values is None:
        return None
    return tuple(name for value in values for name in value.split(",") if name)


def parse_choice(text: str, own: dict[str, Any]) -> dict[str, Any]:
    """Return the mapping that `NAME[,KEY=VALUE...]` names; keys not given keep the run's own.

    Args:
        text: As typed, `routed,weak=0.8`; an empty name keeps the run's.
        own: The run's mapping; its keys hold where the name is the same.

    Raises:
        MetricError: A part that is no `key=value`.
    """
    name, *parts = text.split(",")
    chosen = dict(own) if name in ("", own["name"]) else {"name": name}
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals:
            raise MetricError(f"{text}: expected NAME,KEY=VALUE,..., got {part!r} after the comma")
        chosen[key] = yaml.safe_load(value)
    return chosen


def _processes() -> torch.device:
    """Join the processes of torchrun, if there are any, and return this one's device."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from accelerate import PartialState

        return PartialState(cpu=not torch.cuda.is_available()).device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _cache(arguments: argparse.Namespace) -> Path:
    return Path(arguments.cache).expanduser() if arguments.cache else scoring.default_cache()


# --- runs ---------------------------------------------------------------------------------------


def _run(args: argparse.Namespace, source: Path, device: torch.device, console: log.Console) -> int:
    from experiments import build
    from experiments.checkpoint import load_model
    from experiments.diffusion.shards import write_npz

    loaded = load_model(source, args.step, args.weights, device)
    config = loaded.config
    dataset = build.make_dataset(config, device)
    cache = Path(args.cache).expanduser() if args.cache else scoring.cache_of(config)
    options = scoring.options_for(
        config,
        samples=args.samples,
        seed=args.seed,
        batch=args.batch,
        metrics=args.metrics,
        features=args.features,
        reference=args.reference,
        inception_weights=args.inception_weights,
        dinov2_weights=args.dinov2_weights,
    )
    if args.write_reference:
        images = _split_images(dataset, args.split)
        name = f"{dataset.name}-{args.split}"
        return _write(args, options, dataset, cache, images, name, device, console)
    sampler = parse_choice(args.sampler or "", config.sampler)
    if args.steps is not None:
        sampler["steps"] = args.steps
    weights = checksum(loaded.model)
    folder = Path(args.out).expanduser() if args.out else _beside(source) / "evaluations"
    choices = [parse_choice(text, config.guidance) for text in args.guidance or [""]]
    if args.write_samples and len(choices) > 1:
        raise MetricError("--write-samples takes the samples of one --guidance; give one")
    for guidance in choices:
        setup = scoring.setup_for(loaded.model, config, guidance, sampler, loaded.step)
        found = scoring.sample_and_score(
            setup,
            dataset,
            options,
            step=loaded.step,
            device=device,
            cache=cache,
            out=folder / "samples",
            identity=weights,
            progress=console,
        )
        about = {"source": str(source), "step": loaded.step, "kind": args.weights}
        about |= {"weights": weights, "guidance": guidance, "sampler": sampler}
        _finish(folder, f"step-{loaded.step:08d}", about, options, found.scores, console)
        assert found.folder is not None, "samples were asked to be kept"
        if args.write_samples and not world()[0]:
            write_npz(
                sampled.kept_pieces(found.folder, found.labels), options.samples, args.write_samples
            )
            console.say(f"samples     {args.write_samples}")
        with main_first():
            if not args.keep_samples and not world()[0]:
                shutil.rmtree(found.folder, ignore_errors=True)
                with contextlib.suppress(OSError):
                    # Gone too unless another evaluation keeps its samples there.
                    found.folder.parent.rmdir()
    return 0


def _split_images(dataset: Any, split: str) -> Any:
    index = splits.indices(dataset, split)
    mine = share(len(index))
    return splits.images(dataset, split, index[mine.start : mine.stop])


def _beside(source: Path) -> Path:
    return source if source.is_dir() else source.parent


# --- images from elsewhere ----------------------------------------------------------------------


def _images(
    args: argparse.Namespace, source: Path, device: torch.device, console: log.Console
) -> int:
    for name in ("step", "guidance", "sampler", "steps", "seed", "write_samples"):
        if getattr(args, name) is not None:
            raise MetricError(
                f"--{name.replace('_', '-')} is for sampling from a run, and {source} holds images"
            )
    images = Images(source)
    n = args.samples or images.n
    if n > images.n:
        raise MetricError(
            f"{source} holds {images.n} images, fewer than --samples {n}; "
            f"type --samples {images.n} or make more"
        )
    dataset = _dataset(args.data, device)
    options = _defaults(args, n)
    mine = share(n)
    stream = images.batches(mine)
    if args.write_reference:
        cache = _cache(args)
        return _write(args, options, dataset, cache, stream, source.name, device, console)
    labels = images.labels()
    labels = None if labels is None else labels[:n]
    bench = prepare.prepare(options, dataset, _cache(args), device, labelled=labels is not None)
    start = mine.start
    with console.progress("score", n) as bar:
        for batch in stream:
            stop = start + len(batch)
            bench.update(batch, None if labels is None else labels[start:stop])
            start = stop
            bar.update(min(n, (start - mine.start) * world()[1]))
    scores = scoring.scores_of(bench.results(labels), source=str(source))
    folder = Path(args.out).expanduser() if args.out else None
    about = {"source": str(source), "data": args.data}
    _finish(folder, source.stem, about, options, scores, console)
    return 0


def _dataset(name: str | None, device: torch.device) -> Any:
    if name is None:
        return None
    from experiments.data import create

    return create({"name": name}, device=device)


def _defaults(args: argparse.Namespace, n: int) -> EvalOptions:
    """Return the options for images: the data set's own, or the Inception protocol."""
    values = defaults_for(args.data)
    if args.metrics is None:
        # What was asked for is not known of images, and a short list suits every extractor.
        values["metrics"] = ["fd", "precision", "recall"] if args.features else [
            m for m in values["metrics"] if m not in ("accuracy", "adherence")
        ]  # fmt: skip
    for name in (
        "metrics",
        "features",
        "reference",
        "batch",
        "inception_weights",
        "dinov2_weights",
    ):
        if getattr(args, name) is not None:
            values[name] = getattr(args, name)
    return EvalOptions(**{**values, "samples": n})


# --- both ---------------------------------------------------------------------------------------


def _write(
    args: argparse.Namespace,
    options: EvalOptions,
    dataset: Any,
    cache: Path,
    images: Any,
    name: str,
    device: torch.device,
    console: log.Console,
) -> int:
    """Write the statistics of real images for one extractor."""
    if len(options.features) != 1:
        raise MetricError("--write-reference writes one kind of features; give one --features")
    path = Path(args.write_reference)
    if path.suffix != ".npz":
        raise MetricError(f"--write-reference {path}: the name must end in .npz")
    chosen = prepare.labelled_data(dataset, options.features[0])
    features = create_features(
        options.features[0], options, cache=cache, dataset=chosen, device=device
    )
    wanted = {"moments", "rows"} | ({"spatial"} & set(features.provides))
    found = collect(features, images, wanted, device)
    if not world()[0]:
        reference.save(path, features, found, name)
    console.say(f"reference   {path}  ({found.n} images, {features.name})")
    return 0


def _finish(
    folder: Path | None,
    name: str,
    about: dict[str, Any],
    options: EvalOptions,
    scores: Sequence[Score],
    console: log.Console,
) -> None:
    """Print the scores, and write them as one JSON file that the same settings write again."""
    rows = [[s.metric, f"{s.value:.4g}", s.reference or "-"] for s in scores]
    how = " ".join(filter(None, [scores[0].guidance, scores[0].sampler])) if scores else ""
    console.table(f"{name}  {how}".rstrip(), rows, ["score", "value", "against"])
    if folder is None or world()[0]:
        return
    settings = {**about, "eval": {k: v for k, v in vars(options).items()}}
    text = json.dumps(settings, sort_keys=True, default=str)
    path = folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.json"
    record = {**settings, "time": time.time(), "scores": [s.to_dict() for s in scores]}
    atomic_write(path, json.dumps(record, indent=1, default=str) + "\n")
    console.say(f"record      {path}")
