"""Scores of a model: it samples and is measured, and its loss on held-out data.

    conditions and seeds -> generate -> pixels -> features -> moments and rows (merged over
    processes) -> scores

Samples are measured batch by batch and discarded (or kept on disk, to survive a kill): 50,000 of
them need no more memory than one batch.

Held-out data come under noise that depends on nothing but them. That of held-out sample i in draw k
is a function of (i, k): two models are compared on the same noisy inputs whatever their seeds,
routes and backbones, which takes most of the noise out of the difference between their losses.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from experiments.components import make_dataset
from experiments.config.routes import routed_pass
from experiments.config.schema import Config
from experiments.diffusion.auxiliary_losses import masked_mean, pixel_mask
from experiments.diffusion.objective import Objective, create_objective
from experiments.evaluation.collect import exact, prepare
from experiments.evaluation.generation import evaluating, labels_from_seeds
from experiments.evaluation.images import split_indices
from experiments.evaluation.pipeline import SamplingPipeline
from experiments.evaluation.sample_store import SampleStore
from experiments.evaluation.sampling_options import describe_options
from experiments.options.diffusion import DiffusionError
from experiments.options.evaluation import EvalOptions, MetricError, Score, make_score, options_for
from experiments.runtime.console import Console
from experiments.runtime.files import default_cache
from experiments.runtime.processes import gather, gather_rows, share, world
from experiments.training.checkpoint import load_model
from experiments.training.loss import Capture, conditions
from routing.rng import Draws


def cache_of(config: Config) -> Path:
    """Return the cache folder that a run names, or the user's."""
    return Path(config.paths.cache).expanduser() if config.paths.cache else default_cache()


def check(config: Config, dataset: Any, device: torch.device | str = "cpu") -> list[str]:
    """Load what a run's scores need, so that a run that cannot be scored stops before it trains.

    Returns:
        Lines for the log, as the classifier's accuracy on held-out images.
    """
    options, conditional = options_for(config), config.task != "none"
    meters = prepare(options, dataset, cache_of(config), device, conditional, config.data)
    return [meter.note for meter in meters if meter.note]


def score(
    model: Any,
    config: Config,
    dataset: Any,
    *,
    step: int | None = None,
    guidance: Any = None,
    sampler: Any = None,
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
        console: Shows progress.
        **changes: Fields of `EvalOptions` in place of the run's own.
    """
    options = options_for(config, **changes)
    parts = (SamplingPipeline.make(model, config, sampler, guidance), config, dataset, options)
    device = next(model.parameters()).device
    return sample_and_score(*parts, step=step, device=device, console=console)[0]


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
    total, (rank, processes) = options.samples, world()
    if total < processes:  # before networks are trained and references made
        raise MetricError(f"{total} images are fewer than {processes} processes; ask for more")
    cache, conditional = cache or cache_of(config), config.task != "none"
    meters = prepare(options, dataset, cache, device, conditional, config.data)
    made = {
        part: describe_options(getattr(pipeline, part).options) for part in ("guidance", "sampler")
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
        # Samples made in exactly this way; those of another way are in another folder.
        text = json.dumps(about, sort_keys=True)
        store = SampleStore(out / hashlib.sha256(text.encode()).hexdigest()[:12])
        if not rank:
            store.claim(about)
        gather(None)  # the folder is claimed
    losses = "heldout_loss" in options.metrics
    missing = no_split(dataset) if losses else ""
    notes = [*(meter.note for meter in meters), missing and f"heldout_loss is missing: {missing}"]
    for note in filter(None, notes):
        console.once(note)
    # A loss alone needs no samples.
    pieces = sample_pieces(pipeline, dataset, options, device, store) if meters else ()
    macs = pipeline.cost().macs
    record = {**made, "seed": options.seed, "step": step, "macs_per_sample": macs}
    results = measure(meters, pieces, total, console, "sample", **record)
    if losses and not missing:
        parts = (pipeline.model, config, dataset, pipeline.objective, device)
        results += heldout_scores(HeldOut(*parts), options.batch, **record)
    return results, store


# --- the samples ---------------------------------------------------------------------------------


def measure(
    meters: Sequence[Any],
    pieces: Iterable[tuple[Tensor, Tensor | None, list[str] | None]],
    total: int,
    console: Console,
    what: str,
    **record: Any,
) -> list[Score]:
    """Return the scores of `total` images over all processes, each with its pieces of them.

    A piece is uint8 images `(B, 3, H, W)` with their classes `(B,)` and captions, or None; `record`
    is what all scores have in common, `what` a word for the progress.
    """
    done, labels, processes = 0, [], world()[1]
    if total < processes:
        raise MetricError(f"{total} images are fewer than {processes} processes; ask for more")
    with console.progress(what, total) as bar:
        for images, asked, captions in pieces:
            for meter in meters:
                meter.update(images, asked, captions)
            if asked is not None:
                labels.append(asked)
            done += len(images)
            # All processes are about equally fast: one measures the progress of all.
            bar.update(min(total, done * processes))
    asked = gather_rows(torch.cat(labels)) if labels else None
    return [score for meter in meters for score in meter.results(asked, **record)]


def asked_of(
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


def sample_pieces(
    pipeline: SamplingPipeline,
    dataset: Any,
    options: EvalOptions,
    device: torch.device,
    store: SampleStore | None = None,
) -> Iterator[tuple[Tensor, Tensor | None, list[str] | None]]:
    """Yield this process's share of the samples for `measure`, made now or read from `store`.

    Every piece is sampled as one full batch (a short one is filled up and cut), so that an image
    does not depend on where a run was interrupted, nor on the number of processes.
    """
    mine, batch = share(options.samples), min(options.batch, options.samples)
    for number, piece in enumerate(_piece_ranges(options)):
        if piece.start not in mine:
            continue
        index = torch.arange(piece.start, piece.start + batch).clamp_max(piece.stop - 1)
        seeds, count = options.seed + index, len(piece)
        labels, text, captions = asked_of(dataset, pipeline.model, options, index, device)
        own = None if labels is None else labels[:count]
        images = _kept(store, number, seeds[:count]) if store else None
        if images is None:
            made = pipeline.generate(seeds, labels, text, batch=batch, device=device)[:count]
            if not bool(made.isfinite().all()):
                raise MetricError(
                    "the model samples NaN or infinite pixels: it diverged; try a smaller train.lr"
                )
            images = dataset.to_pixels(made.to(dataset.device)).cpu()
            if store:
                store.write(number, images, seeds[:count], own)
        yield images, own, captions and captions[:count]


def _kept(store: SampleStore, number: int, seeds: Tensor) -> Tensor | None:
    """Return the images of a kept piece; one that is absent or damaged is made again."""
    with contextlib.suppress(DiffusionError):
        images, found, _ = store.read(number)
        if images.shape[3] == 3 and np.array_equal(found, seeds.numpy()):
            return torch.from_numpy(images.transpose(0, 3, 1, 2).copy())
    return None


# --- loss on held-out data ------------------------------------------------------------------------


#: A loss is measured on so many held-out images at most, and on several noisy inputs of each where
#: there are fewer than half of these.
IMAGES, INPUTS = 2000, 1000
_SEED = 424242
_GOLDEN, _SILVER = (math.sqrt(5) - 1) / 2, math.sqrt(2) - 1


class Sample(NamedTuple):
    """Some held-out samples: clean data and standard normal noise, (B, C, H, W).

    `cond` and `null` are their own and the null condition, as the model takes them; the noise came
    from `draws`, and so does a route's subset.
    """

    x: Tensor
    noise: Tensor
    cond: dict[str, Any]
    null: dict[str, Any]
    draws: Draws


@dataclass
class HeldOut:
    """A model (of a run, on a device, after `step` steps) before its held-out data."""

    model: Any
    config: Config
    dataset: Any
    objective: Objective
    device: torch.device
    step: int | None = None

    @classmethod
    def open(
        cls, run: str | Path, step: int | None = None, weights: str = "ema", device: Any = None
    ) -> HeldOut:
        """Open a run folder or exported weights, in evaluation mode, with the run's data."""
        loaded = load_model(run, step=step, weights=weights, device=device)
        config, at = loaded.config, next(loaded.model.parameters()).device
        parts = (make_dataset(config, at), create_objective(config.objective), at)
        return cls(loaded.model.eval(), config, *parts, loaded.step)

    def sample(
        self, index: Tensor, draw: int = 0, seed: int = _SEED, stream: str = "noise"
    ) -> Sample:
        """Return the held-out samples at `index` (B,) with their noise of one draw."""
        index = index.to(self.device)
        draws = Draws(seed, draw, index, device=self.device)
        batch = self.dataset.batch(index, draws, split="test")
        noise = draws.normal(stream, tuple(batch.x.shape[1:])).to(batch.x)
        given, null = (conditions(self.model, batch, draws, dropped) for dropped in (0.0, 1.0))
        return Sample(batch.x, noise, given, null, draws)

    def noisy(self, found: Sample, level: float) -> tuple[Tensor, Tensor]:
        """Return noisy data (B, C, H, W) and their native time (B,) at a noise level.

        The level is sigma / alpha over the data's standard deviation, whatever the objective.
        """
        level = level * self.objective.sigma_data
        time = self.objective.from_level(torch.full((len(found.x),), level, device=self.device))
        return self.objective.corrupt(found.x, found.noise, time), time

    def losses(self, index: Tensor, draw: int = 0) -> list[Tensor]:
        """Return the mean loss of the dense pass, and of the routed one where there is a route.

        It is the objective's own loss, with its weights and without auxiliary terms, at noise
        levels spread evenly over those of training. A routed pass that drops tokens for good is
        measured on those that it keeps.
        """
        x, noise, cond, _, draws = self.sample(index, draw)
        time = self.objective.times(_Spread(index, draw)).to(self.device)
        found, routed = [], routed_pass(self.config, draws)
        for routing in (None, routed) if routed else (None,):
            net = Capture(self.model, self.model.dtype)
            terms = self.objective.loss(net, x, noise, time, **cond, routing=routing).float()
            kept = net.output.kept
            if kept is not None:
                mask = pixel_mask(kept.expand(len(x), -1), self.model.grid, self.model.size.patch)
            found.append(terms.mean() if kept is None else masked_mean(terms, mask))
        return found


class _Spread:
    """What `Objective.times` draws from: one number per sample, evenly spread over [0, 1).

    A Kronecker sequence: any stretch of samples, and the draws of any one, cover the interval.
    """

    def __init__(self, index: Tensor, draw: int) -> None:
        place = (index.cpu().double() + 0.5) * _GOLDEN + draw * _SILVER
        self._at = place.frac().unsqueeze(1)

    def uniform(self, stream: str, n: int) -> Tensor:
        """Return the numbers, (B, 1)."""
        return self._at.float()

    def normal(self, stream: str, shape: int) -> Tensor:
        """Return the quantiles of the standard normal distribution there, (B, 1)."""
        return torch.special.ndtri(self._at).float()


def no_split(dataset: Any) -> str:
    """Return why a data set has nothing held out, as part of a sentence; empty where it has."""
    if dataset.sizes.get("test", 0) != 0:
        return ""
    hint = "; set data.held_out=N or data.test=FOLDER" if dataset.name == "latents" else ""
    return f"data={dataset.name} has no held-out split here{hint}"


def heldout_scores(data: HeldOut, batch: int, **record: Any) -> list[Score]:
    """Return the held-out loss of both passes over all processes; a collective call.

    `batch` is the images per pass and process, `record` what all scores of the run have in common.
    """
    index = split_indices(data.dataset, "test", IMAGES)
    mine = share(len(index))
    own, names = index[mine.start : mine.stop], ["heldout_loss"]
    if routed_pass(data.config, None):
        names.append("heldout_loss_routed")
    total = torch.zeros(1 + len(names), dtype=torch.float64)
    with torch.inference_mode(), evaluating(data.model), exact():
        for draw in range(max(1, INPUTS // len(index))):
            # A process without a sample has no loss; it only waits for the others.
            for part in own.split(batch) if len(own) else ():
                found = torch.stack(data.losses(part, draw)).cpu()
                total += len(part) * torch.cat((torch.ones(1), found))
    count, *sums = gather_rows(total.unsqueeze(0)).sum(dim=0).tolist()
    label = f"{data.dataset.name}-test@{data.dataset.fingerprint[:8]}"
    return [
        make_score(name, value / count, len(index), None, label, record)
        for name, value in zip(names, sums, strict=True)
    ]
