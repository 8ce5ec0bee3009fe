"""Sample from a model and measure: what training calls every N steps, and evaluate.py at any time later.

    conditions and seeds -> generate -> pixels -> features -> moments and rows (merged over
    processes) -> scores

Samples are looked at as they are made and then forgotten (or kept on disk, to survive a kill), so
50,000 of them need no more memory than one batch.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from experiments.metrics import meters, reference, sampled
from experiments.metrics.distributed import gather_rows, world
from experiments.metrics.features import Features, create_features
from experiments.metrics.names import METRICS, MetricError, Score, direction, full_name
from experiments.metrics.options import EvalOptions

if TYPE_CHECKING:
    from experiments.config import Config

#: Called with images done and images in all (over all processes).
Report = Callable[[int, int], None]


def default_cache() -> Path:
    """Return the user's cache folder for this project: `$XDG_CACHE_HOME/tread-suite` or `~/.cache/tread-suite`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tread-suite"


def cache_of(config: Config) -> Path:
    """Return the cache folder that a run names, or the user's."""
    return Path(config.paths.cache).expanduser() if config.paths.cache else default_cache()


@dataclasses.dataclass
class Bench:
    """The meters of one evaluation, with references loaded: made before anything is sampled, so that it fails early.

    Attributes:
        options: What is measured.
        meters: One per extractor, and one for adherence.
        notes: Lines for the log, as the classifier's accuracy.
    """

    options: EvalOptions
    meters: list[Any]
    notes: list[str]

    def update(
        self, images: Tensor, labels: Tensor | None = None, captions: Sequence[str] | None = None
    ) -> None:
        """Show a uint8 batch `(B, 3, H, W)` to every meter."""
        for meter in self.meters:
            meter.update(images, labels, captions)

    def results(self, labels: Tensor | None) -> list[meters.Result]:
        """Return all numbers over all processes; a collective call."""
        return [result for meter in self.meters for result in meter.results(labels)]


def prepare(
    options: EvalOptions,
    dataset: Any,
    cache: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    labelled: bool = True,
    data: Any = None,
) -> Bench:
    """Load extractors and references, and refuse what cannot be measured; a collective call.

    Args:
        options: What to measure.
        dataset: The data set whose held-out split is the reference unless `options.reference` names
            a file; None for images from elsewhere, which then need a file.
        cache: Folder of trained classifiers, downloaded weights and references.
        device: Where the networks run.
        labelled: Whether classes or captions were asked for.
        data: Options of the data set, for a classifier in a run without labels.

    Raises:
        MetricError: One sentence on what does not fit.
    """
    plan = meters.assign(options.metrics, options.features)
    alone = [m for m in options.metrics if {"probe", "pixels"} & set(METRICS[m].needs)]
    if dataset is not None and dataset.cannot_decode:
        raise MetricError(f"scores are taken on pixels: {dataset.cannot_decode}")
    if not labelled and {"accuracy", "adherence"} & set(options.metrics):
        raise MetricError(
            "accuracy and adherence compare with what was asked for, and these images come without; "
            "leave them out of the metrics"
        )
    made, notes = [], []
    for name, metrics in plan.items():
        if metrics:
            features = create_features(
                name, options, cache=cache, dataset=_labelled(dataset, name, data), device=device
            )
            made.append(_meter(features, metrics, options, dataset, cache, device))
            notes += [features.note] if features.note else []
    for metric in alone:
        if dataset is None or (metric == "adherence" and dataset.name != "scenes"):
            have = "images from elsewhere" if dataset is None else f"data={dataset.name}"
            need = "data=scenes" if metric == "adherence" else "a data set with a held-out split"
            raise MetricError(
                f"metric {metric} needs {need}, here are {have}; leave it out of the metrics"
            )
        pixels = metric == "memorisation_pixels"
        made.append(
            meters.pixel_meter(dataset, options, device) if pixels else meters.AdherenceMeter()
        )
    return Bench(options, made, notes)


def _labelled(dataset: Any, features: str, data: Any) -> Any:
    """Return the data set with labels, which its classifier is trained on whatever the run's task is."""
    if dataset is None or not features.endswith("-classifier") or dataset.task == "class":
        return dataset
    from experiments.data import create

    return create(data or {"name": dataset.name}, task="class", device=dataset.device)


def _meter(
    features: Features,
    metrics: Sequence[str],
    options: EvalOptions,
    dataset: Any,
    cache: str | os.PathLike[str],
    device: torch.device | str,
) -> meters.Meter:
    needs = {need for m in metrics for need in METRICS[m].needs}
    real = None
    if needs & {"moments", "rows", "spatial"}:
        spatial = "spatial" in needs
        if options.reference is not None:
            real = reference.load(
                options.reference, features, rows="rows" in needs, spatial=spatial
            )
        elif dataset is not None:
            real = reference.heldout(dataset, features, cache, spatial=spatial)
        else:
            raise MetricError(
                f"{', '.join(metrics)} compare with real images: pass --reference FILE.npz, "
                "or --data NAME for a data set's held-out split"
            )
    train = None
    if "train" in needs:
        if dataset is None:
            raise MetricError(
                "memorisation compares with training images: pass --data NAME or leave it out"
            )
        train = meters.train_rows(dataset, features)
    return meters.Meter(features, metrics, options, real, train, device)


def options_for(config: Config, **changes: Any) -> EvalOptions:
    """Return a run's evaluation options with `changes` (None keeps the run's own).

    Raises:
        MetricError: An unknown metric or features, or a number out of range.
    """
    given = {key: value for key, value in changes.items() if value is not None}
    return EvalOptions(**{**config.eval, **given})


def setting_for(
    model: Any,
    config: Config,
    guidance: Any = None,
    sampler: Any = None,
    device: torch.device | str | None = None,
) -> sampled.Setting:
    """Return how a run samples, with guidance and sampler replaced where given.

    Args:
        model: The network with the weights to be scored.
        config: The run.
        guidance: A name or mapping in place of the run's own.
        sampler: A name or mapping in place of the run's own.
        device: Where a weaker checkpoint is put.
    """
    from experiments.diffusion import create_guidance, create_objective, create_sampler
    from routing.selection import Selection

    objective = create_objective(config.objective)
    selection = Selection(
        config.routing.selection, shared=config.routing.shared, block=config.routing.block
    )
    chosen = create_guidance(
        guidance or config.guidance, route=config.resolved_route, selection=selection
    )
    weak = None
    if chosen.needs_weak:
        from experiments.checkpoint import load_model
        from experiments.init import split

        if chosen.options.checkpoint is None:
            raise MetricError(
                f"guidance={chosen.name} needs a weaker model; give guidance.checkpoint=RUN@STEP or a file"
            )
        path, step = split(chosen.options.checkpoint)
        weak = load_model(path, step, device=device).model
    return sampled.Setting(
        model, objective, create_sampler(sampler or config.sampler, objective), chosen, weak
    )


def macs_per_sample(setting: sampled.Setting) -> float:
    """Return the multiply-adds of sampling one image, from the passes that the guidance makes."""
    from backbones.cost import cost
    from experiments.diffusion import sampling_cost

    route = getattr(setting.guidance, "route", None)

    def one_pass(rate: float, weak: bool) -> float:
        model = setting.weak if weak else setting.model
        if not rate or route is None:
            return cost(**model.config).macs_dense
        return cost(**{**model.config, "route": route.with_rate(rate)}).macs_routed

    return sampling_cost(setting.objective, setting.sampler, setting.guidance, one_pass).macs


def describe(options: Any, drop: Sequence[str] = ("name",)) -> str:
    """Return an options dataclass as `name key=value ...`, leaving out what has its default."""
    changed = [
        f"{f.name}={getattr(options, f.name)}"
        for f in dataclasses.fields(options)
        if f.name not in drop
        and (f.name in ("steps", "scale") or getattr(options, f.name) != f.default)
    ]
    return " ".join([options.name, *changed])


def score(
    model: Any,
    config: Config,
    dataset: Any,
    *,
    step: int | None = None,
    samples: int | None = None,
    seed: int | None = None,
    guidance: Any = None,
    sampler: Any = None,
    features: Sequence[str] | None = None,
    metrics: Sequence[str] | None = None,
    batch: int | None = None,
    reference: str | None = None,
    accelerator: Any = None,
    out: str | os.PathLike[str] | None = None,
    identity: str = "",
    progress: Any = None,
) -> list[Score]:
    """Sample from a model and measure; in several processes, all of them call it and get the same scores.

    Args:
        model: The network with the weights to be scored (the EMA's), on its device.
        config: The run; what is not given here is taken from it.
        dataset: The run's data set.
        step: Training step of the weights, for the record.
        samples: Number of samples.
        seed: Seed of the first sample.
        guidance: Name or mapping in place of the run's own.
        sampler: Name or mapping in place of the run's own.
        features: Extractors.
        metrics: Metrics.
        batch: Images per sampling batch and process.
        reference: Statistics file in place of the held-out split.
        accelerator: Gives the device; processes are found through torch.distributed.
        out: Keep finished samples below this folder, so that an interrupted call goes on where it
            was.
        identity: What the weights are (a checksum): kept samples of other weights are not taken.
        progress: A `experiments.log.Console`, or a function of (done, total), or None.

    Returns:
        One `Score` per number.

    Raises:
        MetricError: Something that cannot be measured; said before the first image is sampled.
    """
    options = options_for(
        config,
        samples=samples,
        seed=seed,
        features=features,
        metrics=metrics,
        batch=batch,
        reference=reference,
    )
    device = (
        torch.device(accelerator.device)
        if accelerator is not None
        else next(model.parameters()).device
    )
    if options.samples < world()[1]:
        raise MetricError(
            f"eval.samples={options.samples} are fewer than {world()[1]} processes; ask for more"
        )
    setting = setting_for(model, config, guidance, sampler, device)
    bench = prepare(
        options, dataset, cache_of(config), device, labelled=config.task != "none", data=config.data
    )
    folder = None
    if out is not None:
        about = {
            "weights": identity, "step": step, "guidance": describe(setting.guidance.options),
            "sampler": describe(setting.sampler.options), "eval": [options.seed, options.batch, options.labels],
            "samples": options.samples, "config": config.to_dict()["objective"], "data": dataset.fingerprint,
        }  # fmt: skip
        folder = sampled.open_folder(Path(out), about)
    asked = _run(bench, sampled.pieces(setting, dataset, options, device, folder), progress)
    record = {
        "seed": options.seed, "step": step, "guidance": describe(setting.guidance.options),
        "sampler": describe(setting.sampler.options), "macs_per_sample": macs_per_sample(setting),
    }  # fmt: skip
    return scores_of(bench.results(asked), **record)


def scores_of(results: Sequence[meters.Result], **record: Any) -> list[Score]:
    """Return results as scores, with full names and the record of how the images were made."""
    return [
        Score(
            metric=full_name(r.key, r.n, r.features), key=r.key, value=r.value, n=r.n, features=r.identity,
            reference=r.reference, better=direction(r.key), **record,
        )
        for r in results
    ]  # fmt: skip


def _run(bench: Bench, stream: Any, progress: Any) -> Tensor | None:
    """Show all pieces to the meters; return the labels that were asked for, over all processes."""
    total, done, labels = bench.options.samples, 0, []
    with _Display(progress, total, bench.notes) as report:
        for piece in stream:
            bench.update(piece.images, piece.labels, piece.captions)
            if piece.labels is not None:
                labels.append(piece.labels.cpu())
            done += len(piece.images)
            # The processes go at the same pace: one of them stands for all.
            report(min(total, done * world()[1]), total)
    return gather_rows(torch.cat(labels)) if labels else None


class _Display:
    """Show progress on a console, through a function, or not at all."""

    def __init__(self, progress: Any, total: int, notes: Sequence[str]) -> None:
        self.bar = None
        self.report: Report = lambda done, total: None
        if progress is None:
            return
        if callable(progress):
            self.report = progress
            return
        for note in notes:
            progress.say(note)
        self.bar = progress.progress("sample", total)
        self.report = lambda done, total: self.bar.update(done)

    def __enter__(self) -> Report:
        if self.bar is not None:
            self.bar.__enter__()
        return self.report

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.__exit__(*error)
