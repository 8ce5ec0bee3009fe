"""Samples of a pipeline for scoring, batch by batch; optionally kept on disk, to be resumed."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.diffusion.guidance import has_text
from experiments.evaluation.generation import labels_from_seeds
from experiments.evaluation.pipeline import SamplingPipeline
from experiments.evaluation.sample_store import SampleStore
from experiments.options.evaluation import EvalOptions, MetricError
from experiments.options.roles import ConfigError
from experiments.runtime.processes import gather, share, world
from routing.errors import require

#: uint8 images `(B, 3, H, W)`, their requested classes `(B,)` and captions, or None.
ImageBatch = tuple[Tensor, Tensor | None, list[str] | None]


def open_store(folder: Path, options: EvalOptions, settings: Mapping[str, Any]) -> SampleStore:
    """Return the store of samples with exactly these settings; a collective call.

    Each combination of settings has a subfolder of its own.
    """
    manifest = {
        **settings,
        "samples": options.samples,
        "seed": options.seed,
        "batch": options.batch,
        "labels": options.labels,
        "processes": world()[1],
        "count": options.samples,
        "shard": min(options.batch, options.samples),
        "shards": len(batch_ranges(options)),
    }
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    store = SampleStore(folder / digest[:12])
    if world()[0] == 0:
        store.claim(manifest)
    gather(None)  # wait for the folder
    return store


def batch_ranges(options: EvalOptions) -> list[range]:
    """Return the samples of every batch: each process's share in pieces of `options.batch`."""
    batch = min(options.batch, options.samples)
    ranges = []
    for rank in range(world()[1]):
        samples = share(options.samples, rank)
        for start in samples[::batch]:
            ranges.append(range(start, min(start + batch, samples.stop)))
    return ranges


def sample_batches(
    pipeline: SamplingPipeline,
    dataset: Any,
    options: EvalOptions,
    device: torch.device,
    store: SampleStore | None = None,
) -> Iterator[ImageBatch]:
    """Yield this process's share of the samples, generated now or read from `store`.

    Every batch is sampled at full size (a short one is filled up and cut), so that an image does
    not depend on where a run was interrupted, nor on the number of processes.

    Raises:
        MetricError: The model samples NaN or infinite pixels.
    """
    process_samples, batch = share(options.samples), min(options.batch, options.samples)
    for number, samples in enumerate(batch_ranges(options)):
        if samples.start not in process_samples:
            continue
        count = len(samples)
        index = torch.arange(samples.start, samples.start + batch).clamp_max(samples.stop - 1)
        seeds = options.seed + index
        labels, text, captions = sample_conditions(dataset, pipeline.model, options, index, device)
        batch_labels = None if labels is None else labels[:count]
        images = _stored_images(store, number) if store else None
        if images is None:
            x = pipeline.generate(seeds, labels, text, batch=batch, device=device)[:count]
            require(
                bool(x.isfinite().all()),
                "the model samples NaN or infinite pixels: it diverged; try a smaller train.lr",
                MetricError,
            )
            images = dataset.to_pixels(x.to(dataset.device)).cpu()
            if store:
                store.write(number, images, seeds[:count], batch_labels)
        yield images, batch_labels, None if captions is None else captions[:count]


def sample_conditions(
    dataset: Any, model: Any, options: EvalOptions, index: Tensor, device: torch.device
) -> tuple[Tensor | None, Tensor | None, list[str] | None]:
    """Return labels, text states and captions of the samples at `index`; None if unused.

    Labels are balanced or drawn per seed; captions are those of the held-out split, in order.
    """
    num_classes = getattr(model, "num_classes", 0)
    if num_classes:
        how = "balanced" if options.labels == "balanced" else "from-seed"
        return labels_from_seeds(options.seed + index, num_classes, how), None, None
    if not has_text(model):
        return None, None, None
    prompts = dataset.prompts(index)
    return None, prompts.text.to(device), prompts.captions


def _stored_images(store: SampleStore, number: int) -> Tensor | None:
    """Return the images of a shard, or None if it is absent or damaged."""
    with contextlib.suppress(ConfigError):
        images, _, _ = store.read(number)
        return torch.from_numpy(images.transpose(0, 3, 1, 2).copy())
    return None
