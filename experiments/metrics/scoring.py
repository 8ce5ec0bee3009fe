"""Sample from a model and measure: while training, and from evaluate.py at any time later.

    conditions and seeds -> generate -> pixels -> features -> moments and rows (merged over
    processes) -> scores

Samples are looked at as they are made and then forgotten (or kept on disk, to survive a kill), so
50,000 of them need no more memory than one batch.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from experiments.metrics import meters, scored_samples
from experiments.metrics.collectives import gather_rows, world
from experiments.metrics.display import Display
from experiments.metrics.eval_options import EvalOptions, defaults_for
from experiments.metrics.instruments import Bench, prepare
from experiments.metrics.metric_names import MetricError, Score, direction, full_name

if TYPE_CHECKING:
    from experiments.config.schema import Config
    from experiments.sampling.recipe import Setup


def default_cache() -> Path:
    """Return the user's cache folder: `$XDG_CACHE_HOME/tread-suite` or `~/.cache/tread-suite`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tread-suite"


def cache_of(config: Config) -> Path:
    """Return the cache folder that a run names, or the user's."""
    return Path(config.paths.cache).expanduser() if config.paths.cache else default_cache()


def options_for(config: Config, **changes: Any) -> EvalOptions:
    """Return a run's evaluation options with `changes` (None keeps the run's own).

    A run without a condition has nothing to adhere to: its own metrics lose accuracy and adherence.

    Raises:
        MetricError: An unknown metric or features, or a number out of range.
    """
    given = {key: value for key, value in changes.items() if value is not None}
    # A run with eval=none is measured as its data usually are.
    values = {**defaults_for(config.data["name"]), **config.eval, **given}
    if config.task == "none" and "metrics" not in given:
        values["metrics"] = [m for m in values["metrics"] if m not in ("accuracy", "adherence")]
    return EvalOptions(**values)


def setup_for(
    model: Any, config: Config, guidance: Any = None, sampler: Any = None, step: int | None = None
) -> Setup:
    """Return how a run samples, with guidance and sampler replaced where given.

    Args:
        model: The network with the weights to be scored.
        config: The run.
        guidance: A name or mapping in place of the run's own.
        sampler: A name or mapping in place of the run's own.
        step: Training step of the weights.

    Raises:
        DiffusionError: A combination that this run cannot have.
    """
    from experiments.sampling.recipe import Setup
    from experiments.training.checkpoint import TrainedModel

    loaded = TrainedModel(model, config, step or 0, "", {})
    return Setup.make(loaded, sampler or config.sampler, guidance or config.guidance)


def describe(options: Any, drop: Sequence[str] = ("name",)) -> str:
    """Return an options dataclass as `name key=value ...`, leaving out what has its default."""
    changed = [
        f"{f.name}={getattr(options, f.name)}"
        for f in dataclasses.fields(options)
        if f.name not in drop
        and (f.name in ("steps", "scale") or getattr(options, f.name) != f.default)
    ]
    return " ".join([options.name, *changed])


@dataclasses.dataclass(frozen=True)
class Scored:
    """Scores with what they were measured on.

    Attributes:
        scores: One per number.
        labels: Classes that were asked for, `(n,)`, or None.
        folder: Where the samples are kept, or None.
    """

    scores: list[Score]
    labels: Tensor | None
    folder: Path | None


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
    progress: Any = None,
) -> list[Score]:
    """Sample from a model and measure; all processes call it and get the same scores.

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
        progress: A `experiments.runtime.console.Console`, or a function of (done, total), or None.

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
    device = accelerator.device if accelerator is not None else next(model.parameters()).device
    setup = setup_for(model, config, guidance, sampler, step)
    return sample_and_score(
        setup, dataset, options, step=step, device=device, progress=progress
    ).scores


def check(
    config: Config, dataset: Any, model: Any = None, device: torch.device | str = "cpu"
) -> list[str]:
    """Load what a run's scores need, so that a run that cannot be scored stops before it trains.

    Args:
        config: The run.
        dataset: Its data set.
        model: Its model, to check guidance and sampler against; None leaves that out.
        device: Where the feature networks run.

    Returns:
        Lines for the log, as the classifier's accuracy on held-out images.

    Raises:
        MetricError: Weights or a reference that are not there, or metrics that do not fit.
    """
    conditional = config.task != "none"
    options, cache = options_for(config), cache_of(config)
    if model is not None:
        setup_for(model, config)
    return prepare(options, dataset, cache, device, conditional, config.data).notes


def sample_and_score(
    setup: Setup,
    dataset: Any,
    options: EvalOptions,
    *,
    step: int | None = None,
    device: torch.device | str = "cpu",
    cache: Path | None = None,
    out: Path | None = None,
    identity: str = "",
    progress: Any = None,
) -> Scored:
    """Sample as `setup` says and measure as `options` say; a collective call.

    Args:
        setup: How images are made.
        dataset: The run's data set.
        options: What is measured.
        step: Training step of the weights, for the record.
        device: Where to sample and measure.
        cache: Folder of the cache; None: the run's.
        out: Keep finished samples below this folder: an interrupted call goes on where it was.
        identity: What the weights are (a checksum): kept samples of other weights are not taken.
        progress: See `score`.

    Raises:
        MetricError: See `score`.
    """
    device, config = torch.device(device), setup.loaded.config
    if options.samples < world()[1]:
        raise MetricError(
            f"eval.samples={options.samples} are fewer than {world()[1]} processes; ask for more"
        )
    cache, conditional = cache or cache_of(config), config.task != "none"
    bench = prepare(options, dataset, cache, device, conditional, config.data)
    made = {
        "guidance": describe(setup.guidance.options),
        "sampler": describe(setup.sampler.options),
    }
    folder = None
    if out is not None:
        about = {
            **made, "weights": identity, "step": step, "samples": options.samples,
            "seed": options.seed, "batch": options.batch, "labels": options.labels,
            "objective": dict(config.objective), "data": dataset.fingerprint,
        }  # fmt: skip
        folder = scored_samples.open_folder(out, about)
    labels = _show(bench, scored_samples.pieces(setup, dataset, options, device, folder), progress)
    scores = scores_of(
        bench.results(labels),
        **made,
        seed=options.seed,
        step=step,
        macs_per_sample=setup.cost().macs,
    )
    return Scored(scores, labels, folder)


def scores_of(results: Sequence[meters.Result], **record: Any) -> list[Score]:
    """Return results as scores, with full names and the record of how the images were made."""
    return [
        Score(
            metric=full_name(r.key, r.n, r.features), key=r.key, value=r.value, n=r.n,
            features=r.identity, reference=r.reference, better=direction(r.key), **record,
        )
        for r in results
    ]  # fmt: skip


def _show(bench: Bench, stream: Any, progress: Any) -> Tensor | None:
    """Show all pieces to the meters; return the labels that were asked for, over all processes."""
    total, done, labels = bench.options.samples, 0, []
    with Display(progress, total, bench.notes) as report:
        for piece in stream:
            bench.update(piece.images, piece.labels, piece.captions)
            if piece.labels is not None:
                labels.append(piece.labels.cpu())
            done += len(piece.images)
            # The processes go at the same pace: one of them stands for all.
            report(min(total, done * world()[1]), total)
    return gather_rows(torch.cat(labels)) if labels else None
