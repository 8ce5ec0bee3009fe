"""Sample from a model and measure: while training, and from evaluate.py at any time later.

    conditions and seeds -> generate -> pixels -> features -> moments and rows (merged over
    processes) -> scores

Samples are measured batch by batch and discarded (or kept on disk, to survive a kill): 50,000 of
them need no more memory than one batch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.config.schema import Config
from experiments.diffusion.diffusion_options import DiffusionError
from experiments.metrics import heldout
from experiments.metrics.collect import gather_rows, main_first, share, world
from experiments.metrics.eval_options import EvalOptions, MetricError, Score, defaults_for
from experiments.metrics.meters import prepare
from experiments.runtime.console import Console
from experiments.runtime.files import default_cache
from experiments.sampling.generation import labels_from_seeds
from experiments.sampling.pipeline import SamplingPipeline, described
from experiments.sampling.sample_store import SampleStore


def cache_of(config: Config) -> Path:
    """Return the cache folder that a run names, or the user's."""
    return Path(config.paths.cache).expanduser() if config.paths.cache else default_cache()


def options_for(config: Config, **changes: Any) -> EvalOptions:
    """Return a run's evaluation options with `changes` (None keeps the run's own).

    A run without a condition has nothing to adhere to: its own metrics lose accuracy and adherence.
    """
    given = {key: value for key, value in changes.items() if value is not None}
    # A run with eval=none is measured as its data usually are.
    values = {**defaults_for(config.data["name"]), **config.eval, **given}
    if config.task == "none" and "metrics" not in given:
        values["metrics"] = [m for m in values["metrics"] if m not in ("accuracy", "adherence")]
    return EvalOptions(**values)


def check(config: Config, dataset: Any, device: torch.device | str = "cpu") -> list[str]:
    """Load what a run's scores need, so that a run that cannot be scored stops before it trains.

    Returns:
        Lines for the log, as the classifier's accuracy on held-out images.
    """
    options, conditional = options_for(config), config.task != "none"
    return prepare(options, dataset, cache_of(config), device, conditional, config.data).notes


def score(
    model: Any,
    config: Config,
    dataset: Any,
    *,
    step: int | None = None,
    guidance: Any = None,
    sampler: Any = None,
    accelerator: Any = None,
    console: Console | None = None,
    **changes: Any,
) -> list[Score]:
    """Sample from a model and measure; all processes call it and get the same scores.

    Args:
        model: The network with the weights to be scored (the EMA's), on its device.
        config: The run; what is not given here is taken from it.
        dataset: The run's data set.
        step: Training step of the weights, for the record.
        guidance: Name or mapping in place of the run's own.
        sampler: Name or mapping in place of the run's own.
        accelerator: Gives the device; processes are found through torch.distributed.
        console: Shows progress.
        **changes: Fields of `EvalOptions` in place of the run's own.
    """
    options = options_for(config, **changes)
    device = accelerator.device if accelerator is not None else next(model.parameters()).device
    pipeline = SamplingPipeline.make(model, config, sampler, guidance)
    return sample_and_score(
        pipeline, config, dataset, options, step=step, device=device, console=console
    )[0]


def sample_and_score(
    pipeline: SamplingPipeline,
    config: Config,
    dataset: Any,
    options: EvalOptions,
    *,
    step: int | None = None,
    device: torch.device | str = "cpu",
    cache: Path | None = None,
    out: Path | None = None,
    identity: str = "",
    console: Console | None = None,
) -> tuple[list[Score], SampleStore | None]:
    """Sample and measure; a collective call. Return the scores, and where samples are kept if so.

    With `out`, finished samples are kept below this folder and an interrupted call goes on where it
    was; those of another `identity` (a checksum of the weights) are not taken.
    """
    device, console = torch.device(device), console or Console(quiet=True)
    total, (_, processes) = options.samples, world()
    if total < processes:
        raise MetricError(
            f"eval.samples={total} are fewer than {processes} processes; ask for more"
        )
    cache, conditional = cache or cache_of(config), config.task != "none"
    meters = prepare(options, dataset, cache, device, conditional, config.data)
    made = {
        "guidance": described(pipeline.guidance.options),
        "sampler": described(pipeline.sampler.options),
    }
    store = None
    if out is not None:
        about = {
            **made, "weights": identity, "step": step, "samples": total,
            "seed": options.seed, "batch": options.batch, "labels": options.labels,
            "objective": dict(config.objective), "data": dataset.pixels_fingerprint,
            "processes": processes, "count": total, "shard": min(options.batch, total),
            "shards": len(_piece_ranges(options)),
        }  # fmt: skip
        store = _open_store(out, about)
    done, labels = 0, []
    losses = "heldout_loss" in options.metrics
    missing = heldout.no_split(dataset) if losses else ""
    for note in (*meters.notes, *([f"heldout_loss is missing: {missing}"] if missing else [])):
        console.once(note)
    # A loss alone needs no samples.
    pieces = sample_pieces(pipeline, dataset, options, device, store) if meters.meters else ()
    with console.progress("sample", total) as bar:
        for images, asked, captions in pieces:
            meters.update(images, asked, captions)
            if asked is not None:
                labels.append(asked.cpu())
            done += len(images)
            # All processes are about equally fast: one measures the progress of all.
            bar.update(min(total, done * processes))
    requested = gather_rows(torch.cat(labels)) if labels else None
    macs = pipeline.cost().macs
    record = {**made, "seed": options.seed, "step": step, "macs_per_sample": macs}
    results = meters.results(requested, **record)
    if losses and not missing:
        parts = (pipeline.model, config, dataset, pipeline.objective, device)
        results += heldout.scores(heldout.HeldOut(*parts), options.batch, **record)
    return results, store


# --- the samples ---------------------------------------------------------------------------------


def conditions(
    dataset: Any, model: Any, options: EvalOptions, index: Tensor, device: torch.device
) -> tuple[Tensor | None, Tensor | None, list[str] | None]:
    """Return labels, text states and captions of the samples at `index`, None where not taken.

    Labels are balanced or drawn per seed; captions are those of the held-out split, in order.
    """
    if getattr(model, "num_classes", 0):
        how = "balanced" if options.labels == "balanced" else "from-seed"
        return labels_from_seeds(options.seed + index, model.num_classes, how), None, None
    if not (getattr(model, "config", None) or {}).get("text"):
        return None, None, None
    found = dataset.prompts(index)
    return None, found.text.to(device), found.captions


def _piece_ranges(options: EvalOptions) -> list[range]:
    """Return the samples of every piece: each process's share in batches."""
    batch = min(options.batch, options.samples)
    shares = [share(options.samples, rank) for rank in range(world()[1])]
    return [range(i, min(i + batch, s.stop)) for s in shares for i in s[::batch]]


def _open_store(folder: Path, about: dict[str, Any]) -> SampleStore:
    """Return the store of samples made in exactly this way; another way has another folder."""
    text = json.dumps(about, sort_keys=True)
    store = SampleStore(folder / hashlib.sha256(text.encode()).hexdigest()[:12])
    with main_first():
        if not world()[0]:
            store.claim(about)
    return store


def sample_pieces(
    pipeline: SamplingPipeline,
    dataset: Any,
    options: EvalOptions,
    device: torch.device,
    store: SampleStore | None = None,
) -> Iterator[tuple[Tensor, Tensor | None, list[str] | None]]:
    """Yield this process's share of the samples, made now or read from `store`.

    A piece is uint8 images `(B, 3, H, W)` with their classes `(B,)` and captions, or None.

    Every piece is sampled as one full batch (a short one is filled up and cut), so that an image
    does not depend on where a run was interrupted, nor on the number of processes.
    """
    mine, batch = share(options.samples), min(options.batch, options.samples)
    for number, piece in enumerate(_piece_ranges(options)):
        if piece.start not in mine:
            continue
        index = torch.arange(piece.start, piece.stop)
        seeds = options.seed + index
        labels, text, captions = conditions(dataset, pipeline.model, options, index, device)
        images = _kept(store, number, seeds) if store else None
        if images is None:
            fill = torch.arange(batch).clamp_max(len(index) - 1)
            made = pipeline.generate(
                seeds[fill],
                None if labels is None else labels[fill],
                None if text is None else text[fill.to(text.device)],
                batch=batch,
                device=device,
            )[: len(index)]
            if not bool(made.isfinite().all()):
                raise MetricError(
                    "the model samples NaN or infinite pixels: it diverged; try a smaller train.lr"
                )
            images = dataset.to_pixels(made.to(dataset.device)).cpu()
            if store:
                store.write(number, images, seeds, None if labels is None else labels.cpu())
        yield images, labels, captions


def _kept(store: SampleStore, number: int, seeds: Tensor) -> Tensor | None:
    """Return the images of a kept piece; one that is absent or damaged is made again."""
    try:
        images, found, _ = store.read(number)
    except DiffusionError:
        return None
    if images.shape[3] != 3 or not np.array_equal(found, seeds.numpy()):
        return None
    return torch.from_numpy(images.transpose(0, 3, 1, 2).copy())
