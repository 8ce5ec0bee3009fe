"""What `experiments/evaluate.py` does once its arguments are read."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from experiments import components as build
from experiments.config.removed_keys import former_defaults
from experiments.data.dataset import create
from experiments.evaluation import scoring, write_npz
from experiments.evaluation.collect import collect, own_images, prepare, save_reference
from experiments.evaluation.features import create_features
from experiments.evaluation.images import Images
from experiments.evaluation.pipeline import SamplingPipeline
from experiments.evaluation.sampling_options import chosen_options, parse_overrides
from experiments.evaluation.small_networks import checksum
from experiments.options.evaluation import EvalOptions, MetricError, Score, defaults_for, measurable
from experiments.runtime import console as log
from experiments.runtime.files import atomic_write, check_replaceable, default_cache, sha256
from experiments.runtime.processes import gather, join, share, world
from experiments.training.checkpoint import load_model
from routing.errors import suggest

#: Options of an evaluation that have an argument of their own name.
_OPTIONS = ("metrics", "features", "reference", "batch", "inception_weights", "dinov2_weights")
#: Arguments of the samples that a run makes.
_SAMPLING = (
    "step", "weights", "keep_samples", "batch", "guidance", "sampler", "steps", "seed",
    "write_samples",
)  # fmt: skip
#: Options of data that decide which samples a run was trained on.
_HELD = {"held_out", "split_seed", "test_fraction"}


def evaluate(args: argparse.Namespace) -> int:
    """Score what the arguments name, print a table and write the record; return the exit code."""
    source = Path(args.source).expanduser()
    if not source.exists():
        siblings = [p.name for p in source.parent.iterdir()] if source.parent.is_dir() else []
        raise MetricError(
            f"{source} does not exist: expected a run folder, a model.safetensors, "
            f"a folder of pictures or an .npz{suggest(source.name, siblings)}"
        )
    if args.reference and not Path(args.reference).expanduser().is_file():
        raise MetricError(f"--reference {args.reference}: no such file; expected an .npz")
    args.metrics, args.features = split_names(args.metrics), split_names(args.features)
    for given in filter(None, (args.write_reference, args.write_samples)):
        check_replaceable(given)  # before what takes minutes
    device = torch.device(join())
    console = log.Console(quiet=bool(world()[0]))
    run = source.suffix == ".safetensors" or any(
        (source / name).exists() for name in ("config.yaml", "checkpoints")
    )
    return (_run if run else _images)(args, source, device, console)


def split_names(values: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return names given as `fd,is` or `fd is`, or None for none."""
    return None if values is None else tuple(n for text in values for n in text.split(",") if n)


def words_of(group: str, choice: str) -> list[str]:
    """Return `NAME[,KEY=VALUE...]` as words `group.KEY=VALUE`; an empty name keeps the run's."""
    name, *parts = choice.split(",")
    if "=" in name:
        raise MetricError(f"--{group} {choice}: a name comes first, as in NAME,{choice}")
    return [*([f"{group}.name={name}"] if name else []), *(f"{group}.{part}" for part in parts)]


def _refuse(args: argparse.Namespace, names: Iterable[str], why: str, words: Any = ()) -> None:
    """Refuse arguments that were given, and `words`, where they have no meaning."""
    given = [f"--{n.replace('_', '-')}" for n in names if getattr(args, n) is not None]
    if given := [*given, *words]:
        raise MetricError(f"{given[0]}{why}; leave it out")


# --- runs ---------------------------------------------------------------------------------------


def _run(args: argparse.Namespace, source: Path, device: torch.device, console: log.Console) -> int:
    _refuse(args, ["data"], " is for images; a run is compared with its own data")
    if not args.write_reference:
        why = " is for --write-reference: scores compare with the held-out split"
        _refuse(args, ["split"], why)
    words = [*args.changes, *words_of("sampler", args.sampler or "")]
    changes = parse_overrides(words, steps=args.steps)
    chosen = [
        parse_overrides([*words, *words_of("guidance", text)])["guidance"]
        for text in args.guidance or [""]
    ]
    if args.write_samples and len(chosen) > 1:
        raise MetricError("--write-samples takes the samples of one --guidance; give one")
    loaded = load_model(source, args.step, args.weights or "ema", device)
    own = loaded.config.data
    for key in changes["data"].keys() & _HELD & {"held_out", *own}:
        asked, held = changes["data"][key], own.get(key) or 0
        fewer = key == "held_out" and isinstance(asked, int) and asked < held
        if asked != held and not fewer:
            raise MetricError(
                f"data.{key}={asked}: the run was trained with {held}, on samples that another "
                "split holds out; leave it out, or give others as data.test=FOLDER"
            )
    config = dataclasses.replace(loaded.config, data={**own, **changes["data"]})
    dataset = build.make_dataset(config, device)
    given = {name: getattr(args, name) for name in ("samples", "seed", *_OPTIONS)}
    options = scoring.options_for(config, **given)
    if args.write_samples and set(options.metrics) == {"heldout_loss"}:
        raise MetricError("--write-samples: heldout_loss draws no samples; add another metric")
    if args.write_reference:
        split, other = args.split or "test", [w for w in args.changes if not w.startswith("data.")]
        why = ": --write-reference takes the whole split of the data"
        _refuse(args, ["samples", *_SAMPLING], why, other)
        cache, title = args.cache or scoring.cache_of(config), f"{dataset.name}-{split}"
        images = own_images(dataset, split)
        return _write(args, options, dataset, cache, images, title, device, console)
    sampler = chosen_options("sampler", config.sampler, changes["sampler"])
    guidances = [chosen_options("guidance", config.guidance, each) for each in chosen]
    weights, step = checksum(loaded.model), loaded.step
    title, beside = f"step-{step:08d}", source if source.is_dir() else source.parent
    folder = args.out or beside / "evaluations"
    for guidance in guidances:
        pipeline = SamplingPipeline.make(loaded.model, config, sampler, guidance)
        about: dict[str, Any] = {
            "source": str(source),
            "step": step,
            "kind": args.weights or "ema",
            "weights": weights,
            "guidance": dataclasses.asdict(pipeline.guidance.options),
            "sampler": dataclasses.asdict(pipeline.sampler.options) | former_defaults("sampler"),
            **({"data": changes["data"]} if changes["data"] else {}),
            **({} if pipeline.weak is None else {"weaker": checksum(pipeline.weak)}),
        }
        path, settings = _record(folder, title, about, options)
        # All processes decide as the first, which alone may have written the file just now.
        kept = gather(path.is_file())[0]
        if kept and not (args.write_samples or args.keep_samples):
            # A command that was cut short goes on with the guidances that are missing.
            console.say(f"record      {path}  (scored before; delete it to score again)")
            continue
        scores, store = scoring.sample_and_score(
            pipeline, config, dataset, options, step=step, device=device, cache=args.cache,
            out=folder / "samples", identity=weights + about.get("weaker", ""), console=console,
        )  # fmt: skip
        _finish(title, scores, path, settings, console)
        assert store is not None, "samples are kept until they are scored"
        if world()[0]:
            continue
        if args.write_samples:
            pieces = ((images, labels) for images, _, labels in store.shards())
            write_npz(pieces, options.samples, args.write_samples)
            console.say(f"samples     {args.write_samples}")
        if not args.keep_samples:
            shutil.rmtree(store.folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                # Gone too unless another evaluation keeps its samples there.
                store.folder.parent.rmdir()
    return 0


# --- images from elsewhere ----------------------------------------------------------------------


def _images(
    args: argparse.Namespace, source: Path, device: torch.device, console: log.Console
) -> int:
    changes = [] if args.data is None else [c for c in args.changes if c.startswith("data.")]
    why = f" is for sampling from a run, and {source} holds images"
    _refuse(args, [*_SAMPLING, "split"], why, [c for c in args.changes if c not in changes])
    if "heldout_loss" in (args.metrics or ()):
        raise MetricError(f"heldout_loss is a model's own loss, and {source} holds images")
    images = Images(source)
    n = images.n if args.samples is None else args.samples
    if n > images.n:
        raise MetricError(
            f"{source} holds {images.n} images, fewer than --samples {n}; "
            f"type --samples {images.n} or make more"
        )
    data = {**parse_overrides(changes)["data"], "name": args.data}
    dataset = None if args.data is None else create(data, device=device)
    # The data set's own options, or the Inception protocol.
    values = defaults_for(args.data)
    if args.metrics is None:
        # The conditions of images are unknown, and a short list suits every extractor.
        unknown = ("accuracy", "adherence", "heldout_loss")
        usual = [m for m in values["metrics"] if m not in unknown]
        values["metrics"] = ["fd", "precision", "recall"] if args.features else usual
    given = {name: getattr(args, name) for name in _OPTIONS if getattr(args, name) is not None}
    options = EvalOptions(**{**values, **given, "samples": n})
    cache, stream = args.cache or default_cache(), images.batches(share(n))
    if args.write_reference:
        return _write(args, options, dataset, cache, stream, source.name, device, console)
    labels = images.labels()
    meters = prepare(options, dataset, cache, device, labelled=labels is not None)

    def pieces() -> Iterator[tuple[Any, Any, None]]:
        start = share(n).start
        for batch in stream:
            yield batch, None if labels is None else labels[start : start + len(batch)], None
            start += len(batch)

    scores = scoring.measure(meters, pieces(), n, console, "score", source=str(source))
    about = {"source": str(source), "data": data if changes else args.data}
    path, settings = _record(args.out or Path(), source.stem, about, options)
    _finish(source.stem, scores, path if args.out else None, settings, console)
    return 0


# --- both ---------------------------------------------------------------------------------------


def _write(
    args: argparse.Namespace,
    options: EvalOptions,
    dataset: Any,
    cache: Path,
    images: Any,
    title: str,
    device: torch.device,
    console: log.Console,
) -> int:
    """Write the statistics of real images for one extractor."""
    _refuse(args, ["metrics", "reference", "out"], ": --write-reference scores nothing")
    if not options.features or (len(options.features) != 1 and args.features):
        raise MetricError("--write-reference writes one kind of features; give one --features")
    path = args.write_reference
    if path.suffix != ".npz":
        raise MetricError(f"--write-reference {path}: the name must end in .npz")
    name = options.features[0]
    features = create_features(name, options, cache=cache, dataset=dataset, device=device)
    wanted = {"moments", "rows"} | ({"spatial"} if measurable("sfid", name) else set())
    found = collect(features, images, wanted)
    if not world()[0]:
        save_reference(path, features, found, title)
    console.say(f"reference   {path}  ({found['n']} images, {features.name})")
    return 0


def _record(
    folder: Path, name: str, about: dict[str, Any], options: EvalOptions
) -> tuple[Path, dict[str, Any]]:
    """Return the file of an evaluation and the settings that it is named after."""
    settings = {**about, "eval": dict(vars(options))}
    if options.reference is not None:
        reference = Path(options.reference).expanduser()
        if reference.is_file():  # another file may come to bear its name
            settings["reference"] = sha256(reference)
    text = json.dumps(settings, sort_keys=True, default=str)
    return folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.json", settings


def _finish(
    name: str,
    scores: Sequence[Score],
    path: Path | None,
    settings: dict[str, Any],
    console: log.Console,
) -> None:
    """Print the scores, and write them with the settings as one JSON file, if it has a path."""
    rows = [[s.metric, f"{s.value:.4g}", s.reference or "-"] for s in scores]
    how = " ".join(filter(None, [scores[0].guidance, scores[0].sampler])) if scores else ""
    console.table(f"{name}  {how}".rstrip(), rows, ["score", "value", "against"])
    if path is None or world()[0]:
        return
    record = {**settings, "time": time.time(), "scores": [s.to_dict() for s in scores]}
    atomic_write(path, json.dumps(record, indent=1, default=str) + "\n")
    console.say(f"record      {path}")
